"""Fixtures of the engine tests: rigs, and engine processes that end with the test or the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from engine_rig import MB, EngineHost, Machine, Rig, get_rig, rig_names
from engine_stages import Stages, stages_of

_numbers = count()
Starter = Callable[..., EngineHost]


@pytest.fixture(scope="session")
def machine(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """What this machine has; builds are kept in pytest's cache."""
    cache = getattr(pytestconfig, "cache", None)
    machine = Machine(cache.mkdir("mori-mp-engines") if cache else tmp_path_factory.mktemp("engines"))
    yield machine
    machine.close()


def _grouped(names: Sequence[str]) -> list[ParameterSet]:
    return [pytest.param(name, marks=pytest.mark.xdist_group(f"engine-{name}")) for name in names]


@pytest.fixture(scope="module", params=_grouped(rig_names()))
def rig(request: pytest.FixtureRequest, machine: Machine) -> Rig:
    """Each engine on each platform that this machine has."""
    return get_rig(machine, request.param)


@pytest.fixture(scope="module", params=_grouped([name for name in rig_names() if name != "shm"]))
def gpu_rig(request: pytest.FixtureRequest, machine: Machine) -> Rig:
    """The rigs whose engines move GPU memory."""
    return get_rig(machine, request.param)


@pytest.fixture(scope="module", params=_grouped(["cuda_ipc", "xgmi"]))
def emulated_rig(request: pytest.FixtureRequest, machine: Machine) -> Rig:
    """The rigs over the emulated HIP runtime, where failures and delays can be had."""
    return get_rig(machine, request.param)


@pytest.fixture(scope="module", params=_grouped(["xgmi"]))
def mori_rig(request: pytest.FixtureRequest, machine: Machine) -> Rig:
    """Real Mori over the emulated HIP runtime."""
    return get_rig(machine, request.param)


@pytest.fixture(scope="module", params=_grouped(["cuda_ipc"]))
def cuda_ipc_rig(request: pytest.FixtureRequest, machine: Machine) -> Rig:
    """The engine cuda_ipc over the emulated HIP runtime."""
    return get_rig(machine, request.param)


# Not the emulated xgmi: its wheel is for CPython 3.10, without torch, so no stage of it can receive. Not in
# one group, as engine tests are: stages are processes of their own, in which nothing is shared.
@pytest.fixture(scope="module", params=[name for name in rig_names() if name not in ("shm", "xgmi")])
def stages_rig(request: pytest.FixtureRequest, machine: Machine) -> Rig:
    """The rigs over which whole connectors can send and receive."""
    return get_rig(machine, request.param)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engine processes' blocks of knobs lie."""
    return tmp_path_factory.mktemp("blocks")


@pytest.fixture
def start(blocks: Path, machine: Machine) -> Iterator[Starter]:
    """Starts engine processes that end with the test."""
    started: list[EngineHost] = []

    def start_one(rig: Rig, **environment: str) -> EngineHost:
        nursery = None if "LD_LIBRARY_PATH" in environment else machine.nursery(rig)
        host = EngineHost(rig, blocks / str(next(_numbers)), nursery, **environment)
        started.append(host)
        return host

    yield start_one
    for host in started:
        host.kill()


@pytest.fixture
def stages(stages_rig: Rig, blocks: Path) -> Iterator[Stages]:
    """Makes stages with connectors, which end with the test."""
    with stages_of(stages_rig, blocks) as stages:
        yield stages


@pytest.fixture(scope="module")
def shared_pair(rig: Rig, blocks: Path, machine: Machine) -> Iterator[tuple[EngineHost, EngineHost]]:
    """A sender and, as its peer 1, a receiver, with a MiB each; tests leave them as they found them."""
    nursery = machine.nursery(rig)
    sender = EngineHost(rig, blocks / str(next(_numbers)), nursery)
    receiver = EngineHost(rig, blocks / str(next(_numbers)), nursery)
    sender.become_sender(MB)
    sender("add_peer", 1, *receiver.become_receiver(MB))
    yield sender, receiver
    sender.kill()
    receiver.kill()


@pytest.fixture
def held_stages(cuda_ipc_rig: Rig, blocks: Path) -> Iterator[Stages]:
    """Stages over the emulated runtime, which can hold copies back and have them fail."""
    with stages_of(cuda_ipc_rig, blocks) as stages:
        yield stages
