"""Reading sysfs and procfs: CPUs, caches, NUMA nodes, devices and limits of recorded machines."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import sysfs_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from sysfs_tree import MI300X_GPUS, MI300X_NICS, Device, Machine, mi300x

from mori_mp.shared.errors import MoriMPError, PinningError
from mori_mp.shared.topology import (
    Cpu,
    Topology,
    TopologyError,
    device_node,
    format_cpulist,
    normalize_bdf,
    parse_cpulist,
    read_topology,
)


@pytest.fixture(scope="module")
def nps1(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    return sysfs_tree.read(tmp_path_factory.mktemp("nps1"), mi300x())


# -------------------------------------------------------------------------------------- cpulists
@settings(deadline=None)
@given(st.frozensets(st.integers(0, 400)))
def test_cpulists_round_trip(cpus: frozenset[int]) -> None:
    assert parse_cpulist(format_cpulist(cpus)) == cpus


def test_cpulists_are_the_kernels() -> None:
    assert parse_cpulist("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_cpulist("") == frozenset()
    assert format_cpulist({8, 3, 2, 1, 0}) == "0-3,8"


@pytest.mark.parametrize("text", ["3-1", "1,,2", "a", "-1", "1-", "0-3:1/2", "١", "0-99999999999", "0x1"])
def test_bad_cpulists_are_named(text: str) -> None:
    with pytest.raises(PinningError) as caught:
        parse_cpulist(text)
    assert repr(text) in str(caught.value)


def test_negative_cpus_cannot_be_formatted() -> None:
    with pytest.raises(PinningError, match="-1"):
        format_cpulist([-1, 2])


def test_pci_addresses_are_normalized() -> None:
    assert normalize_bdf("83:00.0") == "0000:83:00.0"
    assert normalize_bdf("00000000:C6:00.1") == "0000:c6:00.1"
    with pytest.raises(PinningError, match="gpu0"):
        normalize_bdf("gpu0")


# -------------------------------------------------------------------------------- reading sysfs
def test_reads_a_two_socket_epyc(nps1: Topology) -> None:
    assert len(nps1.cpus) == 384
    assert nps1.cpus[95] == Cpu(95, 0, frozenset({95, 287}), parse_cpulist("88-95,280-287"))
    assert nps1.nodes == {0: parse_cpulist("0-95,192-287"), 1: parse_cpulist("96-191,288-383")}
    assert nps1.distances[0, 1] == 32
    assert nps1.allowed == frozenset(nps1.cpus)
    assert nps1.quota is None
    assert nps1.reasons == ()


def test_gpus_are_counted_as_the_driver_counts(nps1: Topology, tmp_path: Path) -> None:
    assert nps1.gpus == MI300X_GPUS[4:] + MI300X_GPUS[:4]  # KFD order; partition bits are not address bits
    without_kfd = sysfs_tree.read(tmp_path, Machine(devices=mi300x().devices))
    assert without_kfd.gpus == MI300X_GPUS


def test_nics_are_found_through_infiniband(nps1: Topology) -> None:
    assert nps1.nics == {f"mlx5_{index}": address for index, address in enumerate(MI300X_NICS)}
    assert device_node(nps1, nps1.nics["mlx5_6"])[0] == 1


TWO_NODES = Machine(sockets=2, cores=4, l3_cores=4)
GPU = "0000:05:00.0"


@pytest.mark.parametrize(
    ("device", "node", "how"),
    [
        (Device(GPU, node=1, bridge_node=0), 1, "of the device"),
        (Device(GPU, node=-1, bridge_node=1), 1, "bridge 0000:01:01.0"),
        (Device(GPU, node=7, bridge_node=1), 1, "bridge"),  # firmware names a node that is not there
        (Device(GPU, local_cpus="4-7"), 1, "local_cpulist"),
        (Device(GPU, local_cpus="0-7"), None, "no usable NUMA node"),
        (Device("0000:06:00.0", node=1), None, "not in sysfs"),
    ],
)
def test_device_nodes(tmp_path: Path, device: Device, node: int | None, how: str) -> None:
    found, why = device_node(sysfs_tree.read(tmp_path, replace(TWO_NODES, devices=(device,))), GPU)
    assert found == node
    assert how in why


def test_l3_is_found_by_its_level(tmp_path: Path) -> None:
    files = {f"devices/system/cpu/cpu{cpu}/cache/index2/level": "3" for cpu in range(4)}
    files |= {f"devices/system/cpu/cpu{cpu}/cache/index2/shared_cpu_list": "0-3" for cpu in range(4)}
    topology = sysfs_tree.read(tmp_path, Machine(cores=4, l3_cores=None, files=files))
    assert topology.cpus[2].l3 == frozenset(range(4))


def test_missing_files_are_reasons_not_guesses(tmp_path: Path) -> None:
    topology = sysfs_tree.read(tmp_path, Machine(cores=2, l3_cores=None, nodes_per_socket=None, mask=None))
    os.unlink(tmp_path / "devices/system/cpu/cpu1/topology/thread_siblings_list")
    os.unlink(tmp_path / "proc/self/mountinfo")
    topology = read_topology(tmp_path, tmp_path / "proc")
    assert topology.cpus == {0: Cpu(0, None, frozenset({0}), None), 1: Cpu(1, None, frozenset({1}), None)}
    assert topology.nodes == {}
    story = "\n".join(topology.reasons)
    for part in (
        "no SMT siblings known for CPUs 1",
        "no L3",
        "no NUMA nodes",
        "CPU mask",
        "quota are unknown",
    ):
        assert part in story


def test_malformed_files_are_reasons(tmp_path: Path) -> None:
    bad = {"devices/system/cpu/isolated": "banana", "devices/system/node/node0/cpulist": "3-0"}
    topology = sysfs_tree.read(tmp_path, Machine(cores=4, files=bad))
    assert topology.isolated == frozenset()
    assert topology.cpus[0].node is None
    assert any("isolated" in reason and "banana" in reason for reason in topology.reasons)
    assert any("node0/cpulist" in reason and "3-0" in reason for reason in topology.reasons)


@pytest.mark.parametrize("text", [None, "", "x"])
def test_without_online_cpus_the_topology_is_unreadable(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "devices/system/cpu").mkdir(parents=True)
        (tmp_path / "devices/system/cpu/online").write_text(text)
    with pytest.raises(TopologyError, match="devices/system/cpu/online") as caught:
        read_topology(tmp_path, tmp_path / "proc")
    assert isinstance(caught.value, MoriMPError)
    assert isinstance(caught.value, OSError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# ----------------------------------------------------------------------------- affinity, cgroups
V1_MOUNTS = (
    "/docker/ab /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct",
    "/docker/ab /sys/fs/cgroup/cpuset ro - cgroup cgroup rw,cpuset",
)
V1_CGROUP = "5:cpu,cpuacct:/docker/ab/stage\n4:cpuset:/docker/ab/stage\n0::/\n"


@pytest.mark.parametrize(
    ("machine", "allowed", "quota"),
    [
        (Machine(mask="2-5"), "2-5", None),
        (Machine(mask="0-7,64-127"), "0-7", None),  # the mask may name CPUs that are offline
        # Unified: the nearest cpuset counts, and the tightest quota of all levels.
        (
            Machine(
                cgroup="0::/pod/box\n",
                files={
                    "fs/cgroup/pod/box/cpuset.cpus.effective": "1,3-6",
                    "fs/cgroup/cpuset.cpus.effective": "0-7",
                    "fs/cgroup/pod/box/cpu.max": "max 100000",
                    "fs/cgroup/pod/cpu.max": "250000 100000",
                    "fs/cgroup/cpu.max": "600000 100000",
                },
            ),
            "1,3-6",
            2.5,
        ),
        # Unified, seen from outside its namespace: only the mount point counts.
        (
            Machine(
                cgroup="0::/../other\n",
                files={"fs/cgroup/cpuset.cpus.effective": "0-3", "fs/other/cpuset.cpus.effective": "1"},
            ),
            "0-3",
            None,
        ),
        # Version 1 in a container without a cgroup namespace: the mount shows a subtree.
        (
            Machine(
                mounts=V1_MOUNTS,
                cgroup=V1_CGROUP,
                files={
                    "fs/cgroup/cpuset/stage/cpuset.effective_cpus": "4-7",
                    "fs/cgroup/cpuset/cpuset.cpus": "0-7",
                    "fs/cgroup/cpu,cpuacct/stage/cpu.cfs_quota_us": "-1",
                    "fs/cgroup/cpu,cpuacct/stage/cpu.cfs_period_us": "100000",
                    "fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
                    "fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "50000",
                },
            ),
            "4-7",
            3.0,
        ),
    ],
)
def test_limits_of_the_process(tmp_path: Path, machine: Machine, allowed: str, quota: float | None) -> None:
    topology = sysfs_tree.read(tmp_path, machine)
    assert format_cpulist(topology.allowed) == allowed
    assert topology.quota == quota


def test_a_foreign_cpuset_is_ignored_with_a_reason(tmp_path: Path) -> None:
    machine = Machine(mask="0-3", files={"fs/cgroup/cpuset.cpus.effective": "4-7"})
    topology = sysfs_tree.read(tmp_path, machine)
    assert topology.allowed == frozenset(range(4))
    assert any("4-7" in reason for reason in topology.reasons)
