"""Properties that hold between our codec and vllm-omni's OmniSerializer; run in a process that has vllm-omni.

An object must come back in the same form over all four pairs of encoder and decoder (`both_ways`). The
functions of CHECKS are hypothesis tests without a test runner (omni_child calls them).
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import struct
import uuid
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from vllm.logprobs import Logprob
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput, SamplingMask
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, RequestStateStats
from vllm_omni import data_entry_keys
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer
from vllm_omni.outputs import OmniRequestOutput

from mori_mp.codec import decode, plan
from mori_mp.codec_memory import DTYPES
from mori_mp.shared.errors import PayloadError

checked = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def form(obj: Any) -> Any:
    """What two decoded objects must have in common, to the bit."""
    if isinstance(obj, torch.Tensor):
        raw = obj.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ("tensor", str(obj.dtype), tuple(obj.shape), raw)
    if isinstance(obj, np.ndarray):
        return ("array", obj.dtype.str, obj.shape, obj.tobytes())
    if isinstance(obj, Image.Image):
        return ("image", obj.mode, obj.size, obj.tobytes())
    if isinstance(obj, float):
        return ("float", struct.pack("d", obj))
    if isinstance(obj, dict):
        return ("dict", {key: form(value) for key, value in obj.items()})
    if isinstance(obj, list | tuple):
        return (type(obj).__name__, [form(item) for item in obj])
    if isinstance(obj, msgspec.Struct):
        return (type(obj).__name__, form(msgspec.structs.asdict(obj)))
    if hasattr(obj, "__dict__"):
        return (type(obj).__name__, form(vars(obj)))
    return (type(obj).__name__, obj)


def both_ways(obj: Any) -> Any:
    """Check all pairs of encoder and decoder; returns the object as it arrives."""
    ours, theirs = plan(obj).to_bytes(), OmniSerializer.serialize(obj)
    arrived = OmniSerializer.deserialize(theirs)
    want = form(arrived)
    assert form(decode(theirs)) == want, "encoded there, decoded here"
    assert form(decode(theirs, copy=False)) == want, "encoded there, decoded here in place"
    assert form(OmniSerializer.deserialize(ours)) == want, "encoded here, decoded there"
    assert form(decode(ours)) == want, "encoded and decoded here"
    assert form(decode(ours, copy=False)) == want, "encoded and decoded here in place"
    return arrived


# ------------------------------------------------------------------------------ values
class Colour(enum.Enum):
    RED = "red"
    TWO = 2


class Flag(enum.IntFlag):
    A = 1
    B = 2


class Point(msgspec.Struct, omit_defaults=True):
    x: Any
    y: Any = None


class Row(msgspec.Struct, array_like=True):
    a: Any
    b: Any


@dataclasses.dataclass
class Box:
    content: Any
    label: str = ""


sides = st.lists(st.integers(0, 4), max_size=3)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
whole = st.integers(-(2**63), 2**64 - 1)
token_ids = st.lists(st.integers(0, 152_000), max_size=6)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = DTYPES[draw(st.sampled_from(sorted(set(DTYPES) - {"complex32", "chalf"})))]
    shape = draw(sides)
    count = int(np.prod(shape)) if shape else 1
    raw = torch.arange(count * dtype.itemsize).remainder(2 if dtype is torch.bool else 251).to(torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    # The in-tree encoder fails where torch calls a strided tensor contiguous: with sides of 0 or 1.
    if min(shape, default=0) < 2 or draw(st.booleans()):
        return tensor
    return tensor.permute(tuple(reversed(range(tensor.dim()))))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    names = ["?", "<i2", ">i4", "<u8", "<f2", ">f8", "<c8", "S3", "<U2", "<M8[D]", "<m8[ms]"]
    dtype = np.dtype(draw(st.sampled_from(names)))
    shape = draw(sides)
    count = int(np.prod(shape)) if shape else 1
    raw = bytes(i % 2 if dtype.kind == "b" else 0 if dtype.kind == "U" else i % 251 for i in range(4096))
    array = np.frombuffer(raw, dtype, count=count).reshape(shape)
    return array.T if draw(st.booleans()) else array


images = st.builds(
    lambda mode, width, height: Image.frombytes(
        "L", (width, height), bytes(i * 97 % 251 for i in range(width * height))
    ).convert(mode),
    st.sampled_from(["L", "RGB", "RGBA", "CMYK", "YCbCr", "LA"]),
    st.integers(1, 9),
    st.integers(1, 9),
)
leaves = (
    st.none()
    | st.booleans()
    | whole
    | st.floats()
    | texts
    | st.binary(max_size=40)
    | st.binary(max_size=9).map(bytearray)
    | tensors()
    | arrays()
    | images
    | st.builds(slice, st.none() | st.integers(-9, 9), st.none() | st.integers(-9, 9), st.none() | st.just(2))
    | st.sampled_from([*Colour, Flag.A, Flag.B])
    | st.datetimes()
    | st.dates()
    | st.times()
    | st.timedeltas(max_value=datetime.timedelta(days=400), min_value=datetime.timedelta())
    | st.uuids(allow_nil=True).map(lambda u: uuid.UUID(int=u.int))
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.frozensets(whole, max_size=1)
    | st.sets(texts, max_size=1)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(texts | st.integers(-5, 2**40), inner, max_size=4)
        | st.builds(Point, inner, inner)
        | st.builds(Row, inner, inner)
        | st.builds(Box, inner, texts)
    ),
    max_leaves=12,
)


@settings(checked, max_examples=150)
@given(obj=values)
def any_values(obj: Any) -> None:
    both_ways(obj)


REFUSED = [
    object(), 1 + 2j, 2**64, -(2**63) - 1, np.array([object()]), np.zeros(2, [("a", "i4")]), range(3), len
]  # fmt: skip


@settings(checked, max_examples=60)
@given(
    obj=st.sampled_from(REFUSED),
    wrap=st.sampled_from([lambda o: o, lambda o: [o], lambda o: {"k": (1, o)}, Point, Box]),
)
def what_neither_end_takes(obj: Any, wrap: Callable[[Any], Any]) -> None:
    for encode in (OmniSerializer.serialize, plan):
        try:
            encode(wrap(obj))
        except (TypeError, ValueError, OverflowError, PayloadError):
            continue
        raise AssertionError(f"{encode} takes {obj!r}")


# --------------------------------------------------------------------- the chunk payload
def some_of(struct_class: Any, field_strategies: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Build a Struct with any of these fields set."""
    return st.fixed_dictionaries({}, optional=field_strategies).map(lambda fields: struct_class(**fields))


