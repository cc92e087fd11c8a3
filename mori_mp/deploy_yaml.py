"""Reading a deploy YAML and what it inherits from.

A deploy file may name a `base_config` (a path relative to its own folder), which may name another. The
result is one plain mapping, merged as vllm-omni merges it:

    connectors    merged key by key, all the way down
    stages        matched by stage_id; the overlay's keys win, except that the keys in DEEP_MERGE_KEYS are
                  merged all the way down; unknown ids are appended
    platforms     merged per platform, their `stages` like `stages`
    all else      the overlay's value replaces the base's

Scalars are read as vllm-omni's loader (OmegaConf) reads them, which differs from PyYAML in three ways:
`1e-5` is a number, dates stay strings, and a key given twice is an error. A `${oc.env:NAME}` or
`${oc.env:NAME,default}` is replaced from the environment. Every other `${...}` is refused: vllm-omni would
fail on it too, log one warning, and then run every edge over shared memory.

Nothing here knows what the keys mean, beyond what the merge needs; see `deploy_schema` for that.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from mori_mp.shared.errors import DeployError

DEEP_MERGE_KEYS = frozenset(
    {
        "default_sampling_params",
        "default_pooling_params",
        "subtalker_sampling_params",
        "engine_extras",
        "engine_args",
    }
)
"""Keys of a stage whose mappings an overlay extends instead of replacing."""


@dataclass(frozen=True)
class Document:
    """A deploy file after inheritance. files: the file itself, then its bases, nearest first."""

    root: dict[str, Any]
    files: tuple[Path, ...]

    @property
    def label(self) -> str:
        """The file's name for messages, with its bases where it has any."""
        bases = ", ".join(str(path) for path in self.files[1:])
        return f"{self.files[0]} (with base_config {bases})" if bases else str(self.files[0])


def read_document(path: str | Path) -> Document:
    """Read `path` (JSON by its suffix, else YAML) and everything it inherits from.

    Raises DeployError for a missing or unreadable file, a syntax error (with its line), an empty file, a
    root that is no mapping, a circular `base_config`, or stages that cannot be merged.
    """
    files: list[Path] = []
    try:
        root = _resolve(Path(path), (), files)
    except RecursionError:
        raise DeployError(
            f"{files[-1]}: the values are nested too deeply, or refer to themselves through an anchor."
        ) from None
    return Document(root, tuple(files))


