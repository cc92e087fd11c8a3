"""Pinning plans for recorded and invented machines, explicit CPUs, plan files, precedence of requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import sysfs_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from sysfs_tree import MI300X_GPUS, Device, Machine, mi300x

from mori_mp.shared.affinity import pin_self
from mori_mp.shared.errors import PinningError
from mori_mp.shared.pinning import PinRequest, Plan, parse_sets, plan, resolve_request
from mori_mp.shared.topology import Cpu, Topology, format_cpulist, parse_cpulist

GPU = "0000:05:00.0"


@pytest.fixture(scope="module")
def nps1(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    return sysfs_tree.read(tmp_path_factory.mktemp("nps1"), mi300x())


@pytest.fixture(scope="module")
def nps4(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    return sysfs_tree.read(tmp_path_factory.mktemp("nps4"), mi300x(nodes_per_socket=4))


@pytest.fixture(scope="module")
def no_smt(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    return sysfs_tree.read(tmp_path_factory.mktemp("no-smt"), mi300x(threads=1))


def flat(cores: int = 8, threads: int = 1, l3_cores: int = 8, nodes: int = 1, **changes: object) -> Topology:
    """A machine without devices, in memory: core c has the CPUs c and, with SMT, c + cores."""
    core = [frozenset(c + cores * t for t in range(threads)) for c in range(cores)]
    l3 = [frozenset().union(*core[c - c % l3_cores : c - c % l3_cores + l3_cores]) for c in range(cores)]
    per_node = cores // nodes
    cpus = {cpu: Cpu(cpu, c // per_node, core[c], l3[c]) for c in range(cores) for cpu in core[c]}
    topology = Topology(
        cpus=cpus,
        nodes={n: frozenset(cpu for cpu, entry in cpus.items() if entry.node == n) for n in range(nodes)},
        distances={
            (a, b): 10 if a == b else 10 + 10 * abs(a - b) for a in range(nodes) for b in range(nodes)
        },
        allowed=frozenset(cpus),
        quota=None,
        isolated=frozenset(),
        pci={},
        gpus=(),
        nics={},
        reasons=(),
    )
    return replace(topology, **changes)  # type: ignore[arg-type]


def sets_of(made: Plan) -> list[frozenset[int]]:
    """The plan's CPU sets, control first; the plan must pin everything."""
    assert made.control is not None
    return [made.control, *(cpus for cpus in made.workers if cpus is not None)]


def assert_ideal(made: Plan, topology: Topology, node: int) -> None:
    sets = sets_of(made)
    assert len(sets) == 1 + len(made.workers)
    assert not made.degraded, made.reasons
    assert made.node == node
    assert made.cpus <= topology.nodes[node]
    assert len({topology.cpus[min(cpus)].l3 for cpus in sets}) == 1
    assert all(cpus == topology.cpus[min(cpus)].core for cpus in sets)
    assert sum(map(len, sets)) == len(made.cpus)


