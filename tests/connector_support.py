"""What the connector tests share: deadlines instead of sleeps, leak counting, processes to stop and kill."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import torch

from mori_mp import MoriTransferEngineConnector

T = TypeVar("T")
MIB = 1 << 20
KEY = "req_0_0"
SOAK_SECONDS = float(os.environ.get("MORI_MP_SOAK_SECONDS", "2"))
_COUNTED = re.compile(r"^(/memfd:mori-mp|socket:|pipe:|anon_inode:\[?(eventfd|pidfd|eventpoll))")


def eventually(check: Callable[[], T], what: str, seconds: float = 10.0) -> T:
    """Return the first true value of check(); fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}; last value {value!r}"
        time.sleep(0.005)


# ------------------------------------------------------------------------------- leaks
class Snapshot(NamedTuple):
    """What a connector could leave behind in this process, its children or the file system."""

    children: frozenset[int]
    files: frozenset[str]
    threads: frozenset[str]
    pool_mappings: int
    runtime: frozenset[str]


def snapshot(runtime: Path | None) -> Snapshot:
    """Take stock."""
    files = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if _COUNTED.match(link):
            # eventfds all have the same name
            files.add(f"{fd}->{link}" if link.startswith("anon_inode") else link)
    maps = Path("/proc/self/maps").read_text()
    return Snapshot(
        frozenset(child.pid for child in psutil.Process().children(recursive=True)),
        frozenset(files),
        frozenset(f"{t.name}#{t.ident}" for t in threading.enumerate() if t.name.startswith("mori-mp")),
        maps.count("/memfd:mori-mp-pool"),
        frozenset(os.listdir(runtime)) if runtime is not None and runtime.exists() else frozenset(),
    )


