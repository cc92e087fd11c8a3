"""Connectors for tests of the pipeline job: one over files, and some that misbehave.

They are given to stages by class path (`pipeline_doubles:Name`), the same way any other class is compared.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch


class DirectoryConnector:
    """Payloads as files in `config["directory"]`: slow, but no more than the API."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self._directory = Path(config["directory"])
        self._held = 0

    def _path(self, source: str, target: str, key: str) -> Path:
        return self._directory / f"{key}@{source}_{target}"

    def put(self, source: str, target: str, key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        path = self._path(source, target, key)
        raw = pickle.dumps(data)
        unfinished = path.with_suffix(f".{threading.get_ident()}")
        unfinished.write_bytes(raw)
        unfinished.rename(path)
        return True, len(raw), {}

    def get(
        self, source: str, target: str, key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        path = self._path(source, target, key)
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        path.unlink()
        return pickle.loads(raw), len(raw)

    def get_with_deadline(
        self,
        source: str,
        target: str,
        key: str,
        metadata: dict[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        while (found := self.get(source, target, key, metadata)) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return found

    def get_wakeup_generation(self) -> int:
        return 0

    def wait_for_change(self, generation: int, timeout: float) -> None:
        time.sleep(min(timeout, 0.001))

    def health(self) -> dict[str, Any]:
        return {"status": "healthy", "pool": {"used_bytes": self._held}, "deliveries": {"file": 1}}

    def close(self) -> None:
        return


def _is(key: str, request: int, chunk: int) -> bool:
    return key.startswith(f"req-{request:04d}_") and key.endswith(f"_{chunk}")


class FlippingConnector(DirectoryConnector):
    """Flips one bit of chunk 2 of request 1 on the edge 0 -> 1."""

    def get(
        self, source: str, target: str, key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        found = super().get(source, target, key, metadata)
        if found is not None and source == "0" and _is(key, 1, 2):
            found[0]["hidden_states"]["output"].view(torch.uint8)[0, 7] ^= 1
        return found


class DroppingConnector(DirectoryConnector):
    """Accepts chunk 3 of request 0 on the edge 0 -> 1 and loses it."""

    def put(self, source: str, target: str, key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        if source == "0" and _is(key, 0, 3):
            return True, 1, {}
        return super().put(source, target, key, data)


class RepeatingConnector(DirectoryConnector):
    """Delivers chunk 1 of request 0 once more in place of chunk 2."""

    _kept: Any = None

    def put(self, source: str, target: str, key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        if _is(key, 0, 1):
            self._kept = copy.deepcopy(data)
        return super().put(source, target, key, self._kept if _is(key, 0, 2) else data)


class RefusingConnector(DirectoryConnector):
    """Refuses each put() twice, once with False and once with an exception."""

    _tries: dict[str, int]

    def put(self, source: str, target: str, key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        self._tries = getattr(self, "_tries", {})
        self._tries[key] = self._tries.get(key, 0) + 1
        if self._tries[key] == 1:
            return False, 0, None
        if self._tries[key] == 2:
            raise MemoryError("no room just now")
        return super().put(source, target, key, data)


class CrashingConnector(DirectoryConnector):
    """Kills stage 1 with SIGKILL when it receives chunk 2."""

    def get(
        self, source: str, target: str, key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        if target == "1" and key.endswith("_2"):
            print("about to go down in flames", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().get(source, target, key, metadata)


class BrokenConnector(DirectoryConnector):
    """Cannot be built in stage 2."""

    def __init__(self, config: dict[str, Any]) -> None:
        if config["stage_id"] == 2:
            raise RuntimeError("port 4242 is taken")
        super().__init__(config)


class PrintingConnector(DirectoryConnector):
    """Writes to stdout, as Mori does, and starts a child that does so too."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        print('{"event": "done"}', flush=True)
        subprocess.run(["echo", "not a message"], check=True)


class LeavingConnector(DirectoryConnector):
    """Leaves a child process and pool bytes behind."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._held = 4096 if config["stage_id"] == 0 else 0
        if config["stage_id"] == 1:
            self.child = subprocess.Popen(["sleep", "60"], start_new_session=True)


class StuckConnector(DirectoryConnector):
    """close() never returns."""

    def close(self) -> None:
        while True:
            time.sleep(1)
