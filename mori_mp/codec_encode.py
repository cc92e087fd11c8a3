"""Encoding: an object becomes a plan of segments that are copied straight into their destination.

msgspec encodes everything but the big data. Where it meets a tensor, array or image, the hook leaves a
random mark in the output and remembers the data; afterwards the output is split at the marks and each mark
is replaced by a map head, followed by the data itself as a segment of its own:

    skeleton   ... "codes" <mark> "meta" {...}
    segments   [ ... "codes" {"__tensor__": true, "dtype": ..., "shape": ..., "__pad__": bin, "data": bin32 ]
               [ tensor data, where it lies now ]
               [ "meta" {...} ]

The length of "__pad__" is chosen so that the data starts at a multiple of 64 bytes from the start of the
payload. Decoders read only the keys they know, so the pad means nothing to them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import msgspec
import torch

from mori_mp import codec_omni
from mori_mp.codec_device import DeviceTensors
from mori_mp.codec_image import describe_image
from mori_mp.codec_memory import (
    ALIGNMENT,
    DTYPES,
    MAX_DIMS,
    address_of,
    copy_bytes,
    is_plain,
    random_token,
    tensor_at,
)
from mori_mp.shared.errors import PayloadError
from mori_mp.shared.syscalls import copy_memory

MAX_BIN_BYTES = 0xFFFFFFFF
"""Most bytes that one msgpack bin value holds."""

ARRAY_KINDS = "biufcSUMm"
"""numpy dtype kinds that are plain bytes (no objects, no structs, no variable-width strings)."""

_encode = msgspec.msgpack.encode
_PADS = [b"\xa7__pad__\xc4" + bytes([n]) + bytes(n) for n in range(ALIGNMENT)]
_DATA_KEY = b"\xa4data"
_DATA_HEAD_BYTES = len(_DATA_KEY) + 5
_TENSOR_HEADS = {
    dtype: b"\x85" + _encode("__tensor__") + b"\xc3" + _encode("dtype") + _encode(name) + _encode("shape")
    for name, dtype in DTYPES.items()
    if name == str(dtype).removeprefix("torch.")
}
_ARRAY_HEAD = b"\x85" + _encode("__ndarray__") + b"\xc3" + _encode("dtype")
_SHAPE_KEY = _encode("shape")


class HostSegment(NamedTuple):
    """Bytes that lie contiguous in host memory; owner keeps them there."""

    address: int
    nbytes: int
    owner: Any


class TensorSegment(NamedTuple):
    """A tensor that must be gathered or brought to the host: on a device, strided, or lazily conjugated."""

    tensor: torch.Tensor
    nbytes: int


Segment = bytes | HostSegment | TensorSegment


class Plan:
    """An encoded object whose big data has not moved yet.

    nbytes is the exact size of the payload. segments are its pieces in order: bytes, HostSegment or
    TensorSegment. Tensors and arrays are read when the plan is written: leave them unchanged until then.
    """

    __slots__ = ("nbytes", "segments")

    def __init__(self, segments: list[Segment], nbytes: int) -> None:
        self.segments = segments
        self.nbytes = nbytes

    @property
    def host_only(self) -> bool:
        """True when writing is memory copies only: no device, no torch call, the GIL kept up to 4 MiB."""
        return not any(type(segment) is TensorSegment for segment in self.segments)

    def write_into_address(self, address: int) -> None:
        """Write the payload's nbytes bytes to an address of this process."""
        for segment in self.segments:
            if type(segment) is bytes:
                nbytes = len(segment)
                copy_bytes(address, segment, nbytes)
            elif type(segment) is HostSegment:
                nbytes = segment.nbytes
                copy_memory(address, segment.address, nbytes)
            else:
                assert type(segment) is TensorSegment
                nbytes = segment.nbytes
                source = segment.tensor
                tensor_at(address, source.dtype, tuple(source.shape)).copy_(source)
            address += nbytes

    def write_into(self, dst: bytearray | memoryview) -> None:
        """Write the payload to the start of a writable contiguous buffer of at least nbytes bytes."""
        view = memoryview(dst)
        if view.readonly or not view.c_contiguous or view.nbytes < self.nbytes:
            raise ValueError(
                f"a payload of {self.nbytes} bytes needs a writable contiguous buffer of that size, "
                f"not one of {view.nbytes} bytes (read-only: {view.readonly})"
            )
        self.write_into_address(address_of(view))

    def to_bytes(self) -> bytes:
        """Return the payload as bytes (two copies: for small payloads)."""
        buffer = bytearray(self.nbytes)
        self.write_into(buffer)
        return bytes(buffer)


