"""Properties of the payloads and output objects of vllm-omni that hold between our codec and its own."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_parity import both_ways, checked, form, images, leaves, tensors, texts, token_ids, whole
from vllm.logprobs import Logprob
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput, SamplingMask
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, RequestStateStats
from vllm_omni import data_entry_keys
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer
from vllm_omni.outputs import OmniRequestOutput

from mori_mp.codec import decode, plan


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


requests_with_multimodal = st.builds(with_multimodal, requests, multimodal_outputs | proxies)
diffused = st.builds(OmniRequestOutput.from_diffusion, texts, st.lists(images, max_size=2), latents=tensors())


WRAPS: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
    (lambda o: o, lambda a: a),
    (lambda o: [o, 1], lambda a: a[0]),
    (lambda o: {"engine_inputs": (o,)}, lambda a: a["engine_inputs"][0]),
    (lambda o: {"a": {"b": [[o]]}}, lambda a: a["a"]["b"][0][0]),
]


@settings(checked, max_examples=100)
@given(
    output=completions | requests_with_multimodal | omni_requests | diffused,
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


@settings(checked, max_examples=30)
@given(
    request=requests.filter(lambda request: request.outputs),
    wrap=st.sampled_from([lambda o: o, lambda o: [o]]),
)
def completions_within(request: RequestOutput, wrap: Callable[[Any], Any]) -> None:
    """In an OmniRequestOutput completions keep their multimodal output; the in-tree encoder drops it."""
    sent = {"audio": torch.ones(3)}
    for completion in request.outputs:
        completion.multimodal_output = sent
    staged = OmniRequestOutput.from_stage_output(request, stage_id=1)
    ours, theirs = plan(wrap(staged)).to_bytes(), OmniSerializer.serialize(wrap(staged))
    for read in (decode, OmniSerializer.deserialize):
        for data, kept in ((ours, form(sent)), (theirs, form(None))):
            arrived = read(data)
            [output] = arrived if isinstance(arrived, list) else [arrived]
            assert type(output) is OmniRequestOutput
            assert output.stage_id == 1
            assert [form(getattr(o, "multimodal_output", None)) for o in output.outputs] == [kept] * len(
                request.outputs
            )


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
        the_payload_between_stages,
        output_objects,
        completions_within,
        maps_that_have_some_of_the_keys,
    )
}
