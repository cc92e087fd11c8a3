"""Transfer engines: one module each, imported only in the worker that runs it.

`load()` makes a worker's engine, `describe()` makes the descriptors of a stage's own pool. Choosing among
backends (`backend_type: auto`) is the connector's business, not the registry's.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from mori_mp.shared.errors import EngineUnavailable
from mori_mp.shared.pool import Pool
from mori_mp.workers.engines.base import Engine, EngineFactory

_MODULES = {"shm": ("mori_mp.workers.engines.shm", "ShmEngine")}


def available() -> list[str]:
    """List the engines of this version."""
    return sorted(_MODULES)


def load(name: str, pool: Pool, options: dict[str, Any]) -> Engine:
    """Make an engine over a pool that this process has mapped. Raises EngineUnavailable."""
    module, attribute = _find(name)
    return cast(EngineFactory, getattr(import_module(module), attribute))(pool, options)


def describe(name: str, pool: Pool) -> tuple[bytes, bytes]:
    """Return the packed (engine descriptor, memory descriptor) of a pool under an engine."""
    module, _ = _find(name)
    return cast("tuple[bytes, bytes]", import_module(module).describe(pool))


def _find(name: str) -> tuple[str, str]:
    try:
        return _MODULES[name]
    except KeyError:
        raise EngineUnavailable(
            f"this version has no engine {name!r}; it has: {', '.join(available())}"
        ) from None
