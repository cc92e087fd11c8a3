"""Logging across the process border: what a child writes comes out of the stage's own logging."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mori_mp.workers import childlog
from mori_mp.workers.childlog import Relay

CHILD = """
import logging, os, sys
from mori_mp.workers import childlog
childlog.install("worker stage=1 index=0", logging.INFO)
log = logging.getLogger("mori_mp.workers.somewhere")
"""


def run(code: str) -> bytes:
    """What a child with our logging writes on both of its outputs."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD + code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True
    )
    return child.stdout


@pytest.fixture
def relay(caplog: pytest.LogCaptureFixture) -> Relay:
    caplog.set_level(logging.DEBUG)
    return Relay("control stage=1")


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int, str]]:
    return caplog.record_tuples


# -- both ends together --------------------------------------------------------------------------------


def test_records_keep_logger_level_and_text(relay: Relay, caplog: pytest.LogCaptureFixture) -> None:
    relay.feed(run("log.info('%d peers', 3); log.error('bad\\nthing ä'); log.debug('not asked for')"))
    assert said(caplog) == [
        ("mori_mp.workers.somewhere", logging.INFO, "[worker stage=1 index=0] 3 peers"),
        ("mori_mp.workers.somewhere", logging.ERROR, "[worker stage=1 index=0] bad\nthing ä"),
    ]
    assert relay.last_lines == ["3 peers", "bad\nthing ä"]


def test_a_traceback_stays_one_record(relay: Relay, caplog: pytest.LogCaptureFixture) -> None:
    relay.feed(run("try: 1 / 0\nexcept ZeroDivisionError: log.exception('oh')"))
    ((_, level, text),) = said(caplog)
    assert level == logging.ERROR
    assert text.startswith("[worker stage=1 index=0] oh\nTraceback")
    assert text.endswith("ZeroDivisionError: division by zero")


def test_output_that_is_not_ours_is_passed_on(relay: Relay, caplog: pytest.LogCaptureFixture) -> None:
    relay.feed(run("print('[mori] version 1', flush=True); log.info('up')"))
    assert said(caplog) == [
        ("mori_mp.child", logging.WARNING, "[control stage=1] [mori] version 1"),
        ("mori_mp.workers.somewhere", logging.INFO, "[worker stage=1 index=0] up"),
    ]


def test_a_record_that_does_not_format_ends_nothing(relay: Relay, caplog: pytest.LogCaptureFixture) -> None:
    relay.feed(run("log.info('%d peers', 'three'); log.info('going on')"))
    assert [text for _, _, text in said(caplog)][1:] == ["[worker stage=1 index=0] going on"]
    assert "'%d peers' does not format" in caplog.text


# -- the child's end -----------------------------------------------------------------------------------


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The read end of a pipe that takes the place of standard error, as a child has it."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    monkeypatch.setattr(childlog, "_STDERR", write_fd)
    yield read_fd
    os.close(read_fd)
    os.close(write_fd)


@pytest.fixture
def child_logger(pipe: int) -> logging.Logger:
    logger = logging.Logger("mori_mp.somewhere")
    logger.addHandler(childlog._JsonLines("worker"))
    return logger


def test_a_stage_that_does_not_read_holds_nobody_up(pipe: int, child_logger: logging.Logger) -> None:
    """It may be stopped; its payloads are still to be served."""
    for number in range(2000):
        child_logger.info("line %d of %s", number, "x" * 200)
    read = os.read(pipe, 1 << 20)
    lines = read.split(b"\n")
    whole = [json.loads(line)["text"] for line in lines[:-1]]
    assert whole == [f"line {n} of {'x' * 200}" for n in range(len(whole))]
    assert 0 < len(whole) < 2000
    child_logger.info("and on")
    *_, loss, last = os.read(pipe, 1 << 20).strip(b"\n").split(b"\n")
    lost = 2000 - len(whole) - bool(lines[-1])
    assert json.loads(loss)["text"] == f"{lost} lines of log before this one were lost"
    assert json.loads(last)["text"] == "and on"


# -- the stage's end -----------------------------------------------------------------------------------


def line(**record: object) -> bytes:
    return json.dumps(record).encode()


RECORD = {"level": 30, "logger": "mori_mp.x", "child": "worker", "text": "hello"}


def test_output_comes_in_any_pieces(relay: Relay, caplog: pytest.LogCaptureFixture) -> None:
    data = line(**RECORD) + b"\n" + line(**RECORD) + b"\n"
    for at in range(0, len(data), 7):
        relay.feed(data[at : at + 7])
    assert said(caplog) == [("mori_mp.x", 30, "[worker] hello")] * 2


def test_the_last_line_needs_no_newline(relay: Relay, caplog: pytest.LogCaptureFixture) -> None:
    relay.feed(b"Segmentation fault")
    assert said(caplog) == []
    relay.feed(b"")
    relay.feed(b"")
    assert said(caplog) == [("mori_mp.child", logging.WARNING, "[control stage=1] Segmentation fault")]


def test_a_line_without_end_is_cut(relay: Relay, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(300):
        relay.feed(b"x" * 1000)
    assert 0 < len(caplog.records) <= 5
    assert sum(len(text) for _, _, text in said(caplog)) > 200_000


@pytest.mark.parametrize(
    "junk",
    [
        b"5",
        b"null",
        b'"text"',
        b"[1, 2]",
        b"{}",
        b'{"level": "high", "logger": "x", "text": "t", "child": "c"}',
        b'{"level": Infinity, "logger": "x", "text": "t", "child": "c"}',
        b'{"level": NaN, "logger": "x", "text": "t", "child": "c"}',
        b'{"level": 30, "logger": "x", "text": "t"}',
        b"{" * 50_000,
        b"[" * 50_000,
        b"\xff\xfe\x00",
        b"%s %d %(nothing)s",
    ],
    ids=lambda junk: repr(junk[:24]),
)
def test_no_line_can_stop_the_relay(relay: Relay, junk: bytes, caplog: pytest.LogCaptureFixture) -> None:
    relay.feed(junk + b"\n" + line(**RECORD) + b"\n")
    assert [level for _, level, _ in said(caplog)] == [logging.WARNING, 30]
    assert said(caplog)[0][2] == f"[control stage=1] {junk.decode('utf-8', 'replace')}"
    assert said(caplog)[1] == ("mori_mp.x", 30, "[worker] hello")


def test_the_last_lines_are_kept_for_error_messages(relay: Relay) -> None:
    for number in range(50):
        relay.feed(b"line %d\n" % number)
    relay.feed(b"\n   \n")
    assert relay.last_lines == [f"line {n}" for n in range(30, 50)]
