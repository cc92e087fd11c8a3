"""Stages with our connector or the in-tree one, each a process of its own, driven by the mixed-end tests.

A stage is forked from the process that has imported vLLM-Omni (omni_support.Host). It puts the Mori facade on
its path, then takes commands from its pipe and answers each:

    {"op": "make", "on": name, "kind": "ours" | "in-tree", "config": {...}}   -> {"port": ...}
    {"op": "put", "on": name, "key": ..., "payload": name, "edge": [0, 1]}    -> put()'s result
    {"op": "get", "on": name, "key": ..., "metadata": ..., "edge": [0, 1],
     "like": payload name, "seconds": ...}                                    -> None | what came
    {"op": "forward", "from": name, "to": name, "key": ..., "metadata": ...}  -> put()'s result
    {"op": "cleanup" | "health" | "close", "on": name, ...}

It ends when its pipe does.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mori_mp import MoriTransferEngineConnector

IN_TREE = "vllm_omni.distributed.omni_connectors.connectors.mori_transfer_engine_connector"
FACADE = Path(__file__).with_name("mori_facade")


def _in_tree_class() -> Any:
    """Return vllm-omni's own class, imported anew if that was done before the facade was on the path."""
    module = importlib.import_module(IN_TREE)
    if module.IOEngine is None:
        module = importlib.reload(module)
    return module.MoriTransferEngineConnector


class Stage:
    """The commands of one stage."""

    def __init__(self) -> None:
        self._connectors: dict[str, Any] = {}

    def make(self, command: dict[str, Any]) -> Any:
        made = MoriTransferEngineConnector if command["kind"] == "ours" else _in_tree_class()
        connector = made(command["config"])
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

    def end(self) -> None:
        for connector in self._connectors.values():
            if type(connector).__module__.startswith("mori_mp"):
                connector.close()  # the in-tree class's may wait for ever


def serve(pipe: Connection, runtime: str) -> None:
    """Entry point of a stage process."""
    sys.path.insert(0, str(FACADE))
    os.environ.update(MORI_MP_RUNTIME_DIR=runtime, MORI_MP_PIN="off")
    import torch
    from mori import pinned

    pinned.install()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The given buffer is not writable")  # the in-tree class, of bytes
    stage = Stage()
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            break
        try:
            answer = ("answer", getattr(stage, command["op"])(command))
        except Exception as exc:
            answer = ("raised", f"{type(exc).__name__}: {exc}")
        pipe.send(answer)
    stage.end()
    os._exit(0)  # whatever threads the in-tree class has left