def deep_merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new dict: `overlay` over `base`, mappings merged all the way down. Neither is changed."""
    merged = dict(base)
    for key, value in overlay.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = deep_merge(below, value)
        else:
            merged[key] = value
    return merged


# ------------------------------------------------------------------------------------------- inheritance
def _resolve(path: Path, above: tuple[Path, ...], files: list[Path]) -> dict[str, Any]:
    """Read `path` and merge it over its bases. above: the overlays that led here, outermost first."""
    if os.path.realpath(path) in (os.path.realpath(overlay) for overlay in above):
        chain = " -> ".join(str(step) for step in (*above, path))
        raise DeployError(f"{above[0]}: base_config goes in a circle: {chain}. Remove one of the references.")
    files.append(path)
    overlay = _parse(path, above)
    base_name = overlay.pop("base_config", None)
    if base_name is None:
        return overlay
    if not isinstance(base_name, str) or not base_name or "\0" in base_name:
        raise DeployError(
            f"{path}: base_config must be the path of a deploy file, relative to {path.parent}, "
            f"got {base_name!r}."
        )
    base = _resolve(path.parent / base_name, (*above, path), files)

    merged = {**base, **{k: v for k, v in overlay.items() if k not in ("connectors", "stages", "platforms")}}
    where = f"{path} over its base_config {base_name}"
    connectors = _merge_sections(base, overlay, "connectors", where)
    if connectors:
        merged["connectors"] = connectors
    merged["stages"] = _merge_stages(base.get("stages"), overlay.get("stages"), f"{where}: stages")
    platforms = _merge_platforms(base, overlay, where)
    if platforms:
        merged["platforms"] = platforms
    return merged


def _merge_sections(
    base: Mapping[str, Any], overlay: Mapping[str, Any], key: str, where: str
) -> dict[str, Any]:
    return deep_merge(
        _mapping(base.get(key), f"{where}: {key}"), _mapping(overlay.get(key), f"{where}: {key}")
    )


def _merge_stages(base: Any, overlay: Any, where: str) -> list[dict[str, Any]]:
    merged = stages_by_id(base, where)
    for stage_id, stage in stages_by_id(overlay, where).items():
        below = merged.get(stage_id, {})
        deep = deep_merge(_only(below, DEEP_MERGE_KEYS), _only(stage, DEEP_MERGE_KEYS))
        merged[stage_id] = {**below, **stage, **deep}
    return list(merged.values())


def _merge_platforms(base: Mapping[str, Any], overlay: Mapping[str, Any], where: str) -> dict[str, Any]:
    where = f"{where}: platforms"
    below, above = (_mapping(side.get("platforms"), where) for side in (base, overlay))
    merged: dict[str, Any] = {}
    for name in (*below, *(name for name in above if name not in below)):
        lower, upper = (_mapping(side.get(name), f"{where}.{name}") for side in (below, above))
        merged[name] = {**lower, **upper}
        merged[name]["stages"] = _merge_stages(
            lower.get("stages"), upper.get("stages"), f"{where}.{name}.stages"
        )
    return merged


def stages_by_id(stages: Any, where: str) -> dict[int, dict[str, Any]]:
    """Index a YAML's list of stages, in its order. None is an empty list.

    Raises DeployError for anything but a list of mappings with distinct integer stage_ids >= 0.
    """
    by_id: dict[int, dict[str, Any]] = {}
    if stages is None:
        return by_id
    if not isinstance(stages, list):
        raise DeployError(f"{where} must be a list, got {type(stages).__name__}. Start each stage with '- '.")
    for index, stage in enumerate(stages):
        stage_id = stage.get("stage_id") if isinstance(stage, dict) else None
        if not isinstance(stage_id, int) or isinstance(stage_id, bool) or stage_id < 0:
            got = f"stage_id {stage_id!r}" if stage_id is not None else "no stage_id"
            raise DeployError(f"{where}[{index}] has {got}. Begin it with '- stage_id: <number from 0>'.")
        if stage_id in by_id:
            raise DeployError(f"{where}: stage_id {stage_id} is given twice. Merge the two entries.")
        by_id[stage_id] = stage
    return by_id


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DeployError(f"{where} must be a mapping, got {type(value).__name__}.")
    return value


def _only(mapping: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: mapping[key] for key in keys if key in mapping}


# ----------------------------------------------------------------------------------------------- parsing
def _parse(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """Read one file, without what it inherits. Always a new dict with interpolations replaced."""
    named_by = f"{above[-1]}: base_config: " if above else ""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = " A base_config is relative to the folder of the file that names it." if above else ""
        raise DeployError(f"{named_by}deploy file {path} does not exist.{hint}") from None
    except UnicodeDecodeError as exc:
        raise DeployError(f"{named_by}{path} is not UTF-8 text ({exc}).") from None
    except OSError as exc:
        raise DeployError(f"{named_by}cannot read {path}: {exc.strerror or exc}.") from None

    root = _parse_json(path, text) if path.suffix.lower() == ".json" else _parse_yaml(path, text)
    if root is None:
        raise DeployError(f"{named_by}{path} is empty. A deploy file needs at least 'stages:'.")
    if not isinstance(root, dict):
        raise DeployError(
            f"{named_by}{path} must be a mapping with keys such as connectors and stages, "
            f"got {type(root).__name__}."
        )
    result = _interpolate(root, path, "")
    assert isinstance(result, dict)
    return result


def _parse_json(path: Path, text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise DeployError(f"{path}: key {twice!r} is given twice in one object. Remove one.")
        return mapping

    if not text.strip():
        return None
    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as exc:
        raise DeployError(f"{path}, line {exc.lineno}, column {exc.colno}: not JSON: {exc.msg}.") from None
    except DeployError:
        raise
    except ValueError as exc:  # an integer of thousands of digits
        raise DeployError(f"{path}: not JSON: {exc}.") from None


def _parse_yaml(path: Path, text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        begun = f"that begins on line {exc.context_mark.line + 1}:" if exc.context_mark else ""
        story = " ".join(part for part in (exc.context, begun, exc.problem) if part)
        raise DeployError(f"{path}{place}: not YAML: {story}.") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as exc:
        # ReaderError for control characters. PyYAML's constructors raise the others, whatever they happen
        # to trip over, for a scalar that is not what its tag or its look promises ('!!int x').
        raise DeployError(f"{path}: not YAML: {exc}.") from None


class _Loader(yaml.SafeLoader):
    """SafeLoader with OmegaConf's reading of dates, exponents and keys given twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here rather than at construction, where '<<' merges have already added keys of their own.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(
                    None, None, f"key {key.value!r} is given twice in one mapping", key.start_mark
                )
            seen.add((key.tag, key.value))
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


# ----------------------------------------------------------------------------------------- interpolation
_REFERENCE = re.compile(r"(?P<escape>\\)?\$\{(?P<body>[^{}]*)(?P<end>\})?")
_ENVIRONMENT = re.compile(r"\s*oc\.env\s*:\s*(?P<name>\w+)\s*(?:,(?P<default>.*))?", re.DOTALL)


def _interpolate(value: Any, path: Path, where: str) -> Any:
    """Return a copy of `value` with `${oc.env:NAME}` replaced. where: the dotted place, for messages."""
    if isinstance(value, dict):
        return {k: _interpolate(v, path, f"{where}.{k}" if where else str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [_interpolate(item, path, f"{where}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole and not whole["escape"]:
        return _reference(whole, path, where)
    return _REFERENCE.sub(
        lambda found: found[0][1:] if found["escape"] else str(_reference(found, path, where)), value
    )


def _reference(found: re.Match[str], path: Path, where: str) -> str | None:
    environment = _ENVIRONMENT.fullmatch(found["body"]) if found["end"] else None
    if environment is None:
        _refuse_reference(found, path, where)
    name, default = environment["name"], environment["default"]
    if name in os.environ:
        return os.environ[name]
    if default is None:
        raise DeployError(
            f"{path}: {where}: the environment has no {name}. Set it, or write ${{oc.env:{name},<default>}}."
        )
    default = default.strip()
    return None if default == "null" else default.strip("'\"")


def _refuse_reference(found: re.Match[str], path: Path, where: str) -> NoReturn:
    name = found["body"].strip()
    variable = name if re.fullmatch(r"[A-Za-z_]\w*", name) else "NAME"
    raise DeployError(
        f"{path}: {where}: cannot resolve {found[0]!r}: vllm-omni reads ${{...}} as a reference to "
        f"another key. For an environment variable write ${variable} (ports, without braces) or "
        f"${{oc.env:{variable}}}; for a literal '${{' write '\\${{'."
    )
