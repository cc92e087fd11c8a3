"""The ways a stage can wait for its chunks.

    deadline   get_with_deadline(): one thread for each request and input edge, each blocked on its next key,
               as a model runner that receives synchronously
    poll       get() over all pending keys from one thread, and 1 ms of sleep after a round without a hit, as
               vLLM-Omni 0.30.0's chunk adapter
    wake       the same round, but waiting in wait_for_change() instead of sleeping (newer adapters)

In the last two, one more thread checks content, so that a check never delays the next get().
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Queue
from typing import Any

from mori_mp.pipeline.plan import GetMode
from mori_mp.pipeline.streams import Arrival, Connector, Inbox, RunClock, Stream, take

_POLL_INTERVAL_S = 0.001
_WAKE_TIMEOUT_S = 0.1
_UNCHECKED = 64
_BLOCK_S = 5.0
"""Longest single get_with_deadline(): a receiver looks at the run's own end at least that often."""

REQUIRED_METHODS: dict[GetMode, tuple[str, ...]] = {
    "deadline": ("get_with_deadline",),
    "poll": ("get",),
    "wake": ("get", "get_wakeup_generation", "wait_for_change"),
}

Work = Callable[[], None]


def receiver_work(
    mode: GetMode, connector: Connector, inbox: Inbox, streams: list[Stream], clock: RunClock
) -> list[Work]:
    """The functions to run in a thread each; all return once every stream has ended or the run is over.

    Raises ValueError when the connector lacks a method that the mode needs.
    """
    missing = [name for name in REQUIRED_METHODS[mode] if not callable(getattr(connector, name, None))]
    if missing:
        raise ValueError(
            f"{type(connector).__name__} has no {' or '.join(missing)}, which receiving by "
            f"{mode!r} needs; run with --get poll"
        )
    if mode == "deadline":
        return [BlockingReceiver(connector, inbox, stream, clock).run for stream in streams]
    scanner = ScanningReceiver(connector, inbox, streams, clock, wake=mode == "wake")
    return [scanner.run, scanner.run_checks]


class BlockingReceiver:
    """Follows one stream with get_with_deadline()."""

    def __init__(self, connector: Any, inbox: Inbox, stream: Stream, clock: RunClock) -> None:
        self._connector = connector
        self._inbox = inbox
        self._stream = stream
        self._clock = clock

    def run(self) -> None:
        """Fetch and check until the stream has ended."""
        stream, clock = self._stream, self._clock
        count = self._inbox.chunk_count(stream)
        ended = count == 0
        while not ended and not clock.over():
            until = min(clock.deadline_s, time.monotonic() + _BLOCK_S)
            result = self._get(until)
            if result is None:
                # Whatever made get() return early must not make this loop spin.
                if time.monotonic() < until:
                    clock.stopped.wait(_POLL_INTERVAL_S)
                continue
            arrival = take(stream, result, count)
            del result
            self._inbox.accept(arrival)
            ended = arrival.last
            # The payload may be a view that holds its sender's memory: let go of it before blocking again.
            del arrival

    def _get(self, until: float) -> tuple[Any, int] | None:
        stream = self._stream
        try:
            result: tuple[Any, int] | None = self._connector.get_with_deadline(
                *stream.arguments(), deadline=until
            )
        except Exception as error:
            # Counted and repeated, as the adapter of vLLM-Omni does with a get() that raises.
            self._inbox.failed(stream.edge, stream.key, error)
            return None
        if result is None:
            self._inbox.missed(stream.edge)
        return result


class ScanningReceiver:
    """Asks for every stream's next chunk in turn with get()."""

    def __init__(
        self, connector: Any, inbox: Inbox, streams: list[Stream], clock: RunClock, *, wake: bool
    ) -> None:
        self._connector = connector
        self._inbox = inbox
        self._clock = clock
        self._wake = wake
        self._pending = [stream for stream in streams if inbox.chunk_count(stream) != 0]
        self._fetched: Queue[Arrival | None] = Queue(maxsize=_UNCHECKED)

    def run(self) -> None:
        """Fetch until every stream has ended."""
        while self._pending and not self._clock.over():
            generation = self._connector.get_wakeup_generation() if self._wake else 0
            if not self._scan():
                self._idle(generation)
        self._fetched.put(None)

    def run_checks(self) -> None:
        """Check what run() fetched."""
        while (arrival := self._fetched.get()) is not None:
            self._inbox.accept(arrival)
            del arrival

    def _scan(self) -> bool:
        """One get() for each pending stream; whether any brought a chunk."""
        hit = False
        unfinished = []
        for stream in self._pending:
            arrival = self._try(stream)
            hit = hit or arrival is not None
            if arrival is None or not arrival.last:
                unfinished.append(stream)
            if arrival is not None:
                self._fetched.put(arrival)
            del arrival
        self._pending = unfinished
        return hit

    def _try(self, stream: Stream) -> Arrival | None:
        try:
            result = self._connector.get(*stream.arguments())
        except Exception as error:
            self._inbox.failed(stream.edge, stream.key, error)
            return None
        if result is None:
            self._inbox.missed(stream.edge)
            return None
        return take(stream, result, self._inbox.chunk_count(stream))

    def _idle(self, generation: int) -> None:
        if self._wake:
            self._connector.wait_for_change(generation, _WAKE_TIMEOUT_S)
        else:
            self._clock.stopped.wait(_POLL_INTERVAL_S)
