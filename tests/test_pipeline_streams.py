"""Sending, relaying and receiving inside a stage, over a connector in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mori_mp.pipeline.plan import ChunkShape, Edge, GetMode, TensorShape, Traffic
from mori_mp.pipeline.receivers import receiver_work
from mori_mp.pipeline.streams import Inbox, Outbox, Relay, RunClock, Source, Stream
from mori_mp.pipeline.workload import Workload

A, B = Edge(source=0, target=1, kind="hidden"), Edge(source=1, target=2, kind="codec")
EDGES = (A, B)
TRACED_EDGES = (Edge(source=0, target=1, kind="trace"), Edge(source=1, target=2, kind="trace"))
MODES: list[GetMode] = ["deadline", "poll", "wake"]


class MemoryConnector:
    """One dict that all stages of a test share."""

    def __init__(self) -> None:
        self.stored: dict[tuple[str, str, str], Any] = {}
        self.put_order: list[str] = []
        self.asked: list[tuple[str, dict[str, Any] | None]] = []
        self.generation = 0
        self.changed = threading.Condition()

    def put(self, source: str, target: str, key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        with self.changed:
            self.stored[source, target, key] = data
            self.put_order.append(key)
            self.generation += 1
            self.changed.notify_all()
        return True, 100, None

    def get(
        self, source: str, target: str, key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        self.asked.append((key, metadata))
        found = self.stored.pop((source, target, key), None)
        return None if found is None else (found, 100)

    def get_with_deadline(
        self,
        source: str,
        target: str,
        key: str,
        metadata: dict[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        with self.changed:
            self.changed.wait_for(
                lambda: (source, target, key) in self.stored, max(0.0, deadline - time.monotonic())
            )
        return self.get(source, target, key, metadata)

    def get_wakeup_generation(self) -> int:
        return self.generation

    def wait_for_change(self, generation: int, timeout: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.generation != generation, timeout)

    def health(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        return


def clock_of(seconds: float = 30.0) -> RunClock:
    now = time.monotonic_ns()
    return RunClock(now, now + int(seconds * 1e9))


def in_threads(*work: Callable[[], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=w, daemon=True) for w in work]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def run_three_stages(traffic: Traffic, mode: GetMode) -> tuple[list[Any], list[Any]]:
    """0 -> 1 -> 2 in one process; returns the send and receive reports of both edges."""
    first_edge, second_edge = EDGES if not traffic.trace else TRACED_EDGES
    connector, workload, clock = MemoryConnector(), Workload(traffic), clock_of()
    first, second = (
        Outbox(connector, workload, [first_edge], clock),
        Outbox(connector, workload, [second_edge], clock),
    )
    relay = Relay(second, workload, [first_edge], [second_edge])
    middle, last = Inbox(workload, [first_edge], relay), Inbox(workload, [second_edge], None)
    receiving = [
        in_threads(
            *receiver_work(
                mode, connector, inbox, [Stream(edge, r, None) for r in range(traffic.requests)], clock
            )
        )
        for inbox, edge in ((middle, first_edge), (last, second_edge))
    ]
    sending = in_threads(Source(first, workload, [first_edge], clock).run, relay.run)
    join(receiving[0])
    relay.close()
    join(sending)
    join(receiving[1])
    assert not connector.stored
    return first.reports() + second.reports(), middle.reports() + last.reports()


# ------------------------------------------------------------------------------- whole
@pytest.mark.parametrize("mode", MODES)
def test_every_chunk_arrives_right_in_every_mode(mode: GetMode) -> None:
    sent, received = run_three_stages(Traffic(requests=3, chunks=6, gap_s=0.001), mode)
    assert [report.chunks for report in sent] == [18, 18]
    assert [report.chunks for report in received] == [18, 18]
    assert [report.wrong() for report in received] == [0, 0], received
    assert all(report.usable_us.count == 18 for report in received)
    assert all(report.put_us.count == 18 and report.retries == 0 for report in sent)
    assert all(report.last_usable_ns > 0 for report in received)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_by_duration_ends_by_the_finished_flag(mode: GetMode) -> None:
    sent, received = run_three_stages(Traffic(requests=2, duration_s=0.2, gap_s=0.02), mode)
    assert sent[0].chunks == received[0].chunks >= 4
    assert sent[1].chunks == received[1].chunks == sent[0].chunks
    assert [report.wrong() for report in received] == [0, 0]
    assert received[0].expected is None


@pytest.mark.parametrize("counts", [(7, 3), (3, 7), (1, 4), (4, 1)])
def test_a_relay_spreads_its_recorded_chunks_over_its_inputs(counts: tuple[int, int]) -> None:
    one = ChunkShape((TensorShape("x", "int32", (5,)),), 0.0)
    trace = {"0->1": [[one] * counts[0]], "1->2": [[one] * counts[1]]}
    sent, received = run_three_stages(Traffic(requests=2, trace=trace), "deadline")
    assert tuple(report.chunks for report in sent) == (2 * counts[0], 2 * counts[1])
    assert [report.wrong() for report in received] == [0, 0]


# ------------------------------------------------------------------------------ outbox
class Refusing(MemoryConnector):
    """put() says no `times` times for each key, by False or by an exception."""

    def __init__(self, times: int, error: Exception | None = None) -> None:
        super().__init__()
        self.left: dict[str, int] = {}
        self.times = times
        self.error = error

    def put(self, source: str, target: str, key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        left = self.left.setdefault(key, self.times)
        if left:
            self.left[key] = left - 1
            if self.error is not None:
                raise self.error
            return False, 0, None
        return super().put(source, target, key, data)


@pytest.mark.parametrize("error", [None, MemoryError("full")])
def test_a_refused_put_is_repeated_and_counted(error: Exception | None) -> None:
    connector = Refusing(3, error)
    outbox = Outbox(connector, Workload(Traffic(chunks=1)), [A], clock_of())
    outbox.send(A, 0, 0, last=True)
    (report,) = outbox.reports()
    assert (report.chunks, report.retries, report.unsent) == (1, 3, 0)
    assert report.errors == (3 if error else 0)
    assert report.stalled_ms > 0
    assert bool(report.notes) is bool(error)


def test_the_stamp_is_that_of_the_put_that_was_accepted() -> None:
    connector = Refusing(2)
    outbox = Outbox(connector, Workload(Traffic(chunks=1)), [A], clock_of())
    before = time.monotonic_ns()
    outbox.send(A, 0, 0, last=True)
    stamp = connector.stored["0", "1", "req-0000_0_0"]["meta"]["sent_ns"]
    # Two backoffs lie before it: half a millisecond, then one.
    assert stamp - before >= 1_400_000


def test_what_is_never_accepted_is_unsent_after_the_deadline() -> None:
    outbox = Outbox(Refusing(10**9), Workload(Traffic(chunks=1)), [A], clock_of(0.05))
    outbox.send(A, 0, 0, last=True)
    (report,) = outbox.reports()
    assert (report.chunks, report.unsent) == (0, 1)
    assert report.notes[-1] == "put req-0000_0_0: not accepted before the deadline"


# ------------------------------------------------------------------------------ source
def test_the_source_serves_requests_in_turn() -> None:
    connector, traffic = MemoryConnector(), Traffic(requests=3, chunks=2, gap_s=0.0)
    workload, clock = Workload(traffic), clock_of()
    Source(Outbox(connector, workload, [A], clock), workload, [A], clock).run()
    assert connector.put_order == [f"req-000{r}_0_{c}" for c in range(2) for r in range(3)]


def test_the_source_keeps_the_gap() -> None:
    connector, traffic = MemoryConnector(), Traffic(requests=1, chunks=3, gap_s=0.03)
    workload, clock = Workload(traffic), clock_of()
    Source(Outbox(connector, workload, [A], clock), workload, [A], clock).run()
    stamps = [connector.stored["0", "1", f"req-0000_0_{c}"]["meta"]["sent_ns"] for c in range(3)]
    assert stamps[2] - clock.start_ns >= 60_000_000


# ------------------------------------------------------------------------------- relay
class Recorder:
    """An outbox that only writes down."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, int, bool]] = []

    def send(self, edge: Edge, request: int, chunk: int, *, last: bool) -> None:
        self.sent.append((edge.label, request, chunk, last))


