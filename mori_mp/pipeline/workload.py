"""What travels: shapes and content of every payload, and the check of every payload received.

All of it is a function of (seed, edge, request, chunk), so a receiver knows exactly what it must get:

    hidden   an edge out of a stage without inputs (Thinker -> Talker). bf16 hidden states and embeddings
             `[tokens, 2048]` with token ids: a first prefill chunk of 64..512 tokens, then decode chunks
             of 1..8.
    codec    any other edge (Talker -> Code2Wav). int64 codec frames `[16, context + frames]`; the frames
             before the chunk's own are left context, which grows to the deploy's codec_left_context_frames.
    trace    shapes from a recorded trace.

Each payload has `meta`: `request_id`, `chunk_seq`, `finished` (bool tensor `[]`), `left_context_size` where
it applies, and `sent_ns`, the sender's CLOCK_MONOTONIC just before put().
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from mori_mp.pipeline.content import Noise, first_difference, same_bytes, tensor_of
from mori_mp.pipeline.plan import ChunkShape, Edge, TensorShape, Traffic
from mori_mp.pipeline.trace import DTYPES

PREFILL_TOKENS = (64, 512)
DECODE_TOKENS = (1, 8)
CODEBOOK_SIZE = 2048
VOCABULARY = 1 << 17

Payload = dict[str, Any]


class Verdict(Enum):
    """What a received payload turned out to be."""

    GOOD = "good"
    CORRUPT = "corrupt"
    DUPLICATE = "duplicate"
    MISORDERED = "misordered"
    FOREIGN = "foreign"


@dataclass(frozen=True)
class Finding:
    """The result of a check: the verdict, why, and what the payload's own meta says."""

    verdict: Verdict
    reason: str = ""
    finished: bool = False
    sent_ns: int = 0


def request_id(request: int) -> str:
    """External request id, as it appears in chunk keys."""
    return f"req-{request:04d}"


def chunk_key(request: int, source: int, chunk: int) -> str:
    """vLLM-Omni's chunk key: `{external_req_id}_{stage}_{chunk}`."""
    return f"{request_id(request)}_{source}_{chunk}"


