"""Recorded workloads: payload shapes, dtypes and gaps of a real run, replayed with generated content.

A trace says, for each edge and recorded request, which tensors each chunk held and how long the sender
paused before it. The bytes are generated from the run's seed, so that receivers can still check every one.
With more requests than the trace has, its requests are used in turn. Gaps pace edges that leave a stage
without inputs; a stage that relays sends as its own inputs arrive, spreading its recorded chunks evenly
over them.

JSON lines (`.jsonl`), one object a line. The first one is the header, each other one a chunk, in sending
order within its edge and request (more keys in the header are comments):

    {"format": "mori-mp-trace", "version": 1}
    {"edge": "0->1", "request": 0, "gap_s": 0.0, "tensors": {
        "hidden_states.output": {"dtype": "bfloat16", "shape": [211, 2048]},
        "ids.prompt": {"dtype": "ints", "shape": [211]}}}

`dtype` is torch's name, or `ints` for a Python list of integers. `gap_s` may be left out (the run's own
pacing). Keys of a tensor are dotted paths into the payload dict; `meta` belongs to the job itself.

safetensors (`.safetensors`): payloads as they were, one tensor an entry, named
`{request}/{source}->{target}/{chunk}/{dotted.path}`; `__metadata__` may hold `gaps`, a JSON object
`{"{request}/{edge}/{chunk}": seconds}`. Only the file's header is read.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mori_mp.pipeline.plan import ChunkShape, TensorShape
from mori_mp.shared.errors import MoriMPError

FORMAT = "mori-mp-trace"
VERSION = 1
DTYPES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "ints": 8,
}
"""Known dtype names and their bytes an element."""

_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_EDGE = re.compile(r"\d+->\d+")
_MAX_HEADER_BYTES = 100 << 20
_MAX_CHUNK_BYTES = 1 << 32

Trace = dict[str, list[list[ChunkShape]]]
"""Edge label -> recorded request -> its chunks in order."""


class TraceError(MoriMPError, ValueError):
    """A trace file cannot be used; the message names file and line (or entry) and what is wrong."""


def load_trace(path: Path | str) -> Trace:
    """Read a trace; raises TraceError for anything that is not exactly the documented format."""
    path = Path(path)
    try:
        trace = _load_safetensors(path) if path.suffix == ".safetensors" else _load_json_lines(path)
    except OSError as error:
        raise TraceError(f"trace {path}: cannot be read: {error.strerror or error}") from error
    if not trace:
        raise TraceError(f"trace {path}: holds no chunks")
    return trace


def save_trace(path: Path | str, trace: Mapping[str, Iterable[Iterable[ChunkShape]]]) -> None:
    """Write a trace as JSON lines."""
    with Path(path).open("w", encoding="utf-8") as out:
        out.write(json.dumps({"format": FORMAT, "version": VERSION}) + "\n")
        for edge, requests in trace.items():
            for request, chunks in enumerate(requests):
                for chunk in chunks:
                    line: dict[str, Any] = {"edge": edge, "request": request}
                    if chunk.gap_s is not None:
                        line["gap_s"] = chunk.gap_s
                    line["tensors"] = {
                        t.path: {"dtype": t.dtype, "shape": list(t.shape)} for t in chunk.tensors
                    }
                    out.write(json.dumps(line) + "\n")


# ----------------------------------------------------------------------------- JSON lines
def _load_json_lines(path: Path) -> Trace:
    recorded: dict[str, dict[int, list[ChunkShape]]] = {}
    header_seen = False
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            where = f"trace {path}, line {number}"
            try:
                line = json.loads(text)
            except ValueError as error:
                raise TraceError(f"{where}: not JSON: {error}") from error
            if not isinstance(line, dict):
                raise TraceError(f"{where}: expected an object, got {type(line).__name__}")
            if not header_seen:
                if line.get("format") != FORMAT or line.get("version") != VERSION:
                    raise TraceError(
                        f"{where}: expected the header "
                        f'{{"format": "{FORMAT}", "version": {VERSION}}}, got {text.strip()[:80]}'
                    )
                header_seen = True
                continue
            edge, request, chunk = _chunk_of_line(line, where)
            recorded.setdefault(edge, {}).setdefault(request, []).append(chunk)
    return _in_order(recorded, path)


def _chunk_of_line(line: dict[str, Any], where: str) -> tuple[str, int, ChunkShape]:
    unknown = set(line) - {"edge", "request", "gap_s", "tensors"}
    if unknown:
        raise TraceError(f"{where}: unknown key(s) {sorted(unknown)}; known: edge, request, gap_s, tensors")
    edge, request, tensors = line.get("edge"), line.get("request"), line.get("tensors")
    if not isinstance(edge, str) or not _EDGE.fullmatch(edge):
        raise TraceError(f'{where}: edge must look like "0->1", got {edge!r}')
    if not isinstance(request, int) or isinstance(request, bool) or request < 0:
        raise TraceError(f"{where}: request must be an integer >= 0, got {request!r}")
    if not isinstance(tensors, dict):
        raise TraceError(f"{where}: tensors must be an object, got {tensors!r}")
    shapes = []
    for name, described in tensors.items():
        if not isinstance(described, dict) or set(described) != {"dtype", "shape"}:
            raise TraceError(f'{where}: tensor {name!r} must be {{"dtype": ..., "shape": [...]}}')
        shapes.append(_tensor(name, described["dtype"], described["shape"], where))
    return edge, request, ChunkShape(_complete(shapes, where), _gap(line.get("gap_s"), where))


# ---------------------------------------------------------------------------- safetensors
def _load_safetensors(path: Path) -> Trace:
    where = f"trace {path}"
    header = _safetensors_header(path)
    gaps = _safetensors_gaps(header.pop("__metadata__", {}), where)
    chunks: dict[tuple[str, int, int], list[TensorShape]] = {}
    for name, entry in header.items():
        parts = name.split("/", 3)
        if len(parts) != 4 or not _EDGE.fullmatch(parts[1]) or not (parts[0] + parts[2]).isdecimal():
            raise TraceError(f"{where}: entry {name!r} is not named request/source->target/chunk/path")
        if not isinstance(entry, dict) or entry.get("dtype") not in _SAFETENSORS_DTYPES:
            raise TraceError(f"{where}: entry {name!r} has an unknown dtype")
        place = (parts[1], int(parts[0]), int(parts[2]))
        shape = _tensor(parts[3], _SAFETENSORS_DTYPES[entry["dtype"]], entry.get("shape"), where)
        chunks.setdefault(place, []).append(shape)
    recorded: dict[str, dict[int, list[ChunkShape]]] = {}
    for (edge, request, chunk), shapes in sorted(chunks.items()):
        stream = recorded.setdefault(edge, {}).setdefault(request, [])
        if chunk != len(stream):
            raise TraceError(f"{where}: request {request} on edge {edge} has no chunk {len(stream)}")
        gap = _gap(gaps.get(f"{request}/{edge}/{chunk}"), where)
        stream.append(ChunkShape(_complete(shapes, where), gap))
    return _in_order(recorded, path)


def _safetensors_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise TraceError(f"trace {path}: too short for a safetensors file")
        (size,) = struct.unpack("<Q", prefix)
        if size > _MAX_HEADER_BYTES:
            raise TraceError(f"trace {path}: not a safetensors file (its header claims {size} bytes)")
        raw = file.read(size)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise TraceError(f"trace {path}: not a safetensors file: {error}") from error
    if len(raw) < size or not isinstance(header, dict):
        raise TraceError(f"trace {path}: not a safetensors file (header is cut short or no object)")
    return header


def _safetensors_gaps(metadata: Any, where: str) -> dict[str, Any]:
    text = metadata.get("gaps", "{}") if isinstance(metadata, dict) else "{}"
    try:
        gaps = json.loads(text)
    except (TypeError, ValueError) as error:
        raise TraceError(f"{where}: __metadata__.gaps is not JSON: {error}") from error
    if not isinstance(gaps, dict):
        raise TraceError(f"{where}: __metadata__.gaps must be an object")
    return gaps


# --------------------------------------------------------------------------------- common
def _tensor(path: str, dtype: Any, shape: Any, where: str) -> TensorShape:
    if not path or path.split(".")[0] == "meta":
        raise TraceError(f"{where}: tensor path {path!r} is empty or in `meta`, which belongs to the job")
    if dtype not in DTYPES:
        raise TraceError(f"{where}: tensor {path!r} has unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or any(
        not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in shape
    ):
        raise TraceError(f"{where}: tensor {path!r} needs a shape of integers >= 0, got {shape!r}")
    if dtype == "ints" and len(shape) != 1:
        raise TraceError(f"{where}: {path!r} is a list of integers and needs a shape [n], got {shape!r}")
    size = DTYPES[dtype]
    for n in shape:
        size *= n
    if size > _MAX_CHUNK_BYTES:
        raise TraceError(f"{where}: tensor {path!r} would take {size} bytes; the limit is {_MAX_CHUNK_BYTES}")
    return TensorShape(path, dtype, tuple(shape))


def _complete(shapes: list[TensorShape], where: str) -> tuple[TensorShape, ...]:
    paths = [shape.path for shape in shapes]
    for path in paths:
        if any(other.startswith(path + ".") for other in paths):
            raise TraceError(f"{where}: {path!r} is both a tensor and a group of tensors")
    return tuple(shapes)


def _gap(value: Any, where: str) -> float | None:
    if value is None:
        return None
    # Written so that NaN is refused too.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 3600:
        raise TraceError(f"{where}: gap_s must be seconds in 0..3600, got {value!r}")
    return float(value)


def _in_order(recorded: dict[str, dict[int, list[ChunkShape]]], path: Path) -> Trace:
    counts = {edge: len(requests) for edge, requests in recorded.items()}
    if len(set(counts.values())) > 1:
        raise TraceError(f"trace {path}: edges have different numbers of requests: {counts}")
    for edge, requests in recorded.items():
        if sorted(requests) != list(range(len(requests))):
            raise TraceError(f"trace {path}: edge {edge} must number its requests 0, 1, 2, ...")
    return {edge: [requests[r] for r in range(len(requests))] for edge, requests in recorded.items()}