def relay_of(traffic: Traffic, inputs: list[Edge], outputs: list[Edge]) -> tuple[Relay, Recorder]:
    recorder = Recorder()
    return Relay(recorder, Workload(traffic), inputs, outputs), recorder  # type: ignore[arg-type]


def test_a_join_waits_for_all_of_its_inputs() -> None:
    left, right = Edge(source=0, target=2, kind="hidden"), Edge(source=1, target=2, kind="hidden")
    out = Edge(source=2, target=3, kind="codec")
    relay, recorder = relay_of(Traffic(chunks=2), [left, right], [out])
    relay.arrived(left, 0, finished=False)
    relay.arrived(left, 0, finished=True)
    relay.arrived(right, 1, finished=False)
    relay.arrived(right, 0, finished=False)
    relay.arrived(right, 0, finished=True)
    relay.close()
    relay.run()
    assert recorder.sent == [("2->3", 0, 0, False), ("2->3", 0, 1, True)]


def test_a_branch_sends_to_all_of_its_outputs() -> None:
    outs = [Edge(source=1, target=2, kind="codec"), Edge(source=1, target=3, kind="codec")]
    relay, recorder = relay_of(Traffic(chunks=1), [A], outs)
    relay.arrived(A, 0, finished=True)
    relay.close()
    relay.run()
    assert recorder.sent == [("1->2", 0, 0, True), ("1->3", 0, 0, True)]


