"""Payloads are a function of the seed, and the check catches whatever is not that payload."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mori_mp.pipeline.content import Noise, first_difference, same_bytes
from mori_mp.pipeline.plan import ChunkShape, Edge, TensorShape, Traffic
from mori_mp.pipeline.workload import Verdict, Workload, chunk_key, says_finished, touch

HIDDEN = Edge(source=0, target=1, kind="hidden")
CODEC = Edge(source=1, target=2, kind="codec")
TRAFFIC = Traffic(seed=7, requests=2, chunks=5)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(TRAFFIC)


def stamped(workload: Workload, edge: Edge, request: int, chunk: int, *, last: bool = False) -> Any:
    payload = workload.build(edge, request, chunk, last=last)
    payload["meta"]["sent_ns"] = time.monotonic_ns()
    return payload


def verdict(workload: Workload, payload: Any, edge: Edge, request: int, chunk: int) -> Verdict:
    return workload.check(payload, edge, request, chunk, time.monotonic_ns()).verdict


# ------------------------------------------------------------------------------ shapes
def test_hidden_states_start_with_a_prefill_chunk_and_go_on_with_few_tokens(workload: Workload) -> None:
    prefill = workload.build(HIDDEN, 0, 0, last=False)
    tokens = prefill["hidden_states"]["output"].shape[0]
    assert 64 <= tokens <= 512
    assert prefill["hidden_states"]["output"].shape == prefill["embed"]["prefill"].shape == (tokens, 2048)
    assert prefill["hidden_states"]["output"].dtype is torch.bfloat16
    assert len(prefill["ids"]["prompt"]) == tokens
    for chunk in range(1, 5):
        decode = workload.build(HIDDEN, 0, chunk, last=chunk == 4)
        assert 1 <= decode["embed"]["decode"].shape[0] <= 8
        assert decode["meta"]["finished"].dtype is torch.bool
        assert decode["meta"]["finished"].item() is (chunk == 4)


def test_codec_chunks_carry_the_frames_before_them_as_left_context() -> None:
    traffic = Traffic(seed=1, requests=1, chunks=6, codec_chunk_frames=10, codec_left_context_frames=25)
    workload = Workload(traffic)
    stream = torch.empty((16, 0), dtype=torch.int64)
    for chunk in range(6):
        payload = workload.build(CODEC, 0, chunk, last=False)
        frames = payload["codes"]["audio"]
        context = min(25, chunk * 10)
        assert frames.dtype is torch.int64
        assert frames.shape == (16, context + 10)
        assert payload["meta"]["left_context_size"] == context
        assert 0 <= int(frames.min()) <= int(frames.max()) < 2048
        assert torch.equal(frames[:, :context], stream[:, stream.shape[1] - context :])
        stream = torch.cat([stream, frames[:, context:]], dim=1)


def test_keys_are_those_of_the_host() -> None:
    assert chunk_key(3, 1, 17) == "req-0003_1_17"


# ------------------------------------------------------------------------- determinism
def test_two_processes_of_one_seed_agree_and_other_seeds_differ(workload: Workload) -> None:
    twin, other = Workload(TRAFFIC), Workload(Traffic(seed=8, requests=2, chunks=5))
    for edge, request, chunk in ((HIDDEN, 0, 0), (HIDDEN, 1, 3), (CODEC, 0, 0), (CODEC, 1, 4)):
        payload = stamped(workload, edge, request, chunk, last=chunk == 4)
        assert verdict(twin, payload, edge, request, chunk) is Verdict.GOOD
        assert verdict(other, payload, edge, request, chunk) is Verdict.CORRUPT


@given(name=st.text(max_size=20), count=st.integers(0, 5000))
@settings(max_examples=30, deadline=None)
def test_noise_repeats_by_name_and_differs_between_names(name: str, count: int) -> None:
    noise = Noise(3)
    assert torch.equal(noise.words(name, count), noise.words(name, count))
    if count:
        assert not torch.equal(noise.words(name, count), noise.words(name + "x", count))


def test_noise_longer_than_its_table_does_not_repeat() -> None:
    words = Noise(3).words("long", 3 << 18)
    first, second, third = words.split(1 << 18)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


# ------------------------------------------------------------------------------- check
@given(where=st.integers(0), bit=st.integers(0, 7), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_flipped_bit_is_caught(where: int, bit: int, data: st.DataObject) -> None:
    workload = Workload(TRAFFIC)
    edge, chunk = data.draw(st.sampled_from([(HIDDEN, 0), (HIDDEN, 2), (CODEC, 0), (CODEC, 3)]))
    payload = stamped(workload, edge, 1, chunk)
    assert verdict(workload, payload, edge, 1, chunk) is Verdict.GOOD
    tensors = [t for group in payload.values() for t in group.values() if isinstance(t, torch.Tensor)]
    tensor = data.draw(st.sampled_from(tensors))
    raw = tensor.reshape(-1).view(torch.uint8)
    if tensor.dtype is torch.bool:
        bit = 0  # torch leaves other bits of a bool undefined
    raw[where % raw.numel()] ^= 1 << bit
    assert verdict(workload, payload, edge, 1, chunk) is Verdict.CORRUPT


def test_the_first_wrong_byte_is_named(workload: Workload) -> None:
    payload = stamped(workload, HIDDEN, 0, 1)
    payload["hidden_states"]["output"].view(torch.uint8)[0, 1234] ^= 64
    finding = workload.check(payload, HIDDEN, 0, 1, time.monotonic_ns())
    assert finding.reason == "hidden_states.output differs first at byte 1234"


def test_duplicates_order_and_other_requests_are_told_apart(workload: Workload) -> None:
    payload = stamped(workload, HIDDEN, 0, 2)
    assert verdict(workload, payload, HIDDEN, 0, 2) is Verdict.GOOD
    assert verdict(workload, payload, HIDDEN, 0, 3) is Verdict.DUPLICATE
    assert verdict(workload, payload, HIDDEN, 0, 1) is Verdict.MISORDERED
    assert verdict(workload, payload, HIDDEN, 1, 2) is Verdict.FOREIGN


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: p["embed"].pop("decode"),
        lambda p: p["embed"].update(more=torch.zeros(1)),
        lambda p: p["ids"]["output"].append(1),
        lambda p: p["ids"].update(output=tuple(p["ids"]["output"])),
        lambda p: p["embed"].update(decode=p["embed"]["decode"].view(torch.int16)),
        lambda p: p["embed"].update(decode=p["embed"]["decode"].reshape(2048, -1)),
        lambda p: p["embed"].update(decode="a string"),
        lambda p: p["meta"].update(sent_ns=0),
        lambda p: p["meta"].update(sent_ns=time.monotonic_ns() + 10**12),
        lambda p: p["meta"].pop("sent_ns"),
        lambda p: p["meta"].update(finished=torch.tensor(True)),
        lambda p: p["meta"].update(finished=True),
        lambda p: p.update(meta=None),
    ],
)
def test_damage_to_the_structure_is_corruption(workload: Workload, damage: Any) -> None:
    payload = stamped(workload, HIDDEN, 0, 2)
    payload["embed"]["decode"] = payload["embed"]["decode"].clone()
    damage(payload)
    assert verdict(workload, payload, HIDDEN, 0, 2) is Verdict.CORRUPT


@pytest.mark.parametrize("payload", [None, b"bytes", [], {"meta": 3}])
def test_a_payload_of_another_kind_is_corruption(workload: Workload, payload: Any) -> None:
    assert verdict(workload, payload, HIDDEN, 0, 0) is Verdict.CORRUPT
    assert says_finished(payload) is False
    assert touch(payload) == 0


def test_a_run_by_duration_ends_where_the_sender_says() -> None:
    workload = Workload(Traffic(requests=1, duration_s=1.0))
    payload = stamped(workload, CODEC, 0, 9, last=True)
    finding = workload.check(payload, CODEC, 0, 9, time.monotonic_ns())
    assert (finding.verdict, finding.finished) == (Verdict.GOOD, True)
    assert says_finished(payload)


# ------------------------------------------------------------------------------- trace
def test_recorded_shapes_are_replayed_with_requests_in_turn() -> None:
    recorded = [
        [ChunkShape((TensorShape("a.b", "float16", (3, 5)), TensorShape("c", "ints", (4,))), 0.5)],
        [ChunkShape((TensorShape("flag", "bool", (9,)),)), ChunkShape(())],
    ]
    edge = Edge(source=0, target=1, kind="trace")
    workload = Workload(Traffic(requests=3, gap_s=0.125, trace={"0->1": recorded}))
    assert [workload.traffic.chunk_count(edge, request) for request in range(3)] == [1, 2, 1]
    assert workload.traffic.total_chunks(edge) == 4
    assert workload.gap_s(edge, 2, 0) == 0.5
    assert workload.gap_s(edge, 1, 0) == 0.125
    payload = stamped(workload, edge, 2, 0, last=True)
    assert (payload["a"]["b"].dtype, payload["a"]["b"].shape) == (torch.float16, (3, 5))
    assert len(payload["c"]) == 4
    assert verdict(workload, payload, edge, 2, 0) is Verdict.GOOD
    assert stamped(workload, edge, 1, 0)["flag"].dtype is torch.bool
    assert set(stamped(workload, edge, 1, 1, last=True)) == {"meta"}


def test_touch_reads_every_tensor(workload: Workload) -> None:
    # Hidden states, embeddings and the finished flag.
    assert touch(workload.build(HIDDEN, 0, 0, last=False)) == 3


# -------------------------------------------------------------------------- comparison
def test_bytes_are_compared_not_numbers() -> None:
    nan = torch.full((4,), float("nan"))
    zero = torch.zeros(4)
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(zero, -zero)
    assert same_bytes(torch.empty(0, 3), torch.empty(0, 3))
    assert not same_bytes(torch.empty(0, 3), torch.empty(3, 0))
    odd = torch.arange(7, dtype=torch.uint8)
    assert same_bytes(odd[1:], torch.arange(1, 7, dtype=torch.uint8))
    assert first_difference(odd, odd) == -1
    changed = copy.deepcopy(odd)
    changed[6] = 0
    assert first_difference(odd, changed) == 6
