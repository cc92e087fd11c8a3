"""What the engines share whose backends copy in the background: writes that are polled, and their peers.

A mapping of a peer's memory outlives the peer's process, so a write is begun only while the process is there,
and a success counts only if it still is (`mori_mp.workers.engines.liveness`). A peer that has been dropped is
let go of when its last write has ended, whether or not anyone polls that write.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from mori_mp.shared.errors import TransferFailed
from mori_mp.workers.engines.base import LocalMemory, PeersEngine
from mori_mp.workers.engines.liveness import PeerProcess

CLOSE_SECONDS = 0.5
_CLOSE_PAUSE_SECONDS = 0.0005


class Link(ABC):
    """A peer: its memory of so many bytes, its process, and how many writes to it are under way."""

    def __init__(self, size: int, process: PeerProcess) -> None:
        self.size = size
        self.process = process
        self.under_way = 0
        self._closed = False

    def close(self) -> None:
        """Let go of everything, once the last write has ended."""
        self._closed = True
        self.release_if_done()

    def release_if_done(self) -> None:
        """Let go of everything if that is due."""
        if self._closed and not self.under_way:
            self._release()

    @abstractmethod
    def _release(self) -> None:
        """Let go of everything now."""


class Write:
    """A transfer under way."""

    def __init__(self, engine: PollingEngine[Any, Any], link: Link) -> None:
        self._engine = engine
        self.link = link
        self.failure: TransferFailed | None = None
        self.ended = False

    def poll(self) -> bool:
        if not self.ended and not self._engine.settle(self):
            return False
        if self.failure is not None:
            raise self.failure
        return True


L = TypeVar("L", bound=Link)
W = TypeVar("W", bound=Write)


class PollingEngine(PeersEngine[L], ABC, Generic[L, W]):
    """An engine with at most `depth` writes under way."""

    depth: int

    def __init__(self, memory: LocalMemory) -> None:
        super().__init__(memory)
        self._pid = os.getpid()
        self._writes: set[W] = set()

    def drop_peer(self, peer: int) -> None:
        self._sweep()
        super().drop_peer(peer)

    def settle(self, write: W) -> bool:
        """See whether a write has ended, and note how."""
        if not self._has_ended(write):
            return False
        link = write.link
        if write.failure is None and link.process.gone():
            write.failure = _gone(link)
        write.ended = True
        self._writes.discard(write)
        link.under_way -= 1
        link.release_if_done()
        return True

    def close(self) -> None:
        """Drop all peers, and wait for the writes, CLOSE_SECONDS at most: `_writes` has what still runs."""
        super().close()
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._writes and time.monotonic() < deadline:
            self._sweep()
            time.sleep(_CLOSE_PAUSE_SECONDS)

    @abstractmethod
    def _has_ended(self, write: W) -> bool:
        """Ask the backend, without waiting; sets `failure` if it ended badly. Not asked again after a yes."""

    def _admit(self, peer: int, local: list[int], remote: list[int], sizes: list[int]) -> L:
        link = super()._admit(peer, local, remote, sizes)
        if os.getpid() != self._pid:
            raise TransferFailed("a GPU context does not survive fork(); start transfer workers by exec")
        if link.process.gone():
            raise _gone(link)
        if len(self._writes) >= self.depth:
            self._sweep()
        if len(self._writes) >= self.depth:
            raise TransferFailed(f"{self.depth} transfers are under way already")
        return link

    def _begun(self, write: W) -> W:
        """Note a write that the backend has accepted."""
        self._writes.add(write)
        write.link.under_way += 1
        return write

    def _sweep(self) -> None:
        """Note the end of writes that nobody polls."""
        for write in list(self._writes):
            self.settle(write)


def _gone(link: Link) -> TransferFailed:
    return TransferFailed(f"receiver process {link.process.pid} has exited")
