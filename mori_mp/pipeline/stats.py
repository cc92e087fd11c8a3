"""What the pipeline job measures, as small records that cross the stages' control pipe.

Samples are nanoseconds of CLOCK_MONOTONIC while they are collected (one `array` per edge and side, 8 bytes a
chunk) and become microseconds in a `Summary`. Percentiles interpolate linearly between the two nearest ranks.
A ratio of two summaries compares two runs of the same traffic.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

_LIVE_WINDOW = 2000


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of one time, in microseconds; all zero when nothing was measured."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Value below which `fraction` (0..1) of the ascending samples lie; ValueError without samples."""
    if not ordered:
        raise ValueError("percentile of no samples")
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction must be in 0..1, got {fraction}")
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(samples_ns: Sequence[int]) -> Summary:
    """Summary in microseconds of samples in nanoseconds."""
    if not samples_ns:
        return Summary()
    ordered = sorted(samples_ns)

    def micros(nanoseconds: float) -> float:
        return round(nanoseconds / 1e3, 1)

    return Summary(
        count=len(ordered),
        mean=micros(sum(ordered) / len(ordered)),
        p50=micros(percentile(ordered, 0.50)),
        p90=micros(percentile(ordered, 0.90)),
        p99=micros(percentile(ordered, 0.99)),
        max=micros(ordered[-1]),
    )


def ratio(value: float, baseline: float) -> float | None:
    """value / baseline to two places; None when the baseline measured nothing."""
    return round(value / baseline, 2) if baseline > 0 else None


class Samples:
    """Times of one kind on one edge, in nanoseconds."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values = array("q")

    def __len__(self) -> int:
        return len(self._values)

    def add(self, nanoseconds: int) -> None:
        self._values.append(nanoseconds)

    def summary(self) -> Summary:
        return summarise(self._values)

    def recent(self) -> Summary:
        """Summary of the last samples only: cheap enough for a live table."""
        return summarise(self._values[-_LIVE_WINDOW:])


class SendReport(msgspec.Struct, kw_only=True):
    """What a sender saw on one edge. Sizes in bytes, times in microseconds unless the name says otherwise."""

    edge: str
    chunks: int = 0
    bytes: int = 0
    put_us: Summary = msgspec.field(default_factory=Summary)
    retries: int = 0
    """put() calls that returned False and were repeated."""
    stalled_ms: float = 0.0
    """Time spent waiting between a refused put() and its repeat."""
    errors: int = 0
    """put() calls that raised."""
    unsent: int = 0
    """Chunks that were never accepted before the deadline."""
    first_put_ns: int = 0
    notes: list[str] = msgspec.field(default_factory=list)


class ReceiveReport(msgspec.Struct, kw_only=True):
    """What a receiver saw on one edge."""

    edge: str
    chunks: int = 0
    """Chunks that arrived, right or wrong."""
    expected: int | None = None
    """Chunks that had to arrive; None when only the sender knows (a run by duration)."""
    bytes: int = 0
    usable_us: Summary = msgspec.field(default_factory=Summary)
    """From just before the put() that was accepted until the payload is decoded and read here."""
    misses: int = 0
    """get() calls that came back empty."""
    errors: int = 0
    """get() calls that raised."""
    corrupt: int = 0
    duplicates: int = 0
    misordered: int = 0
    foreign: int = 0
    """Chunks of another request."""
    last_usable_ns: int = 0
    notes: list[str] = msgspec.field(default_factory=list)

    def wrong(self) -> int:
        """Chunks that arrived but were not what they had to be."""
        return self.corrupt + self.duplicates + self.misordered + self.foreign


_WRONG = {
    "corrupt": "corrupt",
    "duplicates": "delivered twice",
    "misordered": "out of order",
    "foreign": "of another request",
}


class EdgeReport(msgspec.Struct, kw_only=True):
    """Both sides of one edge."""

    edge: str
    sent: SendReport
    received: ReceiveReport
    gb_per_s: float = 0.0
    """Received bytes over the time from the first put() to the last usable chunk, 1e9 bytes a second."""
    lost: int = 0

    def faults(self) -> list[str]:
        """One sentence for each thing that makes the run fail."""
        found = []
        received = self.received
        if self.lost:
            found.append(f"edge {self.edge}: {self.lost} chunk(s) lost")
        for name, words in _WRONG.items():
            count = getattr(received, name)
            if count:
                found.append(f"edge {self.edge}: {count} chunk(s) {words}")
        return found


def join_edge(sent: SendReport, received: ReceiveReport) -> EdgeReport:
    """Put the two sides of an edge together: losses and throughput.

    A chunk is lost when it had to arrive and did not: put() refused it to the end, or the bytes never came.
    """
    expected = received.expected if received.expected is not None else sent.chunks + sent.unsent
    span_ns = received.last_usable_ns - sent.first_put_ns
    moving = sent.first_put_ns > 0 and span_ns > 0
    return EdgeReport(
        edge=sent.edge,
        sent=sent,
        received=received,
        gb_per_s=round(received.bytes / span_ns, 4) if moving else 0.0,
        lost=max(0, expected - received.chunks),
    )
