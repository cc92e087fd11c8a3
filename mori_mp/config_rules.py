"""Which values of configuration keys do not go together: rules over several keys, for mori_mp.config.

A rule sees the values of its keys, given or default, and says what is wrong with them and what to set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple


class _Rule(NamedTuple):
    keys: tuple[str, ...]
    broken: Callable[..., bool]  # takes the keys' values, in that order
    text: str


_RULES = (
    _Rule(
        ("backend_type", "memory_pool_device"),
        lambda backend, device: backend == "xgmi" and device == "cpu",
        "XGMI is a GPU-to-GPU fabric and cannot reach host memory; set memory_pool_device: cuda (or cuda:N),"
        " or backend_type: auto",
    ),
    _Rule(
        ("backend_type", "memory_pool_device"),
        lambda backend, device: backend == "cuda_ipc" and device == "cpu",
        "cuda_ipc shares GPU memory only; set memory_pool_device: cuda (or cuda:N), or backend_type: auto",
    ),
    _Rule(
        ("backend_type", "memory_pool_device"),
        lambda backend, device: backend == "shm" and device != "cpu",
        "shm shares host memory only; set memory_pool_device: cpu, or backend_type: auto",
    ),
    _Rule(("post_batch_size",), lambda size: size == 0, "allowed: -1, or 1..1048576"),
    _Rule(
        ("num_transfer_workers", "worker_cpus"),
        lambda workers, cpus: "|" in cpus and cpus.count("|") + 1 != workers,
        "give one cpulist for all workers, or exactly one for each",
    ),
    _Rule(
        ("worker_mode", "worker_python"),
        lambda mode, python: mode == "thread" and python != "",
        "threads run in the stage's own interpreter; set worker_mode: process, or leave worker_python out",
    ),
    _Rule(
        ("health_dump_interval_seconds", "health_dump_path"),
        lambda interval, path: interval > 0 and path == "",
        "there is no file to write to; set health_dump_path, or leave the interval at 0",
    ),
    _Rule(
        ("prometheus_port", "stage_id"),
        lambda port, stage: port and port + max(stage, 0) > 65535,
        "their sum is the port that is bound, and it is no port (1..65535)",
    ),
    _Rule(
        ("prometheus_port",),
        lambda port: port and find_spec("prometheus_client") is None,
        "metrics need prometheus-client, which is not installed: pip install 'mori-mp[metrics]', or set 0",
    ),
)


def broken_rules(
    config: Mapping[str, Any], found: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[str]:
    """A line for each rule that a configuration breaks.

    config: what was given; found: the values of those keys that are sound by themselves.
    """
    broken = []
    for rule in _RULES:
        # A key that was refused by itself has been reported; what it was meant to be is unknown.
        if any(config.get(name) is not None and name not in found for name in rule.keys):
            continue
        values = [found.get(key, defaults[key]) for key in rule.keys]
        if rule.broken(*values):
            named = " with ".join(f"{key}={value!r}" for key, value in zip(rule.keys, values, strict=True))
            broken.append(f"{named}: {rule.text}")
    return broken
