"""Stage processes with connectors over the GPU memory of one rig, and what their tests share."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from connector_support import short_directory
from engine_host import pattern
from engine_rig import MB, GpuStage, Rig

CONFIG: dict[str, Any] = {
    "host": "127.0.0.1",
    "memory_pool_size": 8 * MB,
    "host_pool_size": 4 * MB,
    "num_transfer_workers": 1,
    "prefault": False,
    "pin": "off",
    "restart_limit": 1000,
    "prestart": False,
}
DELIVERIES = {"offer": "auto", "landing": "landing"}
"""How a GPU payload comes: copied by its receiver from the sender's pool, or written by a worker."""

_numbers = count()
deliveries = pytest.mark.parametrize("delivery", DELIVERIES.values(), ids=DELIVERIES)


class Stages:
    """Stage processes of one rig that end together."""

    def __init__(self, rig: Rig, blocks: Path, runtime: Path) -> None:
        self.rig = rig
        self._blocks = blocks
        self._runtime = runtime
        self._made: list[GpuStage] = []

    def bare(self, **environment: str) -> GpuStage:
        """Start a stage process without a connector yet."""
        stage = GpuStage(self.rig, self._blocks / f"stage-{next(_numbers)}", self._runtime, **environment)
        self._made.append(stage)
        return stage

    def make(self, device: int, **config: Any) -> tuple[GpuStage, int]:
        """Make a stage with its pool on the sender's (0) or the receiver's (1) device; returns its port."""
        stage = self.bare()
        settings = {**CONFIG, "backend_type": self.rig.engine, **config}
        return stage, stage("make", settings, self.rig.devices[device])

    def pair(self, **config: Any) -> tuple[GpuStage, GpuStage]:
        sender, port = self.make(0, role="sender", zmq_port=0, stage_id=0, **config)
        upstream = {"sender_host": "127.0.0.1", "sender_zmq_port": port}
        receiver, _ = self.make(
            1, role="receiver", stage_id=1, from_stage=0, to_stage=1, **upstream, **config
        )
        return sender, receiver

    def end(self) -> None:
        for stage in self._made:
            stage.end()


@contextmanager
def stages_of(rig: Rig, blocks: Path) -> Iterator[Stages]:
    """Yield a maker of stages that share a runtime directory, and end in the end."""
    with short_directory() as runtime:
        stages = Stages(rig, blocks, runtime)
        try:
            yield stages
        finally:
            stages.end()


def crc(seed: int, size: int) -> int:
    return zlib.crc32(pattern(seed, size))


def used(stage: GpuStage, pool: str = "device_pool") -> int:
    return int(stage("health")[pool]["used_bytes"])
