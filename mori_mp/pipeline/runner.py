"""Starts the stages of a run, keeps them in step, and finds out what became of everything.

One single-threaded loop waits on every stage's pipes. Stages are started with `subprocess` in sessions of
their own, so a Ctrl-C reaches the runner alone, which then ends them in order:

    SIGTERM  the stage closes its connector and exits; _TERM_S for that
    SIGKILL  to the stage's process group; children notice by their lifelines

The control pipe's end of file means the stage process is gone, at whatever moment: that is noticed at once,
not at the deadline. A run is good when every expected chunk arrived right, and afterwards no process, no
pool byte and no file is left.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from mori_mp.pipeline.plan import StagePlan
from mori_mp.pipeline.processes import ProcessRow, ProcessWatch
from mori_mp.pipeline.stats import EdgeReport, ReceiveReport, SendReport, join_edge
from mori_mp.shared.runtime import base_directory

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_START_S = 60.0
_LEAD_NS = 20_000_000
_DEADLINE_GRACE_S = 5.0
_END_S = 15.0
_TERM_S = 7.0
_KILL_S = 5.0
_EXIT_S = 3.0
_SURVIVE_S = 2.0
_TAIL_LINES = 25


class StageReport(msgspec.Struct, kw_only=True):
    """What is known about one stage at the end."""

    stage_id: int
    pid: int
    exit_status: int | None = None
    close_s: float | None = None
    cpu_s: float | None = None
    health: dict[str, Any] = msgspec.field(default_factory=dict)


class RunOutcome(msgspec.Struct, kw_only=True):
    """Everything a run found out. It is good when `problems` is empty."""

    problems: list[str]
    edges: list[EdgeReport]
    stages: list[StageReport]
    processes: list[ProcessRow]
    wall_s: float
    streamed: bool = True
    """Whether every connector came up, so that there was traffic to lose."""
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        return not self.problems


class Observer(Protocol):
    """Who watches a run."""

    def progress(self, edges: list[EdgeReport]) -> None:
        """Called about four times a second while chunks move."""

    def stage_line(self, stage_id: int, line: str) -> None:
        """One line of a stage's stderr."""


class _RunFailed(Exception):
    """The run cannot go on; the message says why."""


class _Stage:
    """A stage process and what it has said so far."""

    def __init__(self, plan: StagePlan) -> None:
        self.plan = plan
        self.stage_id = plan.stage_id
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.events: set[str] = set()
        self.endpoint: dict[str, Any] | None = None
        self.failure: str | None = None
        self.told = False
        self.gone = False
        self.sent: dict[str, SendReport] = {}
        self.received: dict[str, ReceiveReport] = {}
        self.left_over: list[str] = []
        self.report = StageReport(stage_id=plan.stage_id, pid=0)
        self._partial: dict[str, bytes] = {"stdout": b"", "stderr": b""}

    def start(self) -> None:
        """Start the process; it waits for its plan."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mori_mp.pipeline.stage", str(self.stage_id)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.report.pid = self.process.pid

    def write(self, line: bytes) -> None:
        """Send a line; a stage that is gone is noticed when its stdout ends."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            logger.debug("stage %d took no more commands", self.stage_id)

    def lines(self, stream: str, data: bytes) -> list[bytes]:
        """Complete lines that `data` brings, or at its end (b"") what was left without a newline."""
        *complete, rest = (self._partial[stream] + data).split(b"\n")
        if not data and rest:
            complete, rest = [rest], b""
        self._partial[stream] = rest
        return complete

    def take(self, message: dict[str, Any]) -> None:
        """Apply one message of the control pipe."""
        event = message["event"]
        self.events.add(event)
        if event == "ready":
            self.endpoint = message["endpoint"]
        elif event == "failed":
            self.failure = message["error"]
            self.told = message["told"]
        if event in ("progress", "result"):
            for sent in msgspec.convert(message["sent"], list[SendReport]):
                self.sent[sent.edge] = sent
            for received in msgspec.convert(message["received"], list[ReceiveReport]):
                self.received[received.edge] = received
        if event == "result":
            self.left_over = [] if message["aborted"] else message["left_over"]
            self.report.health = message["health"]
            self.report.close_s = message["close_s"]
            self.report.cpu_s = message["cpu_s"]

    def story(self) -> str:
        """Why it ended and its last words, for a message."""
        status = self.process.returncode
        how = f"exit status {status}" if status is None or status >= 0 else f"signal {-status}"
        why = f": {self.failure}" if self.failure else f" ({how})"
        words = "" if self.told else "".join(f"\n    {line}" for line in self.tail)
        return f"stage {self.stage_id} failed{why}" + (f"; its last output:{words}" if words else "")