# ------------------------------------------------------------------------------- plans: MI300X
@pytest.mark.parametrize("gpu", range(8))
@pytest.mark.parametrize("kind", ["nps1", "nps4", "no_smt"])
def test_each_gpu_gets_whole_cores_of_one_l3_on_its_node(
    request: pytest.FixtureRequest, kind: str, gpu: int
) -> None:
    topology: Topology = request.getfixturevalue(kind)
    made = plan(topology, workers=4, gpu_bdf=MI300X_GPUS[gpu])
    assert_ideal(made, topology, node=gpu if kind == "nps4" else gpu // 4)
    # From the high end: no free core of that L3 lies above the chosen ones.
    l3 = topology.cpus[min(made.cpus)].l3
    assert l3 is not None
    cores = sorted({min(topology.cpus[cpu].core) for cpu in l3})
    assert sorted(min(cpus) for cpus in sets_of(made)) == cores[-5:]


@pytest.mark.parametrize("kind", ["nps1", "nps4", "no_smt"])
def test_connectors_of_different_gpus_do_not_collide(request: pytest.FixtureRequest, kind: str) -> None:
    topology: Topology = request.getfixturevalue(kind)
    plans = [plan(topology, workers=4, gpu_bdf=address) for address in MI300X_GPUS]
    assert len(frozenset().union(*(made.cpus for made in plans))) == sum(len(made.cpus) for made in plans)


def test_the_first_gpu_of_a_node_uses_its_last_cores(nps1: Topology) -> None:
    made = plan(nps1, workers=2, gpu_bdf="05:00.0")
    assert made.control == {95, 287}
    assert made.workers == ({94, 286}, {93, 285})


def test_a_nic_stands_in_for_a_gpu(nps1: Topology) -> None:
    assert_ideal(plan(nps1, workers=2, nic="mlx5_5"), nps1, node=1)
    assert_ideal(plan(nps1, workers=2, nic="absent_0, mlx5_5:1"), nps1, node=1)


def test_the_gpu_counts_before_the_nic_and_says_so(nps1: Topology) -> None:
    made = plan(nps1, workers=2, gpu_bdf=MI300X_GPUS[7], nic="mlx5_0")
    assert_ideal(made, nps1, node=1)
    assert any("different nodes" in reason for reason in made.reasons)


def test_an_unknown_device_is_not_node_0(nps1: Topology) -> None:
    made = plan(nps1, workers=2, gpu_bdf="0000:77:00.0", nic="absent_0")
    assert made.node is None
    assert made.degraded
    assert any("0000:77:00.0" in reason for reason in made.reasons)
    assert any("absent_0" in reason for reason in made.reasons)


def test_an_explicit_node_wins_over_devices(nps1: Topology) -> None:
    assert_ideal(plan(nps1, workers=2, gpu_bdf=MI300X_GPUS[0], numa_node=1), nps1, node=1)
    with pytest.raises(PinningError, match=r"node 2 is not online .*0-1"):
        plan(nps1, workers=2, numa_node=2)
    with pytest.raises(PinningError, match=r"node 1 .*96-191"):
        plan(replace(nps1, allowed=nps1.nodes[0]), workers=2, numa_node=1)


def test_without_devices_the_engines_node_counts(nps1: Topology) -> None:
    assert_ideal(plan(nps1, workers=2, reserve=frozenset({3})), nps1, node=0)
    made = plan(nps1, workers=2)
    assert made.node is None
    assert not made.degraded


def test_smt_hands_out_threads(nps1: Topology) -> None:
    made = plan(nps1, workers=3, gpu_bdf=MI300X_GPUS[0], smt=True)
    assert sets_of(made) == [{287}, {95}, {286}, {94}]
    assert not made.degraded


def test_the_engines_core_is_left_alone_with_its_sibling(nps1: Topology) -> None:
    for smt in (False, True):
        made = plan(nps1, workers=2, gpu_bdf=MI300X_GPUS[0], reserve=frozenset({287}), smt=smt)
        assert not made.cpus & {95, 287}
        assert not made.degraded


def test_cores_of_other_plans_are_left_alone(nps1: Topology) -> None:
    first = plan(nps1, workers=4, gpu_bdf=MI300X_GPUS[0])
    second = plan(nps1, workers=4, gpu_bdf=MI300X_GPUS[0], taken=first.cpus)
    assert_ideal(second, nps1, node=0)
    assert not first.cpus & second.cpus


# -------------------------------------------------------------------------- plans: stepping down
def test_eight_workers_on_an_eight_core_l3_share_a_core_with_control(nps1: Topology) -> None:
    made = plan(nps1, workers=8, gpu_bdf=MI300X_GPUS[0])
    assert made.control == made.workers[-1]
    assert len(set(made.workers)) == 8
    assert len({nps1.cpus[cpu].l3 for cpu in made.cpus}) == 1
    assert made.degraded
    assert any("shares the core" in reason for reason in made.reasons)


def test_without_smt_they_rather_use_two_l3s(no_smt: Topology) -> None:
    made = plan(no_smt, workers=8, gpu_bdf=MI300X_GPUS[0])
    assert len(made.cpus) == 9
    assert made.cpus <= no_smt.nodes[0]
    assert made.degraded
    assert any("spread over 2 domains" in reason for reason in made.reasons)


def test_other_nodes_help_out_nearest_first(nps4: Topology) -> None:
    few = frozenset({0, 192}) | nps4.nodes[2] | nps4.nodes[6]
    made = plan(replace(nps4, allowed=few), workers=4, gpu_bdf=MI300X_GPUS[0])
    assert made.node == 0
    assert made.cpus <= nps4.nodes[2]
    assert made.degraded
    assert any("node 0 has 1 free cores for 5 processes" in reason for reason in made.reasons)


def test_spreading_starts_at_home() -> None:
    topology = flat(cores=12, l3_cores=2, nodes=3)
    made = plan(topology, workers=5, numa_node=2)
    assert made.cpus == parse_cpulist("6-11")


def test_home_cores_are_used_up_before_a_larger_l3_elsewhere() -> None:
    topology = flat(cores=12, l3_cores=4, nodes=3, allowed=parse_cpulist("0-2,4-11"))
    assert plan(topology, workers=6, numa_node=0).cpus == parse_cpulist("0-2,4-7")


def test_whole_cores_of_a_lower_l3_are_better_than_half_cores_of_a_higher_one() -> None:
    made = plan(flat(cores=8, threads=2, l3_cores=4, allowed=parse_cpulist("0-11")), workers=2)
    assert made.cpus == parse_cpulist("1-3,9-11")
    assert not made.degraded
    spread = plan(flat(cores=8, threads=2, l3_cores=2, allowed=parse_cpulist("0-13")), workers=4)
    assert not spread.cpus & {6, 7}


def test_with_fewer_cores_than_workers_nothing_is_pinned() -> None:
    made = plan(flat(cores=4), workers=5)
    assert (made.control, made.workers) == (None, (None,) * 5)
    assert made.degraded
    assert any("4 free cores for 6 processes: not pinned" in reason for reason in made.reasons)


def test_force_shares_cores_but_not_the_engines() -> None:
    made = plan(flat(cores=4), workers=5, mode="force", reserve=frozenset({3}))
    assert made.cpus == {0, 1, 2}
    assert None not in made.workers
    assert made.degraded


def test_force_uses_taken_cores_when_there_are_no_others() -> None:
    made = plan(flat(cores=4), workers=1, mode="force", reserve=frozenset({3}), taken=frozenset({0, 1, 2}))
    assert made.cpus
    assert made.cpus <= {0, 1, 2}
    assert plan(flat(cores=4), workers=1, taken=frozenset(range(4))).cpus == frozenset()


def test_when_everything_is_reserved_even_force_does_not_pin() -> None:
    made = plan(flat(cores=4), workers=1, mode="force", reserve=frozenset(range(4)))
    assert made.control is None
    assert made.degraded


def test_a_core_shared_with_strangers_is_a_last_resort() -> None:
    topology = flat(cores=8, threads=2)
    made = plan(replace(topology, allowed=parse_cpulist("4-7,8-11,0-3")), workers=2)
    assert not made.degraded
    assert made.cpus <= parse_cpulist("0-3,8-11")
    half = plan(replace(topology, allowed=frozenset(range(8))), workers=2)
    assert sets_of(half) == [{7}, {6}, {5}]
    assert half.degraded
    assert any("core 7,15" in reason for reason in half.reasons)


def test_isolated_cpus_come_last_and_one_to_a_process() -> None:
    topology = flat(cores=8, threads=2, isolated=parse_cpulist("4-7,12-15"))
    assert plan(topology, workers=3).cpus == parse_cpulist("0-3,8-11")
    only = plan(replace(topology, allowed=topology.isolated), workers=2)
    assert sets_of(only) == [{7}, {6}, {5}]
    assert any("isolated" in reason for reason in only.reasons)


def test_an_l3_for_each_cpu_is_no_l3() -> None:
    made = plan(flat(cores=8, l3_cores=1), workers=2)
    assert sets_of(made) == [{7}, {6}, {5}]
    assert not made.degraded


def test_a_connector_without_workers_has_a_control_process() -> None:
    made = plan(flat(), workers=0)
    assert made.control == {7}
    assert made.workers == ()


TOPOLOGY = flat(cores=12, threads=2, l3_cores=4, nodes=2)
CPUS = st.frozensets(st.integers(0, 23))


@settings(max_examples=150, deadline=None)
@given(
    allowed=CPUS.filter(len),
    isolated=CPUS,
    reserve=CPUS,
    taken=CPUS,
    quota=st.none() | st.floats(0.5, 24),
    workers=st.integers(0, 13),
    smt=st.booleans(),
    node=st.sampled_from([None, 0, 1]),
    mode=st.sampled_from(["auto", "force", "off"]),
)
def test_every_plan_keeps_the_rules(
    allowed, isolated, reserve, taken, quota, workers, smt, node, mode
) -> None:  # type: ignore[no-untyped-def]
    topology = replace(TOPOLOGY, allowed=allowed, isolated=isolated, quota=quota)
    if node is not None and not topology.nodes[node] & allowed:
        node = None
    made = plan(topology, workers=workers, numa_node=node, reserve=reserve, taken=taken, smt=smt, mode=mode)
    assert len(made.workers) == workers
    assert made.cpus <= allowed
    reserved_cores = frozenset().union(*(topology.cpus[cpu].core for cpu in reserve))
    assert not made.cpus & reserved_cores
    pinned = [cpus for cpus in (made.control, *made.workers) if cpus is not None]
    assert all(pinned)  # no empty set
    assert len(pinned) in (0, workers + 1)
    assert all(len(cpus) == 1 for cpus in pinned if smt or cpus & isolated)
    if mode == "off":
        assert not pinned
    elif not pinned:
        assert made.degraded
    if mode == "auto" and pinned:
        assert not made.cpus & taken
        assert len(allowed) >= 4
        assert quota is None or quota >= len(allowed)
        assert len(set(made.workers)) == workers
    if pinned and len(set(pinned)) < len(pinned):
        assert made.degraded
    assert Plan.from_json(made.to_json()) == made


# --------------------------------------------------------------- virtual machines and containers
def test_two_core_vm_is_not_pinned_unless_forced(tmp_path: Path) -> None:
    machine = Machine(cores=2, l3_cores=2, devices=(Device(GPU),))
    topology = sysfs_tree.read(tmp_path, machine)
    made = plan(topology, workers=1, gpu_bdf=GPU)
    assert (made.control, made.workers, made.node) == (None, (None,), 0)
    assert made.degraded
    assert any("fewer than 4" in reason for reason in made.reasons)
    forced = plan(topology, workers=1, gpu_bdf=GPU, mode="force")
    assert sets_of(forced) == [{1}, {0}]
    assert forced.degraded


def test_container_with_an_odd_cpuset(tmp_path: Path) -> None:
    cpuset = sysfs_tree.ODD_CPUSET
    machine = mi300x(files={"fs/cgroup/cpuset.cpus.effective": cpuset})
    topology = sysfs_tree.read(tmp_path, machine)
    assert format_cpulist(topology.allowed) == cpuset
    assert_ideal(plan(topology, workers=3, gpu_bdf=MI300X_GPUS[0]), topology, node=0)
    wide = plan(topology, workers=5, gpu_bdf=MI300X_GPUS[0])
    assert wide.degraded
    assert wide.cpus <= topology.allowed & topology.nodes[0]
    away = plan(topology, workers=3, gpu_bdf=MI300X_GPUS[7])  # one stray CPU on that GPU's node
    assert away.node == 1
    assert away.cpus == parse_cpulist("17-20,209-212")
    assert away.degraded


def test_quota_in_a_shared_pool_is_not_pinned() -> None:
    topology = flat(quota=6.0)
    made = plan(topology, workers=2)
    assert made.cpus == frozenset()
    assert made.degraded
    assert any("quota of 6 CPUs on 8" in reason for reason in made.reasons)
    assert plan(topology, workers=2, mode="force").cpus == {5, 6, 7}
    # Exclusive CPUs: the quota is as large as the set.
    assert plan(replace(topology, quota=8.0), workers=2).cpus == {5, 6, 7}


# ---------------------------------------------------------------------------------- explicit CPUs
def test_an_explicit_cpu_outside_the_allowed_set_is_an_error() -> None:
    topology = flat(allowed=parse_cpulist("0-3,6"))
    with pytest.raises(PinningError, match=r"control_cpus='4'.* CPU 4 .*\(0-3,6\)") as caught:
        plan(topology, workers=1, control_cpus="4")
    assert isinstance(caught.value, ValueError)
    with pytest.raises(PinningError, match=r"worker_cpus='2\|6-7'.* CPU 7 "):
        plan(topology, workers=2, worker_cpus="2|6-7", mode="off")
    with pytest.raises(PinningError, match="CPU 4095"):
        plan(topology, workers=1, control_cpus="4095", mode="force")


def test_explicit_cpus_win_and_the_rest_keeps_clear_of_them() -> None:
    topology = flat()
    made = plan(topology, workers=2, control_cpus="7", worker_cpus="6|4-5", reserve=frozenset({7}))
    assert sets_of(made) == [{7}, {6}, {4, 5}]
    assert not made.degraded
    assert any("engine's main thread" in reason for reason in made.reasons)
    assert sets_of(plan(topology, workers=2, control_cpus="6")) == [{6}, {7}, {5}]
    assert sets_of(plan(topology, workers=2, worker_cpus="7|6")) == [{5}, {7}, {6}]
    assert plan(topology, workers=3, worker_cpus="2-3").workers == ({2, 3},) * 3


def test_explicit_cpus_hold_when_the_rest_is_not_pinned() -> None:
    for changes, mode in (({}, "off"), ({"quota": 2.0}, "auto")):
        made = plan(flat(**changes), workers=2, control_cpus="3", mode=mode)  # type: ignore[arg-type]
        assert (made.control, made.workers) == ({3}, (None, None))
    assert plan(flat(), workers=2, control_cpus="none", worker_cpus="1|none").workers == ({1}, None)


def test_sets_must_fit_the_processes() -> None:
    with pytest.raises(PinningError, match="2 CPU sets for 3 workers"):
        plan(flat(), workers=3, worker_cpus="1|2")
    with pytest.raises(PinningError, match="2 CPU sets for one control"):
        plan(flat(), workers=3, control_cpus="1|2")
    with pytest.raises(PinningError, match=r"worker_cpus='1\|' has an empty"):
        plan(flat(), workers=2, worker_cpus="1|")
    with pytest.raises(PinningError, match="workers=-1"):
        plan(flat(), workers=-1)
    with pytest.raises(PinningError, match="'forse'"):
        plan(flat(), workers=1, mode="forse")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ JSON
def test_plans_survive_json_and_unpinned_is_null() -> None:
    made = Plan(frozenset({30, 31}), (None, frozenset({29})), None, True, ("too few",))
    document = json.loads(made.to_json())
    assert document["control"] == "30-31"
    assert document["workers"] == [None, "29"]
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 1"),
        ({"control": 31}, "'control' is 31"),
        ({"control": "3-1"}, "3-1"),
        ({"workers": "31"}, "'workers'"),
        ({"workers": [""]}, "'workers' holds ''"),
        ({"node": True}, "'node' is True"),
        ({"degraded": None}, "'degraded' is None"),
    ],
)
def test_damaged_plans_are_refused(change: dict[str, object], message: str) -> None:
    document = {**json.loads(Plan.unpinned(1, "why").to_json()), **change}
    with pytest.raises(PinningError, match=message):
        Plan.from_json(json.dumps(document))