def fields_of(struct_class: Any) -> st.SearchStrategy[Any]:
    found: dict[str, st.SearchStrategy[Any]] = {}
    for field in msgspec.structs.fields(struct_class):
        kind = str(field.type)
        if "list[torch.Tensor]" in kind:
            found[field.name] = st.lists(tensors(), max_size=3)
        elif "tuple[torch.Tensor" in kind:
            found[field.name] = st.tuples(tensors(), tensors())
        elif "dict[int, torch.Tensor]" in kind:
            found[field.name] = st.dictionaries(st.integers(0, 48), tensors(), max_size=3)
        elif "torch.Tensor" in kind:
            found[field.name] = tensors()
        elif "list[int]" in kind:
            found[field.name] = token_ids
        elif "list[str]" in kind:
            found[field.name] = st.lists(texts, max_size=2)
        elif "list[tuple[str, str]]" in kind:
            found[field.name] = st.lists(st.tuples(texts, texts), max_size=2)
        elif "dict[str" in kind:
            found[field.name] = st.dictionaries(texts, whole, max_size=2)
        elif "Struct" in kind:
            inner = next(s for s in data_entry_keys._NESTED_STRUCTS.values() if s.__name__ in kind)
            found[field.name] = fields_of(inner)
        elif "bool" in kind:
            found[field.name] = st.booleans()
        elif "int" in kind:
            found[field.name] = st.integers(0, 2**40)
        else:
            assert "str" in kind, f"{struct_class.__name__}.{field.name}: {kind}"
            found[field.name] = texts
    return some_of(struct_class, found)


@settings(checked, max_examples=60)
@given(payload=fields_of(data_entry_keys.OmniPayloadStruct))
def the_payload_between_stages(payload: Any) -> None:
    keys = data_entry_keys
    again = keys.to_struct(both_ways(payload))  # the schema that the host checks payloads against
    assert form(keys.to_dict(again)) == form(keys.to_dict(keys.to_struct(keys.to_dict(payload))))


# --------------------------------------------------------------------------- outputs
def with_multimodal(output: Any, extra: Any) -> Any:
    """Set the attribute that vllm-omni adds to vllm's objects."""
    if extra is not None:
        output.multimodal_output = extra
    return output