class Workload:
    """Builds and checks the payloads of one run."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self._noise = Noise(traffic.seed)

    # ------------------------------------------------------------------------------ shape
    def gap_s(self, edge: Edge, request: int, chunk: int) -> float:
        """Seconds that a pacing sender waits before this chunk."""
        recorded = self.traffic.recorded(edge, request)
        gap = None if recorded is None else recorded[chunk].gap_s
        return self.traffic.gap_s if gap is None else gap

    def shape(self, edge: Edge, request: int, chunk: int) -> ChunkShape:
        """Tensors and integer lists of this payload, without `meta`."""
        recorded = self.traffic.recorded(edge, request)
        if recorded is not None:
            return recorded[chunk]
        if edge.kind == "codec":
            frames = self._left_context(chunk) + self.traffic.codec_chunk_frames
            return ChunkShape((TensorShape("codes.audio", "int64", (self.traffic.codebooks, frames)),))
        low, high = DECODE_TOKENS if chunk else PREFILL_TOKENS
        tokens = self._noise.number(f"tokens/{edge.label}/{request}/{chunk}", low, high)
        width = self.traffic.hidden_size
        embedding, ids = ("embed.decode", "ids.output") if chunk else ("embed.prefill", "ids.prompt")
        return ChunkShape(
            (
                TensorShape("hidden_states.output", "bfloat16", (tokens, width)),
                TensorShape(embedding, "bfloat16", (tokens, width)),
                TensorShape(ids, "ints", (tokens,)),
            )
        )

    def largest(self, edge: Edge) -> tuple[int, int]:
        """(request, chunk) of a payload of an edge that no other one of it exceeds in size."""
        traffic, first = self.traffic, range(self.traffic.requests)
        if edge.label in traffic.trace:
            known = [(r, c) for r in first for c in range(traffic.chunk_count(edge, r) or 0)]
        elif edge.kind == "codec":  # the left context has grown to all that it may be
            grown = -(-traffic.codec_left_context_frames // traffic.codec_chunk_frames)
            known = [(0, grown if traffic.chunks is None else min(grown, traffic.chunks - 1))]
        else:
            known = [(request, 0) for request in first]
        return max(known, key=lambda at: _bytes_of(self.shape(edge, *at)))

    def _left_context(self, chunk: int) -> int:
        return min(self.traffic.codec_left_context_frames, chunk * self.traffic.codec_chunk_frames)

    # ------------------------------------------------------------------------------ build
    def build(self, edge: Edge, request: int, chunk: int, *, last: bool) -> Payload:
        """The payload of this chunk. `meta.sent_ns` is 0 until the sender stamps it."""
        payload = self._content(edge, request, chunk)
        meta: dict[str, Any] = {
            "request_id": request_id(request),
            "chunk_seq": chunk,
            "finished": torch.tensor(last, dtype=torch.bool),
            "sent_ns": 0,
        }
        if edge.kind == "codec":
            meta["left_context_size"] = self._left_context(chunk)
        payload["meta"] = meta
        return payload

    def _content(self, edge: Edge, request: int, chunk: int) -> Payload:
        """Everything but `meta`. The tensors of a chunk share one storage, because making few is cheaper."""
        specs = self.shape(edge, request, chunk).tensors
        if edge.kind == "codec":
            return {"codes": {"audio": self._codec_frames(edge, request, chunk, frames=specs[0].shape[1])}}
        sizes = [-(-math.prod(spec.shape) * DTYPES[spec.dtype] // 8) for spec in specs]
        parts = self._noise.words(f"{edge.label}/{request}/{chunk}", sum(sizes)).split_with_sizes(sizes)
        payload: Payload = {}
        for spec, words in zip(specs, parts, strict=True):
            if spec.dtype == "ints":
                value: Any = (words & (VOCABULARY - 1)).tolist()
            else:
                value = tensor_of(words, getattr(torch, spec.dtype), spec.shape)
            _place(payload, spec.path, value)
        return payload

    def _codec_frames(self, edge: Edge, request: int, chunk: int, frames: int) -> torch.Tensor:
        """The last `frames` frames of the request's codec stream up to and including this chunk."""
        own = self.traffic.codec_chunk_frames
        blocks = -(-frames // own)
        parts = [
            self._noise.integers(
                f"{edge.label}/{request}/{block}/codes", self.traffic.codebooks * own, CODEBOOK_SIZE
            ).reshape(self.traffic.codebooks, own)
            for block in range(chunk - blocks + 1, chunk + 1)
        ]
        return torch.cat(parts, dim=1)[:, -frames:].contiguous()

    # ------------------------------------------------------------------------------ check
    def check(self, payload: Any, edge: Edge, request: int, chunk: int, usable_ns: int) -> Finding:
        """Compare a received payload with what this chunk must be; never raises for a wrong payload."""
        meta = payload.get("meta") if isinstance(payload, dict) else None
        if not isinstance(meta, dict):
            return Finding(Verdict.CORRUPT, f"no payload dict with meta: {type(payload).__name__}")
        seq, sent_ns = meta.get("chunk_seq"), meta.get("sent_ns")
        finished = _flag(meta.get("finished"))
        if not isinstance(seq, int) or not isinstance(sent_ns, int) or finished is None:
            return Finding(Verdict.CORRUPT, "meta without chunk_seq, sent_ns or finished")
        if meta.get("request_id") != request_id(request):
            return Finding(Verdict.FOREIGN, f"belongs to request {meta.get('request_id')!r}", False, sent_ns)
        if seq != chunk:
            verdict = Verdict.DUPLICATE if seq < chunk else Verdict.MISORDERED
            return Finding(verdict, f"is chunk {seq}, wanted {chunk}", False, sent_ns)
        wrong = self._difference(payload, edge, request, chunk, finished=finished)
        if not wrong and not 0 < sent_ns <= usable_ns:
            wrong = f"meta.sent_ns {sent_ns} is not before its arrival at {usable_ns}"
        return Finding(Verdict.CORRUPT if wrong else Verdict.GOOD, wrong, finished, sent_ns)

    def _difference(self, payload: Payload, edge: Edge, request: int, chunk: int, *, finished: bool) -> str:
        """What is wrong with the content, or an empty string."""
        count = self.traffic.chunk_count(edge, request)
        if count is not None and finished != (chunk == count - 1):
            return f"meta.finished is {finished} on chunk {chunk} of {count}"
        expected = self.build(edge, request, chunk, last=finished)
        want, have = dict(_leaves(expected)), dict(_leaves(payload))
        if set(want) != set(have):
            missing, extra = sorted(set(want) - set(have)), sorted(set(have) - set(want))
            return f"entries differ: missing {missing}, extra {extra}"
        for path, value in want.items():
            if path == "meta.sent_ns":
                continue
            wrong = _compare(path, value, have[path])
            if wrong:
                return wrong
        return ""


def _bytes_of(shape: ChunkShape) -> int:
    return sum(math.prod(tensor.shape) * DTYPES[tensor.dtype] for tensor in shape.tensors)


def _place(payload: Payload, path: str, value: Any) -> None:
    *groups, leaf = path.split(".")
    for group in groups:
        payload = payload.setdefault(group, {})
    payload[leaf] = value


def _leaves(payload: Payload, prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in payload.items():
        if isinstance(value, dict):
            found += _leaves(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def _flag(value: Any) -> bool | None:
    if isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.numel() == 1:
        return bool(value.item())
    return None


def _compare(path: str, want: Any, have: Any) -> str:
    if not isinstance(want, torch.Tensor):
        return "" if type(want) is type(have) and want == have else f"{path} differs"
    if not isinstance(have, torch.Tensor):
        return f"{path} is a {type(have).__name__}, not a tensor"
    have = have.cpu()
    if have.dtype != want.dtype or have.shape != want.shape:
        return f"{path} is {have.dtype} {list(have.shape)}, wanted {want.dtype} {list(want.shape)}"
    if same_bytes(want, have):
        return ""
    return f"{path} differs first at byte {first_difference(want, have)}"


def says_finished(payload: Any) -> bool:
    """Whether a received payload claims to be the last of its request; False for a malformed one."""
    meta = payload.get("meta") if isinstance(payload, dict) else None
    return isinstance(meta, dict) and _flag(meta.get("finished")) is True


def touch(payload: Any) -> int:
    """Read one element of each tensor of a payload, which proves it usable; returns the number of tensors."""
    if isinstance(payload, torch.Tensor):
        if payload.numel():
            payload.reshape(-1)[0].item()
        return 1
    if isinstance(payload, dict):
        return sum(touch(value) for value in payload.values())
    return 0
