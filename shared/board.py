"""The lease board: who reads which block of a pool in place, kept in the pool's own memory.

A lease must survive messages that get lost when the control process is killed, so its record is memory, not
a message. One record of 16 bytes per 4096-byte block, used for the block at which a payload starts:

    0        8         12        16
    generation  holder pid  state        state: 0 none, 1 GRANTED, 2 RELEASED

Each record has one writer at a time, so no atomics are needed: the sender's control process writes GRANTED
before it sends the reply that tells the receiver about the lease; from then on only the receiver writes,
RELEASED, once. The record's words are aligned, so each store is one store; the control process writes the
state last. A record of another generation than the entry's is an old one and means nothing. Beyond that
nobody relies on the order of stores: a grant is told of in a message, an offer is read under a file lock.
"""

from __future__ import annotations

RECORD_BYTES = 16
GRANTED = 1
RELEASED = 2


class LeaseBoard:
    """A view of the board; `slot` is a payload's offset divided by the block size."""

    def __init__(self, memory: memoryview) -> None:
        self._wide = memory.cast("Q")
        self._narrow = memory.cast("I")

    def grant(self, slot: int, generation: int, holder: int) -> None:
        """Record a lease (control process)."""
        self._narrow[slot * 4 + 3] = 0
        self._wide[slot * 2] = generation
        self._narrow[slot * 4 + 2] = holder
        self._narrow[slot * 4 + 3] = GRANTED

    def offer(self, slot: int, generation: int) -> None:
        """Show which payload lies at a slot, for receivers that claim it (control process)."""
        self._narrow[slot * 4 + 3] = 0
        self._wide[slot * 2] = generation

    def clear(self, slot: int) -> None:
        """Show that nothing lies there any more (control process, while it excludes claims)."""
        self._wide[slot * 2] = 0

    def generation(self, slot: int) -> int:
        """Return the generation last offered or leased at a slot."""
        return self._wide[slot * 2]

    def release(self, slot: int, generation: int) -> None:
        """Record the end of a lease (receiver, or the control process for a dead holder)."""
        if self._wide[slot * 2] == generation:
            self._narrow[slot * 4 + 3] = RELEASED

    def lessee(self, slot: int, generation: int) -> int:
        """Return the pid that was granted a lease on this generation, ended or not; 0: none was."""
        if self._wide[slot * 2] == generation and self._narrow[slot * 4 + 3]:
            return self._narrow[slot * 4 + 2]
        return 0

    def was_released(self, slot: int, generation: int) -> bool:
        """Tell whether this generation was leased and its holder is done with it."""
        return self._wide[slot * 2] == generation and self._narrow[slot * 4 + 3] == RELEASED
