"""Decoding: the big data is copied once, or not at all.

msgspec would copy every bin value into a bytes object before a tensor could be made from it. So the data is
taken out first. Every sender of this format writes tensor data as the key "data" and a bin value: wherever
those bytes are found, the bin value is replaced by a small extension value with a random token, and msgspec
decodes what is left:

    payload    ... "data" bin32(1 GiB) ... "data" bin32(80 MiB) ...
    skeleton   ... "data" ext(token 0) ... "data" ext(token 1) ...

Is every match a value, and not bytes that only look like one, inside a string? msgspec says so: a token can
only reach the extension hook if its first byte stood where a value begins, and up to the first false match
skeleton and payload parse alike. If each token comes back, each match was true. If one does not, the whole
payload is decoded by msgspec, with one copy more.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import msgspec
import torch

from mori_mp import codec_omni
from mori_mp.codec_device import MARK, Fetch
from mori_mp.codec_encode import ARRAY_KINDS
from mori_mp.codec_image import restore_image
from mori_mp.codec_memory import DTYPES, MAX_DIMS, address_of, copy_bytes, random_token, tensor_from
from mori_mp.shared.errors import CorruptPayload

_DATA_KEY = b"\xa4data"
_CHUNK = 64 << 10  # searched at a time: bytes.find needs bytes
_SEARCH_FROM_BYTES = 32 << 10
_TAKE_OUT_FROM_BYTES = 8 << 10
"""When copying, smaller payloads and smaller data are not worth the search: two short copies are quicker."""

_TOKEN_CODE = 0x6D
_TOKEN_HEAD = bytes([0xD8, _TOKEN_CODE])  # fixext 16
_TOKEN_SALT_BYTES = 12
_BIN_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4}

# numpy's dtype.str of a plain dtype: byte order, kind, size, unit of time.
_ARRAY_DTYPE = re.compile(rf"[<>|=][{ARRAY_KINDS}][1-9]\d{{0,8}}(\[[1-9]?\d{{0,8}}[a-zA-Z]{{1,7}}\])?")

_MAX_SPAN = (1 << 62) - 1  # strides, in bytes, must fit 64 bits even where a side is 0


class _Bin:
    """A bin value that was taken out: where its bytes lie in the payload."""

    __slots__ = ("nbytes", "offset")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes


_NESTED = frozenset({dict, list, _Bin})


def decode(buf: bytes | bytearray | memoryview, *, copy: bool = True, fetch: Fetch | None = None) -> Any:
    """Decode a payload of the OmniSerializer format, from either end's class.

    copy=True: tensors, arrays and images own their memory and are writable; big data is copied once.
    copy=False: tensors and arrays are views of buf wherever their data is aligned for their dtype (payloads
    written by mori-mp always are, if buf is), and hold a reference to buf. Views of a read-only buffer must
    not be written to (numpy refuses, torch cannot). Images, and bytes objects, are always copies.

    fetch gets the GPU tensors that travel by themselves; a payload with such is corrupt without it.

    Tensors come back on the CPU, contiguous, with dtype and shape kept; tuples as lists; Structs and
    dataclasses as dicts; vLLM's output objects as themselves where vLLM is installed, else as dicts.
    Raises CorruptPayload when the bytes are not a payload. Memory for data is only allocated once the data
    is there in full.
    """
    view = memoryview(buf)
    if view.ndim != 1 or view.format != "B" or not view.c_contiguous:
        view = view.cast("B")
    try:
        taken = _find_data(view, _TAKE_OUT_FROM_BYTES if copy else 1, _SEARCH_FROM_BYTES if copy else 0)
        if taken:
            run = _Run(view, copy, fetch)
            if run.parse(taken):
                result = run.restore(run.root)
                if run.resolved == len(taken):
                    return result
        return _Run(view, copy, fetch).restore(msgspec.msgpack.decode(view))
    except msgspec.DecodeError as error:
        raise CorruptPayload(f"a payload of {view.nbytes} bytes is damaged: {error}") from error
    except RecursionError as error:
        raise CorruptPayload(f"a payload of {view.nbytes} bytes is nested too deeply") from error


def _find_data(view: memoryview, least: int, search_from: int) -> list[tuple[int, _Bin]]:
    """Return (offset of the bin value, its bytes) for every "data" bin of at least least bytes."""
    found: list[tuple[int, _Bin]] = []
    end = len(view)
    if end < search_from:
        return found
    base = 0  # of the chunk
    while end - base > len(_DATA_KEY) + 1:
        chunk = bytes(view[base : base + _CHUNK])
        at = 0
        base_after = base + len(chunk) - len(_DATA_KEY)  # a key may straddle two chunks
        while (hit := chunk.find(_DATA_KEY, at)) >= 0:
            at = hit + len(_DATA_KEY)
            value = base + at
            data = _bin_at(view, value)
            if data is not None and data.nbytes >= least:
                found.append((value, data))
                base_after = max(base_after, data.offset + data.nbytes)
                at = data.offset + data.nbytes - base
        if base + len(chunk) == end and base_after < end:
            break
        base = base_after
    return found


def _bin_at(view: memoryview, offset: int) -> _Bin | None:
    """Return the bin value that starts at an offset, None if there is none or it is cut off."""
    width = _BIN_LENGTH_BYTES.get(view[offset]) if offset < len(view) else None
    if width is None:
        return None
    start = offset + 1 + width
    nbytes = int.from_bytes(view[offset + 1 : start], "big")
    return _Bin(start, nbytes) if start + nbytes <= len(view) else None


class _Run:
    """One run of the decoder over one payload."""

    __slots__ = ("_address", "_bins", "_copy", "_fetch", "_view", "resolved", "root")

    def __init__(self, view: memoryview, copy: bool, fetch: Fetch | None) -> None:
        self._view = view
        self._copy = copy
        self._fetch = fetch
        self._address = -1
        self._bins: dict[bytes, _Bin] = {}
        self.resolved = 0
        self.root: Any = None

    # ------------------------------------------------------------------------------- with data taken out
    def parse(self, taken: list[tuple[int, _Bin]]) -> bool:
        """Decode the skeleton into root; False when a match was not a value."""
        salt = random_token()[:_TOKEN_SALT_BYTES]
        pieces: list[bytes | memoryview] = []
        done = 0
        for index, (offset, data) in enumerate(taken):
            token = salt + index.to_bytes(4, "big")
            self._bins[token] = data
            pieces += (self._view[done:offset], _TOKEN_HEAD, token)
            done = data.offset + data.nbytes
        pieces.append(self._view[done:])
        decoder = msgspec.msgpack.Decoder(ext_hook=self._on_extension)
        try:
            self.root = decoder.decode(b"".join(pieces))
        except msgspec.DecodeError:
            return False  # damaged, or a false match: the payload as a whole will tell
        return not self._bins

    def _on_extension(self, code: int, data: memoryview) -> Any:
        if code == _TOKEN_CODE and len(data) == _TOKEN_SALT_BYTES + 4:
            found = self._bins.pop(bytes(data), None)
            if found is not None:
                return found
        return msgspec.msgpack.Ext(code, bytes(data))

    # ------------------------------------------------------------------------------------------- objects
    def restore(self, obj: Any) -> Any:
        """Replace marked maps and taken out values, in place where possible, and return the object."""
        kind = type(obj)
        if kind is dict:
            if obj.get("__tensor__") is True:
                return self._tensor(obj)
            if obj.get("__ndarray__") is True:
                return self._array(obj)
            if obj.get("__pil_image__") is True:
                return restore_image(obj, self._bytes(obj.get("data")))
            if MARK in obj:
                return self._device_tensor(obj)
            for key, value in obj.items():
                if type(value) in _NESTED:
                    obj[key] = self.restore(value)
            if "finished" in obj or "token_ids" in obj:
                return codec_omni.rebuild(obj)
        elif kind is list:
            if not _NESTED.isdisjoint(map(type, obj)):
                obj[:] = [self.restore(item) if type(item) in _NESTED else item for item in obj]
        elif kind is _Bin:
            return bytes(self._bytes(obj))
        return obj

    def _bytes(self, data: Any) -> bytes | memoryview:
        """Return a bin value's bytes, as a view of the payload if it was taken out."""
        if type(data) is _Bin:
            self.resolved += 1
            return self._view[data.offset : data.offset + data.nbytes]
        if type(data) is bytes:
            return data
        raise CorruptPayload(f"a tensor, array or image has {type(data).__name__} for data")

    def _place(self, data: Any) -> tuple[int | bytes, int, int]:
        """Return (source, nbytes, offset) of a bin value's bytes.

        The source is an address and the offset one in the payload, or bytes that msgspec copied and -1.
        """
        if type(data) is bytes:
            return data, len(data), -1
        if type(data) is _Bin:
            self.resolved += 1
            if self._address < 0:
                self._address = address_of(self._view)
            return self._address + data.offset, data.nbytes, data.offset
        raise CorruptPayload(f"a tensor or array has {type(data).__name__} for data")

    def _device_tensor(self, fields: dict[Any, Any]) -> torch.Tensor:
        key, nbytes = fields[MARK], fields.get("nbytes")
        if self._fetch is None or type(key) is not str or type(nbytes) is not int:
            raise CorruptPayload("a tensor travels by itself in a way that this end does not understand")
        name, dtype = _dtype(fields)
        shape = _checked_shape(fields.get("shape"), dtype.itemsize, nbytes, name)
        return self._fetch(key, nbytes).view(dtype).view(shape)

    def _tensor(self, fields: dict[Any, Any]) -> torch.Tensor:
        name, dtype = _dtype(fields)
        source, nbytes, offset = self._place(fields.get("data"))
        shape = _checked_shape(fields.get("shape"), dtype.itemsize, nbytes, name)
        if self._copy or type(source) is not int or source % dtype.itemsize:
            return tensor_from(source, nbytes, dtype, shape)
        if self._view.readonly:
            # torch.frombuffer warns of read-only memory; the ctypes array keeps the payload alive instead.
            memory = (ctypes.c_ubyte * nbytes).from_address(source)
            memory.owner = self._view  # type: ignore[attr-defined]
            return torch.frombuffer(memory, dtype=dtype).view(shape)
        count = nbytes // dtype.itemsize
        return torch.frombuffer(self._view, dtype=dtype, count=count, offset=offset).view(shape)

    def _array(self, fields: dict[Any, Any]) -> Any:
        import numpy

        name = fields.get("dtype")
        if not isinstance(name, str) or not _ARRAY_DTYPE.fullmatch(name):
            raise CorruptPayload(f"an array has the unknown dtype {name!r:.40}")
        try:
            dtype = numpy.dtype(name)
        except (TypeError, ValueError, OverflowError) as error:
            raise CorruptPayload(f"an array has the unknown dtype {name!r:.40}") from error
        source, nbytes, offset = self._place(fields.get("data"))
        shape = _checked_shape(fields.get("shape"), dtype.itemsize, nbytes, name)
        if not self._copy and type(source) is int and source % dtype.alignment == 0:
            count = nbytes // dtype.itemsize
            return numpy.frombuffer(self._view, dtype=dtype, count=count, offset=offset).reshape(shape)
        array = numpy.empty(shape, dtype=dtype)
        copy_bytes(array.__array_interface__["data"][0], source, nbytes)
        return array


def _dtype(fields: dict[Any, Any]) -> tuple[str, torch.dtype]:
    """Return a tensor's dtype, with its name."""
    name = fields.get("dtype")
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if not isinstance(name, str) or dtype is None:
        raise CorruptPayload(f"a tensor has the unknown dtype {name!r:.40}")
    return name, dtype


def _checked_shape(shape: Any, itemsize: int, nbytes: int, dtype: str) -> tuple[int, ...]:
    """Return the shape as a tuple if nbytes bytes of data are exactly what it needs; or CorruptPayload."""
    if isinstance(shape, list) and len(shape) <= MAX_DIMS:
        size = span = itemsize
        for side in shape:
            if type(side) is not int or side < 0:
                break
            size *= side
            span *= side or 1
        else:
            if size == nbytes and span <= _MAX_SPAN:
                return tuple(shape)
    raise CorruptPayload(f"{nbytes} bytes of data do not make dtype {dtype} and shape {shape!r:.100}")
