"""Addresses of Python buffers, and torch tensors over raw memory, without giving up the GIL.

Every torch function that allocates or reshapes (`torch.empty`, `.view`, `.clone`, `.detach`, ...) releases
the GIL for a moment; beside a busy thread that costs one switch interval each (5 ms). Decoding a hidden
state would pay it twice. The tensors here are made through DLPack instead, whose import keeps the GIL:

    one malloc block:   [ DLManagedTensor 64 B | shape 8*ndim B | pad to 64 | tensor data ]
                           deleter = free

`free` itself is the deleter: it gets the address of the DLManagedTensor, which is the address of the block,
so the block goes away with the last tensor that uses the storage, in any thread, without Python code.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import re
import struct
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from mori_mp.shared.errors import PayloadError
from mori_mp.shared.syscalls import KEEP_GIL_BYTES, copy_memory

ALIGNMENT = 64
"""Alignment in bytes of tensor data, inside a payload and in memory."""

MAX_DIMS = 64
"""Most dimensions that torch's and numpy's iterators handle."""

_lib = ctypes.PyDLL(None)
_aligned_alloc = _lib.aligned_alloc
_aligned_alloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
_aligned_alloc.restype = ctypes.c_void_p
_FREE = ctypes.cast(_lib.free, ctypes.c_void_p).value
_madvise = _lib.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_HUGE_PAGES_FROM_BYTES = 4 << 20
_poke = _lib.memmove
_poke.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
_poke.restype = None

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_new_capsule.restype = ctypes.py_object
_CAPSULE_NAME = b"dltensor"

# DLManagedTensor: data, device type and id, ndim, dtype (code, bits, lanes), shape, strides (NULL means
# row-major), byte offset, context, deleter; then the shape itself.
_HEADERS = [struct.Struct(f"@QiiiBBHQQQQQ{ndim}q") for ndim in range(MAX_DIMS + 1)]
_SHAPE_OFFSET = 64
_CPU = 1
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6
_NATIVE = {
    torch.bool: (_BOOL, 8),
    torch.uint8: (_UINT, 8),
    torch.int8: (_INT, 8),
    torch.int16: (_INT, 16),
    torch.int32: (_INT, 32),
    torch.int64: (_INT, 64),
    torch.float16: (_FLOAT, 16),
    torch.float32: (_FLOAT, 32),
    torch.float64: (_FLOAT, 64),
    torch.bfloat16: (_BFLOAT, 16),
    torch.complex64: (_COMPLEX, 64),
    torch.complex128: (_COMPLEX, 128),
}
# Other dtypes come in as integers of their size and are reinterpreted.
_CARRIERS = {1: (_UINT, 8), 2: (_INT, 16), 4: (_INT, 32), 8: (_INT, 64)}

_PORTABLE = re.compile(r"bool|u?int(8|16|32|64)|b?float16|float(32|64)|complex(32|64|128)|float[48]_\w+")
DTYPES: dict[str, torch.dtype] = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and _PORTABLE.fullmatch(name)
}
"""Every dtype of this torch whose elements are whole bytes, by name without "torch."."""


_random = random.Random()


def random_token() -> bytes:
    """Return 16 random bytes. They never leave the process, and os.urandom would release the GIL."""
    return _random.getrandbits(128).to_bytes(16, "big")


class _PyBuffer(ctypes.Structure):
    """The C API's Py_buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_get_buffer.restype = ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None


def address_of(buffer: bytes | bytearray | memoryview) -> int:
    """Return the address of a contiguous buffer's first byte, read-only ones included.

    It stays valid while the caller holds the buffer and, for a bytearray, a memoryview of it.
    """
    info = _PyBuffer()
    _get_buffer(buffer, ctypes.byref(info), 0)
    address = int(info.buf or 0)
    _release_buffer(ctypes.byref(info))
    return address


