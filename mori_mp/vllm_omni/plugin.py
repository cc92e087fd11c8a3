"""The vLLM plugin: makes vLLM-Omni create our connector.

The entry point `mori_mp` of the group `vllm.general_plugins` names register(). vLLM calls it in each of its
processes, before the scheduler or a worker makes a connector. It sees to two names of a deploy YAML:

    MoriTransferEngineConnector   ours instead of the in-tree class; MORI_MP_TAKEOVER=0 leaves the in-tree one
    MoriMPConnector               ours, under a name that nobody else has

The host computes ports and roles only for connectors whose names are in a frozenset of its own, which other
modules import by value; MoriMPConnector is added wherever that set has arrived, and modules that come later
import the extended one.

Importing the host's factory imports vLLM-Omni, which patches vLLM. That is not for a plugin to cause: in a
process that has not done so, register() waits for the import (an entry in `sys.meta_path`) and acts right
after it. Our connector, and torch and zmq with it, is imported when the first one is made.

On request (MORI_MP_QWEN2_5_OMNI=1) register() also sees to streaming for Qwen2.5-Omni (`qwen2_5_pipeline`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from mori_mp.vllm_omni import qwen2_5_pipeline

logger = logging.getLogger(__name__)

TAKEOVER_ENV = "MORI_MP_TAKEOVER"
IN_TREE_NAME = "MoriTransferEngineConnector"
OWN_NAME = "MoriMPConnector"

_HOST = "vllm_omni"
_FACTORY = "vllm_omni.distributed.omni_connectors.factory"
_BASE = "vllm_omni.distributed.omni_connectors.connectors.base"
_NAME_SET_HOME = "vllm_omni.distributed.omni_connectors.utils.config"
_NAME_SET = "TRANSFER_ENGINE_CONNECTOR_NAMES"


def register() -> None:
    """Have vLLM-Omni make our connector. Idempotent; does nothing where vLLM-Omni is not installed.

    Never raises, since that would end the vLLM process: what goes wrong is logged as an error.
    """
    factory = sys.modules.get(_FACTORY)
    if hasattr(factory, "OmniConnectorFactory"):
        _install()
    elif not _installed(_HOST):
        return
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(_FACTORY, _install))
    qwen2_5_pipeline.register()


def create(config: dict[str, Any]) -> Any:
    """Make a connector for the host's factory, which passes the resolved `extra` of the deploy YAML.

    The host makes connectors for its scheduler and for its model runner alike, from one specification,
    though one of them never transfers anything: so ours start what costs something when they are used.
    """
    from mori_mp.connector import MoriTransferEngineConnector

    base = getattr(sys.modules.get(_BASE), "OmniConnectorBase", None)
    if base is not None:
        base.register(MoriTransferEngineConnector)  # for isinstance(); idempotent
    return MoriTransferEngineConnector({"start": "on_use", **config})


# --------------------------------------------------------------------------- what is changed in the host
def _install() -> None:
    _log_through_vllm()
    try:
        registry = sys.modules[_FACTORY].OmniConnectorFactory._registry
        taken = _take_over(registry)
        _register_own_name(registry)
    except Exception:
        logger.exception(
            "mori-mp cannot register with this version of vllm-omni: its connectors stay as they are. Use a "
            "version that mori-mp supports, or uninstall mori-mp."
        )
        return
    if taken:
        logger.info(
            "mori-mp provides %s in place of vllm-omni's own class (%s=0 undoes that)",
            IN_TREE_NAME,
            TAKEOVER_ENV,
        )


def _take_over(registry: dict[str, Callable[[dict[str, Any]], Any]]) -> bool:
    """Replace the in-tree class unless the environment says no; tell whether anything changed."""
    if os.environ.get(TAKEOVER_ENV, "1").strip().lower() in ("0", "false", "no", "off"):
        return False
    # The registering method of the factory refuses a name that it has.
    changed = registry.get(IN_TREE_NAME) is not create
    registry[IN_TREE_NAME] = create
    return changed


def _register_own_name(registry: dict[str, Callable[[dict[str, Any]], Any]]) -> None:
    registry[OWN_NAME] = create
    names = frozenset(getattr(sys.modules[_NAME_SET_HOME], _NAME_SET)) | {OWN_NAME}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _HOST and _NAME_SET in getattr(module, "__dict__", {}):
            setattr(module, _NAME_SET, names)


def _log_through_vllm() -> None:
    """Let our log lines appear among vLLM's, unless somebody has seen to them already.

    vLLM sets up its own loggers only: without this, ours would show warnings alone, and those bare.
    """
    ours = logging.getLogger("mori_mp")
    if ours.hasHandlers():
        return
    ours.addHandler(_ToVllm())
    ours.propagate = False  # vLLM's logger decides that
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.getLogger("vllm").level or logging.INFO)


class _ToVllm(logging.Handler):
    """Hands records to whichever handlers vLLM's logger has by then: it may be set up after us, or anew."""

    def emit(self, record: logging.LogRecord) -> None:
        """Have vLLM's logger handle it."""
        logging.getLogger("vllm").handle(record)


# --------------------------------------------------------------------------------------- waiting for it
def _installed(package: str) -> bool:
    """Tell whether a package is there, not merely a folder of its name on the path."""
    if package in sys.modules:
        return True
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


class _AfterImport:
    """A finder that runs an action once, right after one module has been executed."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as the path finder does, with its loader calling back."""
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._action()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
