"""Real transfer workers, with the test as their control process: jobs in, bytes at the peer, JobDone out."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from engine_host import pattern
from engine_rig import MB, EngineHost, Rig
from hipemu.control import Block

from mori_mp.shared import messages
from mori_mp.shared.messages import (
    AddPeer,
    DropPeer,
    Job,
    JobDone,
    Stop,
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
)
from mori_mp.shared.pool import Pool
from mori_mp.workers.job_channel import JobChannel
from mori_mp.workers.spawn import Child, module_path, spawn

_SENT, _OLD = pattern(1, MB), pattern(0, MB)
_MILLISECONDS = 30_000
_numbers = count()


class Worker:
    """A transfer worker process, and the test as its control process."""

    def __init__(self, rig: Rig, folder: Path, gpu_pool: bytes) -> None:
        ours, theirs = messages.socketpair()
        self.channel = JobChannel(ours, messages.from_worker)
        self._pool = Pool.create(4096, "worker-test")
        self.log = folder / f"log-{next(_numbers)}"
        setup = WorkerSetup(
            role="worker",
            label="worker test index=0",
            path=module_path(),
            cpus=[],
            log_level=logging.INFO,
            index=0,
            identity="0.1",
            engine="shm",
            engine_options={"xgmi_num_streams": 8, "xgmi_num_events": 8},
            pool_fd=self._pool.fd,
            pool_size=self._pool.size,
            jobs_fd=theirs.fileno(),
            threaded=False,
            prefault=False,
            device_engine=rig.engine,
            gpu_pool=gpu_pool,
        )
        interpreter = "" if rig.python == sys.executable else rig.python
        with open(self.log, "wb") as log, theirs:
            fds = [self._pool.fd, theirs.fileno()]
            self.process: Child = spawn(setup, pass_fds=fds, output_fd=log.fileno(), interpreter=interpreter)

    def send(self, message: messages.ToWorker) -> None:
        self.channel.send(message)
        assert self.channel.backlog == 0

    def receive(self) -> messages.FromWorker:
        poller = select.poll()
        poller.register(self.channel.fileno(), select.POLLIN)
        assert poller.poll(_MILLISECONDS), self.log.read_text()
        message = self.channel.receive()
        assert message is not None, self.log.read_text()
        return message

    def close(self) -> None:
        self.process.kill()
        assert self.process.reap(10)
        self.channel.close()
        self._pool.close()


class Scene:
    """A stage that lends a filled pool, a receiver, and workers in between."""

    def __init__(self, rig: Rig, start, folder: Path) -> None:
        self.rig, self._folder = rig, folder
        self.stage: EngineHost = start(rig)
        self.stage.memory(MB)
        self.stage("fill", 1)
        self._pool = self.stage("lend", 4)
        self.receiver: EngineHost = start(rig)
        self.descriptors = self.receiver.become_receiver(MB)
        self.workers: list[Worker] = []

    def worker(self) -> Worker:
        """Start a worker; returns it ready, with the receiver as its peer 1."""
        worker = Worker(self.rig, self._folder, self._pool)
        self.workers.append(worker)
        ready = worker.receive()
        assert isinstance(ready, WorkerReady), ready
        assert (ready.engine, ready.depth > 1) == (f"shm+{self.rig.engine}", True)
        worker.send(AddPeer(1, *self.descriptors, device=True))
        return worker

    def landed(self) -> bytes:
        return bytes(self.receiver("peek", 0, MB))


@pytest.fixture
def block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Block]:
    """The knobs of the workers that the test starts."""
    block = Block(tmp_path / "block")
    for name, value in block.environment.items():
        monkeypatch.setenv(name, value)
    yield block
    block.close()


@pytest.fixture
def scene(
    gpu_rig: Rig,
    start,
    block: Block,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Scene]:
    for name, value in gpu_rig.environment.items():
        monkeypatch.setenv(name, value)
    scene = Scene(gpu_rig, start, tmp_path_factory.mktemp("w"))
    yield scene
    for worker in scene.workers:
        worker.close()


def need_hold(scene: Scene) -> None:
    if not scene.rig.holds:
        pytest.skip("copies cannot be held back here")


def test_a_worker_moves_bytes_between_gpu_pools(scene: Scene) -> None:
    worker = scene.worker()
    for write_id in range(20):
        at = write_id * 50_000
        worker.send(Job(write_id, 1, [at, at + 30_000], [at + 20_000, at], [20_000, 20_000]))
        done = worker.receive()
        assert (done.write_id, done.error) == (write_id, "")
    expected = bytearray(_OLD)
    for at in range(0, 1_000_000, 50_000):
        expected[at + 20_000 : at + 40_000] = _SENT[at : at + 20_000]
        expected[at : at + 20_000] = _SENT[at + 30_000 : at + 50_000]
    assert scene.landed() == bytes(expected)
    worker.send(DropPeer(1))
    worker.send(Job(99, 1, [0], [0], [1]))
    assert worker.receive() == JobDone(99, "peer 1 is not registered", 0)
    worker.send(Stop())
    assert worker.process.reap(10)
    assert worker.process.exit_status() == 0


def test_jobs_in_flight_end_in_any_order(scene: Scene, block: Block) -> None:
    need_hold(scene)
    worker = scene.worker()
    block["hold"] = 1
    for write_id in range(8):
        worker.send(Job(write_id, 1, [write_id * 1000], [write_id * 1000], [1000]))
    worker.send(Job(8, 1, [0], [0], [MB + 1]))  # refused at once: the others are under way
    refused = worker.receive()
    assert (refused.write_id, "leaves the registered regions" in refused.error) == (8, True)
    assert scene.landed() == _OLD
    block["hold"] = 0
    assert {worker.receive().write_id for _ in range(8)} == set(range(8))
    assert scene.landed() == _SENT[:8000] + _OLD[8000:]


def test_a_job_waits_for_its_event(scene: Scene) -> None:
    need_hold(scene)
    worker = scene.worker()
    scene.stage.block["hold"] = 1
    scene.stage("put", 3, 0, b"new" * 100)
    worker.send(Job(1, 1, [0], [0], [300], event=3))
    worker.send(Job(2, 1, [500], [500], [10]))
    worker.send(Job(3, 1, [0], [0], [1], event=4))
    others = sorted((worker.receive() for _ in range(2)), key=lambda done: done.write_id)
    assert others[0].write_id == 2
    assert others[1] == JobDone(3, "the pool has 4 events, and none with number 4", 0)
    assert scene.landed()[:300] == _OLD[:300]
    scene.stage.block["hold"] = 0
    done = worker.receive()
    assert (done.write_id, done.error) == (1, "")
    assert scene.landed()[:300] == b"new" * 100


def test_a_killed_worker_loses_nothing(scene: Scene, block: Block) -> None:
    need_hold(scene)
    worker = scene.worker()
    block["hold"] = 1
    worker.send(Job(1, 1, [0], [0], [MB]))
    worker.send(Job(2, 1, [0], [0], [MB + 1]))
    assert worker.receive().write_id == 2  # so the first is under way
    worker.process.kill()
    assert worker.process.reap(10)
    block["hold"] = 0
    assert scene.landed() == _OLD
    successor = scene.worker()
    successor.send(Job(1, 1, [0], [0], [MB]))
    assert successor.receive().error == ""
    assert scene.landed() == _SENT


def test_a_dead_receiver_fails_its_jobs_only(scene: Scene, start) -> None:
    worker = scene.worker()
    other = start(scene.rig)
    worker.send(AddPeer(2, *other.become_receiver(MB), device=True))
    scene.receiver.kill()
    worker.send(Job(1, 1, [0], [0], [10]))
    assert "has exited" in worker.receive().error
    worker.send(AddPeer(3, *scene.descriptors, device=True))
    worker.send(Job(2, 3, [0], [0], [10]))
    assert "has exited" in worker.receive().error  # it was refused as a peer
    worker.send(Job(3, 2, [0], [0], [MB]))
    assert worker.receive().error == ""
    assert other("peek", 0, MB) == _SENT


@pytest.mark.parametrize("lifeline", [True, False], ids=["lifeline", "channel"])
def test_a_worker_without_its_control_process_ends(scene: Scene, block: Block, lifeline: bool) -> None:
    need_hold(scene)
    worker = scene.worker()
    block["hold"] = 1
    worker.send(Job(1, 1, [0], [0], [MB]))
    worker.send(Job(2, 1, [0], [0], [MB + 1]))
    assert worker.receive().write_id == 2
    if lifeline:
        worker.process.cut_lifeline()
    else:
        worker.channel.close()
    assert worker.process.reap(2.5)  # with a write under way that never ends


def test_a_worker_that_cannot_borrow_says_so(scene: Scene) -> None:
    scene.stage.kill()
    worker = Worker(scene.rig, scene._folder, scene._pool)
    scene.workers.append(worker)
    failed = worker.receive()
    assert isinstance(failed, WorkerFailed)
    assert "GPU pool cannot be imported" in failed.error, failed


def test_a_worker_whose_gpu_context_is_lost_ends(scene: Scene, block: Block) -> None:
    need_hold(scene)
    if scene.rig.engine != "cuda_ipc":
        pytest.skip("Mori does not tell a lost context from other failures")
    worker = scene.worker()
    block["fail_event"] = 700
    worker.send(Job(1, 1, [0], [0], [10]))
    assert "context" in worker.receive().error
    assert worker.process.reap(10)


def test_a_stopped_stage_holds_up_no_worker(scene: Scene) -> None:
    worker = scene.worker()
    os.kill(scene.stage.pid, signal.SIGSTOP)
    os.kill(scene.receiver.pid, signal.SIGSTOP)
    try:
        worker.send(Job(1, 1, [0], [0], [MB]))
        assert worker.receive().error == ""
    finally:
        os.kill(scene.stage.pid, signal.SIGCONT)
        os.kill(scene.receiver.pid, signal.SIGCONT)
    assert scene.landed() == _SENT
