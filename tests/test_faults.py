"""Faults: counted without exception, remembered, and logged at a bounded rate that says what it left out."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mori_mp.shared.faults import CAUSES, RECENT, Faults, RateLimit

logger = logging.getLogger("mori_mp.test")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def faults(clock: Clock) -> Faults:
    return Faults("control", RateLimit(burst=3, seconds=30.0), clock, lambda: 1.5e9)


# ------------------------------------------------------------------------------- limit
@given(st.lists(st.floats(0, 20), max_size=80), st.integers(1, 5))
def test_no_window_gets_more_than_twice_the_burst_and_nothing_is_lost(gaps: list[float], burst: int) -> None:
    limit = RateLimit(burst, 10.0)
    now, passed, said, held = 0.0, [], 0, 0
    for gap in gaps:
        now += gap
        answer = limit.allow("x", now)
        if answer is None:
            held += 1
        else:
            passed.append(now)
            said += answer
    for start in passed:
        assert sum(start <= at < start + 10.0 for at in passed) <= 2 * burst
    said += sum(count for _, count in limit.overdue(now + 100.0))
    assert said == held == limit.suppressed
    assert len(passed) + held == len(gaps)
    assert limit.overdue(now + 200.0) == []


def test_one_kind_does_not_use_up_the_allowance_of_another() -> None:
    limit = RateLimit(1, 10.0)
    assert [limit.allow("a", 0.0), limit.allow("a", 0.0), limit.allow("b", 0.0)] == [0, None, 0]


def test_the_allowance_comes_back() -> None:
    limit = RateLimit(2, 10.0)
    assert [limit.allow("a", 0.0) for _ in range(4)] == [0, 0, None, None]
    assert limit.allow("a", 5.0) == 2
    assert limit.allow("a", 5.0) is None


def test_what_is_held_back_is_not_told_before_its_period_is_over() -> None:
    limit = RateLimit(1, 10.0)
    limit.allow("a", 0.0)
    limit.allow("a", 1.0)
    assert limit.overdue(10.9) == []
    assert limit.overdue(11.0) == [("a", 1)]


# ------------------------------------------------------------------------------ faults
def test_a_line_names_key_edge_peer_and_cause(faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    faults.report(logger, "write_failed", "write failed", key="r_0_0@0_1", peer="pid 7")
    (record,) = caplog.records
    assert record.name == "mori_mp.test"
    assert record.levelno == logging.ERROR
    assert record.getMessage() == "write failed [cause=write_failed key=r_0_0@0_1 edge=0_1 peer=pid 7]"
    assert faults.as_dict()["recent"] == [
        {
            "time": 1.5e9,
            "process": "control",
            "cause": "write_failed",
            "text": "write failed",
            "key": "r_0_0@0_1",
            "edge": "0_1",
            "peer": "pid 7",
        }
    ]


def test_a_flood_is_counted_in_full_and_logged_in_part(
    faults: Faults, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(100):
        faults.report(logger, "bad_request", f"number {number}")
    faults.report(logger, "expired", "another cause")
    assert [r.getMessage().split(" [")[0] for r in caplog.records] == [
        "number 0",
        "number 1",
        "number 2",
        "another cause",
    ]
    found = faults.as_dict()
    assert found["counts"] == {"bad_request": 100, "expired": 1}
    assert found["suppressed_log_lines"] == 97
    assert len(found["recent"]) == RECENT
    assert found["recent"][-2]["text"] == "number 99"
    clock.now += 10.0
    faults.report(logger, "bad_request", "the next one")
    assert caplog.messages[-1] == ("the next one [cause=bad_request] (97 more of this cause were not logged)")


def test_the_end_of_a_flood_is_told(faults: Faults, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        faults.report(logger, "bad_request", "x")
    faults.flush()
    assert len(caplog.records) == 3
    clock.now += 30.0
    faults.flush()
    assert caplog.messages[3:] == ["2 more faults were not logged one by one [cause=bad_request]"]
    faults.flush()
    assert len(caplog.records) == 4


def test_names_from_a_peer_are_cut(faults: Faults) -> None:
    faults.report(logger, "bad_request", "x" * 10_000, key="k" * 10_000, peer="p" * 10_000)
    (found,) = faults.as_dict()["recent"]
    assert max(len(str(value)) for value in found.values()) <= 500


def test_a_listener_hears_of_faults_but_not_of_what_is_normal(faults: Faults) -> None:
    heard: list[str] = []
    faults.listener = heard.append
    for _ in range(5):  # the log's limit is not the listener's
        faults.report(logger, "corrupt", "x", level=logging.WARNING)
    faults.report(logger, "sender_unreached", "x", level=logging.INFO)
    assert heard == ["corrupt"] * 5


# ------------------------------------------------------------------------------ causes
def test_every_cause_in_the_code_is_listed_and_none_that_is_not() -> None:
    """Metrics start every listed cause at zero."""
    root = Path(__file__).resolve().parents[1]
    found = set()
    for path in (path for top in ("mori_mp", "workers", "shared") for path in (root / top).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func.attr.strip("_")
                given = [item.value for item in node.args if isinstance(item, ast.Constant)]
                if name in ("report", "fault", "on_fault"):
                    found |= {text for text in given if re.fullmatch(r"[a-z]+(_[a-z]+)*", str(text))}
    assert found == set(CAUSES)
