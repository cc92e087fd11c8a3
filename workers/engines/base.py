"""What a transfer engine is: a small protocol modelled on Mori's IOEngine.

An engine lives in one transfer worker and is used by one thread. It reads from the stage's pool, which the
worker borrows, and writes into the memory of peers that the control process introduced by their engine and
memory descriptors. A transfer is one batched write to one peer; it is submitted, then polled until it ends.

The receiving stage runs no engine code while it is written to. What it needs is its descriptors, which
`describe()` of the engine's module makes (see the registry in this package).
"""

from __future__ import annotations

from typing import Any, Protocol

from mori_mp.shared.errors import TransferFailed
from mori_mp.shared.pool import Pool


class Transfer(Protocol):
    """A write under way."""

    def poll(self) -> bool:
        """Tell whether the write has ended, without waiting. Raises TransferFailed when it ended badly."""
        ...


class Engine(Protocol):
    """The active side of one backend; see the module's docstring."""

    name: str
    depth: int
    """Transfers that may be under way at once (streams or queue pairs)."""

    def add_peer(self, peer: int, engine_desc: bytes, mem_desc: bytes) -> None:
        """Register a remote engine and its memory under an id.

        Raises EngineUnavailable when it is out of reach, WireError when a descriptor makes no sense.
        """
        ...

    def drop_peer(self, peer: int) -> None:
        """Forget a peer whose transfers have all ended."""
        ...

    def submit(self, peer: int, local: list[int], remote: list[int], sizes: list[int], uid: int) -> Transfer:
        """Start writing sizes[i] bytes from pool offset local[i] to offset remote[i] of the peer's memory.

        Raises TransferFailed when it cannot be started. Bounds are checked here, before the backend sees
        them: Mori writes past a registered region and reports success.
        """
        ...

    def close(self) -> None:
        """Release everything; no transfer may be under way."""
        ...


class EngineFactory(Protocol):
    """Makes the engine of a worker."""

    def __call__(self, pool: Pool, options: dict[str, Any]) -> Engine: ...


def check_bounds(
    local_size: int, remote_size: int, local: list[int], remote: list[int], sizes: list[int]
) -> None:
    """Raise TransferFailed unless every segment lies inside both registered regions (bytes)."""
    if not len(local) == len(remote) == len(sizes) or not sizes:
        raise TransferFailed(
            f"offsets and sizes of a write differ in number: {len(local)}, {len(remote)}, {len(sizes)}"
        )
    for here, there, size in zip(local, remote, sizes, strict=True):
        if size <= 0 or here < 0 or there < 0 or here + size > local_size or there + size > remote_size:
            raise TransferFailed(
                f"segment of {size} bytes from {here} to {there} leaves the registered regions "
                f"({local_size} bytes here, {remote_size} bytes at the peer)"
            )
