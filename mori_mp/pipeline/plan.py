"""The plan of a run: what the runner decides and each stage process is told. Pure data, no torch.

A `StagePlan` is the first line that a stage reads from its control pipe (JSON). It names the connector class,
the configuration vLLM-Omni would give it, the edges the stage reads and writes, and the traffic.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

GetMode = Literal["deadline", "wake", "poll"]
MetadataMode = Literal["none", "endpoint"]
"""What get() is given beside the key: nothing, or the sender's host and port as the host's engine does."""
EdgeKind = Literal["hidden", "codec", "trace"]


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """A directed edge of the deploy's topology and what travels on it."""

    source: int
    target: int
    kind: EdgeKind

    @property
    def label(self) -> str:
        return f"{self.source}->{self.target}"


class TensorShape(msgspec.Struct, frozen=True):
    """One tensor of a payload: dotted path, dtype name and shape.

    The dtype is torch's name without the prefix ("bfloat16"), or "ints" for a Python list of shape [n].
    """

    path: str
    dtype: str
    shape: tuple[int, ...]


class ChunkShape(msgspec.Struct, frozen=True):
    """One payload. `gap_s` is the recorded pause before it, in seconds; None for the run's own pacing."""

    tensors: tuple[TensorShape, ...]
    gap_s: float | None = None


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What is streamed. Everything random in it comes from `seed`.

    Exactly one of `chunks` (per request on every edge) and `duration_s` is set, unless `trace` (edge label ->
    recorded request -> its chunks) gives every edge its own length.
    """

    seed: int = 0
    requests: int = 4
    chunks: int | None = None
    duration_s: float | None = None
    gap_s: float = 0.02
    hidden_size: int = 2048
    codebooks: int = 16
    codec_chunk_frames: int = 25
    codec_left_context_frames: int = 25
    trace: dict[str, list[list[ChunkShape]]] = msgspec.field(default_factory=dict)

    def recorded(self, edge: Edge, request: int) -> list[ChunkShape] | None:
        """The recorded chunks that this request replays on this edge; None without a trace for it."""
        requests = self.trace.get(edge.label)
        return requests[request % len(requests)] if requests else None

    def chunk_count(self, edge: Edge, request: int) -> int | None:
        """Chunks of this request on this edge; None in a run by duration."""
        recorded = self.recorded(edge, request)
        return self.chunks if recorded is None else len(recorded)

    def total_chunks(self, edge: Edge) -> int | None:
        """Chunks of all requests on this edge; None in a run by duration."""
        counts = [self.chunk_count(edge, request) for request in range(self.requests)]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None


class StagePlan(msgspec.Struct, kw_only=True):
    """Everything one stage process needs."""

    stage_id: int
    connector_class: str
    """`package.module:Class`."""
    connector_config: dict[str, Any]
    inputs: list[Edge]
    outputs: list[Edge]
    traffic: Traffic
    get_mode: GetMode = "deadline"
    metadata: MetadataMode = "none"
    drain_s: float = 3.0
    """How long the connector's pool may take to be whole again after the last chunk, in seconds."""
    busy: bool = False
    """Spin a pure-Python thread, as a scheduler that holds the GIL would."""
