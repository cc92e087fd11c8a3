"""The payload codec: round trips, zero copies, damaged input."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import math
import struct
import sys
import threading
import time
import tracemalloc
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from mori_mp import codec_decode, codec_memory
from mori_mp.codec import ALIGNMENT, HostSegment, TensorSegment, decode, plan, raw_view
from mori_mp.codec_memory import DTYPES, address_of
from mori_mp.shared.errors import CorruptPayload, PayloadError

ARRAY_DTYPES = [
    "?",
    "<i2",
    ">i4",
    "<u8",
    "<f2",
    ">f8",
    "<c8",
    "<c16",
    "S3",
    "<U2",
    ">U1",
    "<M8[D]",
    "<m8[25us]",
]
IMAGE_MODES = ["1", "L", "P", "LA", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"]


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return bytes(plain.view(-1, 1).view(torch.uint8).flatten().tolist())


def make_tensor(
    dtype: torch.dtype, shape: list[int], seed: int = 0, *, layout: str = "plain"
) -> torch.Tensor:
    """A tensor of varied bytes: "t" transposed, "skip" strided, "offset" starting inside its storage."""
    shape = list(shape)
    if layout == "t":
        shape.reverse()
    if layout == "skip":
        shape = [side * 2 for side in shape]
    count = math.prod(shape) + 1
    limit = 2 if dtype is torch.bool else 251
    raw = torch.arange(seed, seed + count * dtype.itemsize).remainder(limit).to(torch.uint8)
    flat = raw.view(dtype)
    tensor = (flat[1:] if layout == "offset" else flat[:-1]).view(shape)
    if layout == "t":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    if layout == "skip":
        return tensor[(slice(None, None, 2),) * tensor.dim()]
    return tensor


def same(got: Any, sent: Any) -> bool:
    """True when got is what a receiver must see for sent."""
    if isinstance(sent, torch.Tensor):
        return (
            type(got) is torch.Tensor
            and got.dtype == sent.dtype
            and got.shape == sent.shape
            and got.is_contiguous()
            and not got.requires_grad
            and tensor_bytes(got) == tensor_bytes(sent)
        )
    if isinstance(sent, np.ndarray):
        return (
            type(got) is np.ndarray
            and got.dtype.str == sent.dtype.str
            and got.shape == sent.shape
            and got.tobytes() == sent.tobytes()
        )
    if isinstance(sent, Image.Image):
        return (got.mode, got.size, got.tobytes()) == (sent.mode, sent.size, sent.tobytes())
    if isinstance(sent, dict):
        return (
            type(got) is dict and got.keys() == sent.keys() and all(same(got[key], sent[key]) for key in sent)
        )
    if isinstance(sent, list | tuple):
        return type(got) is list and len(got) == len(sent) and all(map(same, got, sent))
    if isinstance(sent, float):
        return type(got) is float and struct.pack("d", got) == struct.pack("d", sent)
    return type(got) is type(sent) and bool(got == sent)


def aligned_copy(payload: bytes, shift: int = 0) -> memoryview:
    """The payload in writable memory, shift bytes past a 64-byte boundary."""
    backing = memoryview(bytearray(len(payload) + 2 * ALIGNMENT))
    start = -address_of(backing) % ALIGNMENT + shift
    backing[start : start + len(payload)] = payload
    return backing[start : start + len(payload)]


def peak_of(run: Callable[[], Any]) -> int:
    """The most bytes of Python (and numpy) memory that run() holds at once."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------------------------- round trips
sides = st.lists(st.integers(0, 4), max_size=3)
tensors = st.builds(
    make_tensor,
    st.sampled_from([d for d in DTYPES.values() if d is not torch.complex32]),
    sides,
    st.integers(0, 250),
    layout=st.sampled_from(["plain", "t", "skip", "offset"]),
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(ARRAY_DTYPES)))
    shape = draw(sides)
    raw = bytes(i % 2 if dtype.kind == "b" else 0 if dtype.kind == "U" else i % 251 for i in range(4096))
    array = np.frombuffer(raw, dtype, count=math.prod(shape)).reshape(shape)
    return array.T if draw(st.booleans()) else array


