"""Properties of values that hold between our codec and vllm-omni's OmniSerializer, in a process that has it.

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
from typing import Any

import msgspec
import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

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


ARRAY_DTYPES = (
    *("?", "<i2", ">i4", "<u8", "<f2", ">f8", "<c8", "<c16"),
    *("S3", "<U2", ">U1", "<M8[D]", "<m8[25us]"),
)
IMAGE_MODES = ("L", "P", "LA", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
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
    dtype = np.dtype(draw(st.sampled_from(ARRAY_DTYPES)))
    shape = draw(sides)
    count = int(np.prod(shape)) if shape else 1
    raw = bytes(i % 2 if dtype.kind == "b" else 0 if dtype.kind == "U" else i % 251 for i in range(4096))
    array = np.frombuffer(raw, dtype, count=count).reshape(shape)
    return array.T if draw(st.booleans()) else array


def image(mode: str, width: int = 7, height: int = 5) -> Image.Image:
    """A picture of varied bytes; two modes are made from bytes, as Pillow converts no grey to them."""
    raw = bytes(i * 97 % 251 for i in range(width * height * 3))
    if mode in ("HSV", "LAB"):
        return Image.frombytes(mode, (width, height), raw)
    return Image.frombytes("L", (width, height), raw[: width * height]).convert(mode)


images = st.builds(image, st.sampled_from(IMAGE_MODES), st.integers(1, 9), st.integers(1, 9))
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


def large_values() -> None:
    """Beyond what the codec copies, packs small or leaves in place."""
    both_ways(
        {
            "hidden": torch.randn(300, 1024).bfloat16(),
            "a": np.arange(70_000),
            "codes": torch.arange(800).view(16, 50),
        }
    )


def bitmaps() -> None:
    """An image of mode "1", which the in-tree decoder cannot make, arrives there in grey."""
    bitmap = image("1")
    ours, theirs = plan(bitmap).to_bytes(), OmniSerializer.serialize(bitmap)
    assert form(OmniSerializer.deserialize(ours)) == form(bitmap.convert("L"))
    assert form(decode(ours)) == form(bitmap)
    for read in (OmniSerializer.deserialize, decode):
        try:
            read(theirs)
        except (ValueError, PayloadError):
            continue
        raise AssertionError(f"{read} reads what the in-tree encoder makes of a bitmap")


CHECKS = {check.__name__: check for check in (any_values, what_neither_end_takes, large_values, bitmaps)}
