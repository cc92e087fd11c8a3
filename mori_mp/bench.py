"""How long a payload takes from put() in one process to being usable in another, by size.

Theory of operation. A sending process has two connectors, one with worker_mode process and one with thread,
and this process receives from both. Batches alternate between them, so that whatever else the machine does
falls on both alike, and only the ratio of the two is compared; the one whose turn it is not sleeps. In a
`busy` batch the sender spins a pure-Python thread, as a scheduler that holds the GIL does; in an `idle` one
it does nothing else.

The payload's first 8 bytes are the monotonic time at the call of put(), one clock for all processes of a
host. The receiver reads them out of what get_with_deadline() returned: that is when it is usable.

`python -m mori_mp.bench JSON` is the sending process: it prints its ports, then obeys a JSON line per batch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import torch

from mori_mp.connector import MoriTransferEngineConnector
from mori_mp.pipeline.stats import Summary, ratio, summarise
from mori_mp.shared.errors import MoriMPError, StartupError, TransferFailed

MODES = ("process", "thread")
STATES = ("idle", "busy")
ROUNDS = 4
_MIB = 1 << 20
_STAMP = 8
_WAIT_SECONDS = 10.0
_END_SECONDS = 10.0
_EDGE = ("0", "1")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the result. ratio_*: thread / process, None where nothing was measured."""

    size: int
    state: str
    process: Summary
    thread: Summary
    put_process: Summary
    put_thread: Summary
    ratio_p50: float | None
    ratio_p99: float | None


class Batch(msgspec.Struct, frozen=True):
    """What the sending process is told: `count` payloads of `size` bytes, `gap_s` apart, keys `name`-0..."""

    mode: str
    name: str
    size: int
    count: int
    gap_s: float
    busy: bool


class _Sender:
    """The sending process; `ports` are those of its connectors, by mode."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mori_mp.bench", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.ports: dict[str, int] = self._answer()["ports"]
        except BaseException:
            self.close()
            raise

    def start(self, batch: Batch) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(batch).decode() + "\n")
        self._process.stdin.flush()

    def put_times(self) -> list[int]:
        """Nanoseconds that each put() of the batch took."""
        return list(self._answer()["put_ns"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise StartupError(f"the sending process ended with status {self._process.wait(_END_SECONDS)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise StartupError(f"the sending process failed: {answer['error']}")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def run(
    sizes: Sequence[int],
    count: int,
    gap_s: float,
    states: Sequence[str] = STATES,
    extra: dict[str, Any] | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> list[Case]:
    """Measure every size (bytes, 8 or more) in every state, `count` payloads for each mode.

    extra: keys of the connectors' configuration. told(text) is called before each case.
    Raises MoriMPError: a connector cannot start, a payload does not come within 10 s.
    """
    pool = max(64 * _MIB, 6 * max(sizes))
    settings = {
        "host": "127.0.0.1",
        "backend_type": "shm",
        "memory_pool_size": pool,
        **(extra or {}),
    }
    receivers: dict[str, MoriTransferEngineConnector] = {}
    sender = _Sender(settings)
    try:
        for mode in MODES:
            upstream = {"sender_host": settings["host"], "sender_zmq_port": sender.ports[mode]}
            edge = {"from_stage": 0, "to_stage": 1, "stage_id": 1, "prestart": False}
            receivers[mode] = MoriTransferEngineConnector(
                {**settings, **upstream, **edge, "role": "receiver"}
            )
        cases = []
        for size in sizes:
            for state in states:
                told(f"{size} bytes, sender {state}")
                cases.append(_case(sender, receivers, size, state, count, gap_s))
        return cases
    finally:
        for receiver in receivers.values():
            receiver.close()
        sender.close()


def _case(
    sender: _Sender,
    receivers: dict[str, MoriTransferEngineConnector],
    size: int,
    state: str,
    count: int,
    gap_s: float,
) -> Case:
    usable: dict[str, list[int]] = {mode: [] for mode in MODES}
    put: dict[str, list[int]] = {mode: [] for mode in MODES}
    for turn in range(min(ROUNDS, count)):
        for mode in MODES if turn % 2 == 0 else reversed(MODES):
            # The first of a batch is not counted: it pays for what has grown cold.
            share = count // ROUNDS + (turn < count % ROUNDS) if count > ROUNDS else 1
            batch = Batch(mode, f"{state}-{size}-{turn}", size, share + 1, gap_s, state == "busy")
            sender.start(batch)
            usable[mode] += _receive(receivers[mode], batch)[1:]
            put[mode] += sender.put_times()[1:]
    times = {mode: summarise(usable[mode]) for mode in MODES}
    return Case(
        size=size,
        state=state,
        process=times["process"],
        thread=times["thread"],
        put_process=summarise(put["process"]),
        put_thread=summarise(put["thread"]),
        ratio_p50=ratio(times["thread"].p50, times["process"].p50),
        ratio_p99=ratio(times["thread"].p99, times["process"].p99),
    )


def _receive(receiver: MoriTransferEngineConnector, batch: Batch) -> list[int]:
    times = []
    for index in range(batch.count):
        deadline = time.monotonic() + _WAIT_SECONDS
        found = receiver.get_with_deadline(*_EDGE, f"{batch.name}-{index}", deadline=deadline)
        if found is None:
            raise TransferFailed(
                f"payload {index} of {batch.name} did not come within {_WAIT_SECONDS:.0f} s; receiver: "
                f"{receiver.receiver.report()['counters']}"
            )
        with found[0] as buffer:
            stamp = int(buffer.as_tensor(torch.int64, (batch.size // _STAMP,))[0])
            times.append(time.monotonic_ns() - stamp)
    return times


# ------------------------------------------------------------------------ the sending process
def main(argument: str) -> None:
    """Send batches until standard input ends."""
    settings = json.loads(argument)
    try:
        with ExitStack() as open_ones:
            senders = {
                mode: open_ones.enter_context(
                    MoriTransferEngineConnector(
                        {**settings, "worker_mode": mode, "role": "sender", "stage_id": 0, "zmq_port": 0}
                    )
                )
                for mode in MODES
            }
            ports = {mode: sender.zmq_port for mode, sender in senders.items()}
            print(json.dumps({"ports": ports}), flush=True)
            for line in sys.stdin:
                batch = msgspec.json.decode(line, type=Batch)
                with _spinning(batch.busy):
                    times = _send(senders[batch.mode], batch)
                print(json.dumps({"put_ns": times}), flush=True)
    except MoriMPError as exc:
        print(json.dumps({"error": str(exc)}), flush=True)


def _send(sender: MoriTransferEngineConnector, batch: Batch) -> list[int]:
    payload = torch.zeros(batch.size // _STAMP, dtype=torch.int64)
    times = []
    for index in range(batch.count):
        time.sleep(batch.gap_s)
        before = time.monotonic_ns()
        payload[0] = before
        ok, _, _ = sender.put(*_EDGE, f"{batch.name}-{index}", payload)
        times.append(time.monotonic_ns() - before)
        if not ok:
            raise TransferFailed(f"put of payload {index} of {batch.name} failed, see the log")
    return times


@contextmanager
def _spinning(busy: bool) -> Iterator[None]:
    """Hold the GIL in another thread, as pure-Python code does."""
    stop = threading.Event()
    spinner = threading.Thread(target=_spin, args=(stop,), daemon=True)
    if busy:
        spinner.start()
    try:
        yield
    finally:
        stop.set()
        if busy:
            spinner.join()


def _spin(stop: threading.Event) -> None:
    turns = 0
    while not stop.is_set():
        turns += 1


if __name__ == "__main__":
    main(sys.argv[1])
