"""The parts of engines: the GPU runtime by itself, watching a process, waiting before a write starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from connector_support import eventually
from engine_rig import Machine, Missing, skip_or_fail

from mori_mp.shared.errors import EngineUnavailable, TransferFailed
from mori_mp.shared.pool import Pool
from mori_mp.workers import engines
from mori_mp.workers.engines import gpu_runtime
from mori_mp.workers.engines.base import HOST, Deferred, LocalMemory, Passive
from mori_mp.workers.engines.gpu_runtime import GpuError, GpuRuntime
from mori_mp.workers.engines.liveness import PeerProcess, start_time


# ----------------------------------------------------------------------------------- GPU runtime
@pytest.fixture(scope="module")
def library(machine: Machine) -> Path:
    """The emulated HIP runtime's file."""
    try:
        return machine.emulated_hip() / "libamdhip64.so.7"
    except Missing as missing:
        skip_or_fail(missing)


@pytest.fixture(scope="module", params=[False, True], ids=["releasing", "keeping the GIL"])
def runtime(request: pytest.FixtureRequest, library: Path) -> GpuRuntime:
    return gpu_runtime.load(path=str(library), keep_gil=request.param)


def test_devices_are_found_by_bus_id(runtime: GpuRuntime) -> None:
    assert runtime.kind == "hip"
    assert runtime.device_count() == 2
    bus_ids = [runtime.bus_id(device) for device in range(2)]
    assert bus_ids == ["0000:c1:00.0", "0000:c2:00.0"]
    assert [runtime.device_by_bus_id(bus_id) for bus_id in bus_ids] == [0, 1]
    assert runtime.device_by_bus_id("0000:99:00.0") is None
    runtime.set_device(1)
    assert runtime.current_device() == 1
    assert runtime.can_access_peer(0, 1)
    runtime.set_device(0)
    runtime.enable_peer_access(1)
    runtime.enable_peer_access(1)  # twice is fine


def test_an_inner_pointer_knows_its_allocation(runtime: GpuRuntime) -> None:
    runtime.set_device(1)
    base = runtime.malloc(100_000)
    assert runtime.allocation(base + 4097) == (base, 100_000)
    assert runtime.pointer_device(base + 5) == 1
    assert runtime.pointer_device(id(base)) is None
    runtime.free(base)


def test_copies_streams_and_events(runtime: GpuRuntime) -> None:
    runtime.set_device(0)
    first, second = runtime.malloc(4096), runtime.malloc(4096)
    stream, event = runtime.stream_create(), runtime.event_create(interprocess=True)
    assert runtime.event_query(event)  # never recorded
    source = gpu_runtime.ctypes.create_string_buffer(b"payload", 7)
    target = gpu_runtime.ctypes.create_string_buffer(7)
    runtime.memcpy(first, gpu_runtime.ctypes.addressof(source), 7)
    runtime.memcpy_async(second, first, 7, stream)
    runtime.event_record(event, stream)
    runtime.event_synchronize(event)
    assert runtime.event_query(event)
    runtime.stream_wait_event(stream, event)
    runtime.memcpy_peer_async(first, 0, second, 0, 7, stream)
    runtime.stream_synchronize(stream)
    runtime.memcpy(gpu_runtime.ctypes.addressof(target), second, 7)
    assert target.raw == b"payload"
    runtime.synchronize()
    runtime.event_destroy(event)
    runtime.stream_destroy(stream)
    for address in (first, second):
        runtime.free(address)


def test_a_failed_call_says_what_the_runtime_says_and_leaves_no_error_behind(runtime: GpuRuntime) -> None:
    with pytest.raises(
        GpuError, match=r"hipSetDevice failed: invalid device ordinal \(error 101\)"
    ) as caught:
        runtime.set_device(77)
    assert (caught.value.code, caught.value.context_lost) == (101, False)
    assert runtime._clear() == 0
    assert GpuError("hipEventQuery", 700, "an illegal memory access").context_lost


def test_a_loaded_runtime_is_found_again(runtime: GpuRuntime, library: Path) -> None:
    assert gpu_runtime.load("hip").path == str(library) == runtime.path