def test_incomplete_plans_are_refused() -> None:
    for text, message in (("{", "not JSON"), ("[]", "version 1"), ('{"version": 1}', "'control' is absent")):
        with pytest.raises(PinningError, match=message):
            Plan.from_json(text)


# ---------------------------------------------------------------------------------------- requests
@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(Plan(frozenset({9}), (frozenset({8}), None), 0, False, ()).to_json())
    return str(path)


ENV = {"MORI_MP_CONTROL_CPUS": "31", "MORI_MP_WORKER_CPUS": "30|29", "MORI_MP_NUMA_NODE": "1"}


@pytest.mark.parametrize(
    ("values", "env", "expected"),
    [
        ({}, {}, PinRequest()),
        ({"control_cpus": "", "worker_cpus": None, "numa_node": -1, "pin": "auto"}, {}, PinRequest()),
        ({"control_cpus": 3, "worker_cpus": " 5, 4 | 7"}, {}, PinRequest("auto", "3", "4-5|7")),
        ({}, ENV, PinRequest("auto", "31", "30|29", 1)),
        ({"control_cpus": "3", "numa_node": 0}, ENV, PinRequest("auto", "3", "30|29", 0)),
        ({"numa_node": 0}, {}, PinRequest(numa_node=0)),
        # off silences what is weaker, not what is stronger or beside it
        ({"pin": "off"}, ENV, PinRequest("off")),
        ({"pin": False, "control_cpus": "3"}, ENV, PinRequest("off", "3")),
        ({}, {**ENV, "MORI_MP_PIN": "off"}, PinRequest("off", "31", "30|29", 1)),
        ({"control_cpus": "3"}, {"MORI_MP_PIN": "OFF"}, PinRequest("off", "3")),
        # force and auto contradict no list
        ({"pin": "force"}, {**ENV, "MORI_MP_PIN": "off"}, PinRequest("force", "31", "30|29", 1)),
        ({"pin": "auto"}, {"MORI_MP_PIN": "force"}, PinRequest("force")),
        # a plan file is a set of lists at its own place in the order
        ({}, {"MORI_MP_PIN": "PLAN"}, PinRequest("auto", "9", "8|none")),
        ({}, {"MORI_MP_CONTROL_CPUS": "31", "MORI_MP_PIN": "PLAN"}, PinRequest("auto", "31", "8|none")),
        ({"pin": "PLAN"}, ENV, PinRequest("auto", "9", "8|none", 1)),
        ({"pin": "PLAN", "control_cpus": "3"}, ENV, PinRequest("auto", "3", "8|none", 1)),
    ],
)
def test_precedence(
    plan_file: str, values: dict[str, object], env: dict[str, str], expected: PinRequest
) -> None:
    values = {name: plan_file if value == "PLAN" else value for name, value in values.items()}
    env = {name: plan_file if value == "PLAN" else value for name, value in env.items()}
    request = resolve_request(values, env)
    assert replace(request, sources=()) == expected
    assert bool(request.sources) == (expected != PinRequest())