images = st.builds(
    lambda mode, width, height: Image.frombytes(
        "L", (width, height), bytes(i * 97 % 251 for i in range(width * height))
    ).convert(mode),
    st.sampled_from(["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LA"]),
    st.integers(1, 9),
    st.integers(1, 9),
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | texts
    | st.binary(max_size=40)
)
objects = st.recursive(
    scalars | tensors | arrays() | images,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(texts | st.integers(-5, 2**40), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(obj=objects, shift=st.integers(0, 9))
def test_round_trip(obj: Any, shift: int) -> None:
    encoded = plan(obj)
    payload = encoded.to_bytes()
    assert len(payload) == encoded.nbytes
    assert same(decode(payload), obj)
    view = aligned_copy(payload, shift)
    assert same(decode(view), obj)
    assert same(decode(view, copy=False), obj)
    assert same(decode(view.toreadonly(), copy=False), obj)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_layout(name: str) -> None:
    sent = [
        make_tensor(DTYPES[name], shape, layout=layout)
        for shape in ([], [0], [3], [4, 0, 2], [4, 6], [2, 3, 4])
        for layout in ("plain", "t", "skip", "offset")
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        view = aligned_copy(plan(sent).to_bytes())
        assert same(decode(view), sent)
        assert same(decode(view, copy=False), sent)


def test_lazy_and_differentiable_tensors_arrive_as_their_values() -> None:
    base = torch.randn(3, 4, dtype=torch.complex64)
    leaf = torch.nn.Parameter(torch.randn(2, 2))
    sent = {
        "conj": base.conj(),
        "neg": base.conj().imag,
        "both": base.conj()[0].imag,
        "leaf": leaf,
        "sum": leaf + 1,
    }
    got = decode(plan(sent).to_bytes())
    assert same(got, {key: value.detach() for key, value in sent.items()})
    assert torch.equal(got["neg"], -base.imag)


def test_what_else_msgpack_carries() -> None:
    @dataclasses.dataclass
    class Point:
        x: int
        weights: torch.Tensor

    class Meta(msgspec.Struct, omit_defaults=True):
        layers: dict[int, torch.Tensor]
        note: str | None = None

    weights = torch.ones(3)
    sent = {
        "point": Point(1, weights),
        "meta": Meta({7: weights}),
        "slice": slice(1, None, 2),
        "numpy": [np.float32(0.5), np.int64(3), np.bool_(True), np.float64(0.25)],
        "size": torch.Size([2, 3]),
        "buffers": [bytearray(b"ab"), memoryview(b"cd")],
        "extension": msgspec.msgpack.Ext(0x6D, b"0123456789abcdef"),
        "large": {"data": bytes(range(256)) * 400},
    }
    got = decode(plan(sent).to_bytes())
    assert got["extension"] == sent.pop("extension")
    del got["extension"]
    assert same(
        got,
        {
            "point": {"x": 1, "weights": weights},
            "meta": {"layers": {7: weights}},
            "slice": [1, None, 2],
            "numpy": [0.5, 3, True, 0.25],
            "size": [2, 3],
            "buffers": [b"ab", b"cd"],
            "large": sent["large"],
        },
    )


@pytest.mark.parametrize("mode", [*IMAGE_MODES, "La", "RGBa", "I", "F", "I;16"])
def test_every_image_mode(mode: str) -> None:
    grey = Image.frombytes("L", (7, 5), bytes(range(0, 210, 6)))
    if mode in ("1", "I", "F", "I;16", "RGBX", "LA", "PA", "RGBA", "CMYK", "YCbCr", "RGB", "P", "L"):
        image = grey.convert(mode)
    elif mode in ("HSV", "LAB"):
        image = Image.frombytes(mode, (7, 5), bytes(range(105)))
    else:
        image = grey.convert({"La": "LA", "RGBa": "RGBA"}[mode]).convert(mode)
    got = decode(plan([image]).to_bytes())[0]
    assert same(got, image)


def test_palettes_are_kept() -> None:
    image = Image.new("P", (2, 2), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    assert decode(plan(image).to_bytes()).convert("RGB").getpixel((0, 0)) == (10, 20, 30)


# ------------------------------------------------------------------------------------ memory behaviour
def test_tensor_data_is_aligned_and_read_in_place() -> None:
    sent = {
        "note": "x" * 13,
        "a": torch.arange(5),
        "b": [torch.ones(3, 3), np.arange(7.0), torch.tensor(True)],
    }
    encoded = plan(sent)
    assert encoded.host_only
    offset = 0
    data = []
    for segment in encoded.segments:
        if isinstance(segment, HostSegment):
            assert offset % ALIGNMENT == 0
            data.append(segment.address)
        offset += len(segment) if isinstance(segment, bytes) else segment.nbytes
    assert offset == encoded.nbytes
    assert data == [
        sent["a"].data_ptr(),
        sent["b"][0].data_ptr(),
        sent["b"][1].ctypes.data,
        sent["b"][2].data_ptr(),
    ]


def test_views_share_the_payload_and_copies_do_not() -> None:
    sent = {"t": torch.arange(6).view(2, 3), "a": np.arange(4), "s": torch.tensor(1.5)}
    view = aligned_copy(plan(sent).to_bytes())
    low, high = address_of(view), address_of(view) + view.nbytes
    shared, own = decode(view, copy=False), decode(view)
    for key in sent:
        places = [
            x.data_ptr() if isinstance(x, torch.Tensor) else x.ctypes.data for x in (shared[key], own[key])
        ]
        assert low <= places[0] < high
        assert not low <= places[1] < high
    assert own["t"].data_ptr() % ALIGNMENT == 0
    own["t"] += 1
    own["a"] += 1  # writable
    assert same(decode(view), sent)
    view[:] = bytes(view.nbytes)
    assert not shared["t"].any()
    assert not shared["a"].any()
    assert same(own["t"], sent["t"] + 1)


def test_views_keep_the_payload_alive_and_misaligned_ones_are_copied() -> None:
    sent = [torch.arange(1000), np.arange(1000), torch.arange(9, dtype=torch.int8)]
    payload = plan(sent).to_bytes()
    got = decode(aligned_copy(payload), copy=False), decode(aligned_copy(payload).toreadonly(), copy=False)
    assert same(list(got), [sent, sent])
    assert not got[1][1].flags.writeable
    odd = aligned_copy(payload, shift=1)
    shared = decode(odd, copy=False)
    odd[:] = bytes(odd.nbytes)
    assert same(shared[:2], sent[:2])
    assert not shared[2].any()  # int8 is aligned anywhere


def test_the_last_view_lets_go_of_the_payload() -> None:
    payload = plan({"t": torch.arange(6).view(2, 3), "a": np.arange(4)}).to_bytes()
    exporter = (ctypes.c_ubyte * len(payload)).from_buffer_copy(payload)
    gone: list[bool] = []
    weakref.finalize(exporter, gone.append, True)
    got = decode(memoryview(exporter).cast("B"), copy=False)
    own = decode(memoryview(exporter).cast("B"))
    del exporter
    part = got.pop("t")[1]
    got.clear()
    assert not gone
    del part
    assert gone
    assert same(own["a"], np.arange(4))


def test_own_memory_goes_with_the_last_tensor() -> None:
    part = decode(plan(torch.arange(1000)).to_bytes())[10:20]
    assert same(part, torch.arange(10, 20))


@pytest.mark.parametrize("what", ["tensor", "array"])
def test_big_data_is_copied_once(what: str) -> None:
    nbytes = 24 << 20
    obj = torch.ones(nbytes, dtype=torch.uint8) if what == "tensor" else np.ones(nbytes, np.uint8)
    payload = bytearray(plan({"data": obj}).nbytes)
    assert peak_of(lambda: plan({"data": obj}).write_into(payload)) < 1 << 20
    # A tensor's own memory is not Python's; an array's is.
    assert peak_of(lambda: decode(payload)) < (1 << 20) + (nbytes if what == "array" else 0)
    assert peak_of(lambda: decode(payload, copy=False)) < 1 << 20
    assert bytes(decode(payload)["data"][-3:]) == b"\x01\x01\x01"


def test_strided_tensors_are_gathered_when_written() -> None:
    tensor = torch.arange(12).view(3, 4)
    encoded = plan([tensor.t()])
    assert [type(s) for s in encoded.segments] == [bytes, TensorSegment]
    assert not encoded.host_only
    tensor += 1  # a plan reads late
    assert same(decode(encoded.to_bytes()), [tensor.t()])


def test_write_into_checks_its_destination() -> None:
    encoded = plan([1, 2, 3])
    for bad in (bytearray(encoded.nbytes - 1), memoryview(bytes(99)), memoryview(bytearray(99))[::2]):
        with pytest.raises(ValueError, match="writable contiguous"):
            encoded.write_into(bad)
    room = bytearray(99)
    encoded.write_into(room)
    assert room == encoded.to_bytes().ljust(99, b"\0")


def test_small_payloads_keep_the_gil() -> None:
    """A thread waits for the GIL and gets no turn: with a long switch interval only a release gives one."""
    frame = {
        "codes": torch.arange(800).view(16, 50),
        "hidden": torch.ones(8, 8, dtype=torch.bfloat16),
        "n": [1],
    }
    room = bytearray(plan(frame).nbytes)
    address = address_of(room)
    kept: list[Any] = []
    turns = 0
    turned = threading.Event()
    stop = False

    def waiter() -> None:
        nonlocal turns
        while not stop:
            time.sleep(0.0002)  # comes back and waits for the GIL
            turns += 1
            turned.set()

    def rounds() -> None:
        for _ in range(100):
            plan(frame).write_into_address(address)
            kept.append(decode(room))  # torch releases the GIL to free a tensor

    rounds()
    thread = threading.Thread(target=waiter)
    interval = sys.getswitchinterval()
    thread.start()
    gc.collect()
    gc.disable()  # other tests' tensors
    sys.setswitchinterval(60)
    try:
        turned.clear()
        turned.wait()  # so that its next wait for the GIL is one of 60 s
        before = turns
        rounds()
        after = turns
    finally:
        stop = True
        sys.setswitchinterval(interval)
        gc.enable()
        thread.join()
    assert after == before


# -------------------------------------------------------------------------------------- refused objects
class Strange:
    pass


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (Strange(), r"payload: an object of type .*Strange"),
        ({"a": [1, {2: (Strange(),)}]}, r"payload\['a'\]\[1\]\[2\]\[0\]: .*Strange"),
        ({"a": {1, 2**70}}, r"payload\['a'\]\{\.\.\.\}, of type int"),
        ([slice(0, Strange())], r"payload\[0\]\.stop"),
        ([1, "\ud800"], r"payload\[1\], of type str"),
        ({"c": CYCLE}, r"payload\['c'\].*contains itself"),
        ([torch.ones(2).to_sparse()], r"payload\[0\]: a tensor with layout torch.sparse_coo"),
        ([torch.empty(2, device="meta")], r"payload\[0\]: .*meta device"),
        (
            torch.zeros(1, dtype=torch.uint8).expand(5 << 30),
            r"payload: a tensor of 5368709120 bytes \(a msgpack bin",
        ),
        ([np.array([None])], r"payload\[0\]: a numpy array of dtype object"),
        ([np.zeros(2, "i4,i4")], r"payload\[0\]: a numpy array of dtype \["),
        ([np.complex128(1)], r"payload\[0\]: .*complex128"),
        ({"t": torch.ones([1] * 65)}, r"payload\['t'\]: a tensor of 65 dimensions"),
    ],
)
def test_refusals_name_type_and_place(obj: Any, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        plan(obj)


# ---------------------------------------------------------------------------------------- damaged input
SAMPLE = plan(
    {
        "codes": torch.arange(60).view(3, 4, 5),
        "mask": [np.arange(6) > 2, torch.tensor(True), torch.zeros(0, 2)],
        "when": np.array(["2020-01-01"], "M8[D]"),
        "image": Image.new("P", (3, 2)),
        "meta": {"finished": True, "token_ids": (1, 2), 5: b"bytes", "text": "\N{SNOWMAN}", "f": 1.5},
    }
).to_bytes()
LARGE = plan({"hidden": torch.arange(6000), "data": bytes(9000), "codes": torch.arange(8)}).to_bytes()


@pytest.fixture
def largest_block(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The largest tensor block that was asked for, in a list of one."""
    largest = [0]
    allocate = codec_memory._allocate

    def watched(nbytes: int) -> int:
        largest[0] = max(largest[0], nbytes)
        return allocate(nbytes)

    monkeypatch.setattr(codec_memory, "_allocate", watched)
    return largest


def check_damaged(payload: bytes) -> None:
    """Decoding gives a value or CorruptPayload, whichever way it is asked for."""
    for copy in (True, False):
        try:
            decode(aligned_copy(payload), copy=copy)
        except CorruptPayload:
            pass


@pytest.mark.parametrize("sample", [SAMPLE, LARGE], ids=["small", "large"])
def test_truncated_payloads_are_corrupt(sample: bytes) -> None:
    cuts = {*range(200), *range(200, len(sample), 997), len(sample) - 1}
    for length in sorted(cuts & set(range(len(sample)))):
        for copy in (True, False):
            with pytest.raises(CorruptPayload):
                decode(sample[:length], copy=copy)
    with pytest.raises(CorruptPayload):
        decode(sample + b"\0")


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_flipped_bytes_never_raise_anything_else(data: st.DataObject) -> None:
    payload = bytearray(SAMPLE)
    for _ in range(data.draw(st.integers(1, 6))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    assert peak_of(lambda: check_damaged(bytes(payload))) < 1 << 20


def marked(kind: str, **fields: Any) -> bytes:
    return msgspec.msgpack.encode([{f"__{kind}__": True, **fields}])


BOMBS = {
    "tensor too large": marked("tensor", dtype="float32", shape=[1 << 40], data=b"1234"),
    "tensor too small": marked("tensor", dtype="int8", shape=[2], data=b"1234"),
    "negative sides": marked("tensor", dtype="int8", shape=[-2, -2], data=b"1234"),
    "no data": marked("tensor", dtype="int8", shape=[1 << 40], data=b""),
    "empty but overflowing": marked("tensor", dtype="int64", shape=[0, 1 << 40, 1 << 40], data=b""),
    "huge side": marked("tensor", dtype="int8", shape=[0, 1 << 63], data=b""),
    "unknown dtype": marked("tensor", dtype="qint8", shape=[4], data=b"1234"),
    "dtype that is no dtype": marked("tensor", dtype="nn", shape=[4], data=b"1234"),
    "dtype of another type": marked("tensor", dtype=["int8"], shape=[4], data=b"1234"),
    "float side": marked("tensor", dtype="int8", shape=[4.0], data=b"1234"),
    "bool side": marked("tensor", dtype="int8", shape=[True], data=b"1"),
    "shape of another type": marked("tensor", dtype="int8", shape=4, data=b"1234"),
    "many dimensions": marked("tensor", dtype="int8", shape=[1] * 65, data=b"1"),
    "text for data": marked("tensor", dtype="int8", shape=[4], data="1234"),
    "nothing else": marked("tensor"),
    "array too large": marked("ndarray", dtype="<f8", shape=[1 << 40], data=b"12345678"),
    "array of objects": marked("ndarray", dtype="|O", shape=[1], data=b"12345678"),
    "array of records": marked("ndarray", dtype="i4,i4", shape=[1], data=b"12345678"),
    "array of nonsense": marked("ndarray", dtype="<i3", shape=[1], data=b"123"),
    "array of bad time": marked("ndarray", dtype="<M8[0zz]", shape=[1], data=b"12345678"),
    "array of giants": marked("ndarray", dtype="<U999999999", shape=[1], data=b"1234"),
    "image too large": marked("pil_image", mode="RGB", shape=[1 << 20, 1 << 20, 3], data=b"123"),
    "image without pixels": marked("pil_image", mode="L", shape=[1 << 30, 0], data=b""),
    "image mode": marked("pil_image", mode="XYZ", shape=[1, 1], data=b"1"),
    "image bands": marked("pil_image", mode="RGB", shape=[1, 1, 4], data=b"1234"),
    "array32 of 4 Gi": b"\xdd\xff\xff\xff\xff",
    "map32 of 4 Gi": b"\xdf\xff\xff\xff\xff\x01",
    "bin32 of 4 GiB": b"\x81\xa4data\xc6\xff\xff\xff\xff123",
    "deep": b"\x91" * 100_000,
    "nothing": b"",
    "unused opcode": b"\xc1",
}


@pytest.mark.parametrize("payload", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_are_refused_before_memory_is_taken(payload: bytes, largest_block: list[int]) -> None:
    def attempt() -> None:
        for copy in (True, False):
            with pytest.raises(CorruptPayload):
                decode(payload, copy=copy)

    assert peak_of(attempt) < 1 << 20
    assert largest_block == [0]


# ------------------------------------------------------------------- bytes that look like tensor data
KEY = b"\xa4data"
look_alikes = st.lists(
    st.sampled_from(
        [
            KEY,
            KEY + b"\xc4\x03",
            KEY + b"\xc5\0\x10",
            KEY + b"\xc6\0\0\0\x02",
            b"abc",
            b"\x81",
            b"\xd8m",
            b"\0" * 9,
        ]
    ),
    max_size=8,
).map(b"".join)


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(
        look_alikes | look_alikes.map(lambda b: b.decode("latin-1")) | st.just("data"), max_size=6
    ),
    tensor=tensors,
)
@example(parts=["data", b"abc"], tensor=torch.ones(2))
@example(parts=[KEY + b"\xc6\0\0\0\x02ab"], tensor=torch.ones(2))
def test_look_alikes_are_left_alone(parts: list[Any], tensor: torch.Tensor) -> None:
    obj = [parts, tensor, dict.fromkeys(parts, tensor), {"data": parts, b"data": 1}, *parts]
    assert same(decode(plan(obj).to_bytes(), copy=False), obj)
    with_big = [torch.arange(8000), obj, {"data": bytes(10_000)}, torch.arange(3000)]
    assert same(decode(plan(with_big).to_bytes()), with_big)


def test_data_is_found_across_search_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(2000)
    for filler in range(20):
        monkeypatch.setattr(codec_decode, "_CHUNK", 64 + filler)
        sent = [bytes(30_000 + filler), tensor, KEY * 9, {"data": bytes(10)}, tensor, tensor[:3]]
        payload = plan(sent).to_bytes()
        found = codec_decode._find_data(memoryview(payload), 1000, 0)
        assert [data.nbytes for _, data in found] == [16000, 16000]
        assert same(decode(payload), sent)
        assert same(decode(payload, copy=False), sent)


def test_a_value_that_is_thrown_away_does_not_confuse() -> None:
    """Data in a key, in a duplicate entry, or beside the known keys of a marked map."""
    big = msgspec.msgpack.encode(bytes(70_000))
    text = msgspec.msgpack.encode("data")
    twice = b"\x82" + text + big + text + msgspec.msgpack.encode(b"last")
    key = b"\x82\x01" + text + big + b"\x02"
    beside = b"\x85" + msgspec.msgpack.encode(
        {"__tensor__": True, "dtype": "uint8", "shape": [1], "data": b"\x07"}
    )[1:] + b"\xa1x\x81" + text + big  # fmt: skip
    payload = b"\x93" + twice + key + beside
    for copy in (True, False):
        got = decode(payload, copy=copy)
        assert same(
            got, [{"data": b"last"}, {1: "data", bytes(70_000): 2}, torch.tensor([7], dtype=torch.uint8)]
        )


# ---------------------------------------------------------------------------------------- raw payloads
@pytest.mark.parametrize(
    "data",
    [
        b"hello",
        bytearray(b"hello"),
        memoryview(b"hello")[1:],
        memoryview(b"hello world")[::2],
        memoryview(np.arange(6).reshape(2, 3)),
        b"",
        torch.arange(6).view(2, 3),
        torch.arange(6).view(2, 3).t(),
        torch.tensor(2.5, requires_grad=True),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.zeros(0, 4),
        torch.arange(20, dtype=torch.bfloat16)[3:],
    ],
    ids=[
        "bytes",
        "bytearray",
        "memoryview",
        "strided memoryview",
        "2-D memoryview",
        "no bytes",
        "tensor",
        "transposed tensor",
        "0-dim tensor that requires grad",
        "conjugate tensor",
        "empty tensor",
        "tensor at an offset",
    ],
)
def test_raw_view(data: Any) -> None:
    address, nbytes, keepalive = raw_view(data)
    expected = tensor_bytes(data) if isinstance(data, torch.Tensor) else memoryview(data).tobytes()
    got = bytearray(nbytes)
    codec_memory.copy_bytes(address_of(got), address, nbytes)
    assert (bytes(got), keepalive is None) == (expected, False)


def test_raw_view_copies_nothing_that_is_contiguous() -> None:
    tensor, array = torch.arange(9)[2:], bytearray(b"abc")
    assert raw_view(tensor)[:2] == (tensor.data_ptr(), 56)
    address, _, keepalive = raw_view(array)
    assert address == address_of(array)
    with pytest.raises(BufferError):
        array.append(1)  # pinned
    del keepalive
    with pytest.raises(PayloadError, match="sparse"):
        raw_view(torch.ones(2).to_sparse())


# ------------------------------------------------------------------------------- vLLM's output objects
@dataclasses.dataclass
class FakeCompletion:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None


class FakeRequest:
    def __init__(
        self, request_id: str, prompt: Any, prompt_token_ids: Any, outputs: Any, finished: Any, **rest: Any
    ):
        assert not rest
        self.request_id, self.prompt, self.prompt_token_ids = request_id, prompt, prompt_token_ids
        self.outputs, self.finished = outputs, finished


@dataclasses.dataclass
class FakeOmni(FakeRequest):
    request_id: str = ""
    outputs: list[Any] = dataclasses.field(default_factory=list)
    finished: bool = True
    final_output_type: str = "text"
    _multimodal_output: Any = None

    def _copy_content_from(self, source: FakeRequest) -> None:
        self.outputs = source.outputs


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, omni = types.ModuleType("vllm.outputs"), types.ModuleType("vllm_omni.outputs")
    vllm.__dict__.update(RequestOutput=FakeRequest, CompletionOutput=FakeCompletion)
    omni.__dict__.update(OmniRequestOutput=FakeOmni)
    monkeypatch.setitem(sys.modules, "vllm.outputs", vllm)
    monkeypatch.setitem(sys.modules, "vllm_omni.outputs", omni)


def fake_outputs() -> tuple[FakeCompletion, FakeRequest, FakeOmni]:
    completion = FakeCompletion(0, "x", [1, 2])
    completion.multimodal_output = {"audio": torch.ones(3)}  # type: ignore[attr-defined]
    request = FakeRequest("r", "p", [1], [completion], True)
    request.multimodal_output = types.MappingProxyType({"sr": 24000})  # type: ignore[attr-defined]
    return (
        completion,
        request,
        FakeOmni("o", [completion], final_output_type="audio", _multimodal_output={"a": 1}),
    )


@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: [o], lambda o: {"k": o}, lambda o: (o, 1)])
def test_output_objects_come_back_with_their_multimodal_output(wrap: Callable[[Any], Any]) -> None:
    def unwrap(got: Any) -> Any:
        return got["k"] if isinstance(got, dict) else got[0] if isinstance(got, list) else got

    completion, request, omni = (unwrap(decode(plan(wrap(o)).to_bytes())) for o in fake_outputs())
    assert type(completion) is FakeCompletion
    assert same(completion.multimodal_output, {"audio": torch.ones(3)})  # type: ignore[attr-defined]
    assert type(request) is FakeRequest
    assert request.multimodal_output == {"sr": 24000}  # type: ignore[attr-defined]
    assert type(omni) is FakeOmni
    assert omni._multimodal_output == {"a": 1}
    for outer in (request, omni):
        assert type(outer.outputs[0]) is FakeCompletion
        assert same(outer.outputs[0].multimodal_output, {"audio": torch.ones(3)})  # type: ignore[attr-defined]


@pytest.mark.usefixtures("fake_vllm")
def test_output_maps_that_do_not_fit_are_corrupt_and_legacy_ones_are_read() -> None:
    with pytest.raises(CorruptPayload, match="CompletionOutput"):
        decode(plan({"index": "zero", "text": 1, "token_ids": [], "finish_reason": None}).to_bytes())
    inner = fake_outputs()[1]
    legacy = decode(plan({"finished": True, "images": [], "request_output": inner, "unknown": 1}).to_bytes())
    assert type(legacy) is FakeOmni
    assert legacy.outputs[0].text == "x"
    with pytest.raises(PayloadError, match=r"payload\.outputs\[0\]\['text'\]: .*Strange"):
        plan(FakeRequest("r", "p", [1], [FakeCompletion(0, Strange(), [])], True))  # type: ignore[arg-type]


def test_output_maps_stay_dicts_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mori_mp.codec_omni._module", lambda name: None)
    for obj in (
        {"finished": True, "final_output_type": "text"},
        {"request_id": "r", "prompt": "p", "prompt_token_ids": [1], "outputs": [], "finished": False},
        {"index": 0, "text": "", "token_ids": [1], "finish_reason": None},
    ):
        assert decode(plan(obj).to_bytes()) == obj
