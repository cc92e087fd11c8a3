"""What sysfs and procfs say about CPUs, caches, NUMA nodes, PCI devices and this process's limits.

`read_topology` reads once into plain structs; nothing here decides anything (pinning.py does). Both roots are
arguments, so a recorded tree reads like a live machine.

A missing or malformed file is normal (virtual machines, containers, masked sysfs): the field becomes unknown
and the reason is recorded. Unknown is never turned into node 0. Only the online CPUs are indispensable.

    devices/system/cpu/{online,isolated}
    devices/system/cpu/cpuN/topology/thread_siblings_list
    devices/system/cpu/cpuN/cache/index*/{level,shared_cpu_list}
    devices/system/node/{online,nodeN/{cpulist,distance}}
    bus/pci/devices/<bdf>/{class,vendor,numa_node,local_cpulist}   the link's target names the bridges
    class/infiniband/<dev>/device                                  RDMA NIC -> PCI device
    class/kfd/kfd/topology/nodes/N/properties                      the order in which HIP numbers GPUs
    fs/cgroup/...                                                  found by proc's self/{mountinfo,cgroup}
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mori_mp.shared.errors import MoriMPError, PinningError

_MAX_CPU = 65535  # far above the kernel's NR_CPUS; keeps a typing error from building a huge set
_BDF = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
_GPU_VENDORS = frozenset({0x1002, 0x10DE})  # AMD, NVIDIA; leaves out a board controller's VGA
_CLASS_NETWORK, _CLASS_DISPLAY, _CLASS_COPROCESSOR, _CLASS_ACCELERATOR = 0x02, 0x03, 0x0B, 0x12
_CLASS_INFINIBAND = 0x0C06  # base class and subclass


class TopologyError(MoriMPError, OSError):
    """Not even the online CPUs can be read; pinning is impossible, running unpinned is not."""


@dataclass(frozen=True)
class Cpu:
    """One online logical CPU. `core`: the online hardware threads of its physical core, itself included."""

    id: int
    node: int | None
    core: frozenset[int]
    l3: frozenset[int] | None  # online CPUs behind the same L3 cache; None: unknown


@dataclass(frozen=True)
class PciDevice:
    """One PCI device. `numa_node` is None where firmware says -1 or nothing."""

    bdf: str
    numa_node: int | None
    local_cpus: frozenset[int]
    bridges: tuple[str, ...]  # upstream bridges, nearest first


@dataclass(frozen=True)
class Topology:
    """A machine as one process may use it."""

    cpus: Mapping[int, Cpu]
    nodes: Mapping[int, frozenset[int]]  # online NUMA node -> its online CPUs (a memory-only node has none)
    distances: Mapping[tuple[int, int], int]  # (from, to) -> firmware's relative distance, 10 is local
    allowed: frozenset[int]  # thread affinity, inside the cpuset, online
    quota: float | None  # CPUs' worth of run time that the tightest cgroup grants; None: unlimited
    isolated: frozenset[int]  # isolcpus: no load balancing on these
    pci: Mapping[str, PciDevice]  # GPUs, accelerators, NICs and the bridges above them
    gpus: tuple[str, ...]  # addresses in the driver's order, before any *_VISIBLE_DEVICES filter
    nics: Mapping[str, str]  # RDMA device name -> PCI address
    reasons: tuple[str, ...]  # what could not be read, and what that means


# ------------------------------------------------------------------------------ kernel CPU lists
def parse_cpulist(text: str) -> frozenset[int]:
    """Parse a kernel CPU list such as "0-3,8" ("" is the empty set). PinningError names the text."""
    cpus: set[int] = set()
    for item in text.strip().split(",") if text.strip() else ():
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", item.strip())
        if match is None:
            raise PinningError(f"bad CPU list {text!r}: {item.strip()!r} is no CPU and no range like 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last > _MAX_CPU:
            why = "runs backwards" if first > last else f"is above the largest CPU number, {_MAX_CPU}"
            raise PinningError(f"bad CPU list {text!r}: {item.strip()!r} {why}")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def format_cpulist(cpus: Iterable[int]) -> str:
    """Format CPU numbers as a kernel CPU list: {0, 1, 2, 8} -> "0-2,8". Raises PinningError below 0."""
    ranges: list[tuple[int, int]] = []
    for cpu in sorted(set(cpus)):
        if cpu < 0:
            raise PinningError(f"bad CPU number {cpu}: CPU numbers start at 0")
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1] = (ranges[-1][0], cpu)
        else:
            ranges.append((cpu, cpu))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def normalize_bdf(text: str) -> str:
    """Return a PCI address as sysfs spells it: "83:00.0" or "00000000:83:00.0" -> "0000:83:00.0"."""
    match = _BDF.fullmatch(text.strip())
    if match is None:
        raise PinningError(f"bad PCI address {text!r}: it must look like 0000:83:00.0 (or 83:00.0)")
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower()


# ---------------------------------------------------------------------------------------- files
class _Tree:
    """Reads files below two roots; an absent or unreadable file is None, a malformed one is also recorded."""

    def __init__(self, sysfs_root: Path, proc_root: Path) -> None:
        self.sys = str(sysfs_root)
        self.proc = str(proc_root)
        self.reasons: list[str] = []

    def text(self, path: str) -> str | None:
        try:
            with open(path, encoding="ascii", errors="replace") as file:
                return file.read().strip()
        except OSError:
            return None

    def cpulist(self, path: str) -> frozenset[int] | None:
        text = self.text(path)
        return None if text is None else self.parse(text, path)

    def parse(self, text: str, path: str) -> frozenset[int] | None:
        try:
            return parse_cpulist(text)
        except PinningError as err:
            self.reasons.append(f"{path}: {err}")
            return None

    def number(self, path: str, base: int = 10) -> int | None:
        text = self.text(path)
        if text is None:
            return None
        try:
            return int(text, base)
        except ValueError:
            self.reasons.append(f"{path}: {text!r} is not a number")
            return None

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []


# -------------------------------------------------------------------------------- CPUs and nodes
def _l3_of(tree: _Tree, cpu: int) -> frozenset[int] | None:
    cache = f"{tree.sys}/devices/system/cpu/cpu{cpu}/cache"
    # index3 nearly always is the L3; the level file decides, because some CPUs number their caches otherwise.
    for index in ["index3", *(name for name in tree.names(cache) if name.startswith("index"))]:
        if tree.text(f"{cache}/{index}/level") == "3":
            return tree.cpulist(f"{cache}/{index}/shared_cpu_list")
    return None


def _read_nodes(tree: _Tree, online: frozenset[int]) -> dict[int, frozenset[int]]:
    base = f"{tree.sys}/devices/system/node"
    nodes: dict[int, frozenset[int]] = {}
    for node in sorted(tree.cpulist(f"{base}/online") or ()):
        cpus = tree.cpulist(f"{base}/node{node}/cpulist")
        if cpus is None:
            tree.reasons.append(f"the CPUs of NUMA node {node} cannot be read")
        nodes[node] = (cpus or frozenset()) & online
    if not nodes:
        tree.reasons.append("no NUMA nodes in sysfs: the node of every CPU is unknown")
    return nodes


def _read_distances(tree: _Tree, nodes: Iterable[int]) -> dict[tuple[int, int], int]:
    order = sorted(nodes)
    distances: dict[tuple[int, int], int] = {}
    for node in order:
        row = (tree.text(f"{tree.sys}/devices/system/node/node{node}/distance") or "").split()
        if len(row) == len(order) and all(item.isdecimal() for item in row):
            distances.update({(node, other): int(item) for other, item in zip(order, row, strict=True)})
    return distances


def _read_cpus(tree: _Tree, online: frozenset[int], nodes: Mapping[int, frozenset[int]]) -> dict[int, Cpu]:
    node_of = {cpu: node for node, cpus in nodes.items() for cpu in cpus}
    core_of: dict[int, frozenset[int]] = {}
    l3_of: dict[int, frozenset[int] | None] = {}
    no_core: set[int] = set()
    for cpu in sorted(online):
        # Both relations are symmetric, so one file a core and one a cache is enough.
        if cpu not in core_of:
            siblings = tree.cpulist(f"{tree.sys}/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            if siblings is None:
                no_core.add(cpu)
            core = ((siblings or frozenset()) & online) | {cpu}
            core_of.update(dict.fromkeys(core, core))
        if cpu not in l3_of:
            shared = _l3_of(tree, cpu)
            domain = None if shared is None else (shared & online) | {cpu}
            l3_of.update(dict.fromkeys(domain or {cpu}, domain))
    if no_core:
        tree.reasons.append(f"no SMT siblings known for CPUs {format_cpulist(no_core)}: one core each")
    no_l3 = {cpu for cpu, domain in l3_of.items() if domain is None}
    if no_l3:
        tree.reasons.append(f"no L3 cache known for CPUs {format_cpulist(no_l3)}")
    return {cpu: Cpu(cpu, node_of.get(cpu), core_of[cpu], l3_of[cpu]) for cpu in sorted(online)}


# --------------------------------------------------------------------------------------- cgroups
def _own_cgroups(tree: _Tree) -> dict[str, str]:
    """Map controller (v2: "") to this process's cgroup path, from lines like "4:cpu,cpuacct:/pod/x"."""
    paths: dict[str, str] = {}
    for line in (tree.text(f"{tree.proc}/self/cgroup") or "").splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            paths.update(dict.fromkeys(fields[1].split(","), fields[2]))
    return paths