def plan(obj: Any, apart: DeviceTensors | None = None) -> Plan:
    """Encode an object in the OmniSerializer format, all but its tensor, array and image data.

    apart takes the GPU tensors that are to travel by themselves; they must be published before the object.
    Takes what msgspec encodes (None, bool, int, float, str, bytes, list, tuple, dict, set, dataclasses,
    msgspec Structs, enums, datetimes, ...), torch tensors of any device, numpy arrays and number scalars,
    PIL images, slices, and vLLM's RequestOutput family. Raises PayloadError, naming type and place, for
    anything else, for integers beyond 64 bits, and for data of 4 GiB or more in one piece.
    """
    for _ in range(2):
        encoder = _Skeleton(apart)
        if apart is not None:
            apart.tensors.clear()
        try:
            pieces = encoder.encode(codec_omni.lift(obj))
        except (TypeError, ValueError, OverflowError, RecursionError, RuntimeError) as error:
            _explain(obj, error)
        if len(pieces) == len(encoder.blobs) + 1:
            return _assemble(pieces, encoder.blobs)
    raise PayloadError(f"an object of type {_name(obj)} calls for tensor data that it does not encode")


class _Blob(NamedTuple):
    """A marked map: its head up to the pad, and its data."""

    head: bytes
    data: Segment