def tensor_at(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a row-major CPU tensor over memory that the caller keeps alive and does not resize."""
    block = _allocate(_SHAPE_OFFSET + 8 * len(shape))
    return _adopt(block, address, dtype, shape)


def tensor_from(source: int | bytes, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a new CPU tensor that owns a copy of nbytes bytes, from an address or a bytes object.

    nbytes must be what dtype and shape need; the caller has checked that. Raises MemoryError.
    """
    data_offset = -(-(_SHAPE_OFFSET + 8 * len(shape)) // ALIGNMENT) * ALIGNMENT
    block = _allocate(data_offset + nbytes)
    copy_bytes(block + data_offset, source, nbytes)
    return _adopt(block, block + data_offset, dtype, shape)


def copy_bytes(address: int, source: int | bytes, nbytes: int) -> None:
    """Copy nbytes bytes from an address or a bytes object, keeping the GIL up to KEEP_GIL_BYTES."""
    if type(source) is not bytes:
        assert type(source) is int
        copy_memory(address, source, nbytes)
    elif nbytes <= KEEP_GIL_BYTES:
        _poke(address, source, nbytes)
    else:
        copy_memory(address, address_of(source), nbytes)


def _allocate(nbytes: int) -> int:
    block = _aligned_alloc(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
    if block is None:
        raise MemoryError(f"no memory for a tensor of {nbytes} bytes")
    if nbytes >= _HUGE_PAGES_FROM_BYTES:
        # Faulting in 4 KiB pages takes longer than the copy. Advice: a kernel without huge pages may refuse.
        start = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        _madvise(start, block + nbytes - start, mmap.MADV_HUGEPAGE)
    return int(block)


def _adopt(block: int, data: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Hand a malloc block over to torch, with data (inside or outside of it) as the tensor's memory."""
    native = _NATIVE.get(dtype)
    code, bits = native or _CARRIERS[dtype.itemsize]
    ndim = len(shape)
    form = _HEADERS[ndim]
    header = form.pack(
        data, _CPU, 0, ndim, code, bits, 1, block + _SHAPE_OFFSET, 0, 0, 0, _FREE, *shape
    )  # fmt: skip
    _poke(block, header, form.size)
    tensor: torch.Tensor = from_dlpack(_new_capsule(block, _CAPSULE_NAME, None))
    return tensor if native else tensor.view(dtype)


def is_plain(tensor: torch.Tensor) -> bool:
    """Say whether the tensor's bytes lie in host memory in the order and form that they are sent in.

    Raises TypeError as check_plain() does.
    """
    check_plain(tensor)
    return tensor.is_cpu and is_dense(tensor)


def check_plain(tensor: torch.Tensor) -> None:
    """Raise TypeError for a tensor that is not a plain array of elements with memory behind it."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(f"a tensor with layout {tensor.layout} (make it dense with to_dense() or padding)")
    if tensor.ndim > MAX_DIMS:
        raise TypeError(f"a tensor of {tensor.ndim} dimensions (at most {MAX_DIMS})")
    if tensor.is_meta:
        raise TypeError("a tensor on the meta device, which has no data")


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether a strided tensor's bytes lie in the order and form that they are sent in."""
    return tensor.is_contiguous() and not _is_lazy(tensor)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a strided tensor, or a copy of it, whose bytes are as `is_dense` has them."""
    if tensor.is_contiguous() and not _is_lazy(tensor):  # is_dense(), on the way of each GPU payload
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _lazy_mask() -> int:
    key = torch._C.DispatchKey
    keys = torch._C.DispatchKeySet(key.Conjugate) | torch._C.DispatchKeySet(key.Negative)
    return int(keys.raw_repr())


_LAZY_MASK = _lazy_mask()


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Say whether conj() or its imag is still to be applied to the bytes (is_conj() releases the GIL)."""
    dtype = tensor.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return False
    return bool(torch._C._dispatch_keys(tensor).raw_repr() & _LAZY_MASK)


def raw_view(data: bytes | bytearray | memoryview | torch.Tensor) -> tuple[int, int, Any]:
    """Return (address, nbytes, keepalive) of a raw payload's bytes in host memory.

    Nothing is copied when the bytes already lie contiguous on the CPU; else the keepalive is a contiguous
    CPU copy. A tensor gives its elements in row-major order, detached; any shape, 0-dim and empty included
    (nbytes may be 0). The address is valid while the keepalive lives. Raises PayloadError for a tensor
    without plain memory (sparse, nested, meta).
    """
    if isinstance(data, torch.Tensor):
        try:
            plain = is_plain(data)
        except TypeError as error:
            raise PayloadError(f"cannot send {error} as a raw payload") from error
        if not plain:
            data = data.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return data.data_ptr(), data.nbytes, data
    if not isinstance(data, bytes):
        data = memoryview(data)  # also pins a bytearray's memory
        if not data.c_contiguous:
            data = data.tobytes()
    return address_of(data), memoryview(data).nbytes, data