def _hierarchies(tree: _Tree) -> Iterator[tuple[frozenset[str] | None, list[str]]]:
    """Yield every cgroup mount below /sys that can limit CPUs: its controllers, None for the unified (v2)
    hierarchy, and the directories from this process's cgroup up to the mount point.

    A mount may show a subtree only (containers without a cgroup namespace); its root, field 4 of mountinfo,
    is then a prefix of the path in /proc/self/cgroup.
    """
    own = _own_cgroups(tree)
    for line in (tree.text(f"{tree.proc}/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = frozenset(kind[2].split(",")) if kind[0] == "cgroup" else None
        names = [""] if controllers is None else sorted(controllers & {"cpu", "cpuset"})
        root, point = fields[3].rstrip("/"), fields[4]
        if not names or not point.startswith("/sys/"):
            continue
        path = own.get(names[0], "/")
        inside = path[len(root) :] if path == root or path.startswith(root + "/") else ""
        parts = [part for part in inside.split("/") if part]
        if ".." in parts:  # the process lives outside its cgroup namespace: only the mount point is visible
            parts = []
        top = tree.sys + point[len("/sys") :]
        yield controllers, ["/".join([top, *parts[:depth]]) for depth in range(len(parts), -1, -1)]


def _quota_at(tree: _Tree, level: str, unified: bool) -> float | None:
    if unified:
        fields = (tree.text(f"{level}/cpu.max") or "max").split()
        quota, period = fields[0], fields[1] if len(fields) > 1 else "100000"
    else:
        quota = tree.text(f"{level}/cpu.cfs_quota_us") or "-1"
        period = tree.text(f"{level}/cpu.cfs_period_us") or ""
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None  # "max" and -1 both mean unlimited
    return int(quota) / int(period)


def _read_limits(tree: _Tree, online: frozenset[int]) -> tuple[frozenset[int], float | None]:
    """Return (allowed CPUs, CPU quota)."""
    mask: frozenset[int] | None = None
    for path in (f"{tree.proc}/thread-self/status", f"{tree.proc}/self/status"):
        match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", tree.text(path) or "", re.MULTILINE)
        if match is not None:
            mask = tree.parse(match[1], path)
            break
    if mask is None:
        tree.reasons.append("this process's CPU mask cannot be read: every online CPU counts as allowed")
    allowed = (online if mask is None else mask) & online
    if tree.text(f"{tree.proc}/self/mountinfo") is None:
        tree.reasons.append("cgroup mounts cannot be read: cpuset and CPU quota are unknown")
    quotas: list[float] = []
    for controllers, levels in _hierarchies(tree):
        if controllers is None or "cpu" in controllers:
            found = (_quota_at(tree, level, unified=controllers is None) for level in levels)
            quotas.extend(quota for quota in found if quota is not None)
        if controllers is None or "cpuset" in controllers:
            v1 = ("cpuset.effective_cpus", "cpuset.cpus")
            names = ("cpuset.cpus.effective",) if controllers is None else v1
            files = (f"{level}/{name}" for level in levels for name in names)
            cpuset = next((cpus for cpus in map(tree.cpulist, files) if cpus), None)
            if cpuset is not None and not cpuset & allowed:
                # The kernel keeps a mask inside its cpuset, so this cpuset is not this process's.
                tree.reasons.append(
                    f"cpuset {format_cpulist(cpuset)} misses this process's CPU mask: ignored"
                )
            elif cpuset is not None:
                allowed &= cpuset
    return allowed, min(quotas, default=None)


# --------------------------------------------------------------------------------------- devices
def _pci_path(path: str) -> tuple[str, ...]:
    """Return the PCI addresses along a device's real sysfs path, the device itself last."""
    return tuple(part for part in os.path.realpath(path).split("/") if _BDF.fullmatch(part))


def _read_device(tree: _Tree, bdf: str, bridges: tuple[str, ...]) -> PciDevice:
    base = f"{tree.sys}/bus/pci/devices/{bdf}"
    node = tree.number(f"{base}/numa_node")
    cpus = tree.cpulist(f"{base}/local_cpulist")
    return PciDevice(bdf, node if node is not None and node >= 0 else None, cpus or frozenset(), bridges)


def _read_pci(tree: _Tree) -> tuple[dict[str, PciDevice], list[str]]:
    """Return (devices that a connector may use plus the bridges above them, GPUs in address order)."""
    pci: dict[str, PciDevice] = {}
    gpus: list[str] = []
    for bdf in tree.names(f"{tree.sys}/bus/pci/devices"):
        base = f"{tree.sys}/bus/pci/devices/{bdf}"
        code = tree.number(f"{base}/class", 16) or 0
        kind = code >> 16
        wanted = (_CLASS_NETWORK, _CLASS_DISPLAY, _CLASS_COPROCESSOR, _CLASS_ACCELERATOR)
        if kind not in wanted and code >> 8 != _CLASS_INFINIBAND:
            continue
        bridges = _pci_path(base)[-2::-1]
        pci[bdf] = _read_device(tree, bdf, bridges)
        for depth, bridge in enumerate(bridges):
            if bridge not in pci:
                pci[bridge] = _read_device(tree, bridge, bridges[depth + 1 :])
        vendor = tree.number(f"{base}/vendor", 16)
        if kind in (_CLASS_DISPLAY, _CLASS_ACCELERATOR) and vendor in _GPU_VENDORS:
            gpus.append(bdf)
    return pci, gpus


def _read_kfd(tree: _Tree) -> list[str]:
    """Return GPU addresses in KFD node order, which is the order in which HIP numbers them."""
    base = f"{tree.sys}/class/kfd/kfd/topology/nodes"
    gpus: list[str] = []
    for node in sorted((name for name in tree.names(base) if name.isdecimal()), key=int):
        # Unreadable: a GPU that this container may not use, and HIP does not count it either.
        text = tree.text(f"{base}/{node}/properties") or ""
        fields = {line.split()[0]: line.split()[1] for line in text.splitlines() if len(line.split()) == 2}
        if not all(fields.get(key, "0").isdecimal() for key in ("simd_count", "domain", "location_id")):
            tree.reasons.append(f"{base}/{node}/properties: not numeric")
        elif int(fields.get("simd_count", "0")):  # a CPU node has none
            # The bits above the low 16 number a partition of the GPU, not its address.
            domain, location = int(fields.get("domain", "0")), int(fields.get("location_id", "0"))
            gpus.append(f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}")
    return gpus


def _read_nics(tree: _Tree) -> dict[str, str]:
    base = f"{tree.sys}/class/infiniband"
    paths = {name: _pci_path(f"{base}/{name}/device") for name in tree.names(base)}
    return {name: path[-1].lower() for name, path in paths.items() if path}


def device_node(topology: Topology, bdf: str) -> tuple[int | None, str]:
    """Return a PCI device's NUMA node and how it was found, or (None, why it is unknown).

    Tried in order: the device's numa_node, its upstream bridges', local_cpulist, the machine's only node.
    """
    device = topology.pci.get(bdf)
    if device is None:
        return None, f"PCI device {bdf} is not in sysfs"
    known = topology.nodes
    for address in (bdf, *device.bridges):
        entry = topology.pci.get(address)
        if entry is not None and entry.numa_node is not None and entry.numa_node in known:
            return entry.numa_node, f"numa_node of {'the device' if address == bdf else f'bridge {address}'}"
    with_cpus = [node for node, cpus in known.items() if cpus]
    local = [node for node in with_cpus if known[node] & device.local_cpus]
    if len(local) == 1:
        return local[0], "local_cpulist of the device"
    if len(with_cpus) == 1:
        return with_cpus[0], "the machine has one NUMA node with CPUs"
    return None, f"firmware gives no usable NUMA node for {bdf}, its bridges or its local CPUs"


def read_topology(sysfs_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> Topology:
    """Read the machine below `sysfs_root` as the process described by `proc_root` may use it.

    Raises TopologyError when the online CPUs, or the CPUs that this process may use, cannot be determined.
    """
    tree = _Tree(sysfs_root, proc_root)
    path = f"{tree.sys}/devices/system/cpu/online"
    online = tree.cpulist(path)
    if not online:
        detail = tree.reasons[-1] if tree.reasons else f"{path} is absent, unreadable or empty"
        raise TopologyError(f"cannot read the machine's CPUs: {detail}. Run unpinned (MORI_MP_PIN=off).")
    nodes = _read_nodes(tree, online)
    cpus = _read_cpus(tree, online, nodes)
    allowed, quota = _read_limits(tree, online)
    if not allowed:
        raise TopologyError("this process's CPU mask holds no online CPU. Run unpinned (MORI_MP_PIN=off).")
    isolated = (tree.cpulist(f"{tree.sys}/devices/system/cpu/isolated") or frozenset()) & online
    pci, gpus = _read_pci(tree)
    return Topology(
        cpus=cpus,
        nodes=nodes,
        distances=_read_distances(tree, nodes),
        allowed=allowed,
        quota=quota,
        isolated=isolated,
        pci=pci,
        gpus=tuple(_read_kfd(tree) or gpus),
        nics=_read_nics(tree),
        reasons=tuple(tree.reasons),
    )