@pytest.mark.parametrize(
    ("values", "env", "message"),
    [
        ({}, {"MORI_MP_CONTROL_CPUS": "3-1"}, "MORI_MP_CONTROL_CPUS='3-1'"),
        ({}, {"MORI_MP_WORKER_CPUS": "3||4"}, r"MORI_MP_WORKER_CPUS='3\|\|4'"),
        ({}, {"MORI_MP_NUMA_NODE": "east"}, "MORI_MP_NUMA_NODE='east'"),
        ({}, {"MORI_MP_PIN": "forse"}, "MORI_MP_PIN='forse'"),
        ({}, {"MORI_MP_PIN": "/nowhere/plan.json"}, "MORI_MP_PIN='/nowhere/plan.json'.*cannot be read"),
        ({"control_cpus": True}, {}, "YAML extra control_cpus=True"),
        ({"numa_node": True}, {}, "YAML extra numa_node=True"),
        ({"pin": "maybe"}, {}, "YAML extra pin='maybe'"),
    ],
)
def test_bad_requests_name_their_place(values: dict[str, object], env: dict[str, str], message: str) -> None:
    with pytest.raises(PinningError, match=message):
        resolve_request(values, env)


def test_a_request_makes_a_plan_that_tells_its_sources() -> None:
    request = resolve_request({"worker_cpus": "1"}, {"MORI_MP_CONTROL_CPUS": "2"})
    made = request.plan(flat(), workers=1)
    assert sets_of(made) == [{2}, {1}]
    assert "worker_cpus is set by the YAML extra" in made.reasons
    assert "control_cpus is set by MORI_MP_*" in made.reasons


