"""Posts: slots of a receiver's GPU pool that a sender on its host may fill before anyone asks for a payload.

As a receive is posted to a queue pair before its message comes, a receiver posts slots to a sender. The
sender's put() has its own GPU copy a payload into one, and the receiver finds it there: between the two lies
no message and no process that would have to wake up. The payload stays the sender's all the while, so a
posted copy can be dropped at any time; only the copy is lost.

The posts are records in a memfd that the receiver makes, one for each posted slot, kept by field:

    state x 8    event x 8    key length x 8                                32 bits each
    offset x 8   room x 8     generation x 8   size x 8    withdrawn x 8    64 bits each
    key x 8                                                                 1024 bytes each, UTF-8

    FREE ---> POSTED           receiver, after offset and room
    POSTED -> WRITING          sender, holding the lock of the record
    WRITING -> POSTED          sender, nothing was enqueued
    WRITING -> FILLED          sender, after event, generation, size and key: the copy is enqueued
    POSTED -> FREE             receiver, holding the lock of the record
    FILLED -> FREE             receiver; it uses the slot again once the copy has ended

`event` numbers the event of the sender's pool that the copy is complete behind, -1 once it is known to be.
`withdrawn` is the generation that is not wanted any more; the sender writes it. The lock is an open file
description lock on the byte of the record's number (`shared.claims`), so the kernel drops it when a sender
dies. WRITING without the lock then tells that a copy of a dead sender's may be under way, until its process
is gone.

Each word has one writer at a time, is aligned and so is one store; the state is written last and read first
(`shared.ordering`). Nobody trusts
what the other has written: a receiver keeps offset and room to itself, and both check what they read.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import msgspec

from mori_mp.shared import memfd
from mori_mp.shared.claims import Claims
from mori_mp.shared.errors import EngineUnavailable, WireError
from mori_mp.shared.ordering import fence
from mori_mp.shared.wire import MAX_KEY_BYTES

RECORDS = 8
FREE, POSTED, WRITING, FILLED = range(4)
_NAME = "mori-mp-posts-"
_WIDE = 3 * 4 * RECORDS  # where the fields of 64 bits begin
_KEYS = _WIDE + 5 * 8 * RECORDS
_BYTES = _KEYS + RECORDS * MAX_KEY_BYTES


class PostsDescriptor(msgspec.Struct, array_like=True, frozen=True):
    """What a sender on the same host needs: the memfd, and the packed descriptor of the GPU pool.

    epoch: the stage whose events the records name; no other one may fill them.
    """

    pid: int
    fd: int
    inode: int
    host_id: str
    gpu_pool: bytes
    epoch: str

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> PostsDescriptor:
        """Decode a descriptor from the wire. Raises WireError."""
        try:
            desc = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
            raise WireError(f"undecodable descriptor of posts, {len(data)} bytes: {exc}") from None
        if desc.pid <= 0 or desc.fd < 0:
            raise WireError("impossible descriptor of posts")
        return desc


class Filled(NamedTuple):
    """A payload that a sender has copied into a posted slot. size: bytes; event -1: the copy is over."""

    record: int
    generation: int
    size: int
    event: int


class Posts:
    """A mapped board of posts; `record` is 0 to RECORDS - 1. Sizes and offsets in bytes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        memory = memoryview(mmap.mmap(fd, _BYTES))
        narrow, wide = memory[:_WIDE].cast("i"), memory[_WIDE:_KEYS].cast("q")
        self._states, self._events, self._lengths = (
            narrow[at : at + RECORDS] for at in range(0, 3 * RECORDS, RECORDS)
        )
        self._offsets, self._rooms, self._generations, self._sizes, self._withdrawn = (
            wide[at : at + RECORDS] for at in range(0, 5 * RECORDS, RECORDS)
        )
        self._keys = memory[_KEYS:]
        claims = Claims(fd)
        self.lock = claims.exclude
        """Locks a record against the other process; False if that one has it."""
        self.unlock = claims.drop

    @classmethod
    def create(cls, label: str) -> Posts:
        """Make a board (receiver). Raises OSError."""
        return cls(memfd.create(_NAME + label, _BYTES))

    @classmethod
    def open_peer(cls, desc: PostsDescriptor) -> Posts:
        """Map a receiver's board (sender). Raises EngineUnavailable, WireError."""
        if desc.host_id != memfd.host_id():
            raise EngineUnavailable("they lie on another host or in another PID namespace")
        fd = memfd.open_peer("the board of posts", _NAME, desc.pid, desc.fd, desc.inode, _BYTES)
        try:
            return cls(fd)
        except OSError as exc:
            os.close(fd)
            raise EngineUnavailable(f"the board of posts cannot be mapped: {exc}") from exc

    def descriptor(self, gpu_pool: bytes, epoch: str) -> PostsDescriptor:
        """Describe this board to the stage of an epoch; valid while this process has it open."""
        inode = os.fstat(self._fd).st_ino
        return PostsDescriptor(os.getpid(), self._fd, inode, memfd.host_id(), gpu_pool, epoch)

    def states(self) -> list[int]:
        """Return of each record whether it is FREE, POSTED, WRITING or FILLED."""
        states = self._states.tolist()
        fence()
        return states

    # -------------------------------------------------------------------------- receiver
    def post(self, record: int, offset: int, room: int) -> None:
        """Post a slot in a FREE record."""
        self._offsets[record], self._rooms[record] = offset, room
        fence()
        self._states[record] = POSTED

    def revoke(self, record: int) -> bool:
        """Take back a slot that has not been filled; False if the sender is just at it, or has filled it."""
        if self._states[record] != POSTED or not self.lock(record):
            return False
        revoked = self._states[record] == POSTED
        if revoked:
            self._states[record] = FREE
        self.unlock(record)
        return revoked

    def filled(self, record: int) -> Filled | None:
        """Return what a FILLED record holds; None for any other."""
        if self._states[record] != FILLED:
            return None
        fence()
        return Filled(record, self._generations[record], self._sizes[record], self._events[record])

    def holds(self, record: int, key: bytes) -> bool:
        """Tell whether a record names this key."""
        at, length = record * MAX_KEY_BYTES, len(key)
        return self._lengths[record] == length and self._keys[at : at + length] == key

    def is_withdrawn(self, filled: Filled) -> bool:
        """Tell whether the sender does not want a payload to be read any more."""
        return self._withdrawn[filled.record] == filled.generation

    def free(self, record: int) -> None:
        """Let go of a FILLED record whose copy has ended, or whose slot is not used again before it has."""
        self._states[record] = FREE

    # ---------------------------------------------------------------------------- sender
    def fitting(self, size: int, below: int) -> int | None:
        """Return the record of the smallest POSTED slot with room for size bytes, and less than below."""
        best = None
        for record, (state, room) in enumerate(zip(self._states.tolist(), self._rooms.tolist(), strict=True)):
            if state == POSTED and size <= room < below:
                best, below = record, room
        return best

    def offset(self, record: int) -> int:
        """Return where the slot of a record lies in the receiver's pool."""
        return self._offsets[record]

    def begin(self, record: int, size: int) -> bool:
        """Take a POSTED record to fill it, and lock it; False if it is not to be had.

        Nor is one that has been taken back and posted again since it was found, with no room for size bytes.
        """
        if self._states[record] != POSTED or not self.lock(record):
            return False
        if self._states[record] == POSTED:
            fence()
            if self._rooms[record] >= size:
                self._states[record] = WRITING
                return True
        self.unlock(record)
        return False

    def fill(self, record: int, key: bytes, generation: int, size: int, event: int) -> None:
        """Say what is being copied into a record that has been begun, and unlock it."""
        at, length = record * MAX_KEY_BYTES, len(key)
        self._events[record], self._lengths[record] = event, length
        self._generations[record], self._sizes[record] = generation, size
        self._keys[at : at + length] = key
        fence()
        self._states[record] = FILLED
        self.unlock(record)

    def cancel(self, record: int) -> None:
        """Leave a record that has been begun as it was, and unlock it."""
        self._states[record] = POSTED
        self.unlock(record)

    def withdraw(self, record: int, generation: int) -> None:
        """Say that a payload is not to be read any more."""
        self._withdrawn[record] = generation

    def set_over(self, record: int) -> None:
        """Say that the copy into a record has ended, and its event means nothing any more."""
        self._events[record] = -1

    def close(self) -> None:
        """Close the memfd; the mapping goes with this object, which others may still look at. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


__all__ = ["FILLED", "FREE", "POSTED", "RECORDS", "WRITING", "Filled", "Posts", "PostsDescriptor"]
