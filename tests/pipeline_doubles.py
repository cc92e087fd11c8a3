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

from mori_mp import MoriTransferEngineConnector


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
        return {"status": "healthy", "pool": {"used_bytes": self._held}}

    def close(self) -> None:
        return


def _is(key: str, request: int, chunk: int) -> bool:
    return key.startswith(f"req-{request:04d}_") and key.endswith(f"_{chunk}")


class FaultyConnector(DirectoryConnector):
    """Everything that a run survives, on the edge 0 -> 1 of two requests.

    Prints to stdout, as Mori does, and starts a child that does so too. Refuses each put() twice, with False
    and with an exception. Puts chunk 1 of request 0 once more in place of chunk 2. Flips a bit of chunk 2 of
    request 1 on its way to the receiver.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._tries: dict[str, int] = {}
        self._kept: Any = None
        print('{"event": "done"}', flush=True)
        subprocess.run(["echo", "not a message"], check=True)

    def put(self, source: str, target: str, key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        self._tries[key] = self._tries.get(key, 0) + 1
        if self._tries[key] == 1:
            return False, 0, None
        if self._tries[key] == 2:
            raise MemoryError("no room just now")
        if _is(key, 0, 1):
            self._kept = copy.deepcopy(data)
        return super().put(source, target, key, self._kept if _is(key, 0, 2) else data)

    def get(
        self, source: str, target: str, key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        found = super().get(source, target, key, metadata)
        if found is not None and _is(key, 1, 2):
            found[0]["hidden_states"]["output"].view(torch.uint8)[0, 7] ^= 1
        return found


class DroppingConnector(DirectoryConnector):
    """Accepts chunk 3 of request 0 on the edge 0 -> 1 and loses it."""

    def put(self, source: str, target: str, key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        if source == "0" and _is(key, 0, 3):
            return True, 1, {}
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
    """Cannot be built in stage 1."""

    def __init__(self, config: dict[str, Any]) -> None:
        if config["stage_id"] == 1:
            raise RuntimeError("port 4242 is taken")
        super().__init__(config)


class LeavingConnector(DirectoryConnector):
    """Stage 0 leaves pool bytes, a child and a file behind; the other stages never return from close()."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._last = config["stage_id"] > 0
        if not self._last:
            self._held = 4096
            Path(config["runtime_dir"], f"{os.getpid()}-socket").touch()
            self.child = subprocess.Popen(["sleep", "60"], start_new_session=True)

    def close(self) -> None:
        while self._last:
            time.sleep(1)


class FlippingMoriConnector(MoriTransferEngineConnector):
    """The real one, with one bit of chunk 2 of request 1 flipped after its arrival in stage 1."""

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        found = super().get(from_stage, to_stage, get_key, metadata)
        if found is not None and from_stage == "0" and _is(get_key, 1, 2):
            found[0]["embed"]["decode"].view(torch.uint8)[0, 7] ^= 1
        return found
