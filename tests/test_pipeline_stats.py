"""The arithmetic of the report."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mori_mp.pipeline.stats import (
    ReceiveReport,
    Samples,
    SendReport,
    Summary,
    join_edge,
    percentile,
    ratio,
    summarise,
)


@given(st.lists(st.integers(0, 10**12), min_size=2, max_size=200))
@settings(max_examples=50)
def test_percentiles_agree_with_the_standard_library(values: list[int]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    ordered = sorted(values)
    for q in (50, 90, 99):
        assert percentile(ordered, q / 100) == pytest.approx(cuts[q - 1])
    assert percentile(ordered, 0.0) == ordered[0]
    assert percentile(ordered, 1.0) == ordered[-1]


def test_percentile_refuses_what_has_no_answer() -> None:
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match=r"0\.\.1"):
        percentile([1], 50)


def test_nanoseconds_become_microseconds() -> None:
    assert summarise([1_000, 2_000, 3_000]) == Summary(count=3, mean=2.0, p50=2.0, p90=2.8, p99=3.0, max=3.0)
    assert summarise([]) == Summary()


def test_the_live_summary_looks_at_recent_samples_only() -> None:
    samples = Samples()
    for _ in range(3000):
        samples.add(1_000_000)
    for _ in range(2000):
        samples.add(1_000)
    assert len(samples) == 5000
    assert samples.recent().max == 1.0
    assert samples.summary().max == 1000.0
    assert samples.summary().count == 5000


def test_ratio() -> None:
    assert ratio(30.0, 20.0) == 1.5
    assert ratio(1.0, 0.0) is None


def sides(**received: int) -> tuple[SendReport, ReceiveReport]:
    sent = SendReport(edge="0->1", chunks=10, bytes=1000, first_put_ns=1_000_000)
    return sent, ReceiveReport(edge="0->1", **{"chunks": 10, "expected": 10, **received})


def test_a_good_edge_has_no_faults_and_a_throughput() -> None:
    edge = join_edge(*sides(bytes=4000, last_usable_ns=1_002_000))
    assert edge.lost == 0
    assert edge.faults() == []
    assert edge.gb_per_s == 2.0


def test_chunks_that_never_came_are_lost() -> None:
    edge = join_edge(*sides(chunks=7))
    assert edge.faults() == ["edge 0->1: 3 chunk(s) lost"]


def test_by_duration_the_sender_knows_what_had_to_come() -> None:
    sent, received = sides(chunks=9)
    received.expected = None
    assert join_edge(sent, received).lost == 1
    sent.unsent = 2
    assert join_edge(sent, received).lost == 3


def test_every_kind_of_wrong_chunk_is_a_fault_of_its_own() -> None:
    edge = join_edge(*sides(corrupt=1, duplicates=2, misordered=3, foreign=4))
    assert edge.received.wrong() == 10
    assert edge.faults() == [
        "edge 0->1: 1 chunk(s) corrupt",
        "edge 0->1: 2 chunk(s) delivered twice",
        "edge 0->1: 3 chunk(s) out of order",
        "edge 0->1: 4 chunk(s) of another request",
    ]


def test_nothing_moved_is_no_throughput() -> None:
    silent = join_edge(SendReport(edge="0->1"), ReceiveReport(edge="0->1"))
    assert (silent.gb_per_s, silent.lost) == (0.0, 0)