def leaked(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Name what is there now and was not before."""
    found: dict[str, Any] = {
        name: sorted(getattr(after, name) - getattr(before, name))
        for name in ("children", "files", "threads", "runtime")
    }
    found["pool_mappings"] = max(0, after.pool_mappings - before.pool_mappings)
    return {name: value for name, value in found.items() if value}


@contextmanager
def no_leaks(
    runtime: Path | None, seconds: float = 3.0, unless: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Fail when something of a connector is left `seconds` after the body, unless() being false."""
    before = snapshot(runtime)
    yield
    if unless():
        return
    deadline = time.monotonic() + seconds
    while True:
        found = leaked(before, snapshot(runtime))
        if not found:
            return
        assert time.monotonic() < deadline, f"left behind: {found}"
        gc.collect()
        time.sleep(0.02)


@contextmanager
def short_directory() -> Iterator[Path]:
    """A temporary directory whose path leaves room for Unix sockets (107 bytes in all)."""
    path = Path(tempfile.mkdtemp(prefix="mmp-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# ------------------------------------------------------------------------- connectors
DEFAULTS: dict[str, Any] = {
    "host": "127.0.0.1",
    "memory_pool_size": 4 * MIB,
    "num_transfer_workers": 1,
    "prefault": False,
    "pin": "off",
    "restart_limit": 1000,
    "prestart": False,
}


class Factory:
    """Makes connectors and closes them, the newest first."""

    def __init__(self) -> None:
        self._made: list[MoriTransferEngineConnector] = []

    def __call__(self, role: str, **config: Any) -> MoriTransferEngineConnector:
        if role != "receiver":
            config.setdefault("zmq_port", 0)
        connector = MoriTransferEngineConnector({**DEFAULTS, "role": role, **config})
        self._made.append(connector)
        return connector

    def sender(self, **config: Any) -> MoriTransferEngineConnector:
        """A sender of stage 0 on a free port."""
        return self("sender", **{"stage_id": 0, **config})

    def receiver(
        self, sender: MoriTransferEngineConnector | int, **config: Any
    ) -> MoriTransferEngineConnector:
        """A receiver of the edge 0 -> 1, from a sender or a port."""
        port = sender if isinstance(sender, int) else sender.zmq_port
        upstream = {"sender_host": "127.0.0.1", "sender_zmq_port": port, "from_stage": 0, "to_stage": 1}
        return self("receiver", **{"stage_id": 1, **upstream, **config})

    def pair(self, receiver: dict[str, Any] | None = None, **config: Any) -> Pair:
        """Sender and receiver of the edge 0 -> 1; `receiver` overrides config for that end."""
        sender = self.sender(**config)
        return Pair(sender, self.receiver(sender, **{**config, **(receiver or {})}))

    def close(self) -> None:
        """Close everything."""
        while self._made:
            self._made.pop().close()


class Pair:
    """Both ends of the edge 0 -> 1."""

    def __init__(self, sender: MoriTransferEngineConnector, receiver: MoriTransferEngineConnector) -> None:
        self.sender = sender
        self.receiver = receiver

    def put(self, key: str, data: Any) -> dict[str, Any]:
        """put() that must succeed; returns the metadata."""
        ok, size, metadata = self.sender.put("0", "1", key, data)
        assert ok, f"put of {key!r} failed"
        assert metadata is not None
        assert metadata["data_size"] == size
        return metadata

    def get(self, key: str, metadata: Any = None) -> tuple[Any, int] | None:
        """Plain get()."""
        return self.receiver.get("0", "1", key, metadata)

    def wait(self, key: str, seconds: float = 10.0, metadata: Any = None) -> tuple[Any, int]:
        """get_with_deadline() that must succeed."""
        found = self.receiver.get_with_deadline("0", "1", key, metadata, deadline=time.monotonic() + seconds)
        assert found is not None, f"{key!r} did not come within {seconds} s"
        return found

    def wait_bytes(self, key: str, seconds: float = 10.0, metadata: Any = None) -> bytes:
        """The same, for a raw payload that is copied out and released."""
        buffer, size = self.wait(key, seconds, metadata)
        with buffer:
            raw = buffer.to_bytes()
        assert len(raw) == size
        return bytes(raw)

    def assert_whole(self, seconds: float = 5.0) -> None:
        """Both pools must become whole again."""
        assert_whole(self.sender, self.receiver, seconds=seconds)


def assert_whole(*connectors: MoriTransferEngineConnector, seconds: float = 5.0) -> None:
    """Wait until in all of them nothing is published, allocated or quarantined."""

    def whole(connector: MoriTransferEngineConnector) -> bool:
        senders = connector.receiver.report()["senders"]  # takes in what has come, as the next get() would
        connector.reap_consumed()
        return (
            connector.publisher.outstanding == 0
            and connector.slots.stats()["used_bytes"] == 0
            and not any(sender["quarantined"] for sender in senders)
        )

    try:
        # All of them each time: what one of them takes in may be what another one waits for.
        eventually(lambda: sum(map(whole, connectors)) == len(connectors), "pools whole again", seconds)
    except AssertionError:
        stories = [
            f"stage {connector.stage_id}: published {[m.key for m in connector.publisher.replay()]}, "
            f"slots {connector.slots.stats()}, receiver {connector.receiver.report()}, "
            f"sender {connector.health().get('sender')}"
            for connector in connectors
        ]
        raise AssertionError("not whole:\n" + "\n".join(stories)) from None


def pattern(size: int, seed: int = 0) -> bytes:
    """`size` bytes that differ from those of any other seed in every 8-byte word."""
    words = torch.arange(size // 8 + 1, dtype=torch.int64) * 2654435761 + seed * 1_000_003
    return words.numpy().tobytes()[:size]


def counter(connector: MoriTransferEngineConnector, name: str) -> int:
    """One of the receiver's counters."""
    return connector.receiver.counters[name]


# -------------------------------------------------------------------------- processes
def control_pid(connector: MoriTransferEngineConnector) -> int:
    """Process id of a connector's control process."""
    assert connector.heart is not None
    pid = connector.heart.supervisor.pid
    assert pid not in (0, os.getpid())
    return pid


def worker_pids(connector: MoriTransferEngineConnector) -> list[int]:
    """Process ids of a connector's transfer workers."""
    control = psutil.Process(control_pid(connector))
    return [child.pid for child in control.children()]


def state_of(pid: int) -> str:
    """Kernel state of a process: R, S, T, Z...; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Hold processes with SIGSTOP; continues those that still exist."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        eventually(lambda pid=pid: state_of(pid) == "T", f"process {pid} stopped")
    try:
        yield
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass


def resident_bytes(pid: int) -> int:
    """Resident set of a process less what it shares with the pool's memfd."""
    memory = psutil.Process(pid).memory_info()
    return int(memory.rss - memory.shared)


def kill(pid: int) -> None:
    """SIGKILL one process, which may be gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


class Background:
    """Runs a call in a thread; result() joins it and raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.entered = threading.Event()
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="test-background")
        self._thread.start()

    def _run(self) -> None:
        self.entered.set()
        try:
            self._value = self._call()
        except BaseException as exc:
            self._error = exc

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self, seconds: float = 20.0) -> Any:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"still running after {seconds} s"
        if self._error is not None:
            raise self._error
        return self._value


class StageProcess:
    """A stage in a process of its own, driven over its standard input (see stage_process.py)."""

    def __init__(self, runtime: Path, **config: Any) -> None:
        environment = {**os.environ, "MORI_MP_RUNTIME_DIR": str(runtime)}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("stage_process.py")), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.pid = self._process.pid
        self.hello = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"stage process ended: {self._process.wait(5)}"
        return json.loads(line)

    def tell(self, op: str, **arguments: Any) -> None:
        """Send a command without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()

    def ask(self, op: str, **arguments: Any) -> Any:
        """Send a command and return its answer."""
        self.tell(op, **arguments)
        return self._read()

    def family(self) -> list[psutil.Process]:
        """All processes below it, and itself."""
        me = psutil.Process(self.pid)
        return [me, *me.children(recursive=True)]

    def kill(self) -> None:
        """SIGKILL the stage only."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it, however it is."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
