"""Starts the multi-process heart of a sending connector: control process and workers, pinned as planned."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from mori_mp.config import ConnectorConfig
from mori_mp.health import StageHealth
from mori_mp.pins import card_of, make_plan
from mori_mp.pools import Pools
from mori_mp.shared import registry, runtime
from mori_mp.shared.errors import StartupError
from mori_mp.shared.messages import ControlSetup, Observing
from mori_mp.shared.pinning import Plan
from mori_mp.workers.inline import ControlThread
from mori_mp.workers.spawn import module_path
from mori_mp.workers.supervisor import Supervisor, launch_process

logger = logging.getLogger(__name__)

_LOGGER_ROOT = "mori_mp"


class Heart:
    """A started control loop, with what the connector needs to know of it."""

    def __init__(self, supervisor: Supervisor, plan: Plan, host: str) -> None:
        self.supervisor = supervisor
        self.plan = plan
        self.host = host

    @property
    def port(self) -> int:
        """Return the TCP port it listens on."""
        return self.supervisor.port


def start(
    config: ConnectorConfig,
    *,
    pools: Pools,
    epoch: str,
    endpoint: tuple[str, int],
    replay: Callable[[], Any],
    freed: Callable[[list[int]], None],
    health: StageHealth,
    target: Callable[[str, bytes], None],
    trace_folder: str = "",
) -> Heart:
    """Start control process and workers and wait until they serve. trace_folder: of spans, "" for none.

    Raises StartupError (port taken, engine failing, ...), PinningError, ConfigError.
    """
    host, port = endpoint
    engine = pools.device_engine or pools.host_engine
    folder = runtime.create(epoch, config.runtime_dir)
    threads = config.worker_mode == "thread"
    try:
        card, plan = _introduce(config, folder, engine=engine, endpoint=_tcp(host, port))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    template = ControlSetup(
        role="control",
        label=f"control stage={config.stage_id} port={port}",
        path=module_path(),
        cpus=[] if threads else sorted(plan.control or ()),
        log_level=logging.getLogger(_LOGGER_ROOT).getEffectiveLevel(),
        epoch=epoch,
        incarnation=0,
        host=host,
        port=port,
        hot_fd=-1,
        admin_fd=-1,
        pool_fd=pools.host.fd,
        pool_size=pools.host.size,
        fence_fd=-1,
        engine=pools.host_engine,
        engine_options=pools.options,
        device_engine=pools.device_engine,
        gpu_pool=pools.lend_device(),
        lend=config.delivery != "landing",
        mem_desc=pools.host.descriptor().pack(),
        workers=config.num_transfer_workers,
        worker_cpus=[] if threads else [sorted(cpus or ()) for cpus in plan.workers],
        worker_python=config.worker_python,
        runtime_dir=str(folder),
        threaded=threads,
        eager_bytes=config.eager_bytes,
        ttl_seconds=config.buffer_ttl_seconds,
        park_seconds=config.park_seconds,
        job_timeout_seconds=config.job_timeout_seconds,
        restart_limit=config.restart_limit,
        prefault=config.prefault,
        lane_path=f"{folder}/lane-{{incarnation}}.sock",
        health_socket=str(folder / registry.HEALTH_SOCKET),
        device=config.memory_pool_device,
        observing=Observing(
            stage_id=config.stage_id,
            stage_pid=os.getpid(),
            stage_started=health.started_at,
            stage_report=health.stage_part(),
            dump_path=config.health_dump_path,
            dump_interval_seconds=config.health_dump_interval_seconds,
            prometheus_port=config.metrics_port(),
            trace_folder=trace_folder,
        ),
    )
    launch = (lambda setup, _: ControlThread(setup, pools.host)) if threads else launch_process
    supervisor = Supervisor(
        template, pools.host, folder, launch, replay, freed, health.stage_part, health.faults, target
    )
    try:
        supervisor.start()
        card = msgspec.structs.replace(card, endpoint=_tcp(host, supervisor.port), serving=True)
        registry.write(folder, card)
    except BaseException:
        supervisor.close()
        raise
    logger.info(
        "stage %d listens on %s:%d: engine %s, %d transfer worker(s), control pid %d, cpus %s",
        config.stage_id,
        host,
        supervisor.port,
        engine,
        config.num_transfer_workers,
        supervisor.pid,
        "; ".join(plan.reasons) if not plan.cpus else sorted(plan.cpus),
    )
    return Heart(supervisor, plan, host)


def _introduce(
    config: ConnectorConfig, folder: Path, *, engine: str, endpoint: str
) -> tuple[registry.Card, Plan]:
    """Plan the CPUs of the children, clear of those of other connectors, and leave a card that says so."""
    with registry.planning(folder.parent) as alone:
        plan = make_plan(config, taken=registry.taken_cpus(folder.parent, but=folder))
        if not alone:
            story = "the lock on planning was not to be had: another connector may have the same CPUs"
            plan = replace(plan, reasons=(*plan.reasons, story))
        card = registry.Card(
            stage_id=config.stage_id,
            role=config.role,
            pid=os.getpid(),
            start_ticks=registry.start_ticks(os.getpid()) or 0,
            started=time.time(),
            engine=engine,
            endpoint=endpoint,
            serving=False,
            worker_mode=config.worker_mode,
            pool_device=config.memory_pool_device,
            pool_size=config.memory_pool_size,
            plan=card_of(plan, pinned=config.worker_mode == "process"),
        )
        registry.write(folder, card)
    return card, plan


def _tcp(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


__all__ = ["Heart", "StartupError", "make_plan", "start"]
