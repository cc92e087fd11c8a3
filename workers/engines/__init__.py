"""Transfer engines: one module each, imported only in the process that runs it.

`load()` makes a worker's engine over a pool that the worker borrows. `receive()` makes what a stage needs for
peers to write into its pool: descriptors, and what must stay alive. Choosing among backends (`backend_type:
auto`) is the connector's business, not the registry's.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from mori_mp.shared.errors import EngineUnavailable
from mori_mp.shared.pool import Pool
from mori_mp.workers.engines.base import Engine, EngineFactory, LocalMemory, Passive

_MODULES = {
    "cuda_ipc": "mori_mp.workers.engines.cuda_ipc",
    "fabric": "mori_mp.workers.engines.mori",
    "rdma": "mori_mp.workers.engines.mori",
    "shm": "mori_mp.workers.engines.shm",
    "xgmi": "mori_mp.workers.engines.mori",
}


ONE_HOST = frozenset({"cuda_ipc", "xgmi"})
"""Engines over GPU pools that reach their own host only, where receivers can read a sender's pool."""


def load(name: str, memory: Pool | LocalMemory, options: dict[str, Any]) -> Engine:
    """Make an engine over memory that this process has mapped. Raises EngineUnavailable or ConfigError."""
    factory = cast(EngineFactory, _module(name).make)
    return factory(name, LocalMemory.of(memory), options)


def check(name: str, options: dict[str, Any]) -> int:
    """Check what load() needs, as far as that goes without a GPU context; returns the engine's depth.

    Raises EngineUnavailable or ConfigError.
    """
    return int(_module(name).check(name, options))


def receive(name: str, memory: Pool | LocalMemory, options: dict[str, Any]) -> Passive:
    """Make a pool reachable for the writes of an engine's peers. Raises EngineUnavailable or ConfigError."""
    return cast(Passive, _module(name).receive(name, memory, options))


def _module(name: str) -> Any:
    try:
        return import_module(_MODULES[name])
    except KeyError:
        raise EngineUnavailable(
            f"this version has no engine {name!r}; it has: {', '.join(sorted(_MODULES))}"
        ) from None
