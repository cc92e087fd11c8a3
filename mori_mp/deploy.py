"""The deploy YAML, and what vllm-omni makes of it for each stage's connector.

`load_deploy(path)` reads the file; `Deploy.connector_for_stage(stage_id)` answers with the name and the
configuration that vllm-omni would hand the connector of that stage, so that our own tools start the same
connectors on the same ports without it. The rules, in the host's order:

1. A stage has one connector whatever its number of edges: its first incoming edge's (`role: receiver`),
   or, where it has none, its first outgoing edge's (`role: sender`). Stage 0 takes the first edge that
   touches it. A `role` in the YAML wins.
2. Transfer engines (TRANSFER_ENGINE_NAMES) learn the edge as `from_stage` and `to_stage`, and get a port
   from `compute_port`: a sender as `zmq_port`, a receiver as `sender_zmq_port` of the edge's sender, beside
   `sender_host`; a receiver's own `zmq_port` is removed. Values that the YAML gives for `sender_*` win.
3. Every other connector gets `stage_id` and `role` only.
"""

from __future__ import annotations

import copy
import graphlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mori_mp.deploy_schema import SHARED_MEMORY, Connector, Edges, Stage, parse_document
from mori_mp.deploy_yaml import deep_merge, read_document
from mori_mp.ports import DEFAULT_BASE_PORT, TRANSFER_ENGINE_NAMES, Purpose, compute_port, expand_port
from mori_mp.shared.errors import DeployError

logger = logging.getLogger(__name__)

__all__ = [
    "TRANSFER_ENGINE_NAMES",
    "Connector",
    "Deploy",
    "Edge",
    "ResolvedConnector",
    "Stage",
    "StageNode",
    "compute_port",
    "load_deploy",
]


@dataclass(frozen=True)
class ResolvedConnector:
    """What the host's factory is given: a registered connector name and its configuration."""

    name: str
    config: dict[str, Any]


@dataclass(frozen=True)
class Edge:
    """One hand-over between two stages."""

    from_stage: int
    to_stage: int
    connector: Connector


@dataclass(frozen=True)
class StageNode:
    """A stage with the edges that end and start at it, each in the YAML's order."""

    stage: Stage
    inputs: tuple[Edge, ...]
    outputs: tuple[Edge, ...]


@dataclass(frozen=True)
class Deploy:
    """A loaded deploy YAML.

    path: the file; bases that it inherits from are merged in.
    async_chunk: whether stages stream chunks to each other (True where the YAML does not say).
    stages: in the YAML's order.
    edges: the connector of each (from_stage, to_stage), in the order in which vllm-omni registers them.
    warnings: what is probably a mistake in it; logged already.
    """

    path: Path
    async_chunk: bool
    stages: tuple[Stage, ...]
    edges: Edges
    warnings: tuple[str, ...] = ()

    def stage(self, stage_id: int) -> Stage:
        """Return one stage. Raises DeployError when there is none of that id."""
        for stage in self.stages:
            if stage.stage_id == stage_id:
                return stage
        known = ", ".join(str(stage.stage_id) for stage in self.stages) or "none"
        raise DeployError(f"{self.path}: stage {stage_id} does not exist. Stages of this file: {known}.")

    def connector_for_stage(
        self,
        stage_id: int,
        *,
        local_rank: int = 0,
        replica_id: int = 0,
        purpose: Purpose = "request_forwarding",
        overrides: Mapping[str, Any] | None = None,
    ) -> ResolvedConnector:
        """Return exactly what vllm-omni hands the connector of one worker of a stage.

        local_rank, replica_id: which worker of the stage, both from 0.
        purpose: what its sockets carry; shifts the port only.
        overrides: merged into the `extra` of every edge first, as if the YAML had said so.

        The configuration is the caller's own copy. A stage without edges gets what the host's chunk adapter
        gives it, an unconfigured SharedMemoryConnector. Raises DeployError for an unknown stage, a zmq_port
        that is no number or names an unset variable, and a port out of range.
        """
        self.stage(stage_id)
        edges = {
            edge: Connector(connector.name, deep_merge(connector.extra, overrides or {}))
            for edge, connector in self.edges.items()
        }
        try:
            name, extra = _choose(edges, stage_id)
            extra = copy.deepcopy(extra)
            _resolve(name, extra, stage_id, purpose, local_rank, replica_id)
        except DeployError as exc:
            raise DeployError(f"{self.path}: connector of stage {stage_id}: {exc}") from None
        return ResolvedConnector(name, extra)

    def topology(self) -> tuple[StageNode, ...]:
        """Return the stages so that every stage follows all stages it receives from.

        Raises DeployError when edges form a cycle.
        """
        edges = [Edge(*ends, connector) for ends, connector in self.edges.items()]
        sorter: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter()
        for stage in self.stages:
            sorter.add(stage.stage_id, *(e.from_stage for e in edges if e.to_stage == stage.stage_id))
        try:
            order = list(sorter.static_order())
        except graphlib.CycleError as exc:
            circle = " -> ".join(str(stage_id) for stage_id in exc.args[1])
            raise DeployError(
                f"{self.path}: the edges form a cycle, {circle}. Remove one: stages hand over one way."
            ) from None
        return tuple(
            StageNode(
                self.stage(stage_id),
                tuple(e for e in edges if e.to_stage == stage_id),
                tuple(e for e in edges if e.from_stage == stage_id),
            )
            for stage_id in order
        )


