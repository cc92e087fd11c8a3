"""Generated content that sender and receiver agree on without talking.

Every process of a run makes the same table of random words from the run's seed. The bytes of one chunk are a
slice of that table at an offset, XORed with a 64-bit word, both hashed from the chunk's name (edge, request,
number). A chunk that is shifted, mixed with another one, stale, torn or flipped in one bit therefore
differs from what the receiver expects, and making or checking content costs about one pass over memory.

Floating-point tensors get arbitrary bit patterns, NaNs included, and everything is compared as raw bytes:
nothing on the way may normalise, round or reinterpret.
"""

from __future__ import annotations

import math
from hashlib import blake2b

import torch

_TABLE_WORDS = 1 << 19
_SLICE_WORDS = 1 << 18


class Noise:
    """Seeded bytes by name."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)
        self._seed = seed
        self._table = torch.empty(_TABLE_WORDS, dtype=torch.int64)
        self._table.random_(-(2**63), None, generator=generator)

    def number(self, name: str, low: int, high: int) -> int:
        """A whole number in low..high, both included."""
        return low + self._digest(name)[0] % (high - low + 1)

    def words(self, name: str, count: int) -> torch.Tensor:
        """int64 tensor [count], a fresh one."""
        out = torch.empty(count, dtype=torch.int64)
        for block, start in enumerate(range(0, count, _SLICE_WORDS)):
            size = min(_SLICE_WORDS, count - start)
            offset, mask = self._digest(f"{name}#{block}")
            offset %= _TABLE_WORDS - size + 1
            torch.bitwise_xor(self._table[offset : offset + size], mask, out=out[start : start + size])
        return out

    def integers(self, name: str, count: int, bound: int) -> torch.Tensor:
        """int64 tensor [count] of values in 0..bound-1; bound is a power of two."""
        return self.words(name, count).bitwise_and_(bound - 1)

    def _digest(self, name: str) -> tuple[int, int]:
        """Two numbers from a name: one unsigned, one signed, 64 bits each."""
        raw = blake2b(f"{self._seed}|{name}".encode(), digest_size=16).digest()
        return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little", signed=True)


def tensor_of(words: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """View the start of int64 words as a tensor of any dtype and shape; bools become 0 or 1 in a copy."""
    raw = words.view(torch.uint8)[: math.prod(shape) * dtype.itemsize]
    if dtype is torch.bool:
        raw = raw & 1
    return raw.view(dtype).reshape(shape)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two CPU tensors hold the same dtype, shape and bytes (NaNs compare by their bits)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(_flat_words(left), _flat_words(right)) if left.numel() else True


def first_difference(left: torch.Tensor, right: torch.Tensor) -> int:
    """Byte offset of the first difference of two tensors of one dtype and shape; -1 when there is none."""
    a, b = _flat_bytes(left), _flat_bytes(right)
    places = (a != b).nonzero()
    return int(places[0]) if len(places) else -1


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _flat_words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes as int64 words where they divide evenly (six times as fast to compare), else as bytes."""
    raw = _flat_bytes(tensor)
    return raw.view(torch.int64) if raw.numel() % 8 == 0 and raw.storage_offset() % 8 == 0 else raw
