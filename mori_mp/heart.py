"""Starts the multi-process heart of a sending connector: control process and workers, pinned as planned."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec

from mori_mp.config import ConnectorConfig
from mori_mp.shared import runtime
from mori_mp.shared.errors import StartupError
from mori_mp.shared.messages import ControlSetup
from mori_mp.shared.pinning import Plan, resolve_request
from mori_mp.shared.pool import Pool
from mori_mp.shared.topology import read_topology
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
    engine: str,
    pool: Pool,
    mem_desc: bytes,
    epoch: str,
    endpoint: tuple[str, int],
    replay: Callable[[], Any],
    freed: Callable[[list[int]], None],
) -> Heart:
    """Start control process and workers and wait until they serve.

    Raises StartupError (port taken, engine failing, ...), PinningError, ConfigError.
    """
    host, port = endpoint
    plan = make_plan(config)
    folder = runtime.create(epoch, config.runtime_dir)
    threads = config.worker_mode == "thread"
    jobs = "inproc://jobs" if threads else f"ipc://{folder}/jobs-{{incarnation}}.sock"
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
        pool_fd=pool.fd,
        pool_size=pool.size,
        fence_fd=-1,
        engine=engine,
        engine_options=_engine_options(config),
        lend=engine == "shm" and config.delivery != "landing",
        mem_desc=mem_desc,
        workers=config.num_transfer_workers,
        worker_cpus=[] if threads else [sorted(cpus or ()) for cpus in plan.workers],
        worker_python=config.worker_python,
        jobs_endpoint=jobs,
        eager_bytes=config.eager_bytes,
        ttl_seconds=config.buffer_ttl_seconds,
        park_seconds=config.park_seconds,
        job_timeout_seconds=config.job_timeout_seconds,
        restart_limit=config.restart_limit,
        prefault=config.prefault,
    )
    launch = (lambda setup, _: ControlThread(setup, pool)) if threads else launch_process
    supervisor = Supervisor(template, pool, folder, launch, replay, freed)
    try:
        supervisor.start()
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


def make_plan(config: ConnectorConfig) -> Plan:
    """Plan the CPUs of the children; an unreadable topology is a recorded reason, not an error."""
    values = msgspec.structs.asdict(config)
    request = resolve_request(values, os.environ)
    try:
        topology = read_topology()
    except OSError as exc:
        return Plan.unpinned(config.num_transfer_workers, f"topology cannot be read: {exc}")
    return request.plan(topology, workers=config.num_transfer_workers, nic=config.device_name or None)


def _engine_options(config: ConnectorConfig) -> dict[str, Any]:
    """Pick the keys that belong to transfer engines."""
    names = (
        "xgmi_num_streams",
        "xgmi_num_events",
        "qp_per_transfer",
        "num_worker_threads",
        "post_batch_size",
        "device_name",
    )
    return {name: getattr(config, name) for name in names}


__all__ = ["Heart", "StartupError", "make_plan", "start"]
