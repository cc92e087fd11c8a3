"""Traces: both formats, and a message with the place for every mistake."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from mori_mp.pipeline.plan import ChunkShape, TensorShape
from mori_mp.pipeline.trace import TraceError, load_trace, save_trace

HEADER = {"format": "mori-mp-trace", "version": 1}
EXAMPLE = Path(__file__).parent.parent / "bench" / "traces" / "qwen3_omni_example.jsonl"


def chunk(**changes: Any) -> dict[str, Any]:
    line: dict[str, Any] = {
        "edge": "0->1",
        "request": 0,
        "tensors": {"hidden_states.output": {"dtype": "bfloat16", "shape": [3, 2048]}},
    }
    return {**line, **changes}


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_json_lines_keep_edges_requests_and_order(tmp_path: Path) -> None:
    ints = {"ids.prompt": {"dtype": "ints", "shape": [3]}}
    lines = [chunk(gap_s=0.5), chunk(request=1), chunk(tensors=ints)]
    lines += [chunk(edge="1->2"), chunk(edge="1->2", request=1)]
    path = write_lines(tmp_path / "t.jsonl", HEADER, *lines)
    hidden = TensorShape("hidden_states.output", "bfloat16", (3, 2048))
    assert load_trace(path) == {
        "0->1": [
            [ChunkShape((hidden,), 0.5), ChunkShape((TensorShape("ids.prompt", "ints", (3,)),))],
            [ChunkShape((hidden,))],
        ],
        "1->2": [[ChunkShape((hidden,))], [ChunkShape((hidden,))]],
    }


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    trace = load_trace(EXAMPLE)
    save_trace(tmp_path / "copy.jsonl", trace)
    assert load_trace(tmp_path / "copy.jsonl") == trace


def test_the_example_covers_the_edges_of_qwen3_omni() -> None:
    trace = load_trace(EXAMPLE)
    assert set(trace) == {"0->1", "1->2"}
    assert all(chunks for requests in trace.values() for chunks in requests)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (chunk(edge="0-1"), "edge must look like"),
        (chunk(request=-1), "request must be an integer >= 0"),
        (chunk(request=True), "request must be an integer >= 0"),
        (chunk(gap_s=-0.1), "gap_s must be seconds"),
        (chunk(gap_s="soon"), "gap_s must be seconds"),
        (chunk(tensors=[]), "tensors must be an object"),
        (chunk(tensor={}), r"unknown key\(s\) \['tensor'\]"),
        (chunk(tensors={"x": {"dtype": "complex64", "shape": [1]}}), "unknown dtype 'complex64'"),
        (chunk(tensors={"x": {"dtype": "int8", "shape": [-1]}}), "needs a shape"),
        (chunk(tensors={"x": {"dtype": "int8", "shape": 4}}), "needs a shape"),
        (chunk(tensors={"x": {"dtype": "int8"}}), "must be"),
        (chunk(tensors={"x": {"dtype": "ints", "shape": [2, 2]}}), r"shape \[n\]"),
        (chunk(tensors={"x": {"dtype": "int64", "shape": [1 << 20, 1 << 20]}}), "the limit is"),
        (chunk(tensors={"meta.x": {"dtype": "int8", "shape": [1]}}), "belongs to the job"),
        (
            chunk(tensors={k: {"dtype": "int8", "shape": [1]} for k in ("a", "a.b")}),
            "both a tensor and a group",
        ),
        ([1], "expected an object"),
    ],
)
def test_a_wrong_line_is_named_with_what_is_wrong(tmp_path: Path, line: Any, message: str) -> None:
    path = write_lines(tmp_path / "t.jsonl", HEADER, chunk(), line)
    with pytest.raises(TraceError, match=rf"t\.jsonl, line 3: .*{message}"):
        load_trace(path)


def test_gaps_must_be_numbers_even_in_python_s_json(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", HEADER, chunk(gap_s=float("nan")))
    with pytest.raises(TraceError, match="gap_s"):
        load_trace(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no chunks"),
        (json.dumps(HEADER), "holds no chunks"),
        (json.dumps(chunk()), "line 1: expected the header"),
        (json.dumps({**HEADER, "version": 2}), "line 1: expected the header"),
        ("\x00\xff{", "line 1: not JSON"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        load_trace(path)


def test_requests_must_be_complete(tmp_path: Path) -> None:
    gap = write_lines(tmp_path / "a.jsonl", HEADER, chunk(), chunk(request=2))
    with pytest.raises(TraceError, match="0, 1, 2"):
        load_trace(gap)
    uneven = write_lines(tmp_path / "b.jsonl", HEADER, chunk(), chunk(request=1), chunk(edge="1->2"))
    with pytest.raises(TraceError, match="different numbers of requests"):
        load_trace(uneven)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl: cannot be read: No such file"):
        load_trace(tmp_path / "none.jsonl")


# ---------------------------------------------------------------------------- safetensors
def write_safetensors(path: Path, header: Any, *, size: int | None = None) -> Path:
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if size is None else size) + raw)
    return path


def entry(dtype: str = "BF16", shape: Any = (2, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [0, 32]}


def test_safetensors_give_shapes_and_gaps(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"gaps": json.dumps({"0/0->1/1": 0.25})},
        "0/0->1/1/embed.decode": entry(),
        "0/0->1/0/embed.prefill": entry(shape=(9, 8)),
        "0/0->1/0/flags": entry("BOOL", (3,)),
    }
    trace = load_trace(write_safetensors(tmp_path / "t.safetensors", header))
    first, second = trace["0->1"][0]
    assert {t.path: (t.dtype, t.shape) for t in first.tensors} == {
        "embed.prefill": ("bfloat16", (9, 8)),
        "flags": ("bool", (3,)),
    }
    assert (first.gap_s, second.gap_s) == (None, 0.25)


def test_safetensors_written_by_the_library_are_read(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    torch = pytest.importorskip("torch")
    path = tmp_path / "t.safetensors"
    save_file({"0/0->1/0/codes.audio": torch.zeros(16, 25, dtype=torch.int64)}, path)
    assert load_trace(path) == {"0->1": [[ChunkShape((TensorShape("codes.audio", "int64", (16, 25)),))]]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"codes.audio": entry()}, "is not named request/source->target/chunk/path"),
        ({"0/0->1/x/codes": entry()}, "is not named"),
        ({"0/0->1/0/codes": entry("Q4")}, "unknown dtype"),
        ({"0/0->1/0/codes": entry(shape=(-1,))}, "needs a shape"),
        ({"0/0->1/1/codes": entry()}, "has no chunk 0"),
        ({"__metadata__": {"gaps": "["}, "0/0->1/0/codes": entry()}, "gaps is not JSON"),
        ({"__metadata__": {"gaps": "[]"}, "0/0->1/0/codes": entry()}, "gaps must be an object"),
        ({}, "holds no chunks"),
        ([], "no object"),
    ],
)
def test_a_wrong_safetensors_header_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load_trace(write_safetensors(tmp_path / "t.safetensors", header))


def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(b"abc")
    with pytest.raises(TraceError, match="too short"):
        load_trace(path)
    with pytest.raises(TraceError, match="claims"):
        load_trace(write_safetensors(path, {}, size=1 << 60))
    with pytest.raises(TraceError, match="cut short"):
        load_trace(write_safetensors(path, {}, size=100))
    path.write_bytes(struct.pack("<Q", 3) + b"\xff\xff\xff")
    with pytest.raises(TraceError, match="not a safetensors file"):
        load_trace(path)
