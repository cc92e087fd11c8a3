"""Latency histograms with power-of-two buckets, and tables of them by edge.

Recording is the only thing that happens on a hot path: bit_length() of a whole number of microseconds is the
bucket, and one element of a fixed list goes up. The list is long enough for every number, so that nothing is
compared. All else (counts, quantiles, upper bounds) is worked out by whoever reads. Buckets of a time t:

    0: t < 1 us      i: 2^(i-1) us <= t < 2^i us      31: all longer ones (2^30 us are 18 minutes)

A time below 0 can only be one of a few microseconds, from stamps of two processes that raced; it counts by
its absolute value.

`Bounded` has the buckets of somebody else's metric instead, and costs a binary search.

None of this takes a lock. Two threads that record at the same moment may lose one count, never more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

BUCKETS = 32
MAX_EDGES = 32
OTHER = "other"
"""The edge under which everything beyond MAX_EDGES edges is counted."""

T = TypeVar("T")


class Histogram:
    """Times in microseconds, below 2^63. The hottest paths do what record() does in place."""

    __slots__ = ("buckets", "total")

    def __init__(self) -> None:
        self.buckets = [0] * 64
        self.total = 0

    def record(self, microseconds: int) -> None:
        """Count one time."""
        self.buckets[microseconds.bit_length()] += 1
        self.total += microseconds

    @property
    def count(self) -> int:
        """Times recorded."""
        return sum(self.buckets)

    def as_dict(self) -> dict[str, Any]:
        """Return {"count", "sum_us", "buckets"}, long times in one bucket and trailing zeros cut."""
        buckets = [*self.buckets[: BUCKETS - 1], sum(self.buckets[BUCKETS - 1 :])]
        return {"count": sum(buckets), "sum_us": self.total, "buckets": _cut(buckets)}


class Bounded:
    """Values by fixed upper bounds, each inclusive, as Prometheus counts them; the last bucket has none."""

    __slots__ = ("bounds", "buckets", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.total = 0.0

    def record(self, value: float) -> None:
        """Count one value."""
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.total += value

    def as_dict(self) -> dict[str, Any]:
        """Return {"sum", "buckets"}: one count for each bound and one for what is above the last."""
        return {"sum": self.total, "buckets": list(self.buckets)}


class Edges(dict[str, T]):
    """What is counted for each edge, made on first use. Bounded: see OTHER."""

    def __init__(self, make: Callable[[], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, edge: str) -> T:
        if len(self) >= MAX_EDGES:
            edge = OTHER
        return self.setdefault(edge, self._make())


def _cut(buckets: Sequence[int]) -> list[int]:
    used = len(buckets)
    while used and not buckets[used - 1]:
        used -= 1
    return list(buckets[:used])


# ------------------------------------------------------------------------- reading them
def upper_us(bucket: int) -> int:
    """Return the upper end of a bucket in microseconds; that of the last one is nominal."""
    return 1 << bucket


def quantile(histogram: Mapping[str, Any], fraction: float) -> float:
    """Estimate a quantile (0..1) of a reported histogram in microseconds, interpolating inside its bucket.

    0.0 for an empty one. Raises ValueError for a fraction outside 0..1.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction must be in 0..1, got {fraction}")
    buckets = histogram["buckets"]
    rank = fraction * sum(buckets)
    below = 0
    for bucket, count in enumerate(buckets):
        if count and below + count >= rank:
            low = upper_us(bucket - 1) if bucket else 0
            return float(low + (upper_us(bucket) - low) * (rank - below) / count)
        below += count
    return 0.0


def mean_us(histogram: Mapping[str, Any]) -> float:
    """Return the exact mean of a reported histogram in microseconds, 0.0 for an empty one."""
    count = int(histogram["count"])
    return int(histogram["sum_us"]) / count if count else 0.0
