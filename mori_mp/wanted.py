"""What one get() asks for."""

from __future__ import annotations

from typing import NamedTuple


class Wanted(NamedTuple):
    """One get(): internal key, edge, sender endpoint, and the size in bytes if the metadata has it."""

    key: str
    edge: str
    host: str
    port: int
    size: int
    fast_path: bool
