"""Counting the calls under way: what is had in the end is had once, and under no call."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from connector_support import Background

from mori_mp.calls import Calls
from mori_mp.shared.errors import ConnectorClosed


def test_no_call_begins_after_the_end() -> None:
    calls = Calls()
    calls.check_open("put")
    assert calls.shut()
    assert not calls.shut()
    with pytest.raises(ConnectorClosed, match=r"put\(\): the connector is closed"), calls.counted("put"):
        pytest.fail("a call began")
    with pytest.raises(ConnectorClosed, match=r"get\(\)"):
        calls.check_open("get")


def test_without_calls_the_action_is_had_at_once() -> None:
    calls, done = Calls(), []
    with pytest.raises(ZeroDivisionError), calls.counted("put"):
        _ = 1 / 0
    calls.shut()
    calls.afterwards(lambda: done.append(threading.get_ident()), 0.0)
    assert done == [threading.get_ident()]


def test_calls_under_way_are_waited_for() -> None:
    calls, done = Calls(), []
    with ExitStack() as call:
        call.enter_context(calls.counted("put"))
        calls.shut()
        waiting = Background(lambda: calls.afterwards(lambda: done.append(1), 10.0))
        assert done == []
    waiting.result()
    assert done == [1]


def test_a_call_that_lasts_has_the_action_at_its_end() -> None:
    calls, done = Calls(), []
    with calls.counted("put"):
        with calls.counted("get"):
            calls.shut()
            calls.afterwards(lambda: done.append(1), 0.0)
        assert done == []  # the outer one is still under way
    assert done == [1]
