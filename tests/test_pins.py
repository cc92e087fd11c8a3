"""What a connector knows when it plans its children's CPUs: its GPU, its own thread, its neighbours."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sysfs_tree as trees
import torch
from connector_support import short_directory

from mori_mp import heart
from mori_mp.config import ConnectorConfig
from mori_mp.pins import card_of, gpu_address, make_plan, reserved_cpus
from mori_mp.shared import registry
from mori_mp.shared.pinning import Plan
from mori_mp.shared.topology import device_node, parse_cpulist, read_topology


@pytest.fixture(scope="module")
def nps4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded tree of two 96-core sockets with eight GPUs, four NUMA nodes to a socket."""
    return trees.write(tmp_path_factory.mktemp("nps4"), trees.mi300x(nodes_per_socket=4))


def planned(root: Path, taken: frozenset[int] = frozenset(), cpu: int = 0, **config: Any) -> Plan:
    values = ConnectorConfig.from_dict(config)
    return make_plan(values, taken=taken, env={}, sysfs_root=root, proc_root=root / "proc", cpu=cpu)


def gpus_at(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Have torch see GPUs at these addresses, the first of them current."""

    def properties(number: int) -> SimpleNamespace:
        domain, bus, rest = addresses[number].split(":")
        slot = int(rest.partition(".")[0], 16)
        return SimpleNamespace(pci_domain_id=int(domain, 16), pci_bus_id=int(bus, 16), pci_device_id=slot)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


# -------------------------------------------------------------------------------- the GPU
@pytest.mark.parametrize("number", range(8))
def test_the_children_run_on_the_node_of_the_pools_gpu(
    nps4: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    gpus_at(monkeypatch, *trees.MI300X_GPUS)
    topology = read_topology(nps4, nps4 / "proc")
    made = planned(nps4, memory_pool_device=f"cuda:{number}")
    node, _ = device_node(topology, trees.MI300X_GPUS[number])
    assert made.node == node
    assert made.cpus <= topology.nodes[number]
    assert not made.degraded


def test_cuda_without_a_number_is_torchs_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_at(monkeypatch, "0001:c6:1f.0")
    assert gpu_address("cuda") == ("0001:c6:1f.0", ())
    assert gpu_address("cpu") == (None, ())


def test_a_torch_that_does_not_tell_the_address_is_a_reason(
    nps4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="a GPU"))
    made = planned(nps4, memory_pool_device="cuda:0")
    assert any("does not tell the PCI address of cuda:0" in reason for reason in made.reasons)
    assert made.cpus  # planned all the same


def test_a_gpu_that_torch_cannot_see_is_a_reason(nps4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    made = planned(nps4, memory_pool_device="cuda:7")
    assert "torch cannot describe cuda:7: no such device" in made.reasons


def test_the_nic_counts_where_the_pool_is_in_host_memory(nps4: Path) -> None:
    made = planned(nps4, device_name="mlx5_5")
    assert made.node == 5


# -------------------------------------------------------------------------------- its own thread
def test_a_wide_mask_reserves_nothing(nps4: Path) -> None:
    topology = read_topology(nps4, nps4 / "proc")
    assert reserved_cpus(topology, 5) == frozenset()


@pytest.mark.parametrize("cpu", [16, 23, 208])
def test_a_thread_confined_to_one_l3_keeps_its_core(tmp_path: Path, cpu: int) -> None:
    root = trees.write(tmp_path, trees.mi300x(nodes_per_socket=4, mask="16-23,208-215"))
    made = planned(root, cpu=cpu)
    topology = read_topology(root, root / "proc")
    assert reserved_cpus(topology, cpu) == {cpu}
    assert made.cpus
    assert not made.cpus & topology.cpus[cpu].core
    assert f"CPU {cpu} is left to the stage's own thread" in made.reasons


def test_a_cpu_that_the_kernel_does_not_tell_reserves_nothing(nps4: Path) -> None:
    assert reserved_cpus(read_topology(nps4, nps4 / "proc"), -1) == frozenset()


# -------------------------------------------------------------------------------- its neighbours
@pytest.mark.parametrize("device", ["cpu", "cuda:2"])
def test_connectors_of_one_node_share_out_its_cores(
    nps4: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    gpus_at(monkeypatch, *trees.MI300X_GPUS)
    taken: frozenset[int] = frozenset()
    plans = []
    for _ in range(6):
        made = planned(nps4, taken, memory_pool_device=device, num_transfer_workers=3)
        assert not made.cpus & taken
        assert len(made.cpus) == 8  # four cores of two threads
        taken |= made.cpus
        plans.append(made)
    if device != "cpu":  # 24 cores of that node, four to each of the six
        assert {made.node for made in plans} == {2}
        topology = read_topology(nps4, nps4 / "proc")
        assert taken == topology.nodes[2]


def test_connectors_that_start_at_one_moment_do_not_choose_the_same_cpus(
    nps4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each under the lock that heart takes, with its card written before the next one plans."""

    def recorded(config: ConnectorConfig, *, taken: frozenset[int]) -> Plan:
        return make_plan(config, taken=taken, env={}, sysfs_root=nps4, proc_root=nps4 / "proc", cpu=0)

    monkeypatch.setattr(heart, "make_plan", recorded)
    config = ConnectorConfig.from_dict({"device_name": "mlx5_3", "stage_id": 1})
    with short_directory() as base, ThreadPoolExecutor(5) as pool:
        folders = [base / f"{os.getpid()}-{number}" for number in range(5)]
        for folder in folders:
            folder.mkdir()
        made = list(
            pool.map(
                lambda folder: heart._introduce(config, folder, engine="shm", endpoint="tcp://h:1")[1],
                folders,
            )
        )
        assert len(registry.live(base)) == 5
        assert registry.taken_cpus(base) == frozenset[int]().union(*(plan.cpus for plan in made))
    assert [len(plan.cpus) for plan in made] == [6] * 5
    assert len(frozenset[int]().union(*(plan.cpus for plan in made))) == 30


def test_when_the_others_have_everything_the_plan_says_so(nps4: Path) -> None:
    everything = frozenset(read_topology(nps4, nps4 / "proc").cpus)
    made = planned(nps4, everything)
    assert made.cpus == frozenset()
    assert made.degraded
    assert any("belong to other connectors" in reason for reason in made.reasons)


def test_an_unreadable_topology_is_a_reason(tmp_path: Path) -> None:
    made = planned(tmp_path)
    assert made.cpus == frozenset()
    assert "topology cannot be read" in made.reasons[0]


def test_the_card_has_the_plan_and_threads_have_none(nps4: Path) -> None:
    made = planned(nps4, num_transfer_workers=2)
    card = card_of(made, pinned=True)
    sets = [parse_cpulist(cpus or "") for cpus in (card.control, *card.workers)]
    assert sets == [made.control, *made.workers]
    assert card_of(made, pinned=False).control is None
    assert card_of(made, pinned=False).workers == [None, None]
