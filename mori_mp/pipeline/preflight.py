"""What can be told of a run before it starts: configurations, engines, addresses, payloads against pools.

A stage would find the same, each for itself and in the middle of things. Plans of another connector class
are left alone: what they may hold is not ours to know.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from mori_mp import codec
from mori_mp.backend import choose
from mori_mp.beforehand import (
    Claim,
    check_claim,
    check_interpreter,
    check_sender_host,
    claims,
    collisions,
)
from mori_mp.config import ConnectorConfig
from mori_mp.pipeline.plan import Edge, StagePlan
from mori_mp.pipeline.planner import OWN_CLASS
from mori_mp.pipeline.workload import Workload
from mori_mp.shared.errors import ConfigError, EngineUnavailable, StartupError


def check_plans(plans: list[StagePlan]) -> None:
    """Raise ConfigError, EngineUnavailable or StartupError for a run that cannot be as asked on this host.

    The message names the stage. Keys that are nearly ours are warned about in the log.
    """
    claimed: list[Claim] = []
    check_once = cache(check_interpreter)  # stages have one in common, as a rule
    for plan in plans:
        if plan.connector_class != OWN_CLASS:
            continue
        try:
            config = ConnectorConfig.from_dict(plan.connector_config)
            engine, _ = choose(config)
            check_sender_host(config)
            puts = bool(plan.outputs) or config.role != "receiver"
            if config.worker_python and puts:
                check_once(config.worker_python, engine)
            wanted = claims(config, puts)
            for claim in wanted:
                if puts or claim.purpose == "metrics":  # a last stage has no need of its listener
                    check_claim(claim)
        except EngineUnavailable as exc:
            hint = "; --backend shm runs the same topology on any host"
            raise EngineUnavailable(f"stage {plan.stage_id}: {exc}{hint}") from None
        except (ConfigError, StartupError) as exc:
            raise type(exc)(f"stage {plan.stage_id}: {exc}") from None
        claimed += wanted
        on_gpu = config.memory_pool_device != "cpu"
        key = "host_pool_size" if on_gpu else "memory_pool_size"
        pool = getattr(config, key)
        for edge, size in _largest(plan, receives=config.delivery == "landing"):
            if size > pool:
                raise ConfigError(
                    f"stage {plan.stage_id}: a chunk of {size} bytes on edge {edge.label} does not fit "
                    f"{key}={pool}; raise {key}{'' if on_gpu else ' (--pool-size)'}"
                )
    for stage_id, text in collisions(claimed):
        raise ConfigError(f"stage {stage_id}: {text}")


def _largest(plan: StagePlan, receives: bool) -> Iterator[tuple[Edge, int]]:
    """The size of the largest chunk on each edge whose chunks need a slot of this stage's pool."""
    workload = Workload(plan.traffic)
    for edge in [*plan.outputs, *(plan.inputs if receives else ())]:
        payload = workload.build(edge, *workload.largest(edge), last=False)
        yield edge, codec.plan(payload).nbytes
