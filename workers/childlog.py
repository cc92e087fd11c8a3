"""Logging across the process border: children write JSON lines, the stage logs them as its own.

A child's standard output and error are one pipe to the stage. Lines of our own logging are JSON objects;
anything else (Mori logs to stdout, an interpreter prints a traceback) is passed on as it is.
"""

from __future__ import annotations

import json
import logging
import os

_MAX_LINE = 64 << 10
_STDERR = 2


class _JsonLines(logging.Handler):
    """Writes one record a line, in one write call, so that lines of several processes do not mix.

    The pipe to the stage does not block: one that does not read loses lines, and no transfer waits for it.
    """

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label = label
        self._lost = 0
        self._torn = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception as exc:  # a mistake in a log call is no reason to end the process
            text = f"log message {record.msg!r} does not format: {exc}"
        try:
            loss = f"{self._lost} lines of log before this one were lost"
            if self._lost and self._write(logging.WARNING, __name__, loss):
                self._lost = 0
            if self._lost or not self._write(record.levelno, record.name, text):
                self._lost += 1
        except OSError:
            self.handleError(record)

    def _write(self, level: int, name: str, text: str) -> bool:
        line = json.dumps({"level": level, "logger": name, "child": self._label, "text": text})
        data = f"{chr(10) if self._torn else ''}{line}\n".encode()
        try:
            self._torn = os.write(_STDERR, data) < len(data)
        except BlockingIOError:
            return False
        return True


def install(label: str, level: int) -> None:
    """Set up logging in a child process."""
    logging.raiseExceptions = False
    root = logging.getLogger()
    root.handlers[:] = [_JsonLines(label)]
    root.setLevel(level)


class Relay:
    """Turns a child's output, as it comes, into log records of this process."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._rest = b""
        self.last_lines: list[str] = []

    def feed(self, data: bytes) -> None:
        """Take a piece of output; b"" ends it."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines, self._rest = [self._rest], b""
        if len(self._rest) > _MAX_LINE:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._log(line.decode("utf-8", "replace"))

    def _log(self, line: str) -> None:
        if not line.strip():
            return
        try:
            record = json.loads(line)
            name, level, text = str(record["logger"]), int(record["level"]), str(record["text"])
            child = str(record["child"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            name, level, text, child = "mori_mp.child", logging.WARNING, line, self._label
        self.last_lines = [*self.last_lines[-19:], text]
        logging.getLogger(name).log(level, "[%s] %s", child, text)
