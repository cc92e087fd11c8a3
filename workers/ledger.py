"""The buffer ledger: who may still read which range of the stage's send pool.

Theory of operation
-------------------
The ledger is the pure core of the control process. It holds one `Entry` per live publication and executes the
table in `mori_mp.workers.ledger_table` (read that first). Methods are events; what the process must do about
them comes back as a list of actions, to be carried out in order and before the next event:

* `Visible(entry)`: the entry became available (again). Serve parked pulls and tell subscribers.
* `Gone(...)`: a visible entry is no longer available, for a reason other than a delivery. Tell subscribers.
* `Freed(...)`: nobody reads the range any more. Tell the stage, which may hand it out again. Exactly once per
  publication, and never while a landing write on it is outstanding or a lease on it is held.

No sockets, no clocks, no threads: times are passed in (monotonic seconds), and one thread calls.

Indexes. `_live` has every entry that is not FREED. `_current` maps a key to the one entry under it that is
not doomed (PUBLISHED, IN_FLIGHT or LEASED), always the newest live generation. `_due` has the entries that
are not doomed in publication order, so that expiry looks only at its head. A doomed entry leaves both at once
and stays reachable by generation, write id and holder.

Late and repeated messages. An event for a generation that is not live is counted in `stale_events` and
ignored. To tell a repeated publication that was freed here from a new one, the ledger remembers the newest
generation per lease board slot (8 bytes each): the stage reuses a slot only after it has seen `Freed`, so an
older generation on that slot is over. Write ids are never used twice: the end of a write that is not
outstanding is a repeated report, unless its id is above all that were started, which is an error.

Replay. A new control process starts with an empty ledger, and the stage publishes its live buffers again. A
lease that the board records is passed to `publish(holder=...)`, so that the entry is never visible in between
nor freed under its reader. A write that outlived the old control process must have ended before the replay,
or be put back with `start_write()` right after the publication and before its actions are carried out.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from mori_mp.shared.errors import IllegalTransition
from mori_mp.workers.ledger_table import REFUSALS, Delivery, Event
from mori_mp.workers.ledger_table import Entry as Entry
from mori_mp.workers.ledger_table import LeaseReply as LeaseReply
from mori_mp.workers.ledger_table import Reason as Reason
from mori_mp.workers.ledger_table import State as State

_DELIVERED = {via: f"delivered_{via.value}" for via in Delivery}
_COUNTERS = (
    "published",
    *_DELIVERED.values(),
    *(reason.value for reason in Reason if reason is not Reason.CONSUMED),
    "failed_writes",
    "retried_writes",
    "refused_leases",
    "stale_events",
)


class Freed(NamedTuple):
    """The range [offset, offset + size) has no readers left; the stage may reuse it and its slot."""

    generation: int
    slot: int
    offset: int
    size: int
    key: str
    reason: Reason


class Visible(NamedTuple):
    """The entry became available (again)."""

    entry: Entry


class Gone(NamedTuple):
    """A visible entry stopped being available without a delivery."""

    key: str
    generation: int
    reason: Reason


Action = Freed | Visible | Gone


class Ledger:
    """All live publications of one stage.

    `counters` has one count per cause. A publication is counted in `published`, and when it is freed in
    exactly one of `delivered_landing`, `delivered_lease`, `delivered_eager`, `withdrawn`, `expired`,
    `replaced` and `abandoned`. A payload that reached a receiver counts as delivered even if it was doomed
    meanwhile.
    """

    __slots__ = (
        "_current",
        "_due",
        "_held",
        "_live",
        "_slots",
        "_top_write_id",
        "_writes",
        "counters",
    )

    def __init__(self) -> None:
        self._live: dict[int, Entry] = {}  # by generation
        self._current: dict[str, Entry] = {}  # by key, not doomed
        self._due: OrderedDict[int, Entry] = OrderedDict()  # by generation, not doomed, in publication order
        self._writes: dict[int, Entry] = {}  # by write id, outstanding
        self._held: dict[int, dict[int, Entry]] = {}  # by holder, then generation
        self._slots: array[int] = array("q")  # newest generation published on each slot, -1 for none
        self._top_write_id = -1
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)

    # -- publications ------------------------------------------------------------------------------

    def publish(
        self,
        key: str,
        generation: int,
        offset: int,
        size: int,
        fast_path: bool,
        slot: int,
        now: float,
        owned: bool,
        *,
        holder: int | None = None,
        device: bool = False,
        event: int = -1,
    ) -> list[Action]:
        """Enter a publication: `size` bytes at `offset` of the pool, `now` in seconds.

        On replay, `holder` is the process that the lease board names (None or 0: none). The newest generation
        wins the key, in whichever order they arrive. Publishing a generation again changes nothing, whether
        it is live or was freed here. Times should not go back: an entry expires no earlier than those that
        were published before it. The caller has checked range and slot against the pool.

        Raises IllegalTransition when a live generation comes again with another key or range, when its slot
        belongs to another live entry, or when `holder` contradicts the recorded state.
        """
        known = self._live.get(generation)
        if known is not None:
            if (known.key, known.offset, known.size, known.slot) != (key, offset, size, slot):
                raise known.illegal(f"PUBLISH again as {key!r} [{offset}, {offset + size}) on slot {slot}")
            if holder:
                self.restore_lease(generation, holder)
            return []
        slots = self._slots
        if slot >= len(slots):
            slots.extend([-1] * (slot + 1 - len(slots)))
        if generation <= slots[slot]:
            self.counters["stale_events"] += 1
            return []
        occupant = self._live.get(slots[slot])
        if occupant is not None:
            raise occupant.illegal(f"PUBLISH of generation {generation} on its slot {slot}")

        entry = Entry(key, generation, offset, size, fast_path, slot, now, owned, device, event)
        if holder:
            self._hold(entry, holder)
        slots[slot] = generation
        self._live[generation] = entry
        self._due[generation] = entry
        self.counters["published"] += 1

        actions: list[Action] = []
        rival = self._current.get(key)
        if rival is not None and rival.generation > generation:
            self._advance(entry, Event.REPLACE, actions, reason=Reason.REPLACED)
            return actions
        if rival is not None:
            self._advance(rival, Event.REPLACE, actions, reason=Reason.REPLACED)
        self._current[key] = entry
        if not holder:
            actions.append(Visible(entry))
        return actions

    def withdraw(self, generation: int) -> list[Action]:
        """The stage takes a publication back."""
        return self._end(generation, Event.WITHDRAW, reason=Reason.WITHDRAWN)

    def expire(self, now: float, ttl: float) -> list[Action]:
        """Doom every entry that is at least `ttl` seconds old; next to free when the oldest is younger."""
        actions: list[Action] = []
        while self._due:
            entry = next(iter(self._due.values()))
            if now - entry.published_at < ttl:
                break
            self._advance(entry, Event.EXPIRE, actions, reason=Reason.EXPIRED)
        return actions

    def lookup(self, key: str, holder: int | None = None) -> Entry | None:
        """The entry that a receiver may fetch under `key`; a LEASED one is shown to its `holder` only."""
        entry = self._current.get(key)
        if entry is None or (entry.holder is not None and entry.holder != holder):
            return None
        return entry

    def find(self, generation: int) -> Entry | None:
        """The live entry of a generation, visible or not."""
        return self._live.get(generation)

    def visible(self) -> Iterator[Entry]:
        """Every entry that anyone may fetch, oldest first. Send no event while iterating."""
        return (entry for entry in self._due.values() if entry.holder is None)

    # -- landing writes ----------------------------------------------------------------------------

    def start_write(self, generation: int, write_id: int) -> bool:
        """A landing write is about to be handed to a worker.

        False when the generation is not live: nothing was recorded, do not dispatch. Raises IllegalTransition
        when the entry is LEASED or DRAINING, or when `write_id` is outstanding already.
        """
        entry = self._live.get(generation)
        if entry is None:
            self.counters["stale_events"] += 1
            return False
        if write_id in self._writes:
            raise entry.illegal(f"PULL with write id {write_id}, which is outstanding")
        entry.step(Event.PULL)
        self._top_write_id = max(write_id, self._top_write_id)
        self._writes[write_id] = entry
        entry.writes += 1
        if entry.failures:
            self.counters["retried_writes"] += 1
        return True

    def finish_write(self, write_id: int, ok: bool) -> list[Action]:
        """A landing write has ended and reads the buffer no more; `ok` when every byte landed.

        Raises IllegalTransition for a write that was never started.
        """
        entry = self._writes.pop(write_id, None)
        if entry is None:
            if write_id > self._top_write_id:
                event = Event.WRITE_DONE if ok else Event.WRITE_FAILED
                raise IllegalTransition(f"<write {write_id}>", -1, "UNKNOWN", event.name, ())
            self.counters["stale_events"] += 1
            return []
        entry.writes -= 1
        actions: list[Action] = []
        if ok:
            event = Event.WRITE_DONE if entry.writes else Event.LAST_WRITE_DONE
            self._advance(entry, event, actions, via=Delivery.LANDING)
        else:
            entry.failures += 1
            self.counters["failed_writes"] += 1
            event = Event.WRITE_FAILED if entry.writes else Event.LAST_WRITE_FAILED
            self._advance(entry, event, actions)
        return actions

    # -- leases and eager copies -------------------------------------------------------------------

    def grant_lease(self, generation: int, holder: int) -> LeaseReply:
        """Process `holder` (> 0) asks to read the buffer in place; its own lease is granted again."""
        entry = self._live.get(generation)
        if entry is None:
            self.counters["stale_events"] += 1
            self.counters["refused_leases"] += 1
            return LeaseReply.GONE
        if entry.state is State.PUBLISHED:
            self._hold(entry, holder)
            return LeaseReply.GRANTED
        if entry.holder == holder:
            entry.step(Event.LEASE)
            return LeaseReply.GRANTED
        self.counters["refused_leases"] += 1
        return REFUSALS[entry.state]

    def restore_lease(self, generation: int, holder: int) -> bool:
        """Record a lease that an earlier control process granted. False when the generation is not live.

        `publish(holder=...)` does the same without a moment in which the entry is visible. Raises
        IllegalTransition when the lease contradicts what happened since: the entry is being written, is
        doomed, or another process holds it.
        """
        entry = self._live.get(generation)
        if entry is None:
            self.counters["stale_events"] += 1
            return False
        if entry.state is State.PUBLISHED:
            self._hold(entry, holder)
        elif entry.holder != holder:
            raise entry.illegal(f"LEASE restored for process {holder}, held by {entry.holder}")
        return True

    def release(self, generation: int, holder: int) -> list[Action]:
        """Process `holder` is done reading in place.

        Without a lease here, an earlier control process granted it and the board shows it no more: the
        payload is delivered, which is the event CONSUMED. A release by anyone but the holder is stale.
        """
        entry = self._live.get(generation)
        if entry is None or (entry.holder is not None and entry.holder != holder):
            self.counters["stale_events"] += 1
            return []
        actions: list[Action] = []
        event = Event.CONSUMED if entry.holder is None else Event.RELEASED
        self._advance(entry, event, actions, via=Delivery.LEASE)
        return actions

    def holder_gone(self, holder: int) -> list[Action]:
        """Process `holder` is dead: end all its leases. Nothing happens when it has none."""
        actions: list[Action] = []
        for entry in list(self._held.get(holder, {}).values()):
            self._advance(entry, Event.HOLDER_GONE, actions, reason=Reason.ABANDONED)
        return actions

    def holds(self, holder: int) -> bool:
        """Whether process `holder` has any lease."""
        return holder in self._held

    def leased(self) -> list[Entry]:
        """Every entry that a process holds a lease on, doomed or not."""
        return [entry for held in self._held.values() for entry in held.values()]

    def consumed(self, generation: int, eager: bool = True) -> list[Action]:
        """A receiver used the eager copy of the payload, or (eager False) read it in place under a claim."""
        return self._end(generation, Event.CONSUMED, via=Delivery.EAGER if eager else Delivery.LEASE)

    # -- health ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of live entries."""
        return len(self._live)

    def stats(self, now: float) -> dict[str, Any]:
        """Describe the ledger for health and metrics; walks all live entries.

        `entries` and `bytes` by state, FREED left out; outstanding `writes`; `holders`, the number of
        processes with a lease; `oldest`, the live entry published first (key, generation, state, age_s in
        seconds and history) or None; `counters`.
        """
        entries = {state.value: 0 for state in State if state is not State.FREED}
        size = dict(entries)
        oldest: dict[str, Any] | None = None
        for entry in self._live.values():
            entries[entry.state.value] += 1
            size[entry.state.value] += entry.size
            if oldest is None:  # _live is in publication order
                oldest = {
                    "key": entry.key,
                    "generation": entry.generation,
                    "state": entry.state.value,
                    "age_s": max(0.0, now - entry.published_at),
                    "history": list(entry.history),
                }
        return {
            "entries": entries,
            "bytes": size,
            "writes": len(self._writes),
            "holders": len(self._held),
            "oldest": oldest,
            "counters": dict(self.counters),
        }

    # -- the machine -------------------------------------------------------------------------------

    def _end(
        self, generation: int, event: Event, *, reason: Reason | None = None, via: Delivery | None = None
    ) -> list[Action]:
        entry = self._live.get(generation)
        if entry is None:
            self.counters["stale_events"] += 1
            return []
        actions: list[Action] = []
        self._advance(entry, event, actions, reason=reason, via=via)
        return actions

    def _hold(self, entry: Entry, holder: int) -> None:
        if holder <= 0:
            raise entry.illegal(f"LEASE for process {holder}")
        entry.step(Event.LEASE)
        entry.holder = holder
        self._held.setdefault(holder, {})[entry.generation] = entry

    def _advance(
        self,
        entry: Entry,
        event: Event,
        actions: list[Action],
        *,
        reason: Reason | None = None,
        via: Delivery | None = None,
    ) -> None:
        """Take one transition, keep the indexes in step and append the actions that it calls for.

        `via` marks a delivery, `reason` another end. The first reason stands, but a delivery overrides it.
        """
        before = entry.state
        entry.step(event)
        after = entry.state
        if via is not None:
            entry.via = entry.via or via
            entry.reason = Reason.CONSUMED
        elif entry.reason is None:
            entry.reason = reason

        if after is State.PUBLISHED:
            actions.append(Visible(entry))
        elif after is not State.IN_FLIGHT and before is not State.DRAINING:
            self._hide(entry, before, actions)
        if after is State.FREED:
            self._free(entry, actions)

    def _hide(self, entry: Entry, before: State, actions: list[Action]) -> None:
        del self._due[entry.generation]
        if self._current.get(entry.key) is not entry:
            return  # replayed after a newer generation: it never had the key
        del self._current[entry.key]
        if before is not State.LEASED and entry.via is None:
            assert entry.reason is not None
            actions.append(Gone(entry.key, entry.generation, entry.reason))

    def _free(self, entry: Entry, actions: list[Action]) -> None:
        assert entry.reason is not None
        del self._live[entry.generation]
        if entry.holder is not None:
            held = self._held[entry.holder]
            del held[entry.generation]
            if not held:
                del self._held[entry.holder]
            entry.holder = None
        # A Reason is the name of its counter.
        cause = entry.reason if entry.via is None else _DELIVERED[entry.via]
        self.counters[cause] += 1
        actions.append(Freed(entry.generation, entry.slot, entry.offset, entry.size, entry.key, entry.reason))
