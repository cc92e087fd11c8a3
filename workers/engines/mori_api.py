"""Loading Mori, and filling its configuration objects from ours.

Mori (package amd-mori) has wheels for CPython 3.10 and 3.12 and needs the ROCm runtime. Its Python layer
imports torch for one annotation and one method that engines do not use, so a process that has not loaded
torch is given an empty stand-in while Mori is imported: a transfer worker stays small and starts at once.

Mori logs to standard output. Its level comes from MORI_IO_LOG_LEVEL; without it, errors only.
"""

from __future__ import annotations

import os
import secrets
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from mori_mp.shared.errors import ConfigError, EngineUnavailable

BACKENDS = ("xgmi", "rdma", "fabric")
DEVICES_ENV = "MORI_RDMA_DEVICES"
LOG_LEVEL_ENV = "MORI_IO_LOG_LEVEL"

_HOW = (
    "install amd-mori into it (pip install amd-mori), or name one in worker_python that has it; its wheels "
    "are for CPython 3.10 and 3.12"
)
_RDMA_KEYS = (
    "qp_per_transfer",
    "post_batch_size",
    "num_worker_threads",
    "enable_transfer_chunking",
    "chunk_bytes",
    "max_chunks_per_transfer",
    "num_nics_per_transfer",
)


def load_api() -> Any:
    """Import mori.io. Raises EngineUnavailable, saying what is missing."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stand_in = None if "torch" in sys.modules else ModuleType("torch")
    if stand_in is not None:
        stand_in.Tensor = object  # type: ignore[attr-defined]
        sys.modules["torch"] = stand_in
    try:
        api = import_module("mori.io")
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in ("mori", "libmori_pybinds"):
            raise EngineUnavailable(f"Mori cannot be imported by {sys.executable}: {exc}") from exc
        raise EngineUnavailable(
            f"Mori is not installed for {sys.executable} (Python {version}); {_HOW}"
        ) from exc
    except (ImportError, OSError, RuntimeError) as exc:
        raise EngineUnavailable(
            f"Mori is installed for {sys.executable} (Python {version}) but does not load: {exc}. It needs "
            f"the ROCm 7 libraries (libamdhip64.so.7): install ROCm or put them on LD_LIBRARY_PATH"
        ) from exc
    finally:
        if stand_in is not None and sys.modules.get("torch") is stand_in:
            del sys.modules["torch"]
    if not os.environ.get(LOG_LEVEL_ENV):
        api.set_log_level("error")
    return api


def new_key() -> str:
    """Make an engine key that no other engine, past or future, has; Mori routes and caches by it."""
    return f"mori-mp-{secrets.token_hex(16)}-pid{os.getpid()}"


def make_io_engine(api: Any, backend: str, options: dict[str, Any]) -> Any:
    """Make an IOEngine with one backend. Raises EngineUnavailable or ConfigError."""
    configuration = backend_config(api, backend, options)
    if backend == "rdma" and options.get("device_name"):
        os.environ[DEVICES_ENV] = str(options["device_name"])
    host = str(options.get("host", ""))
    if backend == "rdma" and not host:
        raise EngineUnavailable("backend_type=rdma needs the address that peers reach this host at; set host")
    try:
        engine = api.IOEngine(new_key(), api.IOEngineConfig(host=host, port=0))
        engine.create_backend(getattr(api.BackendType, backend.upper()), configuration)
    except RuntimeError as exc:
        raise EngineUnavailable(f"Mori cannot start its {backend} backend: {exc}{_advice(backend)}") from exc
    return engine


def backend_config(api: Any, backend: str, options: dict[str, Any]) -> Any:
    """Fill the configuration object of a backend; keys that are not in options keep Mori's default."""
    if backend != "rdma":
        config = api.XgmiBackendConfig() if backend == "xgmi" else api.FabricBackendConfig()
        _fill(config, options, {"xgmi_num_streams": "num_streams", "xgmi_num_events": "num_events"})
        return config
    config = api.RdmaBackendConfig()
    _fill(config, options, {name: name for name in _RDMA_KEYS})
    # The receiver must not have to poll for arrivals: the control process tells it. Both ends must agree.
    config.enable_notification = False
    mode = str(options.get("poll_cq_mode", "polling")).upper()
    try:
        config.poll_cq_mode = getattr(api.PollCqMode, mode)
    except AttributeError:
        raise ConfigError(
            f"poll_cq_mode={options['poll_cq_mode']!r} is not a way to poll; allowed: polling, event"
        ) from None
    return config


def _fill(config: Any, options: dict[str, Any], names: dict[str, str]) -> None:
    for key, attribute in names.items():
        if key in options:
            setattr(config, attribute, options[key])


def _advice(backend: str) -> str:
    if backend != "rdma":
        return ""
    return (
        f". Look for a device with an active port in /sys/class/infiniband/*/ports/*/state, pass "
        f"/dev/infiniband into the container, and name it in device_name ({DEVICES_ENV} is "
        f"{os.environ.get(DEVICES_ENV, '')!r}); on one host, backend_type xgmi or shm needs none"
    )
