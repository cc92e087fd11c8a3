"""The part of a deploy document that concerns connectors: stages, and one connector per edge.

Two layouts are understood, as by vllm-omni::

    connectors: {ref: {name, extra}}          runtime: {connectors: {...}, edges: [...]}
    stages:                                   stage_args:
      - stage_id: 1                             - stage_id: 1
        devices: "1"                              runtime: {devices: "1"}
        input_connectors: {from_stage_0: ref}     input_connectors: {from_stage_0: ref}
        output_connectors: {to_stage_2: ref}      engine_input_source: [0]
    edges: [{from: 0, to: 1}]

An edge may be named at either end or at both; a reference may be replaced by an inline {name, extra}. The
end that comes first in the file gives the edge its `extra` (a stage's inputs before its outputs), and both
must agree on the name. Edges listed under `edges` or implied by `engine_input_source` that no stage names
use shared memory. The order of the edges matters: a stage's connector is its first edge's.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mori_mp.config_keys import nearest
from mori_mp.deploy_yaml import stages_by_id
from mori_mp.ports import TRANSFER_ENGINE_NAMES
from mori_mp.shared.errors import DeployError

logger = logging.getLogger(__name__)

SHARED_MEMORY = "SharedMemoryConnector"
"""The host's connector for every edge that names none."""

REGISTERED_NAMES = TRANSFER_ENGINE_NAMES | {SHARED_MEMORY, "MooncakeStoreConnector", "YuanrongConnector"}
"""Registered names of connectors."""

_STAGE_KEYS = ("input_connectors", "output_connectors", "engine_input_source")


