"""Which transfer engine a connector runs: `backend_type`, and what `auto` makes of it.

Only `auto` chooses, and says in the log and in health() what and why. Any other value is taken at its word:
what is missing for it is an error that says how to get it.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from mori_mp.config import ConnectorConfig
from mori_mp.endpoint import resolve_host
from mori_mp.shared.errors import EngineUnavailable
from mori_mp.workers.engines import mori_api
from mori_mp.workers.engines.gpu_runtime import PATH_ENV

logger = logging.getLogger(__name__)

_MORI_PYTHONS = ((3, 10), (3, 12))
_OPTIONS = (
    "xgmi_num_streams",
    "xgmi_num_events",
    "cuda_ipc_num_streams",
    "cuda_ipc_num_events",
    "qp_per_transfer",
    "num_worker_threads",
    "post_batch_size",
    "enable_transfer_chunking",
    "chunk_bytes",
    "max_chunks_per_transfer",
    "num_nics_per_transfer",
    "poll_cq_mode",
    "device_name",
)


def how_to_get_mori(python: tuple[int, int] = sys.version_info[:2]) -> str:
    """What to do where Mori is missing: there are wheels of it for some versions of Python only."""
    if python in _MORI_PYTHONS:
        return "install it with `pip install 'mori-mp[mori]'` (package amd-mori; needs ROCm)"
    wanted = " or ".join(f"{major}.{minor}" for major, minor in _MORI_PYTHONS)
    return (
        f"its package amd-mori is for CPython {wanted}, and this is {python[0]}.{python[1]}: run the stages "
        f"with one of those, or, where a stage only sends, its workers (worker_python)"
    )


class Choice(NamedTuple):
    """The engine's name, and why it was chosen."""

    engine: str
    reason: str


def engine_options(config: ConnectorConfig) -> dict[str, Any]:
    """Pick the keys that belong to transfer engines; what is left out keeps the engine's own default."""
    options = {name: getattr(config, name) for name in _OPTIONS if getattr(config, name) is not None}
    return {**options, "host": resolve_host(config.host)}


def choose(config: ConnectorConfig) -> Choice:
    """Settle the engine. Raises EngineUnavailable."""
    if config.backend_type != "auto":
        _require(config.backend_type, config)
        return Choice(config.backend_type, "configured")
    wanted = ("rdma",) if config.memory_pool_device == "cpu" else ("xgmi", "rdma", "cuda_ipc")
    passed = []
    for engine in wanted:
        try:
            _require(engine, config)
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


def _require(engine: str, config: ConnectorConfig) -> None:
    """Raise EngineUnavailable unless this process can run an engine.

    A sender with workers of another interpreter needs no Mori itself; its workers say what they lack.
    """
    others = config.worker_python and config.role == "sender"
    if engine in mori_api.BACKENDS and not others and find_spec("mori") is None:
        also = ", also in the interpreter of a stage that receives" if config.worker_python else ""
        raise EngineUnavailable(
            f"backend_type={engine} needs Mori, which is not installed{also}; {how_to_get_mori()}"
        )
    if engine == "rdma" and not _rdma_devices():
        raise EngineUnavailable(
            "backend_type=rdma needs an RDMA device, and /sys/class/infiniband has none; load the NIC's "
            "driver and, in a container, pass /dev/infiniband through"
        )
    if config.memory_pool_device == "cpu" or os.environ.get(PATH_ENV):
        return
    import torch

    if not torch.cuda.is_available():
        raise EngineUnavailable(
            f"backend_type={engine} with memory_pool_device={config.memory_pool_device} needs a GPU "
            f"that this process sees; check the driver, *_VISIBLE_DEVICES, and that this torch is a CUDA or "
            f"ROCm build"
        )
    if engine == "xgmi" and config.backend_type == "auto" and torch.version.hip is None:
        raise EngineUnavailable("xgmi joins AMD GPUs, and this torch is a CUDA build")


def _rdma_devices() -> list[str]:
    try:
        return sorted(entry.name for entry in Path("/sys/class/infiniband").iterdir())
    except OSError:
        return []
