"""Latency histograms: every time lands in the bucket that the documentation names, and reading them back."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mori_mp.shared.histogram import BUCKETS, MAX_EDGES, OTHER, Bounded, Edges, Histogram, mean_us, quantile

TIMES = st.lists(st.integers(0, 1 << 40), max_size=60)


def recorded(times: list[int]) -> dict[str, Any]:
    histogram = Histogram()
    for time in times:
        histogram.record(time)
    return histogram.as_dict()


@given(st.integers(0, 1 << 40))
def test_a_time_lies_between_the_bounds_of_its_bucket(time: int) -> None:
    buckets = recorded([time])["buckets"]
    bucket = len(buckets) - 1
    assert buckets == [0] * bucket + [1]
    assert bucket < BUCKETS
    assert (2 ** (bucket - 1) if bucket else 0) <= time
    assert bucket == BUCKETS - 1 or time < 2**bucket


@given(TIMES)
def test_count_and_sum_are_exact(times: list[int]) -> None:
    found = recorded(times)
    assert (found["count"], found["sum_us"]) == (len(times), sum(times))
    assert sum(found["buckets"]) == len(times)
    assert mean_us(found) == (sum(times) / len(times) if times else 0.0)


def test_stamps_that_raced_do_no_harm() -> None:
    assert recorded([-1, 3]) == {"count": 2, "sum_us": 2, "buckets": [0, 1, 1]}


@given(TIMES.filter(bool), st.floats(0, 1))
def test_a_quantile_is_within_a_factor_of_two_of_the_true_one(times: list[int], fraction: float) -> None:
    times = [min(time, (1 << 31) - 1) for time in times]
    # Where the quantile falls between two of them, either is as true as the other.
    rank = fraction * len(times)
    below = sorted(times)[max(0, math.floor(rank) - 1)]
    above = sorted(times)[min(len(times) - 1, math.ceil(rank))]
    found = quantile(recorded(times), fraction)
    assert below / 2 - 1 <= found <= 2 * above + 1


def test_quantiles_of_nothing_and_outside() -> None:
    assert quantile(recorded([]), 0.5) == 0.0
    with pytest.raises(ValueError, match=r"0\.\.1"):
        quantile(recorded([1]), 1.5)


def test_quantiles_are_in_order() -> None:
    found = recorded([10] * 90 + [1000] * 9 + [100_000])
    assert 8 <= quantile(found, 0.5) <= 16
    assert 512 <= quantile(found, 0.95) <= 1024
    assert 65536 <= quantile(found, 1.0) <= 131072


@given(st.lists(st.sampled_from([1.0, 2.0, 4.0, 0.5, 3.0, 9.0]), max_size=30))
def test_bounds_are_inclusive(values: list[float]) -> None:
    bounded = Bounded((1.0, 2.0, 4.0))
    for value in values:
        bounded.record(value)
    found = bounded.as_dict()
    below = [sum(value <= bound for value in values) for bound in (1.0, 2.0, 4.0)]
    assert [sum(found["buckets"][: i + 1]) for i in range(3)] == below
    assert sum(found["buckets"]) == len(values)
    assert found["sum"] == sum(values)


def test_a_connector_with_endless_edges_does_not_grow() -> None:
    edges: Edges[Histogram] = Edges(Histogram)
    for number in range(MAX_EDGES * 3):
        edges[f"{number}_x"].record(1)
    assert len(edges) == MAX_EDGES + 1
    assert edges[OTHER].as_dict()["count"] == MAX_EDGES * 2
    assert edges["0_x"].as_dict()["count"] == 1