def test_no_runtime_at_all() -> None:
    environment = {
        **os.environ,
        "ROCM_PATH": "/nonexistent",
        "CUDA_HOME": "/nonexistent",
        "LD_LIBRARY_PATH": "",
    }
    code = (
        "from mori_mp.workers.engines import gpu_runtime as g; g._PACKAGES = {'hip': (), 'cuda': ()}\n"
        "g._SONAMES = {'hip': ('libamdhip64.so.none',), 'cuda': ('libcudart.so.none',)}\n"
        "try: g.load()\nexcept g.EngineUnavailable as exc: print(exc)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    ).stdout
    assert "no hip or cuda runtime can be loaded" in said
    assert "/nonexistent/lib64/libcudart.so.none" in said
    assert "MORI_MP_GPU_RUNTIME" in said


@pytest.mark.parametrize("path", ["/nonexistent/libamdhip64.so.7", "/nonexistent/libother.so"])
def test_a_named_runtime_is_taken_at_its_word(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv(gpu_runtime.PATH_ENV, path)
    with pytest.raises(EngineUnavailable, match=path):
        gpu_runtime.load()


# ---------------------------------------------------------------------------------- peer processes
@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as running:
        yield running
        running.kill()


def test_a_process_is_watched_until_it_has_gone(process: subprocess.Popen[bytes]) -> None:
    watched = PeerProcess.exact(process.pid, start_time(process.pid))
    assert watched.watched
    assert not watched.gone()
    process.kill()
    process.wait()
    assert watched.gone()
    watched.close()
    watched.close()
    with pytest.raises(EngineUnavailable, match="has exited"):
        PeerProcess.exact(process.pid, 1)


def test_many_threads_may_ask_whether_a_process_has_gone(process: subprocess.Popen[bytes]) -> None:
    watched = PeerProcess.exact(process.pid, start_time(process.pid))
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(lambda: [watched.gone() for _ in range(20_000)]) for _ in range(4)]
        assert not any(any(each.result()) for each in asked)
    watched.close()


def test_another_process_with_its_pid_is_not_taken_for_it(process: subprocess.Popen[bytes]) -> None:
    with pytest.raises(EngineUnavailable, match="new owner"):
        PeerProcess.exact(process.pid, start_time(process.pid) + 1)


def test_a_likely_process_is_one_that_has_the_library(process: subprocess.Popen[bytes]) -> None:
    maps = Path(f"/proc/{process.pid}/maps")
    eventually(lambda: "libc" in maps.read_text(), "the program loaded")  # it has only just been started
    has_it = PeerProcess.likely(process.pid, "libc")
    has_it_not = PeerProcess.likely(process.pid, "libmori_")
    nobody = PeerProcess.likely((1 << 22) + 1, "libc")
    assert (has_it.watched, has_it_not.watched, nobody.watched) == (True, False, False)
    process.kill()
    process.wait()
    assert (has_it.gone(), has_it_not.gone(), nobody.gone()) == (True, False, False)
    has_it.close()


# ------------------------------------------------------------------------------------------- base
class Switch:
    def __init__(self) -> None:
        self.on = False

    def query(self) -> bool:
        return self.on


class Ended:
    def poll(self) -> bool:
        return True


def test_a_deferred_transfer_starts_when_it_may_and_once() -> None:
    switch, starts = Switch(), []

    def start() -> Ended:
        starts.append(1)
        return Ended()

    transfer = Deferred(switch, start)
    assert not transfer.poll()
    assert starts == []
    switch.on = True
    assert transfer.poll()
    assert transfer.poll()
    assert starts == [1]


def test_shm_waits_too() -> None:
    pool, peer = Pool.create(8192, "a"), Pool.create(8192, "b")
    engine = engines.load("shm", pool, {})
    passive = engines.receive("shm", peer, {})
    engine.add_peer(1, passive.engine_desc, passive.mem_desc)
    pool.view[:3], switch = b"old", Switch()
    transfer = engine.submit(1, [0], [0], [3], 1, switch)
    assert not transfer.poll()
    pool.view[:3], switch.on = b"new", True
    assert transfer.poll()
    assert bytes(peer.view[:3]) == b"new"
    with pytest.raises(TransferFailed):
        engine.submit(1, [0], [0], [9000], 1, switch)  # bounds are checked at once
    engine.close()
    passive.close()
    pool.close()
    peer.close()


def test_a_passive_side_is_released_once() -> None:
    released: list[int] = []
    passive = Passive(b"", b"", lambda: released.append(1))
    passive.close()
    passive.close()
    assert released == [1]


def test_the_registry_names_what_it_has() -> None:
    memory = LocalMemory(4096, 4096, HOST)
    with pytest.raises(EngineUnavailable, match="no engine 'tcp'; it has: cuda_ipc, fabric, rdma, shm, xgmi"):
        engines.load("tcp", memory, {})
    pool = Pool.create(4096, "x")
    for name in ("xgmi", "fabric", "cuda_ipc"):
        with pytest.raises(EngineUnavailable, match="host memory"):
            engines.receive(name, pool, {})
    pool.close()
