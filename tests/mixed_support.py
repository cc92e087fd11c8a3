"""The test's side of `mixed_stage`: one class for a stage process, with either connector in it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import mixed_stage
from connector_support import DEFAULTS, MIB

EDGE = {"from_stage": "0", "to_stage": "1"}
ANSWER_SECONDS = 60


class Stage:
    """A stage in a process of its own, with any number of connectors. Needs a running omni_support.Host."""

    def __init__(self, runtime: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=mixed_stage.serve, args=(theirs, str(runtime)))
        self._process.start()
        theirs.close()

    def tell(self, op: str, **arguments: Any) -> None:
        """Send a command."""
        self._pipe.send({"op": op, **arguments})

    def answer(self) -> Any:
        """Wait for an answer; what the command raised fails the test."""
        assert self._pipe.poll(ANSWER_SECONDS), "the stage does not answer"
        kind, value = self._pipe.recv()
        assert kind == "answer", value
        return value

    def ask(self, op: str, **arguments: Any) -> Any:
        """Send a command and return its answer."""
        self.tell(op, **arguments)
        return self.answer()

    def make(self, kind: str, on: str, **config: Any) -> int:
        """Make a connector; returns its port."""
        made = self.ask("make", kind=kind, on=on, config={**_CONFIGS[kind], **config})
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
        """SIGKILL the process."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """End the process, if it still is there."""
        if self._pipe.closed:
            return
        self._pipe.close()
        self._process.join(20)
        ended = not self._process.is_alive()
        if not ended:
            self._process.kill()
            self._process.join()
        self._process.close()
        assert ended, "the stage did not end by itself"


_CONFIGS = {
    "ours": {**DEFAULTS, "memory_pool_size": 32 * MIB, "park_seconds": 0.2},
    "in-tree": {"host": "127.0.0.1", "memory_pool_size": 32 * MIB, "backend_type": "rdma"},
}
