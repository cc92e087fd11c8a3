"""The control pipe between the runner and a stage process: JSON lines over the stage's stdin and stdout.

    runner -> stage   the StagePlan, then {"op": "go", "start_ns", "deadline_ns"}, then {"op": "stop"}
    stage -> runner   ready, progress (four a second), done, result; failed instead of any of them

A stage keeps both ends for itself: `take_over_stdio` moves them to private descriptors, points stdin at
/dev/null and stdout at stderr. A library that prints (Mori logs to stdout) or a child that reads can then
never touch the protocol. End of file on the stage's side means that the runner is gone.
"""

from __future__ import annotations

import os
import threading
from typing import Any, BinaryIO

import msgspec


class ControlPipe:
    """A stage's end of the pipe. send() may be called from any thread; receive() from one."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self._reader = reader
        self._writer = writer
        self._lock = threading.Lock()

    @classmethod
    def take_over_stdio(cls) -> ControlPipe:
        """Make this process's stdin and stdout the control pipe, and give everyone else harmless ones."""
        reader = os.fdopen(os.dup(0), "rb")
        writer = os.fdopen(os.dup(1), "wb", buffering=0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        return cls(reader, writer)

    def receive_line(self) -> bytes | None:
        """One line, or None at end of file."""
        return self._reader.readline() or None

    def receive(self) -> dict[str, Any] | None:
        """One command, or None at end of file."""
        line = self.receive_line()
        return None if line is None else msgspec.json.decode(line, type=dict[str, Any])

    def send(self, event: str, **fields: Any) -> None:
        """Tell the runner something; a runner that is gone is noticed by receive(), not here."""
        line = memoryview(msgspec.json.encode({"event": event, **fields}) + b"\n")
        with self._lock:
            try:
                while line:
                    line = line[self._writer.write(line) :]
            except BrokenPipeError:
                return