class Runner:
    """Runs one set of plans, once."""

    def __init__(self, plans: list[StagePlan], *, timeout_s: float, observer: Observer) -> None:
        """timeout_s: for all traffic, once every connector is up."""
        self._stages = [_Stage(plan) for plan in plans]
        self._timeout_s = timeout_s
        self._observer = observer
        self._watch = ProcessWatch()
        self._rows: list[ProcessRow] = []
        self._streaming = False
        self._ending = False
        self._selector = selectors.DefaultSelector()
        self._started: list[_Stage] = []

    def run(self) -> RunOutcome:
        """Run to the end, whatever it is; does not raise for anything that goes wrong in a stage."""
        began = time.monotonic()
        problems: list[str] = []
        interrupted = False
        try:
            self._carry_out()
        except _RunFailed as failure:
            problems.append(str(failure))
        except KeyboardInterrupt:
            interrupted = True
            problems.append("interrupted")
        finally:
            self._tear_down()
        edges = self._edges()
        for edge in edges:
            problems += edge.faults()
        problems += self._left_over()
        self._selector.close()
        return RunOutcome(
            problems=problems,
            edges=edges,
            stages=[stage.report for stage in self._stages],
            processes=self._rows,
            wall_s=round(time.monotonic() - began, 3),
            streamed=self._streaming,
            interrupted=interrupted,
        )

    # ------------------------------------------------------------------------- the run
    def _carry_out(self) -> None:
        for stage in self._stages:
            stage.start()
            self._started.append(stage)
            for name, pipe in (("stdout", stage.process.stdout), ("stderr", stage.process.stderr)):
                assert pipe is not None
                self._selector.register(pipe, selectors.EVENT_READ, (stage, name))
            stage.write(msgspec.json.encode(stage.plan))
        if not self._until(lambda: self._all_said("ready"), time.monotonic() + _START_S):
            raise _RunFailed(f"{self._silent('ready')} did not bring a connector up in {_START_S:g} s")
        self._streaming = True
        deadline = time.monotonic() + self._timeout_s
        self._tell(
            {
                "op": "go",
                "start_ns": time.monotonic_ns() + _LEAD_NS,
                "deadline_ns": int(deadline * 1e9),
                "endpoints": {str(stage.stage_id): stage.endpoint for stage in self._stages},
            }
        )
        if not self._until(lambda: self._all_said("done"), deadline + _DEADLINE_GRACE_S):
            raise _RunFailed(f"{self._silent('done')} did not stop at --timeout and had to be ended")
        if time.monotonic() >= deadline:
            raise _RunFailed(f"not finished within --timeout {self._timeout_s:g} s")
        self._look_at_processes()
        self._ending = True
        self._tell({"op": "stop"})
        if not self._until(lambda: all(stage.gone for stage in self._stages), time.monotonic() + _END_S):
            raise _RunFailed(f"{self._silent('result')} did not close its connector and exit in {_END_S:g} s")

    def _tell(self, command: dict[str, Any]) -> None:
        line = msgspec.json.encode(command)
        for stage in self._stages:
            stage.write(line)

    def _all_said(self, event: str) -> bool:
        return all(event in stage.events for stage in self._stages)

    def _silent(self, event: str) -> str:
        return ", ".join(f"stage {s.stage_id}" for s in self._stages if event not in s.events) or "a stage"

    def _until(self, reached: Callable[[], bool], deadline: float, *, tolerant: bool = False) -> bool:
        """Serve the pipes until `reached()`; False at the deadline. Raises _RunFailed when a stage fails.

        tolerant: while tearing down, failing stages are no news.
        """
        next_tick = time.monotonic() + _TICK_S
        while not reached():
            now = time.monotonic()
            if now >= deadline:
                return False
            if now >= next_tick:
                next_tick = now + _TICK_S
                if not tolerant:
                    self._look_at_processes()
                    self._observer.progress(self._edges())
            for key, _ in self._selector.select(max(0.0, min(deadline, next_tick) - now)):
                self._serve(key)
            if not tolerant:
                self._raise_for_failures()
        return True

    def _serve(self, key: selectors.SelectorKey) -> None:
        """Read what a pipe has."""
        stage, name = key.data
        data = os.read(key.fd, 1 << 20)
        for line in stage.lines(name, data):
            if name == "stdout":
                stage.take(msgspec.json.decode(line))
            else:
                text = line.decode(errors="replace").rstrip()
                stage.tail.append(text)
                self._observer.stage_line(stage.stage_id, text)
        if data:
            return
        self._selector.unregister(key.fileobj)
        if name == "stdout":
            stage.gone = True

    def _raise_for_failures(self) -> None:
        failed = [s for s in self._stages if s.failure is not None or (s.gone and "result" not in s.events)]
        if not failed:
            return
        # The first one to fail is the cause; give its stderr a moment to arrive whole.
        stage = failed[0]
        self._until(lambda: stage.gone, time.monotonic() + _EXIT_S, tolerant=True)
        if stage.gone:
            _wait(stage.process, _EXIT_S)
            self._drain_stderr(stage)
        raise _RunFailed(stage.story())

    def _drain_stderr(self, stage: _Stage) -> None:
        until = time.monotonic() + 0.2
        pipe = stage.process.stderr
        while time.monotonic() < until and pipe in {k.fileobj for k in self._selector.get_map().values()}:
            ready = [key for key, _ in self._selector.select(0.02) if key.fileobj is pipe]
            if not ready:
                return
            self._serve(ready[0])

    def _look_at_processes(self) -> None:
        rows = self._watch.look({s.stage_id: s.process.pid for s in self._started if not s.gone})
        # The rows kept are those of the run itself: once stages close, processes come apart one by one.
        if not self._ending:
            self._rows = rows

    # -------------------------------------------------------------------------- the end
    def _tear_down(self) -> None:
        """End every stage that still runs, first asking, then not."""
        running = [stage for stage in self._started if not stage.gone]
        try:
            for stage in running:
                if stage.failure is None:
                    stage.process.terminate()
            self._until(lambda: all(s.gone for s in running), time.monotonic() + _TERM_S, tolerant=True)
        except KeyboardInterrupt:
            logger.warning("interrupted again: killing the stages")
        for stage in self._started:
            # Once its control pipe has ended a stage has only its exit left to do.
            if not stage.gone or not _wait(stage.process, _KILL_S):
                _kill_group(stage.process)
                _wait(stage.process, _KILL_S)
            stage.report.exit_status = stage.process.returncode
            for pipe in (stage.process.stdin, stage.process.stdout, stage.process.stderr):
                if pipe is not None:
                    _close(pipe)

    def _left_over(self) -> list[str]:
        found = [f"left over: stage {s.stage_id}: {text}" for s in self._stages for text in s.left_over]
        survivors = self._watch.survivors(_SURVIVE_S)
        found += [f"left over: {text}" for text in survivors]
        if survivors:
            self._watch.kill_survivors()
        found += [f"left over: {path}" for stage in self._started for path in _runtime_files(stage)]
        return found

    def _edges(self) -> list[EdgeReport]:
        """Every edge with what its two ends last said."""
        sent: dict[str, SendReport] = {}
        for stage in self._stages:
            sent.update(stage.sent)
        reports = []
        for stage in self._stages:
            for edge in stage.plan.inputs:
                expected = stage.plan.traffic.total_chunks(edge) if self._streaming else 0
                silent = ReceiveReport(edge=edge.label, expected=expected)
                reports.append(
                    join_edge(
                        sent.get(edge.label, SendReport(edge=edge.label)),
                        stage.received.get(edge.label, silent),
                    )
                )
        return reports


def _runtime_files(stage: _Stage) -> list[Path]:
    """Runtime directories of the stage's connector, which are named after its pid."""
    base = base_directory(str(stage.plan.connector_config.get("runtime_dir") or ""))
    return sorted(base.glob(f"{stage.process.pid}-*"))


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        return