def load_deploy(path: str | Path) -> Deploy:
    """Read a deploy file (YAML, or JSON by its suffix) with everything it inherits from.

    Raises DeployError, naming file, stage or edge and the fix, for whatever is wrong with it.
    """
    document = read_document(path)
    warnings: list[str] = []
    stages, edges = parse_document(document.root, document.label, warnings)
    async_chunk = document.root.get("async_chunk", True)
    if not isinstance(async_chunk, bool):
        raise DeployError(f"{document.label}: async_chunk must be true or false, got {async_chunk!r}.")
    for text in warnings:
        logger.warning("%s", text)
    return Deploy(Path(path), async_chunk, stages, edges, tuple(warnings))


# --------------------------------------------------------------------------------------- the host's rules
def _choose(edges: Edges, stage_id: int) -> tuple[str, dict[str, Any]]:
    """Pick the edge whose connector a stage gets. Returns its name, and a shallow copy of its options."""
    for (source, target), connector in edges.items():
        receives = target == stage_id
        if not receives and not (source == stage_id == 0):
            continue
        extra = dict(connector.extra)
        extra.setdefault("role", "receiver" if receives else "sender")
        if connector.name in TRANSFER_ENGINE_NAMES:
            extra["from_stage"], extra["to_stage"] = source, target
        else:
            extra.pop("from_stage", None)
            extra.pop("to_stage", None)
        if connector.name == "NixlConnector":
            _add_nixl_outgoing(extra, edges, stage_id)
        return connector.name, extra

    for (source, target), connector in edges.items():
        if source == stage_id:
            extra = dict(connector.extra)
            extra.setdefault("role", "sender")
            if connector.name in TRANSFER_ENGINE_NAMES:
                extra["from_stage"], extra["to_stage"] = source, target
            return connector.name, extra
    return SHARED_MEMORY, {}


def _add_nixl_outgoing(extra: dict[str, Any], edges: Edges, stage_id: int) -> None:
    """NIXL alone is told of its outgoing edge: one connector serves both directions of a middle stage."""
    for (source, target), connector in edges.items():
        if source == stage_id:
            if connector.name != "NixlConnector":
                raise DeployError(
                    f"edge {source} -> {target} uses {connector.name}, but the stage's connector is "
                    f"NixlConnector, which must serve its outgoing edge too. Use NixlConnector on both."
                )
            extra["outgoing"] = {**connector.extra, "from_stage": source, "to_stage": target}
            return


def _resolve(
    name: str, extra: dict[str, Any], stage_id: int, purpose: Purpose, local_rank: int, replica_id: int
) -> None:
    """Complete `extra` in place for one worker: identity, then for transfer engines the endpoint."""
    extra["stage_id"] = stage_id
    role = extra.get("role")
    if role is not None:
        extra["role"] = role = str(role)
    if name not in TRANSFER_ENGINE_NAMES:
        return

    def port(options: Mapping[str, Any]) -> int:
        return compute_port(
            expand_port(options.get("zmq_port", DEFAULT_BASE_PORT), "zmq_port"),
            purpose=purpose,
            from_stage=int(options.get("from_stage", stage_id)),
            local_rank=local_rank,
            replica_id=replica_id,
        )

    if role != "receiver":
        extra["zmq_port"] = port(extra)
        return
    if "sender_zmq_port" not in extra:
        extra["sender_zmq_port"] = port(extra)
    extra.setdefault("sender_host", extra.get("host", "127.0.0.1"))
    extra.pop("zmq_port", None)
    outgoing = extra.get("outgoing")
    if name == "NixlConnector" and isinstance(outgoing, dict):
        extra["zmq_port"] = port(outgoing)
        extra["host"] = outgoing.get("host", "auto")
