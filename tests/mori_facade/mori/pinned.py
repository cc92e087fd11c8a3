"""Pinned memory that other processes can map: pools of ours behind torch tensors."""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch

from mori_mp.shared.pool import BLOCK, Pool

_pools: dict[int, Pool] = {}  # data pointer -> pool
_count = itertools.count()


def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Stand in for torch.Tensor.pin_memory: return a tensor of a pool's memory (contents not copied)."""
    size = -(-max(tensor.nbytes, 1) // BLOCK) * BLOCK
    pool = Pool.create(size, f"facade-{os.getpid()}-{next(_count)}")
    pinned = torch.frombuffer(pool.view[: tensor.nbytes], dtype=torch.uint8)
    _pools[pinned.data_ptr()] = pool
    return pinned.view(tensor.dtype).view(tensor.shape)


def pool_of(tensor: torch.Tensor) -> Pool:
    """Return the pool that a tensor was pinned in. Raises RuntimeError for any other tensor."""
    try:
        return _pools[tensor.data_ptr()]
    except KeyError:
        raise RuntimeError("mori facade: only tensors from pin_memory() can be registered") from None


def unpin(name: str) -> None:
    """Close the pool of this name; its memory goes with the last tensor."""
    for address, pool in list(_pools.items()):
        if pool.name == name:
            del _pools[address]
            pool.close()


def install() -> None:
    """Have every tensor of this process pin that way."""
    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]