@dataclass(frozen=True)
class Connector:
    """A connector as the YAML defines it: the class's registered name and its untouched options."""

    name: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline. devices: comma-separated device ordinals, None where the YAML has none."""

    stage_id: int
    devices: str | None
    raw: Mapping[str, Any]


Edges = dict[tuple[int, int], Connector]


def parse_document(
    root: Mapping[str, Any], label: str, warnings: list[str]
) -> tuple[tuple[Stage, ...], Edges]:
    """Return a document's stages, in its order, and its edges keyed by (from_stage, to_stage).

    label: the file's name, for messages. warnings takes a sentence for whatever is probably a mistake, such
    as a key that is nearly one of those read here. Raises DeployError for whatever vllm-omni would refuse,
    and for what it would accept and then ignore or trip over: edges to stages that do not exist.
    """
    layout = _find_layout(root, label, warnings)
    stages = tuple(
        Stage(stage_id, _devices(raw, f"{label}: stage {stage_id}"), raw)
        for stage_id, raw in stages_by_id(layout.stages, f"{label}: {layout.stages_key}").items()
    )
    builder = _EdgeBuilder(layout, label, frozenset(stage.stage_id for stage in stages), warnings)
    for stage in stages:
        _warn_of_near(stage.raw, _STAGE_KEYS, f"{label}: stage {stage.stage_id}", warnings)
        builder.add_named(stage)
    builder.add_implied(stages)
    return stages, builder.edges


# ------------------------------------------------------------------------------------------------ layout
@dataclass(frozen=True)
class _Layout:
    stages: list[Any]
    connectors: Mapping[str, Any]
    edges: list[Any]
    stages_key: str
    connectors_key: str
    edges_key: str


def _find_layout(root: Mapping[str, Any], label: str, warnings: list[str]) -> _Layout:
    runtime = _typed(root.get("runtime"), dict, f"{label}: runtime")
    legacy = "stage_args" in root
    if legacy and root.get("stages"):
        raise DeployError(
            f"{label}: has both stages and the older stage_args. Keep stages and remove stage_args."
        )
    stages_key = "stage_args" if legacy else "stages"
    if root.get(stages_key) is None:
        raise DeployError(f"{label}: has no stages. List them under 'stages:', each with a stage_id.")

    def section(name: str) -> tuple[str, Any]:
        # The older layout reads runtime only; the newer one prefers it.
        if legacy or name in runtime:
            if name in root:
                warnings.append(
                    f"{label}: vllm-omni ignores the top-level {name} here and reads runtime.{name}"
                )
            return f"runtime.{name}", runtime.get(name)
        return name, root.get(name)

    connectors_key, connectors = section("connectors")
    edges_key, edges = section("edges")
    return _Layout(
        stages=_typed(root.get(stages_key), list, f"{label}: {stages_key}"),
        connectors=_typed(connectors, dict, f"{label}: {connectors_key}"),
        edges=_typed(edges, list, f"{label}: {edges_key}"),
        stages_key=stages_key,
        connectors_key=connectors_key,
        edges_key=edges_key,
    )


def _typed(value: Any, kind: type, where: str) -> Any:
    """Return `value`, or an empty `kind` for None. Raises DeployError for any other type."""
    if value is None:
        return kind()
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "a mapping"
        raise DeployError(f"{where} must be {wanted}, got {value!r}.")
    return value


def _devices(raw: Mapping[str, Any], where: str) -> str | None:
    runtime = _typed(raw.get("runtime"), dict, f"{where}: runtime")
    devices = runtime.get("devices", raw.get("devices"))
    if devices is None or isinstance(devices, str):
        return devices
    if isinstance(devices, int) and not isinstance(devices, bool):
        return str(devices)
    raise DeployError(f'{where}: devices must be a string of device numbers such as "0,1", got {devices!r}.')


# ------------------------------------------------------------------------------------------------- edges
class _EdgeBuilder:
    """Collects the edges of one document in the order in which vllm-omni would."""

    def __init__(self, layout: _Layout, label: str, stage_ids: frozenset[int], warnings: list[str]) -> None:
        self.edges: Edges = {}
        self._warnings = warnings
        self._layout = layout
        self._label = label
        self._stage_ids = stage_ids
        self._named_by: dict[tuple[int, int], str] = {}

    def add_named(self, stage: Stage) -> None:
        """Add the edges that one stage's input_connectors and output_connectors name."""
        for section, prefix in (("input_connectors", "from_stage_"), ("output_connectors", "to_stage_")):
            where = f"{self._label}: stage {stage.stage_id}: {section}"
            named = stage.raw.get(section, {})
            if not isinstance(named, dict):
                raise DeployError(
                    f"{where} must be a mapping such as {{{prefix}N: <connector>}}, got {named!r}."
                )
            for key, definition in named.items():
                other = self._stage_of_key(key, prefix, where)
                edge = (other, stage.stage_id) if prefix == "from_stage_" else (stage.stage_id, other)
                self._add(
                    edge,
                    self._connector(definition, f"{where}.{key}"),
                    f"{section} of stage {stage.stage_id}",
                )

    def add_implied(self, stages: Iterable[Stage]) -> None:
        """Add shared-memory edges where `edges` or `engine_input_source` ask for one that no stage names."""
        for index, entry in enumerate(self._layout.edges):
            where = f"{self._label}: {self._layout.edges_key}[{index}]"
            if not isinstance(entry, dict):
                raise DeployError(f"{where} must be a mapping such as {{from: 0, to: 1}}, got {entry!r}.")
            edge = tuple(self._stage_of_value(entry.get(end), f"{where}: {end}") for end in ("from", "to"))
            self._add_shared_memory((edge[0], edge[1]))
        for stage in stages:
            where = f"{self._label}: stage {stage.stage_id}: engine_input_source"
            sources = stage.raw.get("engine_input_source", [])
            if not isinstance(sources, list):
                raise DeployError(
                    f"{where} must be a list of stage ids, got {sources!r}. Write [0] for stage 0."
                )
            for source in sources:
                self._add_shared_memory((self._stage_of_value(source, where), stage.stage_id))

    def _add(self, edge: tuple[int, int], connector: Connector, named_by: str) -> None:
        existing = self.edges.get(edge)
        if existing is None:
            self.edges[edge] = connector
            self._named_by[edge] = named_by
            return
        where = f"{self._label}: edge {edge[0]} -> {edge[1]}"
        if existing.name != connector.name:
            raise DeployError(
                f"{where}: {self._named_by[edge]} names {existing.name}, but {named_by} names "
                f"{connector.name}. Both ends must use the same connector."
            )
        keys = sorted(existing.extra.keys() | connector.extra.keys(), key=str)
        differing = [
            f"{key} ({existing.extra.get(key)!r} / {connector.extra.get(key)!r})"
            for key in keys
            if existing.extra.get(key) != connector.extra.get(key)
        ]
        if differing:
            self._warnings.append(
                f"{where}: its two ends differ in {', '.join(differing)}; vllm-omni uses the first "
                f"one's, from {self._named_by[edge]}, for both"
            )

    def _add_shared_memory(self, edge: tuple[int, int]) -> None:
        if edge not in self.edges:
            logger.info("%s: edge %d -> %d names no connector: using %s", self._label, *edge, SHARED_MEMORY)
            self.edges[edge] = Connector(SHARED_MEMORY)

    def _connector(self, definition: Any, where: str) -> Connector:
        """Return the connector that a reference or an inline definition means."""
        place = where  # of the definition itself, which several edges may refer to
        if isinstance(definition, str):
            defined = self._layout.connectors
            if definition not in defined:
                names = [str(name) for name in defined]
                raise DeployError(
                    f"{where} refers to connector {definition!r}, which is not defined."
                    f"{_did_you_mean(definition, names)} Defined under {self._layout.connectors_key}: "
                    f"{', '.join(names) or 'none'}."
                )
            place = f"{self._label}: {self._layout.connectors_key}.{definition}"
            where = f"{where}: connector {definition!r}"
            definition = defined[definition]
        if not isinstance(definition, dict):
            raise DeployError(
                f"{where} must be a mapping with name and extra, or the name of one under "
                f"{self._layout.connectors_key}, got {definition!r}."
            )
        name, extra = definition.get("name"), definition.get("extra", {})
        if not isinstance(name, str) or not name.strip():
            given = "has no name" if name is None else f"has name {name!r}"
            raise DeployError(f"{where} {given}. Add 'name: MoriTransferEngineConnector' or another class.")
        if not isinstance(extra, dict):
            raise DeployError(f"{where}: extra must be a mapping, got {extra!r}. Fill it or remove the key.")
        _warn_of_near(definition, ("name", "extra"), place, self._warnings)
        whole = f"{name}Connector"
        meant = whole if whole in REGISTERED_NAMES else nearest(name, REGISTERED_NAMES)
        if name not in REGISTERED_NAMES and meant:
            _warn(f"{place} has name {name!r}; did you mean {meant!r}?", self._warnings)
        odd = [key for key in extra if not isinstance(key, str)]
        if odd:
            raise DeployError(f"{where}: extra has the key {odd[0]!r}, which is not a string. Quote it.")
        return Connector(name, extra)

    def _stage_of_key(self, key: Any, prefix: str, where: str) -> int:
        found = re.fullmatch(rf"{prefix}(0|[1-9][0-9]*)", key) if isinstance(key, str) else None
        if found is None:
            number = re.search(r"[0-9]+$", str(key))
            suggestion = f"{prefix}{int(number[0])}" if number else f"{prefix}<stage id>"
            raise DeployError(f"{where}: {key!r} is not a valid key. Did you mean {suggestion!r}?")
        return self._existing(int(found[1]), f"{where}: {key}")

    def _stage_of_value(self, value: Any, where: str) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]+", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise DeployError(f"{where} must be a stage id, got {value!r}.")
        return self._existing(value, where)

    def _existing(self, stage_id: int, where: str) -> int:
        if stage_id not in self._stage_ids:
            known = ", ".join(str(known) for known in sorted(self._stage_ids)) or "none"
            raise DeployError(f"{where}: stage {stage_id} does not exist. Stages of this file: {known}.")
        return stage_id


def _warn_of_near(given: Mapping[str, Any], known: Iterable[str], where: str, warnings: list[str]) -> None:
    """Warn of keys that are nearly one of `known`; the rest are the host's affair."""
    known = tuple(known)
    for key in given:
        if isinstance(key, str) and key not in known and (meant := nearest(key, known)):
            _warn(f"{where}: key {key!r} has no effect; did you mean {meant!r}?", warnings)


def _warn(text: str, warnings: list[str]) -> None:
    if text not in warnings:  # a definition is read once for each edge that refers to it
        warnings.append(text)


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
