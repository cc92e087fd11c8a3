"""What a connector knows of its surroundings when it plans the CPUs of its children.

    gpu       the PCI address of the pool's GPU, so that the plan is made for its NUMA node
    reserve   the CPU of the constructing thread, where that says something (see reserved_cpus)
    taken     the CPUs of other connectors' children, from their cards (mori_mp.shared.registry)

The plan itself is made by mori_mp.shared.pinning, from these and from what the operator asked for.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from mori_mp.config import ConnectorConfig
from mori_mp.shared.pinning import Plan, resolve_request
from mori_mp.shared.registry import PlanCard
from mori_mp.shared.topology import Topology, format_cpulist, read_topology

_libc = ctypes.CDLL(None, use_errno=True)


def make_plan(
    config: ConnectorConfig,
    *,
    taken: frozenset[int] = frozenset(),
    env: Mapping[str, str] | None = None,
    sysfs_root: Path = Path("/sys"),
    proc_root: Path = Path("/proc"),
    cpu: int | None = None,
) -> Plan:
    """Plan the CPUs of the children; an unreadable topology is a recorded reason, not an error.

    taken: CPUs of other connectors' children. cpu: where the calling thread runs; None asks the kernel.
    Raises PinningError for what the operator asked for and cannot have.
    """
    request = resolve_request(msgspec.structs.asdict(config), os.environ if env is None else env)
    try:
        topology = read_topology(sysfs_root, proc_root)
    except OSError as exc:
        return Plan.unpinned(config.num_transfer_workers, f"topology cannot be read: {exc}")
    gpu, story = gpu_address(config.memory_pool_device)
    reserve = reserved_cpus(topology, current_cpu() if cpu is None else cpu)
    if reserve:
        story += (f"CPU {format_cpulist(reserve)} is left to the stage's own thread",)
    if taken and request.mode != "off":
        story += (f"CPUs {format_cpulist(taken)} belong to other connectors of this host",)
    made = request.plan(
        topology,
        workers=config.num_transfer_workers,
        gpu_bdf=gpu,
        nic=config.device_name or None,
        reserve=reserve,
        taken=taken,
    )
    return replace(made, reasons=(*story, *made.reasons))


def gpu_address(device: str) -> tuple[str | None, tuple[str, ...]]:
    """Return the PCI address of a torch device such as `cuda:1`, and why there is none, if there ought to be.

    torch numbers GPUs after *_VISIBLE_DEVICES, sysfs before, so only torch can tell; versions that do not
    leave the address unknown.
    """
    if not device.startswith("cuda"):
        return None, ()
    import torch

    try:
        number = int(device.partition(":")[2] or torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(number)
    except (RuntimeError, AssertionError) as exc:
        return None, (f"torch cannot describe {device}: {exc}",)
    parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if not all(isinstance(part, int) for part in parts):
        return None, (f"torch {torch.__version__} does not tell the PCI address of {device}",)
    domain, bus, slot = parts
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0", ()


def current_cpu() -> int:
    """Return the CPU that the calling thread is running on, -1 when the kernel does not say."""
    return int(_libc.sched_getcpu())


def reserved_cpus(topology: Topology, cpu: int) -> frozenset[int]:
    """Return {cpu} if this thread was confined to one L3 domain, else nothing.

    A thread that may run on many CPUs is somewhere else a moment later, and the CPU that it happens to be on
    says nothing; one that is confined stays near, and its core must not be given away.
    """
    entry = topology.cpus.get(cpu)
    if entry is None or cpu not in topology.allowed:
        return frozenset()
    near = entry.l3 if entry.l3 is not None and not entry.l3 <= entry.core else entry.core
    return frozenset({cpu}) if topology.allowed <= near else frozenset()


def card_of(plan: Plan, pinned: bool) -> PlanCard:
    """Put a plan into the form of the connector's card; pinned is False where nothing is (threads)."""
    sets = [plan.control, *plan.workers]
    texts = [format_cpulist(cpus) if pinned and cpus is not None else None for cpus in sets]
    return PlanCard(
        control=texts[0],
        workers=texts[1:],
        node=plan.node,
        degraded=plan.degraded,
        reasons=list(plan.reasons),
    )
