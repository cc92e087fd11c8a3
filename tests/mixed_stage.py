"""Stages with our connector or the in-tree one, each a process of its own, driven by the mixed-end tests.

Importing vllm-omni takes seconds, so one process imports it (with the Mori facade on its path) and forks a
stage for every connection to its Unix socket. A stage takes commands and gives answers, JSON lines:

    {"op": "make", "on": name, "kind": "ours" | "in-tree", "config": {...}}   -> {"port": ...}
    {"op": "put", "on": name, "key": ..., "payload": name, "edge": [0, 1]}    -> put()'s result
    {"op": "get", "on": name, "key": ..., "metadata": ..., "edge": [0, 1],
     "like": payload name, "seconds": ...}                                    -> null | what came
    {"op": "forward", "from": name, "to": name, "key": ..., "metadata": ...}  -> put()'s result
    {"op": "cleanup" | "health" | "close", "on": name, ...}

A stage ends with its connection, all stages with the first process's standard input.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any

FACADE = Path(__file__).with_name("mori_facade")


class Stage:
    """The commands of one stage."""

    def __init__(self) -> None:
        self._connectors: dict[str, Any] = {}

    def make(self, command: dict[str, Any]) -> Any:
        if command["kind"] == "ours":
            from mori_mp import MoriTransferEngineConnector
        else:
            from vllm_omni.distributed.omni_connectors.connectors.mori_transfer_engine_connector import (
                MoriTransferEngineConnector,
            )
        connector = MoriTransferEngineConnector(command["config"])
        self._connectors[command["on"]] = connector
        return {"port": connector.zmq_port, "pid": os.getpid()}

    def put(self, command: dict[str, Any]) -> Any:
        from mixed_payloads import PAYLOADS

        start, end = command.get("edge", ("0", "1"))
        if command["payload"] == "empty":
            return self._connectors[command["on"]].put(start, end, command["key"], b"")
        return self._connectors[command["on"]].put(start, end, command["key"], PAYLOADS[command["payload"]]())

    def get(self, command: dict[str, Any]) -> Any:
        start, end = command.get("edge", ("0", "1"))
        connector = self._connectors[command["on"]]
        arguments = (start, end, command["key"], command.get("metadata"))
        began = time.monotonic()
        if "seconds" in command:
            found = connector.get_with_deadline(*arguments, deadline=began + command["seconds"])
        else:
            found = connector.get(*arguments)
        if found is None:
            return None
        payload, size = found
        return {"size": size, **self._describe(payload, command.get("like"))}

    def _describe(self, payload: Any, like: str | None) -> dict[str, Any]:
        import torch
        from mixed_payloads import RAW, digest, raw_bytes, raw_digest

        if not hasattr(payload, "to_bytes"):
            return {"what": digest(payload)}
        told: dict[str, Any] = {"what": raw_digest(payload.to_bytes())}
        model = RAW[like]() if like in RAW else None
        if isinstance(model, torch.Tensor):
            view = payload.as_tensor(model.dtype, tuple(model.shape))
            told["as tensor"] = raw_bytes(view) == raw_bytes(model) and view.dtype == model.dtype
        payload.release()
        return told

    def forward(self, command: dict[str, Any]) -> Any:
        """Hand a raw payload on to the next stage as the buffer that it came in."""
        found = self._connectors[command["from"]].get("0", "1", command["key"], command["metadata"])
        if found is None:
            return None
        return self._connectors[command["to"]].put("1", "2", command["key"], found[0])

    def cleanup(self, command: dict[str, Any]) -> Any:
        return self._connectors[command["on"]].cleanup(command["key"], *command.get("edge", ("0", "1")))

    def health(self, command: dict[str, Any]) -> Any:
        return self._connectors[command["on"]].health()

    def close(self, command: dict[str, Any]) -> Any:
        return self._connectors.pop(command["on"]).close()

    def serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rw") as lines:
            for line in lines:
                command = json.loads(line)
                try:
                    answer = {"answer": getattr(self, command["op"])(command)}
                except Exception as exc:
                    answer = {"raised": f"{type(exc).__name__}: {exc}"}
                lines.write(json.dumps(answer, default=str) + "\n")
                lines.flush()
        for connector in self._connectors.values():
            if type(connector).__module__.startswith("mori_mp"):
                connector.close()  # the in-tree class's may wait for ever


def main() -> None:
    sys.path.insert(0, str(FACADE))
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import mixed_payloads  # noqa: F401
    import torch
    from mori import pinned
    from vllm_omni.distributed.omni_connectors.connectors import mori_transfer_engine_connector

    import mori_mp  # noqa: F401

    assert mori_transfer_engine_connector.IOEngine is not None
    warnings.filterwarnings("ignore", "The given buffer is not writable")  # the in-tree class, of bytes
    torch.set_num_threads(1)
    pinned.install()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # stages are reaped by the kernel
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        print("ready", flush=True)
        while not any(key.fileobj is sys.stdin for key, _ in selector.select()):
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                Stage().serve(connection)
                os._exit(0)
            connection.close()
    os.unlink(sys.argv[1])


if __name__ == "__main__":
    main()
