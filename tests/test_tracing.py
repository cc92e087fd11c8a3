"""Spans become a trace that a viewer accepts: named processes and threads, balanced and nested events."""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from mori_mp.shared import tracing
from mori_mp.shared.tracing import Tracer, join, merge_parts, parts_folder, remove_parts

EPOCH = "e1"
KEY = "r_0_0@0_1"
US = 1000


def assert_readable(trace: dict[str, Any]) -> None:
    """What the trace event format asks for, and what a viewer needs to draw it without complaint."""
    assert json.loads(json.dumps(trace)) == trace
    named: dict[str, set[tuple[int, int]]] = defaultdict(set)
    stacks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    open_spans: dict[str, dict[str, Any]] = {}
    flows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} <= event.keys(), event
        where = (event["pid"], event["tid"])
        if event["ph"] == "M":
            named[event["name"]].add(where)
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            stacks[where].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "b":
            assert event["id"] not in open_spans, "ids are unique"
            open_spans[event["id"]] = event
        elif event["ph"] == "e":
            begin = open_spans.pop(event["id"])
            assert begin["name"] == event["name"]
            assert begin["ts"] <= event["ts"]
        else:
            assert event["ph"] in "sf"
            flows[event["id"]].append(event)
    assert not open_spans, "every begin has its end"
    for event in trace["traceEvents"]:
        assert (event["pid"], 0) in named["process_name"]
        assert event["tid"] == 0 or (event["pid"], event["tid"]) in named["thread_name"]
    for spans in stacks.values():
        assert_nested(sorted(spans, key=lambda span: (span[0], -span[1])))
    for ends in flows.values():
        assert {event["ph"] for event in ends} <= {"s", "f"}


def assert_nested(spans: list[tuple[float, float]]) -> None:
    ends: list[float] = []
    for begin, end in spans:
        while ends and ends[-1] <= begin:
            ends.pop()
        assert not ends or end <= ends[-1], "spans of one thread lie inside or behind each other"
        ends.append(end)


def events(trace: dict[str, Any], name: str, phases: str = "Xb") -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["name"] == name and e["ph"] in phases]


def test_parts_of_several_processes_become_one_trace(tmp_path: Path) -> None:
    folder = parts_folder(tmp_path / "t.json")
    stage = Tracer(folder, "stage", "stage 0", epoch=EPOCH)
    control = Tracer(folder, "control", "control 0", epoch=EPOCH, thread=True)
    stage.add("put", 1000 * US, 1500 * US, KEY, generation=4, size=64)
    control.add("publish", 1000 * US, 1600 * US, KEY, generation=4)
    control.add("dispatch", 1550 * US, 1700 * US, KEY, generation=4, write_id=9)
    stage.flush()
    control.flush()
    trace = merge_parts(folder, EPOCH)
    assert_readable(trace)
    (put,) = events(trace, "put")
    assert (put["ts"], put["dur"]) == (1000.0, 500.0)
    assert put["args"] == {"key": KEY, "generation": 4, "bytes": 64}
    (publish,) = events(trace, "publish")
    (dispatch,) = events(trace, "dispatch")
    assert (publish["ts"], dispatch["ts"], dispatch["args"]["write"]) == (1000.0, 1550.0, 9)
    assert trace["otherData"] == {"clock": "CLOCK_MONOTONIC", "dropped_spans": 0}
    remove_parts(folder, EPOCH)
    assert os.listdir(tmp_path) == []


def test_spans_of_threads_keep_their_threads(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path, "stage", "stage 0", epoch=EPOCH)
    threads = [
        threading.Thread(target=tracer.add, args=("pull", 0, 10, KEY), name=f"getter {number}")
        for number in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracer.flush()
    trace = merge_parts(tmp_path, EPOCH)
    assert_readable(trace)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert len(events(trace, "pull")) == 3
    assert names == {"getter 0", "getter 1", "getter 2"} or len(names) < 3  # thread ids may be reused


def test_a_payload_is_followed_from_put_to_usable_over_two_connectors(tmp_path: Path) -> None:
    for name, stage in (("a", "stage 0"), ("b", "stage 1")):
        tracer = Tracer(tmp_path / name, "stage", stage, epoch=name)
        if name == "a":
            tracer.add("put", 100 * US, 200 * US, KEY, generation=3)
        else:
            tracer.add("usable", 300 * US, 400 * US, KEY, generation=3, epoch="a")
        tracer.flush()
    trace = join([merge_parts(tmp_path / "a", "a"), merge_parts(tmp_path / "b", "b")])
    start, finish = (e for e in trace["traceEvents"] if e["name"] == "payload")
    assert (start["ph"], finish["ph"]) == ("s", "f")
    assert start["id"] == finish["id"]
    assert start["ts"] < finish["ts"]


def test_joining_keeps_asynchronous_spans_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tracer = Tracer(tmp_path / name, "worker", "worker 0.0", epoch=name)
        tracer.add("write", 100 * US, 200 * US, KEY)
        tracer.add("write", 150 * US, 250 * US, KEY)
        tracer.flush()
    trace = join([merge_parts(tmp_path / "a", "a"), merge_parts(tmp_path / "b", "b")])
    assert_readable(trace)
    assert len(events(trace, "write")) == 4


def test_one_connector_does_not_take_the_parts_of_another(tmp_path: Path) -> None:
    for epoch in ("a", "b"):
        tracer = Tracer(tmp_path / "parts", "stage", "stage 0", epoch=epoch)
        tracer.add("put", 0, 1, KEY)
        tracer.flush()
    assert len(events(merge_parts(tmp_path / "parts", "a"), "put")) == 1
    remove_parts(tmp_path / "parts", "a")
    assert len(events(merge_parts(tmp_path / "parts", "b"), "put")) == 1


def test_a_process_keeps_its_first_spans_and_counts_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MAX_SPANS", 600)
    tracer = Tracer(tmp_path, "stage", "stage 0", epoch=EPOCH)
    for number in range(1000):
        tracer.add("put", number, number + 1, KEY)
    tracer.close()
    trace = merge_parts(tmp_path, EPOCH)
    assert len(events(trace, "put")) == 600
    assert trace["otherData"]["dropped_spans"] == 400


def test_the_end_of_a_killed_process_is_passed_over(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path, "worker", "worker 0.0", epoch=EPOCH)
    tracer.add("write", 0, 1, KEY)
    tracer.flush()
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text() + '["write", 1, 2, ')
    trace = merge_parts(tmp_path, EPOCH)
    assert_readable(trace)
    assert len(events(trace, "write")) == 1


def test_a_part_that_cannot_be_written_ends_the_tracing_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    tracer = Tracer(tmp_path / "file" / "parts", "stage", "stage 0", epoch=EPOCH)
    tracer.add("put", 0, 1, KEY)
    tracer.flush()
    tracer.add("put", 0, 1, KEY)
    tracer.flush()
    (message,) = caplog.messages
    assert "no trace of this process" in message
