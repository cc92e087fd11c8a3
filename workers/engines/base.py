"""What a transfer engine is: a small protocol modelled on Mori's IOEngine.

An engine lives in one transfer worker and is used by one thread. It reads from the stage's pool, which the
worker borrows, and writes into the memory of peers that the control process introduced by their engine and
memory descriptors. A transfer is one batched write to one peer; it is submitted, then polled until it ends.
Transfers are unordered, also those to one place.

The receiving stage runs no engine code while it is written to. What it needs is its descriptors, which
`receive()` of the engine's module makes (see the registry in this package); `receive()` also
returns what must stay alive for as long as peers may write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from mori_mp.shared.errors import TransferFailed
from mori_mp.shared.pool import Pool

HOST = -1
"""Device number of host memory."""


class EngineBroken(TransferFailed):
    """The engine's GPU context is lost: every later write fails too, until this process is replaced."""


class LocalMemory(msgspec.Struct, frozen=True):
    """Memory of this process: address, size in bytes, GPU ordinal in this process or HOST.

    Whoever makes one keeps the memory mapped until the engine over it is closed.
    """

    address: int
    size: int
    device: int = HOST

    @classmethod
    def of(cls, memory: Pool | LocalMemory) -> LocalMemory:
        """Return the payload bytes of a mapped host pool, or what is local memory already."""
        return cls(memory.address, memory.size) if isinstance(memory, Pool) else memory


class Ready(Protocol):
    """Something that local memory waits for before it may be read: a GPU event, as a rule."""

    def query(self) -> bool:
        """Tell whether it has happened, without waiting."""
        ...


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
        """Forget a peer. Transfers to it that still run are kept until they have ended."""
        ...

    def submit(
        self,
        peer: int,
        local: list[int],
        remote: list[int],
        sizes: list[int],
        uid: int,
        after: Ready | None = None,
    ) -> Transfer:
        """Start writing sizes[i] bytes from pool offset local[i] to offset remote[i] of the peer's memory.

        The pool is not read before `after` has happened. Raises TransferFailed when the write cannot be
        started, or when `depth` transfers are under way. Bounds are checked here, before the backend sees
        them: Mori writes past a registered region and reports success.
        """
        ...

    def close(self) -> None:
        """Release everything. Transfers still under way are waited for, briefly."""
        ...


class EngineFactory(Protocol):
    """Makes an engine of a module by its name; the module's `make`."""

    def __call__(self, name: str, memory: LocalMemory, options: dict[str, Any]) -> Engine: ...


class Passive:
    """The receiving side of a pool: its packed descriptors, and what must outlive the writes of peers."""

    def __init__(
        self, engine_desc: bytes, mem_desc: bytes, release: Callable[[], None] | None = None
    ) -> None:
        self.engine_desc = engine_desc
        self.mem_desc = mem_desc
        self._release = release

    def close(self) -> None:
        """Withdraw the memory; no peer may be writing any more. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()


class Deferred:
    """A transfer that starts when something has happened, seen by polling it."""

    def __init__(self, after: Ready, start: Callable[[], Transfer]) -> None:
        self._after = after
        self._start = start
        self._started: Transfer | None = None

    def poll(self) -> bool:
        if self._started is None:
            if not self._after.query():
                return False
            self._started = self._start()
        return self._started.poll()


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


class Target(Protocol):
    """A peer's memory as an engine reaches it; size in bytes."""

    size: int

    def close(self) -> None:
        """Let go of it; no write to it is begun any more."""
        ...


T = TypeVar("T", bound=Target)


class PeersEngine(Generic[T]):
    """What every engine here begins with: its peers, and the checks before the backend sees a write."""

    def __init__(self, memory: LocalMemory) -> None:
        self._memory = memory
        self._peers: dict[int, T] = {}

    def drop_peer(self, peer: int) -> None:
        found = self._peers.pop(peer, None)
        if found is not None:
            found.close()

    def close(self) -> None:
        for peer in list(self._peers):
            self.drop_peer(peer)

    def _admit(self, peer: int, local: list[int], remote: list[int], sizes: list[int]) -> T:
        """Return the peer of a write that may begin. Raises TransferFailed."""
        found = self._peers.get(peer)
        if found is None:
            raise TransferFailed(f"peer {peer} is not registered")
        check_bounds(self._memory.size, found.size, local, remote, sizes)
        return found
