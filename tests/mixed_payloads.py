"""Payloads of the mixed-end tests, by name, so that two processes can speak of the same one.

What arrived is compared through `digest()`: the form that an object has on the far side of either codec
(tuples are lists, Structs and dataclasses are maps), with the bytes of arrays as hashes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from connector_support import MIB, pattern
from PIL import Image

DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
}


def tensor_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor whose bytes are a pattern (0 and 1 for bool)."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.frombuffer(bytearray(pattern(max(count, 1), seed=count)), dtype=torch.uint8)[:count]
    if dtype is torch.bool:
        raw = raw & 1
    return raw.view(dtype).reshape(shape)


@dataclasses.dataclass
class Settings:
    rate: int
    gains: list[float]


class Chunk(msgspec.Struct, omit_defaults=True):
    codes: torch.Tensor | None = None
    finished: torch.Tensor | None = None
    unset: torch.Tensor | None = None


def _grey() -> Image.Image:
    return Image.frombytes("L", (7, 5), pattern(35))


RAW: dict[str, Callable[[], bytes | torch.Tensor]] = {
    "bytes": lambda: pattern(1000),
    "one byte": lambda: b"\x00",
    "a page": lambda: pattern(4096, 1),
    "a page and a byte": lambda: pattern(4097, 2),
    "odd megabytes": lambda: pattern(5 * MIB + 13, 3),
    **{f"tensor {name}": lambda dtype=dtype: tensor_of(dtype, 3, 5, 7) for name, dtype in DTYPES.items()},
    "0-dim tensor": lambda: torch.tensor(2.5),
    "strided tensor": lambda: tensor_of(torch.float32, 64, 48).t(),
    "big tensor": lambda: tensor_of(torch.bfloat16, 1500, 2048),
}

OBJECTS: dict[str, Callable[[], Any]] = {
    "scalars": lambda: {"a": 1, "b": -(2**40), "c": 2.5, "d": "é\n", "e": None, "f": True, "g": b"\x00\xff"},
    "bare string": lambda: "text",
    "bare list": lambda: [1, [2, (3, 4)], {"k": [5]}],
    "every dtype": lambda: {name: tensor_of(dtype, 2, 3) for name, dtype in DTYPES.items()},
    "0-dim tensors": lambda: {
        "meta": {"finished": torch.tensor(True), "left": torch.tensor(25), "x": torch.tensor(0.5).bfloat16()}
    },
    "empty tensors": lambda: {"a": torch.zeros(0, 1024), "b": torch.zeros(3, 0, 2, dtype=torch.bfloat16)},
    "strided tensors": lambda: [tensor_of(torch.int64, 9, 4).t(), tensor_of(torch.float16, 8, 8)[::2, 1::3]],
    "arrays": lambda: {
        "i": np.arange(12).reshape(3, 4).T,
        "s": np.array(["ab", "c"]),
        "f": np.float32([1, 2]),
    },
    "images": lambda: {"grey": _grey(), "rgb": _grey().convert("RGB"), "rgba": _grey().convert("RGBA")},
    "struct": lambda: Chunk(tensor_of(torch.int64, 400), torch.tensor(False)),
    "dataclass": lambda: {"s": Settings(24000, [0.5, 1.0]), "slice": slice(1, None, 2)},
    "hidden states": lambda: {
        "embed": {"prefill": tensor_of(torch.bfloat16, 700, 1024)},
        "hidden_states": {"output": tensor_of(torch.float32, 700, 2048)},
        "ids": {"all": list(range(700))},
    },
    "many small tensors": lambda: [tensor_of(torch.float32, n + 1) for n in range(200)],
}

PAYLOADS: dict[str, Callable[[], Any]] = {**RAW, **OBJECTS}


def raw_bytes(data: bytes | torch.Tensor) -> bytes:
    """The bytes that a raw payload has on the wire."""
    if isinstance(data, bytes):
        return data
    return data.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def raw_digest(data: bytes) -> list[Any]:
    """Size and hash."""
    return ["raw", len(data), hashlib.sha256(data).hexdigest()]


def digest(obj: Any) -> Any:
    """The JSON form of an object as it arrives."""
    if isinstance(obj, torch.Tensor):
        return ["tensor", str(obj.dtype), list(obj.shape), *raw_digest(raw_bytes(obj))[1:]]
    if isinstance(obj, np.ndarray):
        return ["array", obj.dtype.str, list(obj.shape), *raw_digest(np.ascontiguousarray(obj).tobytes())[1:]]
    if isinstance(obj, Image.Image):
        return ["image", obj.mode, list(obj.size), *raw_digest(obj.tobytes())[1:]]
    if isinstance(obj, msgspec.Struct):
        fields = {f.name: getattr(obj, f.name) for f in msgspec.structs.fields(obj)}
        return digest({name: value for name, value in fields.items() if value is not None})
    if dataclasses.is_dataclass(obj):
        return digest({f.name: getattr(obj, f.name) for f in dataclasses.fields(obj)})
    if isinstance(obj, slice):
        return digest([obj.start, obj.stop, obj.step])
    if isinstance(obj, dict):
        return {str(key): digest(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [digest(item) for item in obj]
    return [type(obj).__name__, repr(obj)]


def expected(name: str) -> Any:
    """What a receiver must report for a payload."""
    return raw_digest(raw_bytes(RAW[name]())) if name in RAW else digest(OBJECTS[name]())