def test_inputs_of_unequal_unknown_length_still_end_the_output() -> None:
    left, right = Edge(source=0, target=2, kind="hidden"), Edge(source=1, target=2, kind="hidden")
    relay, recorder = relay_of(
        Traffic(duration_s=1.0), [left, right], [Edge(source=2, target=3, kind="codec")]
    )
    for finished in (False, True):
        relay.arrived(left, 0, finished=finished)
    for finished in (False, False, True):
        relay.arrived(right, 0, finished=finished)
    relay.close()
    relay.run()
    assert [last for *_, last in recorder.sent] == [False, False, True]


# --------------------------------------------------------------------------- receivers
def received_by(
    mode: GetMode, connector: MemoryConnector, clock: RunClock, metadata: dict[str, Any] | None = None
) -> Any:
    inbox = Inbox(Workload(Traffic(requests=1, chunks=3)), [A], None)
    join(in_threads(*receiver_work(mode, connector, inbox, [Stream(A, 0, metadata)], clock)))
    return inbox.reports()[0]


def put_three(
    connector: MemoryConnector, spoil: Callable[[int, Any], Any] = lambda chunk, data: data
) -> None:
    workload = Workload(Traffic(requests=1, chunks=3))
    for chunk in range(3):
        payload = workload.build(A, 0, chunk, last=chunk == 2)
        payload["meta"]["sent_ns"] = time.monotonic_ns()
        connector.put("0", "1", f"req-0000_0_{chunk}", spoil(chunk, payload))


@pytest.mark.parametrize("mode", MODES)
def test_a_corrupt_chunk_is_counted_and_the_rest_goes_on(mode: GetMode) -> None:
    def spoil(chunk: int, payload: Any) -> Any:
        if chunk == 1:
            payload["embed"]["decode"][0, 0] += 1.0
            payload["ids"]["output"][0] ^= 1
        return payload

    connector = MemoryConnector()
    put_three(connector, spoil)
    report = received_by(mode, connector, clock_of())
    assert (report.chunks, report.corrupt, report.usable_us.count) == (3, 1, 2)
    assert report.notes[0].startswith("get req-0000_0_1: corrupt: ")


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_chunk_ends_at_the_deadline(mode: GetMode) -> None:
    connector = MemoryConnector()
    put_three(connector)
    del connector.stored["0", "1", "req-0000_0_1"]
    report = received_by(mode, connector, clock_of(0.3))
    assert (report.chunks, report.expected) == (1, 3)
    assert report.misses > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_get_that_raises_is_counted_and_repeated(mode: GetMode) -> None:
    class Raising(MemoryConnector):
        failures = 2

        def get(self, *arguments: Any, **options: Any) -> tuple[Any, int] | None:
            if self.failures:
                self.failures -= 1
                raise ConnectionError("sender is restarting")
            return super().get(*arguments, **options)

    connector = Raising()
    put_three(connector)
    report = received_by(mode, connector, clock_of())
    assert (report.chunks, report.wrong(), report.errors) == (3, 0, 2)
    assert report.notes[0] == "get req-0000_0_0: ConnectionError: sender is restarting"


@pytest.mark.parametrize("mode", MODES)
def test_metadata_is_handed_to_get(mode: GetMode) -> None:
    connector = MemoryConnector()
    put_three(connector)
    endpoint = {"source_host": "127.0.0.1", "source_port": 5}
    received_by(mode, connector, clock_of(), endpoint)
    assert [metadata for _, metadata in connector.asked] == [endpoint] * len(connector.asked)


def test_calling_off_the_run_ends_receivers() -> None:
    clock = clock_of()
    inbox = Inbox(Workload(Traffic(requests=1, chunks=3)), [A], None)
    threads = in_threads(*receiver_work("poll", MemoryConnector(), inbox, [Stream(A, 0, None)], clock))
    clock.stopped.set()
    join(threads)


def test_a_connector_without_the_method_a_mode_needs_is_refused() -> None:
    class Old:
        def get(self) -> None:
            """All it has."""

    inbox = Inbox(Workload(Traffic(chunks=1)), [A], None)
    for mode, method in (("deadline", "get_with_deadline"), ("wake", "get_wakeup_generation or wait_for")):
        with pytest.raises(ValueError, match=rf"Old has no {method}.*--get poll"):
            receiver_work(mode, Old(), inbox, [], clock_of())  # type: ignore[arg-type]
