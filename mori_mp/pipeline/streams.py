"""Sending and receiving inside one stage: the outbox, the pacing source, the relay and the receivers.

    Source ──┐                                 (stage without inputs: one thread that paces all requests)
             ├──> Outbox ──put()──> connector  (one thread, as vLLM-Omni's adapter has)
    Relay  ──┘
      ▲  a chunk that has arrived on every input releases its share of output chunks
      └── Inbox <──get()── connector           (checks content, then tells the relay)

A sender stamps `meta.sent_ns` just before the put() that is accepted; a receiver takes the time once get()
has returned a decoded payload and one element of each tensor has been read. Building and checking content
happen outside that span, though not outside the machine: on few cores they do compete with the transfer.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from mori_mp.pipeline.plan import Edge
from mori_mp.pipeline.stats import ReceiveReport, Samples, SendReport
from mori_mp.pipeline.workload import Verdict, Workload, chunk_key, says_finished, touch

_FIRST_BACKOFF_S = 0.0005
_LAST_BACKOFF_S = 0.02
_MAX_NOTES = 5


class Connector(Protocol):
    """The part of vLLM-Omni's connector API that a stage uses."""

    def put(
        self, from_stage: str, to_stage: str, put_key: str, data: Any
    ) -> tuple[bool, int, dict[str, Any] | None]: ...

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None: ...

    def health(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class RunClock:
    """When this run starts and must end (CLOCK_MONOTONIC), and whether it has been called off."""

    def __init__(self, start_ns: int, deadline_ns: int) -> None:
        self.start_ns = start_ns
        self.deadline_ns = deadline_ns
        self.stopped = threading.Event()

    @property
    def deadline_s(self) -> float:
        return self.deadline_ns / 1e9

    def over(self) -> bool:
        return self.stopped.is_set() or time.monotonic_ns() >= self.deadline_ns

    def sleep_until(self, when_ns: int) -> bool:
        """Wait for a moment; False when the run is over before it."""
        when_ns = min(when_ns, self.deadline_ns)
        while (left := when_ns - time.monotonic_ns()) > 0:
            if self.stopped.wait(left / 1e9):
                return False
        return not self.over()


def add_note(notes: list[str], text: str) -> None:
    """Keep the first few examples of what went wrong."""
    if len(notes) < _MAX_NOTES:
        notes.append(text)


class Outbox:
    """Puts chunks in the order they are handed in, repeating a refused put() until the deadline."""

    def __init__(
        self, connector: Connector, workload: Workload, edges: Iterable[Edge], clock: RunClock
    ) -> None:
        self._connector = connector
        self._workload = workload
        self._clock = clock
        self._times = {edge.label: Samples() for edge in edges}
        self._reports = {label: SendReport(edge=label) for label in self._times}

    def send(self, edge: Edge, request: int, chunk: int, *, last: bool) -> None:
        """Build one chunk and put it. Blocks while the connector refuses it."""
        report = self._reports[edge.label]
        key = chunk_key(request, edge.source, chunk)
        # Nothing is built for a run that is over, of which there may be thousands of chunks left.
        payload = {} if self._clock.over() else self._workload.build(edge, request, chunk, last=last)
        backoff = _FIRST_BACKOFF_S
        first_try_ns = None
        while not self._clock.over():
            began_ns = payload["meta"]["sent_ns"] = time.monotonic_ns()
            if first_try_ns is None:
                first_try_ns = began_ns
            try:
                accepted, size, _ = self._connector.put(str(edge.source), str(edge.target), key, payload)
            except Exception as error:
                # The adapter of vLLM-Omni survives a put() that raises, so the run does too, and counts it.
                accepted, size = False, 0
                report.errors += 1
                add_note(report.notes, f"put {key}: {type(error).__name__}: {error}")
            ended_ns = time.monotonic_ns()
            if accepted:
                self._times[edge.label].add(ended_ns - began_ns)
                report.chunks += 1
                report.bytes += size
                report.first_put_ns = report.first_put_ns or began_ns
                report.stalled_ms += (began_ns - first_try_ns) / 1e6
                return
            report.retries += 1
            self._clock.stopped.wait(backoff)
            backoff = min(2 * backoff, _LAST_BACKOFF_S)
        report.unsent += 1
        add_note(report.notes, f"put {key}: not accepted before the deadline")

    def reports(self, *, live: bool = False) -> list[SendReport]:
        """The counters of every edge; `live` summarises recent samples only."""
        for label, times in self._times.items():
            self._reports[label].put_us = times.recent() if live else times.summary()
        return list(self._reports.values())


class Source:
    """Starts the traffic of a stage without inputs: every request at its own pace, spread over one gap."""

    def __init__(self, outbox: Outbox, workload: Workload, edges: list[Edge], clock: RunClock) -> None:
        self._outbox = outbox
        self._workload = workload
        self._edges = edges
        self._clock = clock

    def run(self) -> None:
        """Send everything; returns when all chunks are out or the run is over."""
        traffic = self._workload.traffic
        tie = itertools.count()
        due: list[tuple[int, int, Edge, int, int]] = []
        for request in range(traffic.requests):
            # Requests do not arrive in step: each one starts at its own share of the first gap.
            offset_ns = int(traffic.gap_s * 1e9 * request / traffic.requests)
            for edge in self._edges:
                if self._workload.traffic.chunk_count(edge, request) != 0:
                    due.append((self._clock.start_ns + offset_ns, next(tie), edge, request, 0))
        heapq.heapify(due)
        while due:
            when_ns, _, edge, request, chunk = heapq.heappop(due)
            self._clock.sleep_until(when_ns)
            last = self._is_last(edge, request, chunk)
            # Once the run is over this only counts the chunk as unsent.
            self._outbox.send(edge, request, chunk, last=last)
            if not last:
                gap_ns = int(self._workload.gap_s(edge, request, chunk + 1) * 1e9)
                heapq.heappush(due, (when_ns + gap_ns, next(tie), edge, request, chunk + 1))

    def _is_last(self, edge: Edge, request: int, chunk: int) -> bool:
        count = self._workload.traffic.chunk_count(edge, request)
        if count is not None:
            return chunk == count - 1
        assert self._workload.traffic.duration_s is not None
        elapsed_ns = time.monotonic_ns() - self._clock.start_ns
        return elapsed_ns >= self._workload.traffic.duration_s * 1e9 or self._clock.over()


class Relay:
    """Sends a stage's output chunks as its input chunks arrive.

    Output chunk j of n leaves once input chunk i of m has arrived on every input edge, for the first i with
    (i + 1) * n >= (j + 1) * m; with equal counts, or unknown ones, that is one for one.
    """

    def __init__(self, outbox: Outbox, workload: Workload, inputs: list[Edge], outputs: list[Edge]) -> None:
        self._outbox = outbox
        self._workload = workload
        self._inputs = inputs
        self._outputs = outputs
        self._arrived: dict[tuple[int, str], int] = defaultdict(int)
        self._ended: set[tuple[int, str]] = set()
        self._released: dict[tuple[int, str], int] = defaultdict(int)
        self._queue: SimpleQueue[tuple[Edge, int, int, bool] | None] = SimpleQueue()
        self._lock = threading.Lock()

    def arrived(self, edge: Edge, request: int, *, finished: bool) -> None:
        """One more chunk of this request has come in on `edge`; called from the receiving threads."""
        with self._lock:
            self._arrived[request, edge.label] += 1
            if finished:
                self._ended.add((request, edge.label))
            for output in self._outputs:
                self._release(output, request)

    def close(self) -> None:
        """No more input: run() returns after what is queued."""
        self._queue.put(None)

    def run(self) -> None:
        """Send what arrivals release, until close()."""
        while (item := self._queue.get()) is not None:
            edge, request, chunk, last = item
            self._outbox.send(edge, request, chunk, last=last)

    def _release(self, output: Edge, request: int) -> None:
        start = self._released[request, output.label]
        ready = min(self._share(edge, output, request) for edge in self._inputs)
        ended = all((request, edge.label) in self._ended for edge in self._inputs)
        total = self._workload.traffic.chunk_count(output, request)
        if total is None and ended:
            # Inputs of unequal length: what was released last was not known to be the end, so one more is.
            ready = max(ready, start + 1)
        for chunk in range(start, ready):
            last = chunk == total - 1 if total is not None else ended and chunk == ready - 1
            self._queue.put((output, request, chunk, last))
        self._released[request, output.label] = max(start, ready)

    def _share(self, edge: Edge, output: Edge, request: int) -> int:
        """Output chunks that the arrivals on one input edge allow."""
        arrived = self._arrived[request, edge.label]
        have, want = (self._workload.traffic.chunk_count(e, request) for e in (edge, output))
        return arrived if not have or want is None else min(arrived * want // have, want)


class Stream:
    """One request on one input edge, and the chunk that comes next."""

    __slots__ = ("chunk", "edge", "metadata", "request")

    def __init__(self, edge: Edge, request: int, metadata: dict[str, Any] | None) -> None:
        self.edge = edge
        self.request = request
        self.metadata = metadata
        self.chunk = 0

    @property
    def key(self) -> str:
        return chunk_key(self.request, self.edge.source, self.chunk)

    def arguments(self) -> tuple[str, str, str, dict[str, Any] | None]:
        """What get() and get_with_deadline() are called with."""
        return str(self.edge.source), str(self.edge.target), self.key, self.metadata


@dataclass(frozen=True)
class Arrival:
    """A payload that get() returned for one chunk; size in bytes, usable_ns of CLOCK_MONOTONIC."""

    edge: Edge
    request: int
    chunk: int
    payload: Any
    size: int
    usable_ns: int
    last: bool


def take(stream: Stream, result: tuple[Any, int], count: int | None) -> Arrival:
    """Read one element of each tensor, note the time, and move the stream on to its next chunk.

    count: chunks of the stream where that is known; else the payload's own `finished` flag ends it.
    """
    payload, size = result
    touch(payload)
    usable_ns = time.monotonic_ns()
    chunk = stream.chunk
    last = says_finished(payload) if count is None else chunk == count - 1
    stream.chunk += 1
    return Arrival(stream.edge, stream.request, chunk, payload, size, usable_ns, last)


class Inbox:
    """Checks what receivers fetched, keeps the counters, and feeds the relay."""

    def __init__(self, workload: Workload, edges: list[Edge], relay: Relay | None) -> None:
        self._workload = workload
        self._relay = relay
        self._lock = threading.Lock()
        self._times = {edge.label: Samples() for edge in edges}
        self._reports = {
            edge.label: ReceiveReport(edge=edge.label, expected=workload.traffic.total_chunks(edge))
            for edge in edges
        }

    def chunk_count(self, stream: Stream) -> int | None:
        """Chunks that this stream must bring; None when only its last chunk says so."""
        return self._workload.traffic.chunk_count(stream.edge, stream.request)

    def accept(self, arrival: Arrival) -> None:
        """Check a chunk, count it, and let the relay send what it releases."""
        edge, request, chunk = arrival.edge, arrival.request, arrival.chunk
        finding = self._workload.check(arrival.payload, edge, request, chunk, arrival.usable_ns)
        with self._lock:
            report = self._reports[edge.label]
            report.chunks += 1
            report.bytes += arrival.size
            report.last_usable_ns = max(report.last_usable_ns, arrival.usable_ns)
            if finding.verdict is Verdict.GOOD:
                self._times[edge.label].add(arrival.usable_ns - finding.sent_ns)
            else:
                self._count_fault(report, finding.verdict)
                key = chunk_key(request, edge.source, chunk)
                add_note(report.notes, f"get {key}: {finding.verdict.value}: {finding.reason}")
        if self._relay is not None:
            self._relay.arrived(edge, request, finished=arrival.last)

    def missed(self, edge: Edge) -> None:
        """A get() came back empty."""
        with self._lock:
            self._reports[edge.label].misses += 1

    def failed(self, edge: Edge, key: str, error: Exception) -> None:
        """A get() raised."""
        with self._lock:
            report = self._reports[edge.label]
            report.errors += 1
            add_note(report.notes, f"get {key}: {type(error).__name__}: {error}")

    def reports(self, *, live: bool = False) -> list[ReceiveReport]:
        """The counters of every edge; `live` summarises recent samples only."""
        with self._lock:
            for label, times in self._times.items():
                self._reports[label].usable_us = times.recent() if live else times.summary()
            return list(self._reports.values())

    @staticmethod
    def _count_fault(report: ReceiveReport, verdict: Verdict) -> None:
        if verdict is Verdict.CORRUPT:
            report.corrupt += 1
        elif verdict is Verdict.DUPLICATE:
            report.duplicates += 1
        elif verdict is Verdict.MISORDERED:
            report.misordered += 1
        else:
            report.foreign += 1