adapters = st.none() | st.builds(LoRARequest, st.just("adapter"), st.just(3), st.just("/adapters/3"))
multimodal_outputs = st.none() | st.fixed_dictionaries(
    {}, optional={"audio": tensors(), "sr": tensors(), "latents": st.lists(tensors(), max_size=2)}
)
logprobs = st.builds(Logprob, st.floats(allow_nan=False), st.none() | st.integers(1, 9), texts)
completions = st.builds(
    CompletionOutput,
    index=st.integers(0, 3),
    text=texts,
    token_ids=token_ids,
    cumulative_logprob=st.none() | st.floats(allow_nan=False),
    logprobs=st.none() | st.lists(st.dictionaries(st.integers(0, 99), logprobs, max_size=2), max_size=2),
    routed_experts=st.none() | st.just(np.arange(12, dtype=np.int16).reshape(2, 3, 2)),
    finish_reason=st.sampled_from([None, "stop", "length"]),
    stop_reason=st.none() | st.integers(0, 9) | texts,
    lora_request=adapters,
    sampling_mask=st.none()
    | st.builds(SamplingMask, st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2)),
    spec_decode_metrics=st.none() | st.builds(RequestSpecDecodeMetrics, st.just(2)),
)
requests = st.builds(
    RequestOutput,
    request_id=texts,
    prompt=st.none() | texts,
    prompt_token_ids=st.none() | token_ids,
    prompt_logprobs=st.none() | st.just([None, {5: Logprob(-0.5, 1, "x")}]),
    outputs=st.lists(st.builds(with_multimodal, completions, multimodal_outputs), max_size=2),
    finished=st.booleans(),
    metrics=st.none() | st.builds(RequestStateStats, st.integers(0, 9), arrival_time=st.floats(0, 1e9)),
    lora_request=adapters,
    encoder_prompt=st.none() | texts,
    encoder_prompt_token_ids=st.none() | token_ids,
    num_cached_tokens=st.none() | st.integers(0, 99),
    kv_transfer_params=st.none() | st.dictionaries(texts, whole, max_size=2),
)
proxies = multimodal_outputs.map(lambda extra: extra if extra is None else MappingProxyType(extra))
omni_requests = st.fixed_dictionaries(
    {"request_id": texts, "finished": st.booleans()},
    optional={
        "prompt": st.none() | texts | st.just({"prompt": "p", "multi_modal_data": None}),
        "prompt_token_ids": token_ids,
        "outputs": st.lists(completions, max_size=2),
        "metrics": st.dictionaries(texts, st.floats(), max_size=2),
        "num_cached_tokens": st.integers(0, 99),
        "num_cache_creation_tokens": st.integers(0, 99),
        "kv_transfer_params": st.dictionaries(texts, whole, max_size=2),
        "ec_transfer_params": st.dictionaries(texts, whole, max_size=2),
        "stage_id": st.integers(0, 3),
        "replica_id": st.integers(0, 3),
        "final_output_type": st.sampled_from(["text", "audio", "image", "latents"]),
        "images": st.lists(images, max_size=2),
        "latents": tensors(),
        "trajectory_latents": tensors(),
        "trajectory_timesteps": tensors(),
        "trajectory_log_probs": tensors(),
        "trajectory_decoded": st.lists(images, max_size=1),
        "_multimodal_output": st.dictionaries(texts, tensors(), max_size=2),
        "_custom_output": st.dictionaries(texts, leaves, max_size=2),
        "stage_durations": st.dictionaries(texts, st.floats(0, 9), max_size=2),
        "peak_memory_mb": st.floats(0, 1e6),
        "error": texts,
        "error_status_code": st.integers(400, 599),
        "error_type": texts,
    },
).map(lambda chosen: OmniRequestOutput(**chosen))


WRAPS: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
    (lambda o: o, lambda a: a),
    (lambda o: [o, 1], lambda a: a[0]),
    (lambda o: {"engine_inputs": (o,)}, lambda a: a["engine_inputs"][0]),
    (lambda o: {"a": {"b": [[o]]}}, lambda a: a["a"]["b"][0][0]),
]


@settings(checked, max_examples=100)
@given(
    output=completions | st.builds(with_multimodal, requests, multimodal_outputs | proxies) | omni_requests,
    wrap=st.sampled_from(WRAPS),
)
def output_objects(output: Any, wrap: tuple[Callable[[Any], Any], Callable[[Any], Any]]) -> None:
    arrived = wrap[1](both_ways(wrap[0](output)))
    assert type(arrived) is type(output)
    for field in ("request_id", "text", "token_ids", "finished", "num_cached_tokens", "error", "stage_id"):
        if not callable(getattr(output, field, None)):
            assert getattr(arrived, field, None) == getattr(output, field, None)
    sent = getattr(output, "multimodal_output", None)
    assert form(getattr(arrived, "multimodal_output", None) or {}) == form(dict(sent or {}))


OUTPUT_KEYS = [
    "finished", "final_output_type", "images", "request_output", "request_id", "prompt", "outputs",
    "prompt_token_ids", "text", "token_ids", "finish_reason",
]  # fmt: skip


@settings(checked, max_examples=40)
@given(
    names=st.sets(st.sampled_from(OUTPUT_KEYS)),
    value=st.none() | st.just([]) | texts | st.just({"k": 1}),
)
def maps_that_have_some_of_the_keys(names: set[str], value: Any) -> None:
    """Plain maps are taken for output objects, or not, by the same rule."""
    both_ways(dict.fromkeys(sorted(names), value))


CHECKS = {
    check.__name__: check
    for check in (
        any_values,
        what_neither_end_takes,
        the_payload_between_stages,
        output_objects,
        maps_that_have_some_of_the_keys,
    )
}
