"""Runs with real stage processes, over connectors that do well and connectors that do not."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mori_mp.deploy import load_deploy
from mori_mp.pipeline.job import run_pipeline
from mori_mp.pipeline.planner import RunOptions
from mori_mp.pipeline.processes import ProcessWatch
from mori_mp.pipeline.runner import RunOutcome
from mori_mp.pipeline.stats import EdgeReport

TWO_STAGES = """
connectors:
  ours: {name: MoriTransferEngineConnector, extra: {codec_chunk_frames: 5, codec_left_context_frames: 5}}
stages:
  - {stage_id: 0, output_connectors: {to_stage_1: ours}}
  - {stage_id: 1}
"""
THREE_STAGES = TWO_STAGES.replace("{stage_id: 1}", "{stage_id: 1, output_connectors: {to_stage_2: ours}}") + (
    "  - {stage_id: 2}\n"
)


class Quiet:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.updates: list[list[EdgeReport]] = []
        self.lines: list[str] = []
        self.on_progress = lambda: None

    def progress(self, edges: list[EdgeReport]) -> None:
        self.updates.append(edges)
        self.on_progress()

    def stage_line(self, stage_id: int, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Any:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    assert left == []


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    mail = tmp_path / "mail"
    mail.mkdir()

    def start(
        double: str,
        deploy: str = TWO_STAGES,
        timeout_s: float = 60.0,
        observer: Quiet | None = None,
        **more: Any,
    ) -> RunOutcome:
        path = tmp_path / "deploy.yaml"
        path.write_text(deploy)
        options = RunOptions(
            requests=2,
            chunks=5,
            gap_s=0.005,
            connector_class=f"pipeline_doubles:{double}",
            overrides={"directory": str(mail)},
        )
        for name, value in more.items():
            object.__setattr__(options, name, value)
        return run_pipeline(load_deploy(path), options, timeout_s=timeout_s, observer=observer or Quiet())

    return start


def test_a_good_run_delivers_everything_and_leaves_nothing(run: Any) -> None:
    outcome = run("DirectoryConnector", THREE_STAGES)
    assert outcome.ok, outcome.problems
    assert [edge.edge for edge in outcome.edges] == ["0->1", "1->2"]
    for edge in outcome.edges:
        assert edge.sent.chunks == edge.received.chunks == edge.received.usable_us.count == 10
        assert edge.gb_per_s > 0
        assert edge.received.usable_us.p50 >= 1
    assert [row.role for row in outcome.processes] == ["stage 0", "stage 1", "stage 2"]
    assert all(row.rss_mib > 10 and row.cpus for row in outcome.processes)
    assert [stage.exit_status for stage in outcome.stages] == [0, 0, 0]
    assert outcome.stages[0].health["deliveries"] == {"file": 1}


def test_busy_stages_that_poll_by_duration_deliver_everything(run: Any) -> None:
    outcome = run("DirectoryConnector", duration_s=0.3, gap_s=0.02, get_mode="poll", busy=True)
    assert outcome.ok, outcome.problems
    assert outcome.edges[0].sent.chunks == outcome.edges[0].received.chunks >= 4


def test_whatever_prints_to_stdout_does_not_touch_the_control_pipe(run: Any) -> None:
    observer = Quiet()
    outcome = run("PrintingConnector", observer=observer)
    assert outcome.ok, outcome.problems
    assert observer.lines.count("not a message") == 2
    assert observer.lines.count('{"event": "done"}') == 2


def test_a_flipped_bit_fails_the_run(run: Any) -> None:
    outcome = run("FlippingConnector")
    assert outcome.problems == ["edge 0->1: 1 chunk(s) corrupt"]
    assert outcome.edges[0].received.notes == [
        "get req-0001_0_2: corrupt: hidden_states.output differs first at byte 7"
    ]


def test_a_lost_chunk_ends_the_run_at_its_timeout(run: Any) -> None:
    # Long enough for the stages to start on a busy machine; the lost chunk costs the rest.
    outcome = run("DroppingConnector", timeout_s=20.0)
    assert outcome.problems == [
        "not finished within --timeout 20 s",
        "edge 0->1: 2 chunk(s) lost",
    ]


def test_a_chunk_delivered_again_is_told_from_corruption(run: Any) -> None:
    outcome = run("RepeatingConnector")
    assert outcome.problems == ["edge 0->1: 1 chunk(s) delivered twice"]


def test_refused_puts_are_repeated_until_they_are_taken(run: Any) -> None:
    outcome = run("RefusingConnector")
    assert outcome.ok, outcome.problems
    sent = outcome.edges[0].sent
    assert (sent.chunks, sent.retries, sent.errors) == (10, 20, 10)


def test_a_stage_that_dies_ends_the_run_at_once_with_its_last_words(run: Any) -> None:
    ended = []
    outcome = run("CrashingConnector", THREE_STAGES, timeout_s=100.0)
    ended.append(time.monotonic())
    assert outcome.wall_s < 50
    first = outcome.problems[0]
    assert first.startswith("stage 1 failed (signal 9); its last output:")
    assert "about to go down in flames" in first
    assert any("lost" in problem for problem in outcome.problems[1:])
    assert not any("left over" in problem for problem in outcome.problems)


def test_a_connector_that_cannot_be_built_is_reported_with_its_error(run: Any) -> None:
    outcome = run("BrokenConnector", THREE_STAGES)
    assert outcome.problems[0].startswith("stage 2 failed: RuntimeError: port 4242 is taken")
    assert outcome.stages[2].exit_status == 1


def test_a_class_that_does_not_exist_is_reported(run: Any) -> None:
    outcome = run("Nothing")
    assert "connector class 'pipeline_doubles:Nothing' cannot be imported" in outcome.problems[0]


def test_what_is_left_over_fails_the_run_and_is_ended(run: Any) -> None:
    outcome = run("LeavingConnector")
    assert "left over: stage 0: 4096 bytes of the pool were not returned" in outcome.problems
    assert any(p.startswith("left over: stage 1: process") and "sleep" in p for p in outcome.problems)
    assert any(p.startswith("left over: process") and "sleep 60" in p for p in outcome.problems)


def test_a_stage_that_hangs_in_close_is_killed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mori_mp.pipeline.runner._END_S", 0.5)
    monkeypatch.setattr("mori_mp.pipeline.runner._TERM_S", 0.5)
    outcome = run("StuckConnector")
    assert outcome.problems[0] == "stage 0, stage 1 did not close its connector and exit in 0.5 s"
    assert [stage.exit_status for stage in outcome.stages] == [-signal.SIGKILL] * 2


def test_an_interrupt_ends_every_stage(run: Any) -> None:
    observer = Quiet()
    once = threading.Event()

    def interrupt() -> None:
        if not once.is_set() and observer.updates[-1][0].received.chunks:
            once.set()
            signal.raise_signal(signal.SIGINT)

    observer.on_progress = interrupt
    outcome = run("DirectoryConnector", chunks=10_000, observer=observer)
    assert outcome.interrupted
    assert outcome.problems[0] == "interrupted"
    assert not any("left over" in problem for problem in outcome.problems)


def test_stages_end_when_the_runner_is_gone(run: Any) -> None:
    """The runner's end of the control pipes closes with it; that alone must end the stages."""
    import subprocess
    import sys

    plan = {
        "stage_id": 0,
        "connector_class": "pipeline_doubles:DirectoryConnector",
        "connector_config": {"directory": "."},
        "inputs": [],
        "outputs": [],
        "traffic": {},
    }
    import msgspec

    with subprocess.Popen(
        [sys.executable, "-m", "mori_mp.pipeline.stage"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as stage:
        assert stage.stdin is not None
        assert stage.stdout is not None
        stage.stdin.write(msgspec.json.encode(plan) + b"\n")
        stage.stdin.flush()
        assert msgspec.json.decode(stage.stdout.readline())["event"] == "ready"
        _, errors = stage.communicate(timeout=30)
    assert stage.returncode == 1
    assert b"the runner is gone" in errors


def test_the_process_table_survives_processes_that_go_away() -> None:
    watch = ProcessWatch()
    (row,) = watch.look({4: os.getpid()})[:1]
    assert (row.role, row.pid) == ("stage 4", os.getpid())
    assert watch.look({4: 2**22 - 1}) == []
