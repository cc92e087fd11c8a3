"""Which transfer engine a connector runs: `backend_type`, and what `auto` makes of it.

Only `auto` chooses, and says in the log and in health() what and why. Any other value is taken at its word:
what is missing for it is an error that says how to get it.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from mori_mp.config import ConnectorConfig
from mori_mp.shared.errors import EngineUnavailable
from mori_mp.workers import engines

logger = logging.getLogger(__name__)

_GET_MORI = "install it with `pip install 'mori-mp[mori]'` (package amd-mori; CPython 3.10 or 3.12, ROCm)"


class Choice(NamedTuple):
    """The engine's name, and why it was chosen."""

    engine: str
    reason: str


def choose(config: ConnectorConfig) -> Choice:
    """Settle the engine. Raises EngineUnavailable."""
    if config.backend_type != "auto":
        _require(config.backend_type)
        return Choice(config.backend_type, "configured")
    wanted = ("rdma",) if config.memory_pool_device == "cpu" else ("xgmi", "rdma", "cuda_ipc")
    passed = []
    for engine in wanted:
        try:
            _require(engine)
        except EngineUnavailable as exc:
            passed.append(f"{engine}: {exc}")
            continue
        return Choice(engine, "auto: first of " + ", ".join(wanted) + " that this host has")
    if config.memory_pool_device == "cpu":
        choice = Choice("shm", "auto: host memory pool and no usable RDMA")
        logger.info("backend_type auto: shm (%s)", "; ".join(passed))
        return choice
    raise EngineUnavailable(
        f"backend_type auto finds no engine for memory_pool_device={config.memory_pool_device!r}: "
        + "; ".join(passed)
    )


def _require(engine: str) -> None:
    """Raise EngineUnavailable unless this host and this version can run an engine."""
    if engine in ("rdma", "xgmi", "fabric") and find_spec("mori") is None:
        raise EngineUnavailable(f"backend_type={engine} needs Mori, which is not installed; {_GET_MORI}")
    if engine == "rdma" and not _rdma_devices():
        raise EngineUnavailable(
            "backend_type=rdma needs an RDMA device, and /sys/class/infiniband has none; load the NIC's "
            "driver and, in a container, pass /dev/infiniband through"
        )
    if engine not in engines.available():
        raise EngineUnavailable(
            f"backend_type={engine}: this version of mori-mp has no such engine; it has "
            f"{', '.join(engines.available())}"
        )


def _rdma_devices() -> list[str]:
    try:
        return sorted(entry.name for entry in Path("/sys/class/infiniband").iterdir())
    except OSError:
        return []
