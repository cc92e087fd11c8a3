"""From a deploy YAML and the command line to one StagePlan per stage.

Each stage's connector gets exactly the configuration that vLLM-Omni would give it
(`Deploy.connector_for_stage`); options of the job are merged into every edge's `extra` first. Nothing is
started here and torch is not imported.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mori_mp.deploy import TRANSFER_ENGINE_NAMES, Connector, Deploy, StageNode
from mori_mp.pipeline.plan import Edge, EdgeKind, GetMode, MetadataMode, StagePlan, Traffic
from mori_mp.pipeline.trace import Trace
from mori_mp.ports import OWN_NAMES
from mori_mp.shared.errors import DeployError

logger = logging.getLogger(__name__)

OWN_NAME = "MoriTransferEngineConnector"
OWN_CLASS = "mori_mp:MoriTransferEngineConnector"


@dataclass(frozen=True)
class RunOptions:
    """What the operator chose. Times in seconds, sizes in bytes."""

    requests: int = 4
    chunks: int | None = 50
    duration_s: float | None = None
    seed: int = 0
    gap_s: float = 0.02
    backend: str | None = None
    connector_class: str | None = None
    """`package.module:Class` for every stage instead of mori-mp's own."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Merged into the `extra` of every edge; wins over everything else."""
    get_mode: GetMode = "deadline"
    metadata: MetadataMode = "none"
    busy: bool = False
    trace: Trace = field(default_factory=dict)


def wants_local_ports(options: RunOptions) -> bool:
    """Whether the run picks its own ports: shm on this host, unless the operator gave a port."""
    return options.backend == "shm" and "zmq_port" not in options.overrides


def make_plans(deploy: Deploy, options: RunOptions, *, base_port: int | None = None) -> list[StagePlan]:
    """One plan for each stage that has an edge, senders before receivers.

    base_port: replaces the YAML's zmq_port, see wants_local_ports().
    Raises DeployError for a YAML without edges, with a connector that is not ours, or unlike the trace.
    """
    deploy = _with_our_connectors(deploy, options)
    overrides = _overrides(options, base_port)
    nodes = [node for node in deploy.topology() if node.inputs or node.outputs]
    if not nodes:
        raise DeployError(f"{deploy.path}: no stage hands over to another one, so there is nothing to run.")
    _check_trace(deploy, options.trace)
    traffic = _traffic(deploy, options)
    has_inputs = {node.stage.stage_id: bool(node.inputs) for node in nodes}
    return [_stage_plan(deploy, node, options, overrides, traffic, has_inputs) for node in nodes]


def _with_our_connectors(deploy: Deploy, options: RunOptions) -> Deploy:
    """The deploy with every edge on a transfer-engine name, which is what gives stages their ports."""
    forced = options.backend is not None or options.connector_class is not None
    accepted = TRANSFER_ENGINE_NAMES if options.connector_class else OWN_NAMES
    edges = dict(deploy.edges)
    for (source, target), connector in deploy.edges.items():
        if connector.name in accepted:
            continue
        if not forced:
            raise DeployError(
                f"{deploy.path}: edge {source} -> {target} uses {connector.name}, which mori-mp does not "
                f"provide. Give --backend (such as --backend shm) to run every edge on {OWN_NAME}, or "
                f"--connector package.module:Class to run another class."
            )
        logger.info(
            "%s: edge %d -> %d names %s; running it on %s",
            deploy.path, source, target, connector.name, options.connector_class or OWN_NAME,
        )  # fmt: skip
        edges[source, target] = Connector(OWN_NAME, connector.extra)
    return dataclasses.replace(deploy, edges=edges)


def _overrides(options: RunOptions, base_port: int | None) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    if options.backend is not None:
        overrides["backend_type"] = options.backend
    if options.backend == "shm":
        overrides["memory_pool_device"] = "cpu"
        overrides["host"] = "127.0.0.1"
    if base_port is not None:
        overrides["zmq_port"] = base_port
    overrides.update(options.overrides)
    return overrides


def _traffic(deploy: Deploy, options: RunOptions) -> Traffic:
    frames = {}
    for key in ("codec_chunk_frames", "codec_left_context_frames"):
        given = [edge.extra[key] for edge in deploy.edges.values() if key in edge.extra]
        value = options.overrides.get(key, given[0] if given else 25)
        lowest = 1 if key == "codec_chunk_frames" else 0
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise DeployError(f"{deploy.path}: {key} must be a whole number >= {lowest}, got {value!r}.")
        frames[key] = value
    return Traffic(
        seed=options.seed,
        requests=options.requests,
        chunks=None if options.duration_s is not None else options.chunks,
        duration_s=options.duration_s,
        gap_s=options.gap_s,
        trace=options.trace,
        **frames,
    )


def _stage_plan(
    deploy: Deploy,
    node: StageNode,
    options: RunOptions,
    overrides: dict[str, Any],
    traffic: Traffic,
    has_inputs: dict[int, bool],
) -> StagePlan:
    stage_id = node.stage.stage_id
    resolved = deploy.connector_for_stage(stage_id, overrides=overrides)

    def edge(source: int, target: int) -> Edge:
        kind: EdgeKind = "codec" if has_inputs[source] else "hidden"
        if f"{source}->{target}" in options.trace:
            kind = "trace"
        return Edge(source=source, target=target, kind=kind)

    return StagePlan(
        stage_id=stage_id,
        connector_class=options.connector_class or OWN_CLASS,
        connector_config=resolved.config,
        inputs=[edge(e.from_stage, e.to_stage) for e in node.inputs],
        outputs=[edge(e.from_stage, e.to_stage) for e in node.outputs],
        traffic=traffic,
        get_mode=options.get_mode,
        metadata=options.metadata,
        busy=options.busy,
    )


def _check_trace(deploy: Deploy, trace: Trace) -> None:
    known = [f"{source}->{target}" for source, target in deploy.edges]
    unknown = sorted(set(trace) - set(known))
    if unknown:
        raise DeployError(
            f"{deploy.path}: the trace has chunks on {', '.join(unknown)}; "
            f"edges of this file: {', '.join(known)}."
        )
    missing = [label for label in known if label not in trace]
    if trace and missing:
        raise DeployError(
            f"{deploy.path}: the trace has no chunks on {', '.join(missing)}; record every edge."
        )
