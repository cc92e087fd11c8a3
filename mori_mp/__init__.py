"""mori-mp: a multi-process stage connector for vLLM-Omni.

Layout:
    mori_mp/            what users import: connector, configuration, payload codec, deploy YAML, CLI
    mori_mp/workers/    what runs in its own process: control process, transfer workers, engines
    mori_mp/shared/     what both sides of a process boundary agree on: messages, wire, pool, topology, errors

Imports point one way: mori_mp -> mori_mp.workers -> mori_mp.shared. The names below are loaded on first
use, because a control process or a shm transfer worker imports this package and must not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mori_mp.config import ConnectorConfig as ConnectorConfig
    from mori_mp.connector import MoriTransferEngineConnector as MoriTransferEngineConnector
    from mori_mp.managed import ManagedBuffer as ManagedBuffer

_HOME = {
    "ConnectorConfig": "mori_mp.config",
    "ManagedBuffer": "mori_mp.managed",
    "MoriTransferEngineConnector": "mori_mp.connector",
}

__all__ = ["ConnectorConfig", "ManagedBuffer", "MoriTransferEngineConnector"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'mori_mp' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
