"""The health document: joined from its parts, honest about old ones, bounded; dumps as files."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from mori_mp.shared.files import expand, write_whole
from mori_mp.shared.histogram import Histogram
from mori_mp.shared.procinfo import NUMBERS, ProcessTable, numa_node
from mori_mp.workers.dump import DumpFile
from mori_mp.workers.report import SCHEMA, Child, Part, compose, fit, process_rows


def histogram(*times: int) -> dict[str, Any]:
    made = Histogram()
    for time in times:
        made.record(time)
    return made.as_dict()


def fault(at: float, cause: str) -> dict[str, Any]:
    return {"time": at, "process": "stage", "cause": cause, "text": "x"}


def stage_part(**more: Any) -> dict[str, Any]:
    return {
        "host": "127.0.0.1",
        "stage_id": 1,
        "puts": 3,
        "pool": {"used_bytes": 4096},
        "edges": {"0_1": {"received": 2, "received_bytes": 20, "get": histogram(5, 6)}},
        "faults": {"counts": {"corrupt": 1}, "recent": [fault(2.0, "corrupt")], "suppressed_log_lines": 1},
        "queues": {"publish_backlog": 0},
        "failed": "",
        "pool_error": "",
        "transfer_families": {"0_1": {}},
        **more,
    }


def sender_part(**more: Any) -> dict[str, Any]:
    return {
        "parked": 4,
        "jobs_queued": 5,
        "jobs_under_way": 6,
        "freed_backlog": 7,
        "workers": [{"index": 0, "ready": True}],
        "edges": {"1_2": {"published": 9, "published_bytes": 90, "publish": histogram(3)}},
        "faults": {"counts": {"corrupt": 2, "expired": 1}, "recent": [fault(1.0, "expired")]},
        **more,
    }


def document(stage: Part, sender: Part | None) -> dict[str, Any]:
    return compose(stage, sender, [], reporter="control")


# ---------------------------------------------------------------------------- document
def test_both_parts_are_joined() -> None:
    found = document(Part(stage_part()), Part(sender_part()))
    assert (found["schema"], found["status"], found["puts"]) == (SCHEMA, "healthy", 3)
    assert "error" not in found
    assert found["queues"] == {
        "publish_backlog": 0,
        "freed_backlog": 7,
        "parked_pulls": 4,
        "jobs_queued": 5,
        "jobs_under_way": 6,
    }
    assert set(found["edges"]) == {"0_1", "1_2"}
    assert found["edges"]["0_1"]["latency_us"]["get"]["count"] == 2
    assert found["edges"]["0_1"]["published"] == 0
    assert found["edges"]["1_2"]["published_bytes"] == 90
    assert found["edges"]["1_2"]["latency_us"]["publish"]["count"] == 1
    assert found["faults"]["counts"] == {"corrupt": 3, "expired": 1}
    assert [one["cause"] for one in found["faults"]["recent"]] == ["expired", "corrupt"]
    assert found["faults"]["suppressed_log_lines"] == 1
    inner = {"failed", "pool_error", "transfer_families"}
    assert not inner & (found.keys() | found["sender"].keys())


def test_a_connector_without_a_control_process_has_no_sender() -> None:
    found = document(Part(stage_part()), None)
    assert "sender" not in found
    assert found["status"] == "healthy"


@pytest.mark.parametrize(
    ("stage", "sender", "status", "error"),
    [
        (Part(stage_part(failed="given up")), Part(None, 0.0, True), "unhealthy", "given up"),
        (Part(stage_part(pool_error="no memory")), Part(sender_part()), "degraded", "no memory"),
        (Part(stage_part()), Part(None, 0.0, True), "degraded", "control process does not answer"),
        (Part(stage_part()), Part(sender_part(), 9.0, True), "degraded", "control process does not answer"),
        (
            Part(stage_part()),
            Part(sender_part(workers=[{"index": 0, "ready": True}, {"index": 1, "ready": False}])),
            "degraded",
            "worker 1 is not up",
        ),
        (Part(stage_part(), 5.0, True), Part(sender_part()), "degraded", "stage does not answer"),
        (
            Part(stage_part(receiver={"senders": [{"address": "tcp://here:1", "silent_s": 31.2}]})),
            Part(sender_part()),
            "degraded",
            "sender tcp://here:1 has not answered for 31 s",
        ),
    ],
)
def test_status(stage: Part, sender: Part, status: str, error: str) -> None:
    found = document(stage, sender)
    assert found["status"] == status
    assert error in found["error"]


def test_a_sender_that_may_still_be_starting_is_no_trouble() -> None:
    senders = [{"address": "tcp://here:1", "silent_s": 29.0}, {"address": "tcp://there:1", "silent_s": 0.0}]
    found = document(Part(stage_part(receiver={"senders": senders})), Part(sender_part()))
    assert found["status"] == "healthy"


@pytest.mark.parametrize("state", ["stopped", "tracing-stop"])
def test_a_stopped_process_shows_before_it_is_missed(state: str) -> None:
    """An idle worker that is stopped fails nobody yet; the next payload would hang."""
    rows = [
        {"role": "stage", "index": None, "pid": 7, "state": "running"},
        {"role": "worker", "index": 1, "pid": 8, "state": state},
        {"role": "worker", "index": 2, "pid": None, "state": None},
    ]
    found = compose(Part(stage_part()), Part(sender_part()), rows, reporter="control")
    assert found["status"] == "degraded"
    assert found["error"] == "stopped by a signal or a debugger: worker 1 (pid 8)"


def test_what_a_silent_control_process_last_said_is_kept_and_marked() -> None:
    found = document(Part(stage_part()), Part(sender_part(), 9.0, True))
    assert found["sender"]["stale"] is True
    assert found["sender"]["age_s"] == 9.0
    assert found["sender"]["parked"] == 4
    nothing = document(Part(stage_part()), Part(None, 0.0, True))
    assert nothing["sender"] == {"stale": True, "age_s": None}


# --------------------------------------------------------------------------- processes
def test_this_process_is_described() -> None:
    (row,) = process_rows(ProcessTable(), os.getpid(), 12.0, [])
    assert (row["role"], row["pid"], row["thread"], row["ready"]) == ("stage", os.getpid(), False, True)
    assert set(NUMBERS) <= row.keys()
    assert row["rss_bytes"] > 1 << 20
    assert row["threads"] >= 1
    assert row["fds"] >= 3
    assert row["state"] == "running"
    assert row["cpus"]
    assert row["cpu_s"] > 0


def test_cpu_use_is_that_since_the_report_before() -> None:
    table = ProcessTable()
    first = table.read(os.getpid())
    while (second := table.read(os.getpid()))["cpu_s"] < first["cpu_s"] + 0.02:
        pass  # this loop is the load
    assert second["cpu_percent"] > 0


def test_children_that_are_gone_or_threads_have_no_numbers() -> None:
    gone = Child("worker", 0, 2**22 - 1, False, True, 1.0, 3, "0-1")
    down = Child("worker", 1, None, False, False, 1.0, 3, "")
    thread = Child("control", None, os.getpid(), True, False, 1.0, 0, "")
    _, *rows = process_rows(ProcessTable(), os.getpid(), 12.0, [gone, down, thread])
    for row in rows:
        assert {row[name] for name in NUMBERS} == {None}
    assert [row["thread"] for row in rows] == [False, False, True]
    assert rows[0]["restarts"] == 3
    assert rows[1]["uptime_s"] is None


def test_numa_nodes_of_cpus(tmp_path: Path) -> None:
    for cpu, node in ((0, 0), (1, 0), (2, 1)):
        (tmp_path / f"devices/system/cpu/cpu{cpu}/node{node}").mkdir(parents=True)
    (tmp_path / "devices/system/cpu/cpu3").mkdir()
    assert numa_node([0, 1], str(tmp_path)) == 0
    assert numa_node([2], str(tmp_path)) == 1
    assert [numa_node(cpus, str(tmp_path)) for cpus in ([0, 2], [3], [9], [])] == [None] * 4


# -------------------------------------------------------------------------------- size
def test_a_document_that_fits_is_whole() -> None:
    found = json.loads(fit(document(Part(stage_part()), Part(sender_part()))))
    assert "truncated" not in found
    assert found["faults"]["counts"] == {"corrupt": 3, "expired": 1}


@pytest.mark.parametrize("limit", [40_000, 6_000, 900])
def test_a_large_document_is_cut_to_its_limit_and_says_so(limit: int) -> None:
    many = [fault(float(at), "corrupt") | {"text": "x" * 500} for at in range(40)]
    senders = [{"address": "a" * 100, "number": number} for number in range(400)]
    part = stage_part(
        faults={"counts": {"corrupt": 40}, "recent": many}, receiver={"senders": senders, "counters": {}}
    )
    whole = document(Part(part), Part(sender_part()))
    whole["error"] = "e" * 5000
    text = fit(whole, limit)
    assert len(text) <= limit
    found = json.loads(text)
    assert found["truncated"] is True
    assert (found["schema"], found["status"], found["stage_id"]) == (SCHEMA, "healthy", 1)
    assert len(part["receiver"]["senders"]) == 400  # what it was made from is left alone


# ------------------------------------------------------------------------------- files
def test_placeholders() -> None:
    assert expand("/d/{stage}/{pid}-{x}.json", pid=7, stage=2) == Path("/d/2/7-{x}.json")


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "new" / "dump.json"
    for text in (b"first", b"second"):
        write_whole(target, text)
    assert target.read_bytes() == b"second"
    assert os.listdir(target.parent) == ["dump.json"]


def test_a_failed_write_leaves_the_old_file_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    dump = DumpFile(tmp_path / "file" / "dump.json")
    dump.write(lambda: b"x")
    dump.write(lambda: b"x")
    (message,) = caplog.messages
    assert "dump.json cannot be written" in message
    assert os.listdir(tmp_path) == ["file"]


def test_a_dump_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr("mori_mp.workers.dump.write_whole", lambda path, text: go.wait(10))
    dump = DumpFile(tmp_path / "dump.json")
    assert dump.write_aside(lambda: b"1")
    assert not dump.write_aside(lambda: b"2")
    assert dump.skipped == 1
    go.set()
    dump.finish(5.0)
    assert dump.write_aside(lambda: b"3")
    dump.finish(5.0)