class _Skeleton:
    """One run of the encoder."""

    __slots__ = ("_apart", "_mark", "_token", "blobs")

    def __init__(self, apart: DeviceTensors | None = None) -> None:
        self._apart = apart
        self._token = random_token()
        self._mark = msgspec.Raw(self._token)
        self.blobs: list[_Blob] = []

    def encode(self, obj: Any) -> list[bytes]:
        """Return the encoded object in pieces, a blob between each two."""
        return msgspec.msgpack.Encoder(enc_hook=self._hook).encode(obj).split(self._token)

    def _hook(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            left_out = self._apart.leave_out(obj) if self._apart is not None else None
            if left_out is not None:
                return left_out
            blob = _tensor_blob(obj)
        else:
            found = _other(obj)
            if type(found) is not _Blob:
                return found
            blob = found
        self.blobs.append(blob)
        return self._mark


def _assemble(pieces: list[bytes], blobs: list[_Blob]) -> Plan:
    segments: list[Segment] = []
    size = 0  # of the segments so far
    text = pieces[0]
    for (head, data), piece in zip(blobs, pieces[1:], strict=True):
        nbytes = len(data) if type(data) is bytes else data.nbytes  # type: ignore[union-attr]
        start = size + len(text) + len(head) + len(_PADS[0]) + _DATA_HEAD_BYTES
        pad = _PADS[-start % ALIGNMENT]
        text = b"".join((text, head, pad, _DATA_KEY, b"\xc6", nbytes.to_bytes(4, "big")))
        segments.append(text)
        size += len(text) + nbytes
        if nbytes:
            segments.append(data)
        text = piece
    if text:
        segments.append(text)
        size += len(text)
    return Plan(segments, size)


def _tensor_blob(tensor: torch.Tensor) -> _Blob:
    plain = is_plain(tensor)
    head = _TENSOR_HEADS.get(tensor.dtype)
    if head is None:
        raise TypeError(f"a tensor of dtype {tensor.dtype}")
    nbytes = _checked_size(tensor.nbytes, "a tensor")
    head += _encode(tensor.shape)
    if plain:
        return _Blob(head, HostSegment(tensor.data_ptr(), nbytes, tensor))
    return _Blob(head, TensorSegment(tensor.detach(), nbytes))


def _other(obj: Any) -> Any:
    """Return a _Blob, or something that msgspec encodes in the object's place; or raise TypeError."""
    numpy = sys.modules.get("numpy")  # an object of a module's class can only exist once it was imported
    if numpy is not None:
        if isinstance(obj, numpy.ndarray):
            return _array_blob(obj, numpy)
        if isinstance(obj, numpy.bool_ | numpy.integer | numpy.floating) and obj.itemsize <= 8:
            return obj.item()
    image = sys.modules.get("PIL.Image")
    if image is not None and isinstance(obj, image.Image):
        keys, data = describe_image(obj)
        return _Blob(_image_head(keys), _checked_bytes(data))
    fields = codec_omni.as_map(obj)
    if fields is not None:
        return fields
    if isinstance(obj, slice):
        return [obj.start, obj.stop, obj.step]
    raise TypeError(f"an object of type {_name(obj)}")


def _array_blob(array: Any, numpy: Any) -> _Blob:
    dtype = array.dtype
    if dtype.kind not in ARRAY_KINDS or not dtype.itemsize:
        raise TypeError(f"a numpy array of dtype {dtype}")
    if array.ndim > MAX_DIMS:
        raise TypeError(f"a numpy array of {array.ndim} dimensions (at most {MAX_DIMS})")
    nbytes = _checked_size(array.nbytes, "a numpy array")
    head = b"".join((_ARRAY_HEAD, _encode(dtype.str), _SHAPE_KEY, _encode(array.shape)))
    packed = array if array.flags.c_contiguous else numpy.ascontiguousarray(array)
    return _Blob(head, HostSegment(packed.__array_interface__["data"][0], nbytes, packed))


def _image_head(keys: dict[str, Any]) -> bytes:
    """Return the head of an image's map: its keys, with room for pad and data."""
    encoded = _encode(keys)
    assert encoded[0] & 0xF0 == 0x80, "an image has few keys"
    return bytes([encoded[0] + 2]) + encoded[1:]


def _checked_size(nbytes: int, what: str) -> int:
    if nbytes > MAX_BIN_BYTES:
        raise TypeError(
            f"{what} of {nbytes} bytes (a msgpack bin holds at most {MAX_BIN_BYTES}: send it in pieces, or "
            f"as a raw payload of its own)"
        )
    return nbytes


def _checked_bytes(data: bytes) -> bytes:
    _checked_size(len(data), "an image")
    return data


# ------------------------------------------------------------------------------- saying what is wrong
def _explain(obj: Any, error: Exception) -> NoReturn:
    """Raise PayloadError for the first place inside obj that cannot be encoded alone."""
    place, culprit, reason = _locate(obj, error)
    if isinstance(reason, RecursionError):
        raise PayloadError(f"cannot send {place}: it is nested too deeply, or contains itself") from error
    if type(reason) is TypeError:
        raise PayloadError(f"cannot send {place}: {reason}") from error
    raise PayloadError(f"cannot send {place}, of type {_name(culprit)}: {reason}") from error


def _locate(obj: Any, error: Exception) -> tuple[str, Any, Exception]:
    place = "payload"
    above: set[int] = set()
    while id(obj) not in above:
        above.add(id(obj))
        for step, child in _children(obj):
            failure = _failure(child)
            if failure is not None:
                place, obj, error = place + step, child, failure
                break
        else:
            break
    return place, obj, error


def _failure(obj: Any) -> Exception | None:
    try:
        _Skeleton().encode(obj)
    except Exception as error:
        return error
    return None


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    fields = codec_omni.as_map(obj)
    if fields is not None:
        yield from ((f".{name}", value) for name, value in fields.items())
    elif isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, list | tuple):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, set | frozenset):
        yield from (("{...}", value) for value in obj)
    elif isinstance(obj, slice):
        yield from ((f".{name}", getattr(obj, name)) for name in ("start", "stop", "step"))
    elif isinstance(obj, msgspec.Struct):
        yield from ((f".{name}", getattr(obj, name)) for name in obj.__struct_fields__)
    elif dataclasses.is_dataclass(obj):
        for field in dataclasses.fields(obj):
            if hasattr(obj, field.name):
                yield f".{field.name}", getattr(obj, field.name)


def _name(obj: Any) -> str:
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
