"""vLLM's and vLLM-Omni's output objects as plain maps, and back.

On the wire these are maps without a marker: a decoder knows them by their keys, as the in-tree serializer
does. Neither vllm nor vllm_omni is imported for encoding (where vllm.outputs was never imported there can
be no RequestOutput), and for decoding only when a map with those keys is met.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import msgspec

from mori_mp.shared.errors import CorruptPayload

logger = logging.getLogger(__name__)

_REQUEST_KEYS = frozenset({"request_id", "prompt", "prompt_token_ids", "outputs", "finished"})
_COMPLETION_KEYS = frozenset({"index", "text", "token_ids", "finish_reason"})
_MULTIMODAL = "multimodal_output"


# --------------------------------------------------------------------------------------- encoding
def as_map(obj: Any) -> dict[str, Any] | None:
    """Return a RequestOutput's or CompletionOutput's fields and its multimodal output, None for others.

    msgspec encodes dataclasses by itself, without attributes that were added later, such as a
    CompletionOutput's multimodal output. So completions are replaced here too, one level down.
    """
    vllm = sys.modules.get("vllm.outputs")
    if vllm is None:
        return None
    if isinstance(obj, vllm.CompletionOutput):
        fields = _dataclass_map(obj)
    elif isinstance(obj, vllm.RequestOutput):
        outputs = [_completion_map(item) for item in obj.outputs]
        if dataclasses.is_dataclass(obj):  # OmniRequestOutput: its multimodal output is a field
            return _dataclass_map(obj) | {"outputs": outputs}
        names = _init_names(vllm.RequestOutput)
        fields = {name: getattr(obj, name) for name in names if hasattr(obj, name)}
        fields["outputs"] = outputs
    else:
        return None
    multimodal = getattr(obj, _MULTIMODAL, None)
    if multimodal is not None:
        fields[_MULTIMODAL] = dict(multimodal) if isinstance(multimodal, Mapping) else multimodal
    return fields


def lift(obj: Any) -> Any:
    """Replace output objects that are the payload itself, or items of it, by their maps.

    Ones deeper inside are encoded by msgspec where they are dataclasses, as the in-tree serializer does.
    """
    if "vllm.outputs" not in sys.modules:
        return obj
    kind = type(obj)
    if kind is dict and _has_dataclass(obj.values()):
        return {key: _completion_map(value) for key, value in obj.items()}
    if (kind is list or kind is tuple) and _has_dataclass(obj):
        return [_completion_map(item) for item in obj]
    return _completion_map(obj)


def _has_dataclass(items: Iterable[Any]) -> bool:
    return any(map(dataclasses.is_dataclass, set(map(type, items))))


def _completion_map(obj: Any) -> Any:
    """Return the map of a dataclass among the output objects, and anything else as it is."""
    if not dataclasses.is_dataclass(obj):
        return obj
    fields = as_map(obj)
    return obj if fields is None else fields


def _dataclass_map(obj: Any) -> dict[str, Any]:
    return {f.name: getattr(obj, f.name) for f in dataclasses.fields(obj)}


@functools.cache
def _init_names(cls: type) -> tuple[str, ...]:
    """Return the names of the constructor's parameters, without self and **kwargs."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    return tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)


# --------------------------------------------------------------------------------------- decoding
def rebuild(fields: dict[Any, Any]) -> Any:
    """Return the output object that a decoded map stands for, or the map itself.

    The map's values are decoded already. Where vllm (or vllm_omni) is not installed the map is returned as
    it is. Raises CorruptPayload when the constructor refuses the values.
    """
    if "finished" in fields and ("final_output_type" in fields or "images" in fields):
        name, module, build = "OmniRequestOutput", _module("vllm_omni.outputs"), _build_omni
    elif fields.keys() >= _REQUEST_KEYS:
        name, module, build = "RequestOutput", _module("vllm.outputs"), _build_request
    elif fields.keys() >= _COMPLETION_KEYS:
        name, module, build = "CompletionOutput", _module("vllm.outputs"), _build_completion
    else:
        return fields
    if module is None:
        return fields
    try:
        return build(getattr(module, name), fields)
    except Exception as error:
        raise CorruptPayload(f"a map with the keys of {name} cannot be made one: {error}") from error


def _build_omni(cls: Any, fields: dict[Any, Any]) -> Any:
    names = {f.name for f in dataclasses.fields(cls)}
    output = cls(**{key: value for key, value in fields.items() if key in names})
    # Senders before vllm-omni made the class a RequestOutput nested the stage's output.
    inner = fields.get("request_output")
    if inner is not None and not isinstance(inner, dict):
        output._copy_content_from(inner)
    return output


def _build_request(cls: Any, fields: dict[Any, Any]) -> Any:
    names = _init_names(cls)
    output = cls(**{name: fields[name] for name in names if name in fields})
    if fields.get(_MULTIMODAL) is not None:
        setattr(output, _MULTIMODAL, fields[_MULTIMODAL])
    return output


def _build_completion(cls: Any, fields: dict[Any, Any]) -> Any:
    output = msgspec.convert({k: v for k, v in fields.items() if k != _MULTIMODAL}, cls)
    if fields.get(_MULTIMODAL) is not None:
        setattr(output, _MULTIMODAL, fields[_MULTIMODAL])
    return output


def _module(name: str) -> ModuleType | None:
    return sys.modules.get(name) or _import(name)


@functools.cache
def _import(name: str) -> ModuleType | None:
    """Import a module of the host once; None, and a warning if it is there but broken, when that fails."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        return None
    try:
        return importlib.import_module(name)
    except Exception as error:
        logger.warning("cannot import %s (%s): its objects are decoded as dicts", name, error)
        return None
