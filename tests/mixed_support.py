"""The test's side of `mixed_stage`: the process that stages are forked from, and one class for a stage."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from connector_support import DEFAULTS, MIB, eventually, state_of

EDGE = {"from_stage": "0", "to_stage": "1"}


class Host:
    """The process with vllm-omni in it; stages are forked from it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "stages"
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("mixed_stage.py")), str(self._path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MORI_MP_RUNTIME_DIR": str(folder)},
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:  # vllm logs while it is imported
            if line == "ready\n":
                return
        raise AssertionError(f"the stages' host process ended: {self._process.wait()}")

    def stage(self) -> Stage:
        """Fork a stage."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self._path))
        return Stage(connection)

    def close(self) -> None:
        """End the process; its stages end with their connections."""
        self._process.communicate(timeout=20)


class Stage:
    """A stage in a process of its own, with any number of connectors."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rw")
        self.pid = 0

    def tell(self, op: str, **arguments: Any) -> None:
        """Send a command."""
        self._lines.write(json.dumps({"op": op, **arguments}) + "\n")
        self._lines.flush()

    def answer(self) -> Any:
        """Wait for an answer; what the command raised fails the test."""
        line = self._lines.readline()
        assert line, "the stage has ended"
        answer = json.loads(line)
        assert "raised" not in answer, answer["raised"]
        return answer["answer"]

    def ask(self, op: str, **arguments: Any) -> Any:
        """Send a command and return its answer."""
        self.tell(op, **arguments)
        return self.answer()

    def make(self, kind: str, on: str, **config: Any) -> int:
        """Make a connector; returns its port."""
        made = self.ask("make", kind=kind, on=on, config={**_CONFIGS[kind], **config})
        self.pid = made["pid"]
        return int(made["port"] or 0)

    def sender(self, kind: str, port: int, **config: Any) -> int:
        """Make the sender of the edge 0 -> 1."""
        return self.make(kind, "out", role="sender", stage_id=0, zmq_port=port, **EDGE, **config)

    def receiver(self, kind: str, port: int, **config: Any) -> None:
        """Make the receiver of the edge 0 -> 1."""
        upstream = {"sender_host": "127.0.0.1", "sender_zmq_port": port}
        self.make(kind, "in", role="receiver", stage_id=1, **EDGE, **upstream, **config)

    def put(self, key: str, payload: str) -> dict[str, Any]:
        """put() that must succeed; returns the metadata."""
        ok, size, metadata = self.ask("put", on="out", key=key, payload=payload)
        assert ok
        assert metadata["data_size"] == size
        return dict(metadata)

    def get(self, key: str, metadata: Any = None, **arguments: Any) -> Any:
        """get() or, with seconds, get_with_deadline()."""
        return self.ask("get", on="in", key=key, metadata=metadata, **arguments)

    def kill(self) -> None:
        """SIGKILL the process and let go of it."""
        os.kill(self.pid, signal.SIGKILL)
        eventually(lambda: state_of(self.pid) == "", f"stage {self.pid} gone")
        self.close()

    def close(self) -> None:
        """End the process, if it still is there."""
        self._lines.close()
        self._connection.close()
        if self.pid:
            eventually(lambda: state_of(self.pid) == "", f"stage {self.pid} gone")


_CONFIGS = {
    "ours": {**DEFAULTS, "memory_pool_size": 32 * MIB, "park_seconds": 0.2},
    "in-tree": {"host": "127.0.0.1", "memory_pool_size": 32 * MIB, "backend_type": "rdma"},
}