def test_parse_sets_knows_none() -> None:
    assert parse_sets("31|None|28-29", "x") == ({31}, None, {28, 29})
    assert parse_sets(" ", "x") == ()


# ------------------------------------------------------------------------------------- pin_self
def in_a_thread(cpus: frozenset[int] | None) -> frozenset[int] | BaseException:
    """Pin a thread of its own, so that the test process keeps its mask."""
    results: list[frozenset[int] | BaseException] = []

    def body() -> None:
        try:
            results.append(pin_self(cpus))
        except BaseException as err:
            results.append(err)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return results[0]


def test_pin_self_reads_the_mask_back() -> None:
    mine = frozenset(os.sched_getaffinity(0))
    one = frozenset({max(mine)})
    assert in_a_thread(None) == mine
    assert in_a_thread(one) == one
    assert frozenset(os.sched_getaffinity(0)) == mine


def test_pin_self_says_when_nothing_is_left() -> None:
    outcome = in_a_thread(frozenset({65000}))
    assert isinstance(outcome, OSError)
    assert "65000" in str(outcome)


def test_affinity_imports_next_to_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); import mori_mp.shared.affinity\n"
        "print([m for m in ('threading', 'torch', 'zmq', 'msgspec', 'dataclasses', 'json', 'pathlib')"
        " if m in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
