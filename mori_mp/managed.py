"""ManagedBuffer: a slot of pool memory in the hands of the user.

``get()`` returns raw payloads as a ManagedBuffer. It owns its slot: the bytes stay as they are until
``release()``, the end of a ``with`` block, or the last reference to the ManagedBuffer itself. After that the
slot may hold another request's payload.

A tensor from ``tensor`` or ``as_tensor`` is a view into the pool. It keeps the pool mapped but does not own
the slot: keep the ManagedBuffer for as long as its views are in use, or copy.

Exactly-once release without a lock: the callback sits in a one-element list, and ``list.pop`` is atomic, so
of any number of threads (and the finalizer) one gets the callback and the others find the list empty.
"""

from __future__ import annotations

import ctypes
import logging
import operator
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn, SupportsIndex

import torch

from mori_mp.shared import forks

logger = logging.getLogger(__name__)


class ManagedBuffer:
    """``size`` bytes at ``offset`` of ``pool_tensor``, owned until released.

    Args:
        pool_tensor: the whole pool, 1-D contiguous uint8, on any device.
        offset: first byte of the slot in the pool.
        size: bytes of the payload.
        on_release: called once, without arguments, when the slot is given back; from whichever thread
            releases, or from a finalizer, which can interrupt any code. So it must not wait for a lock.

    Raises:
        ValueError: ``pool_tensor`` is not a pool, or the slot does not lie inside it. The callback has then
            not been taken: the slot is still the caller's.
    """

    def __init__(
        self, pool_tensor: torch.Tensor, offset: int, size: int, on_release: Callable[[], None]
    ) -> None:
        if pool_tensor.dtype != torch.uint8 or pool_tensor.dim() != 1 or not pool_tensor.is_contiguous():
            raise ValueError(
                f"a pool must be a contiguous 1-D uint8 tensor, got {pool_tensor.dtype} of shape "
                f"{tuple(pool_tensor.shape)}"
            )
        if offset < 0 or size < 0 or offset + size > pool_tensor.numel():
            raise ValueError(
                f"slot of {size} bytes at offset {offset} does not lie inside the pool of "
                f"{pool_tensor.numel()} bytes"
            )
        self.pool_tensor = pool_tensor
        self.offset = offset
        self.size = size
        self._generation = forks.generation
        self._on_release = [on_release]  # last: an object without it owns nothing

    @property
    def released(self) -> bool:
        """True once the slot has been given back, or is being given back."""
        return not self._on_release

    @property
    def tensor(self) -> torch.Tensor:
        """Zero-copy view of the payload: uint8, shape ``(size,)``, on the pool's device.

        Raises:
            RuntimeError: the buffer has been released.
        """
        if not self._on_release:
            raise RuntimeError(
                f"ManagedBuffer of {self.size} bytes at offset {self.offset} has been released: its memory "
                f"may hold another payload. Read it before release(), or keep a copy."
            )
        return self.pool_tensor[self.offset : self.offset + self.size]

    def as_tensor(self, dtype: torch.dtype, shape: Sequence[SupportsIndex]) -> torch.Tensor:
        """Zero-copy view of the whole payload as ``dtype`` and ``shape``; ``()`` gives a 0-dim tensor.

        Raises:
            ValueError: a dimension is negative (none is inferred), or dtype and shape do not take exactly
                ``size`` bytes.
            RuntimeError: the payload is not aligned for ``dtype``, or the buffer has been released.
        """
        view = self.tensor
        dims = tuple(operator.index(dim) for dim in shape)
        if any(dim < 0 for dim in dims):
            raise ValueError(
                f"shape {dims} has a negative dimension: as_tensor infers none, give all of them"
            )
        itemsize = dtype.itemsize
        nbytes = itemsize
        for dim in dims:
            nbytes *= dim
        if nbytes != self.size:
            raise ValueError(
                f"{dtype} of shape {dims} takes {nbytes} bytes, but the buffer holds {self.size}"
            )
        # torch reinterprets by storage offset and the kernels load by address: both must be aligned.
        if view.storage_offset() % itemsize or view.data_ptr() % itemsize:
            raise RuntimeError(
                f"offset {self.offset} of the pool is not aligned for {dtype} ({itemsize} bytes an item): "
                f"copy the payload out with tensor.clone() and view that"
            )
        return view.view(dtype).view(dims)

    def to_bytes(self) -> bytes:
        """Copy the payload out; from a device pool through the current stream, waiting for it.

        Raises:
            RuntimeError: the buffer has been released.
        """
        host = self.tensor.cpu()  # itself, not a copy, if the pool is host memory
        # Not Tensor.numpy(): torch does not depend on numpy. Not ctypes.string_at(): its size is a C int.
        raw: bytes = (ctypes.c_char * self.size).from_address(host.data_ptr()).raw
        return raw

    def release(self) -> None:
        """Give the slot back. Idempotent and thread-safe; only the first call runs the callback.

        What the callback raises reaches that first caller; the buffer counts as released all the same.
        """
        try:
            on_release = self._on_release.pop()
        except IndexError:
            return
        if self._generation == forks.generation:  # else this is a forked child, and the slot the parent's
            on_release()

    def __enter__(self) -> ManagedBuffer:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.release()

    # The default argument outlives this module's globals, which are gone late in interpreter shutdown.
    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At shutdown the pool dies with the process, and the callback could wait for a lock that a stopped
        # daemon thread holds.
        if _is_finalizing() or not getattr(self, "_on_release", None):
            return
        try:
            self.release()
        except Exception:
            logger.exception(
                "release of the pool slot of %d bytes at offset %d failed", self.size, self.offset
            )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        # Covers copy.copy, copy.deepcopy and pickle: two owners would release one slot twice.
        raise TypeError(
            "a ManagedBuffer owns pool memory and cannot be duplicated: use to_bytes() or tensor.clone()"
        )

    def __repr__(self) -> str:
        state = "released" if self.released else f"on {self.pool_tensor.device}"
        return f"<ManagedBuffer offset={self.offset} size={self.size} {state}>"
