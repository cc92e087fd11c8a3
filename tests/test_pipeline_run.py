"""Runs with real stage processes, over connectors that do well and connectors that do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from mori_mp.deploy import load_deploy
from mori_mp.pipeline.job import run_pipeline, with_overrides
from mori_mp.pipeline.planner import RunOptions
from mori_mp.pipeline.processes import ProcessWatch
from mori_mp.pipeline.runner import RunOutcome
from mori_mp.pipeline.stage import load_class
from mori_mp.pipeline.stats import EdgeReport

TWO_STAGES = """
connectors:
  ours: {name: MoriTransferEngineConnector, extra: {codec_chunk_frames: 5, codec_left_context_frames: 5}}
stages:
  - {stage_id: 0, output_connectors: {to_stage_1: ours}}
  - {stage_id: 1}
"""


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
        path.write_text(TWO_STAGES)
        options = RunOptions(
            requests=2,
            chunks=5,
            gap_s=0.005,
            connector_class=f"pipeline_doubles:{double}",
            overrides={"directory": str(mail)},
        )
        options = with_overrides(options, {"runtime_dir": more.pop("runtime_dir", "")})
        options = replace(options, **more)
        return run_pipeline(load_deploy(path), options, timeout_s=timeout_s, observer=observer or Quiet())

    return start


def test_faults_are_told_apart_and_prints_do_no_harm(run: Any) -> None:
    observer = Quiet()
    outcome = run("FaultyConnector", observer=observer, get_mode="poll", busy=True)
    assert outcome.problems == ["edge 0->1: 1 chunk(s) corrupt", "edge 0->1: 1 chunk(s) delivered twice"]
    (edge,) = outcome.edges
    assert "get req-0001_0_2: corrupt: hidden_states.output differs first at byte 7" in edge.received.notes
    assert (edge.sent.chunks, edge.sent.retries, edge.sent.errors) == (10, 20, 10)
    assert (edge.received.chunks, edge.received.usable_us.count) == (10, 8)
    assert observer.lines.count("not a message") == 2
    assert observer.lines.count('{"event": "done"}') == 2


def test_a_lost_chunk_ends_the_run_at_its_timeout(run: Any) -> None:
    outcome = run("DroppingConnector", timeout_s=3.0)
    assert outcome.problems == ["not finished within --timeout 3 s", "edge 0->1: 2 chunk(s) lost"]


def test_a_stage_that_dies_ends_the_run_at_once_with_its_last_words(run: Any) -> None:
    outcome = run("CrashingConnector", timeout_s=100.0)
    assert outcome.wall_s < 60
    first = outcome.problems[0]
    assert first.startswith("stage 1 failed (signal 9); its last output:")
    assert "about to go down in flames" in first
    assert any("lost" in problem for problem in outcome.problems[1:])
    assert not any("left over" in problem for problem in outcome.problems)


@pytest.mark.parametrize("path", ["pipeline_doubles:Nothing", "no_such_module:Class", "no_colon", ":", "a:"])
def test_a_class_that_does_not_exist_is_named(path: str) -> None:
    with pytest.raises(ValueError, match=f"connector class '{path}'"):
        load_class(path)


def test_what_is_left_over_fails_the_run_and_is_ended(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mori_mp.pipeline.runner._END_S", 4.0)
    monkeypatch.setattr("mori_mp.pipeline.runner._TERM_S", 0.5)
    base = tmp_path / "runtime"
    base.mkdir()
    outcome = run("LeavingConnector", duration_s=0.3, gap_s=0.02, runtime_dir=str(base))
    assert outcome.edges[0].sent.chunks == outcome.edges[0].received.chunks >= 4
    assert outcome.edges[0].faults() == []
    assert outcome.problems[0] == "stage 1 did not close its connector and exit in 4 s"
    assert outcome.stages[1].exit_status == -signal.SIGKILL
    assert "left over: stage 0: 4096 bytes of the pool were not returned" in outcome.problems
    assert any(p.startswith("left over: stage 0: process") and "sleep" in p for p in outcome.problems)
    assert any(p.startswith("left over: process") and "sleep 60" in p for p in outcome.problems)
    assert f"left over: {base}/{outcome.stages[0].pid}-socket" in outcome.problems


def test_an_interrupt_ends_every_stage(run: Any) -> None:
    observer = Quiet()
    # A shell that starts us in the background has us ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    once = threading.Event()

    def interrupt() -> None:
        if not once.is_set() and observer.updates[-1][0].received.chunks:
            once.set()
            signal.raise_signal(signal.SIGINT)

    observer.on_progress = interrupt
    try:
        outcome = run("DirectoryConnector", chunks=10_000, observer=observer)
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.interrupted
    assert outcome.problems[0] == "interrupted"
    assert not any("left over" in problem for problem in outcome.problems)


def stage_process(double: str) -> subprocess.Popen[bytes]:
    """A stage without a runner, its plan already written."""
    plan = {
        "stage_id": 1,
        "connector_class": f"pipeline_doubles:{double}",
        "connector_config": {"directory": ".", "stage_id": 1},
        "inputs": [],
        "outputs": [],
        "traffic": {},
    }
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-m", "mori_mp.pipeline.stage"],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(plan) + b"\n")
    process.stdin.flush()
    return process


def test_a_stage_ends_when_its_runner_is_gone() -> None:
    """The runner's end of the control pipe closes with it; that alone must end the stage."""
    with stage_process("DirectoryConnector") as stage:
        assert stage.stdout is not None
        assert msgspec.json.decode(stage.stdout.readline())["event"] == "ready"
        _, errors = stage.communicate(timeout=60)
    assert stage.returncode == 1
    assert b"the runner is gone" in errors


def test_a_stage_says_why_its_connector_cannot_be_built() -> None:
    with stage_process("BrokenConnector") as stage:
        output, _ = stage.communicate(timeout=60)
    (message,) = [msgspec.json.decode(line) for line in output.splitlines()]
    assert (message["event"], message["error"]) == ("failed", "RuntimeError: port 4242 is taken")
    assert stage.returncode == 1


def test_the_process_table_survives_processes_that_go_away() -> None:
    watch = ProcessWatch()
    (row,) = watch.look({4: os.getpid()})[:1]
    assert (row.role, row.pid) == ("stage 4", os.getpid())
    assert watch.look({4: 2**22 - 1}) == []
