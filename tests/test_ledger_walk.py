"""Random walks through the buffer ledger, beside a second model that has no states.

`World` is a stage, its receivers and its workers around a ledger. It knows only facts of each publication
(who reads it, why it ended), works out from them which actions every event must bring, and compares. Apart
from that model it keeps who truly touches a buffer's bytes, over restarts of the control process too.
Whatever else goes wrong, a range is freed once and never under a reader.

The same world is walked twice: long, from fixed seeds, which must execute every row of the table that can be
reached; and by hypothesis, which finds short counterexamples.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mori_mp.shared.errors import IllegalTransition
from mori_mp.workers.ledger import Action, Freed, Gone, Ledger, Visible
from mori_mp.workers.ledger_table import (
    REFUSALS,
    ROWS,
    Delivery,
    Entry,
    Event,
    LeaseReply,
    Reason,
    State,
)

BLOCK = 4096
TTL = 10.0
SLOTS = 6
KEYS = ("a@0_1", "b@0_1", "c@0_1")
HOLDERS = (101, 202)
ENDS = {
    Delivery.LANDING: "delivered_landing",
    Delivery.LEASE: "delivered_lease",
    Delivery.EAGER: "delivered_eager",
    Reason.WITHDRAWN: "withdrawn",
    Reason.EXPIRED: "expired",
    Reason.REPLACED: "replaced",
    Reason.ABANDONED: "abandoned",
}

Pick = Callable[[Sequence[Any]], Any]
Expected = list[tuple[str, int, str]]


@dataclass
class Fact:
    """What is known of one publication, without states."""

    key: str
    generation: int
    at: float
    writes: set[int] = field(default_factory=set)
    holder: int | None = None
    ended: Reason | None = None
    via: Delivery | None = None
    freed: bool = False

    @property
    def state(self) -> str:
        if self.ended:
            return "draining"
        if self.holder is not None:
            return "leased"
        return "in_flight" if self.writes else "published"


class World:
    """Every public method but `check_all` and `wind_up` is one event; `pick` chooses its circumstances."""

    def __init__(self) -> None:
        self.now = 0.0
        self.generation = 0
        self.write_id = -1
        self.stage: dict[
            int, tuple[str, int]
        ] = {}  # generation: (key, slot) in use as far as the stage knows
        self.inbox: list[Freed] = []  # freed notices that the stage has not read
        self.readers: dict[int, set[object]] = {}  # who truly touches the bytes of a generation
        self.writing: dict[int, int] = {}  # write id: generation
        self._boot()

    def _boot(self) -> None:
        self.ledger = Ledger()
        self.facts: dict[int, Fact] = {}
        self.done_writes: list[int] = []
        self.stale = 0
        self.ends = dict.fromkeys(ENDS.values(), 0)

    # what must happen

    def _settle(self, fact: Fact, expected: Expected) -> None:
        if fact.ended and not fact.writes and fact.holder is None:
            fact.freed = True
            self.ends[ENDS[fact.via or fact.ended]] += 1
            expected.append(("freed", fact.generation, fact.ended.value))

    def _end(
        self, fact: Fact, reason: Reason, expected: Expected, via: Delivery | None = None, shown: bool = True
    ) -> None:
        if fact.ended is None and via is None and fact.holder is None and shown:
            expected.append(("gone", fact.generation, reason.value))
        fact.ended = Reason.CONSUMED if via else fact.ended or reason
        fact.via = fact.via or via
        self._settle(fact, expected)

    def _alive(self, generation: int) -> Fact | None:
        fact = self.facts.get(generation)
        if fact is None or fact.freed:
            self.stale += 1
            return None
        return fact

    def _live(self) -> list[Fact]:
        return [fact for fact in self.facts.values() if not fact.freed]

    def _any_generation(self, pick: Pick) -> int:
        late = range(max(1, self.generation - SLOTS), self.generation + 2)
        live = [fact.generation for fact in self._live()]
        generation: int = pick(live if live and pick((True, True, False)) else late)
        return generation

    def _check(self, actions: list[Action], expected: Expected) -> None:
        seen: Expected = []
        for action in actions:
            if isinstance(action, Visible):
                seen.append(("visible", action.entry.generation, ""))
            elif isinstance(action, Gone):
                assert self.facts[action.generation].key == action.key
                seen.append(("gone", action.generation, action.reason.value))
            else:
                assert not self.readers.get(action.generation), "freed under a reader"
                assert action.generation not in {notice.generation for notice in self.inbox}, "freed twice"
                assert (action.key, action.slot) == self.stage[action.generation]
                assert (action.offset, action.size) == (action.slot * BLOCK, BLOCK)
                self.inbox.append(action)
                seen.append(("freed", action.generation, action.reason.value))
        assert sorted(seen) == sorted(expected)

    def _publish(self, generation: int, holder: int | None = None) -> list[Action]:
        key, slot = self.stage[generation]
        return self.ledger.publish(
            key, generation, slot * BLOCK, BLOCK, True, slot, self.now, True, holder=holder
        )

    def _published(self, generation: int, holder: int | None = None) -> None:
        """Publish what is new to this ledger."""
        key, _ = self.stage[generation]
        expected: Expected = []
        rivals = [other for other in self.facts.values() if other.key == key and not other.ended]
        fact = self.facts[generation] = Fact(key, generation, self.now, holder=holder)
        if all(other.generation < generation for other in rivals):
            for other in rivals:
                self._end(other, Reason.REPLACED, expected)
            if holder is None:
                expected.append(("visible", generation, ""))
        else:
            self._end(fact, Reason.REPLACED, expected, shown=False)
        self._check(self._publish(generation, holder), expected)

    # the stage

    def put(self, pick: Pick) -> None:
        free = sorted(set(range(SLOTS)) - {slot for _, slot in self.stage.values()})
        if free:
            self.generation += 1
            self.stage[self.generation] = (pick(KEYS), pick(free))
            self._published(self.generation)

    def publish_again(self, pick: Pick) -> None:
        if self.stage:
            generation = pick(sorted(self.stage))
            fact = self._alive(generation)
            assert self._publish(generation, fact.holder if fact else None) == []

    def stage_reads_freed(self, pick: Pick) -> None:
        for _ in range(pick(range(len(self.inbox) + 1))):
            del self.stage[self.inbox.pop(0).generation]

    def withdraw(self, pick: Pick) -> None:
        generation = self._any_generation(pick)
        expected: Expected = []
        fact = self._alive(generation)
        if fact:
            self._end(fact, Reason.WITHDRAWN, expected)
        self._check(self.ledger.withdraw(generation), expected)

    def control_process_dies(self, pick: Pick) -> None:
        """A new ledger learns of everything that the stage has in use, in any order if no writes go on."""
        if pick((True, False)):  # else the notices were lost
            for notice in self.inbox:
                del self.stage[notice.generation]
        self.inbox.clear()
        board = {fact.generation: fact.holder for fact in self._live()}
        order = sorted(self.stage)
        if pick((True, False)):
            for write_id, generation in self.writing.items():
                self.readers[generation].discard(("write", write_id))
            self.writing.clear()
            order.sort(key=lambda generation: pick(range(100)))
        self._boot()
        for generation in order:
            self._published(generation, board.get(generation))
            for write_id in [w for w, written in self.writing.items() if written == generation]:
                assert self.ledger.start_write(generation, write_id)
                self.facts[generation].writes.add(write_id)

    # the workers

    def pull(self, pick: Pick) -> None:
        entry = self.ledger.lookup(pick(KEYS))
        if entry is None:
            return
        for _ in range(pick((1, 1, 2, 3))):
            self.write_id += 1
            assert self.ledger.start_write(entry.generation, self.write_id)
            self.facts[entry.generation].writes.add(self.write_id)
            self.writing[self.write_id] = entry.generation
            self.readers.setdefault(entry.generation, set()).add(("write", self.write_id))

    def pull_what_cannot_be_pulled(self, pick: Pick) -> None:
        generation = self._any_generation(pick)
        fact = self.facts.get(generation)
        if fact is None or fact.freed:
            self.stale += 1
            assert not self.ledger.start_write(generation, self.write_id + 1)
        elif fact.ended or fact.holder is not None:
            with pytest.raises(IllegalTransition):
                self.ledger.start_write(generation, self.write_id + 1)

    def write_ends(self, pick: Pick) -> None:
        if self.writing:
            self._write_ends(pick(sorted(self.writing)), pick((True, False)))

    def _write_ends(self, write_id: int, ok: bool) -> None:
        generation = self.writing.pop(write_id)
        self.readers[generation].discard(("write", write_id))
        self.done_writes.append(write_id)
        fact = self.facts[generation]
        fact.writes.discard(write_id)
        expected: Expected = []
        if ok:
            self._end(fact, Reason.CONSUMED, expected, via=Delivery.LANDING)
        elif fact.ended:
            self._settle(fact, expected)
        elif not fact.writes:
            expected.append(("visible", generation, ""))
        self._check(self.ledger.finish_write(write_id, ok), expected)

    def write_is_reported_again(self, pick: Pick) -> None:
        if self.done_writes:
            self.stale += 1
            assert self.ledger.finish_write(pick(self.done_writes), pick((True, False))) == []

    # the receivers

    def lease(self, pick: Pick) -> None:
        holder = pick(HOLDERS)
        entry = self.ledger.lookup(pick(KEYS), holder=holder)
        generation = entry.generation if entry and pick((True, False)) else self._any_generation(pick)
        fact = self._alive(generation)
        if fact is None:
            wanted = LeaseReply.GONE
        elif fact.holder == holder or fact.state == "published":
            wanted = LeaseReply.GRANTED
        else:
            wanted = REFUSALS[State(fact.state)]
        assert self.ledger.grant_lease(generation, holder) is wanted
        if wanted and fact:
            fact.holder = holder
            self.readers.setdefault(generation, set()).add(("lease", holder))

    def release(self, pick: Pick) -> None:
        generation = self._any_generation(pick)
        fact = self._alive(generation)
        holder = fact.holder if fact and fact.holder and pick((True, False)) else pick(HOLDERS)
        expected: Expected = []
        if fact and fact.holder not in (None, holder):
            self.stale += 1
        elif fact:
            self.readers.get(generation, set()).discard(("lease", holder))
            fact.holder = None
            self._end(fact, Reason.CONSUMED, expected, via=Delivery.LEASE)
        self._check(self.ledger.release(generation, holder), expected)

    def holder_dies(self, pick: Pick) -> None:
        self._holder_dies(pick(HOLDERS))

    def _holder_dies(self, holder: int) -> None:
        expected: Expected = []
        for fact in self._live():
            if fact.holder == holder:
                self.readers[fact.generation].discard(("lease", holder))
                fact.holder = None
                fact.ended = fact.ended or Reason.ABANDONED
                self._settle(fact, expected)
        self._check(self.ledger.holder_gone(holder), expected)

    def eager_copy_is_used(self, pick: Pick) -> None:
        generation = self._any_generation(pick)
        expected: Expected = []
        fact = self._alive(generation)
        if fact:
            self._end(fact, Reason.CONSUMED, expected, via=Delivery.EAGER)
        self._check(self.ledger.consumed(generation), expected)

    # time

    def time_passes(self, pick: Pick) -> None:
        self.now += pick((0.5, 0.5, 3.0, TTL))
        expected: Expected = []
        for fact in self._live():
            if not fact.ended and self.now - fact.at >= TTL:
                self._end(fact, Reason.EXPIRED, expected)
        self._check(self.ledger.expire(self.now, TTL), expected)

    # what must hold

    def check_all(self) -> None:
        """A key shows its newest generation and only that, and the books balance."""
        live = self._live()
        for key in KEYS:
            current = [fact for fact in live if fact.key == key and not fact.ended]
            assert len(current) <= 1
            for who in (None, *HOLDERS):
                entry = self.ledger.lookup(key, holder=who)
                shown = [fact.generation for fact in current if fact.holder in (None, who)]
                assert ([entry.generation] if entry else []) == shown
        visible = [entry.generation for entry in self.ledger.visible()]
        assert sorted(visible) == sorted(f.generation for f in live if f.state in ("published", "in_flight"))
        held = [entry.generation for entry in self.ledger.leased()]
        assert sorted(held) == sorted(f.generation for f in live if f.holder is not None)

        stats = self.ledger.stats(self.now)
        for state, count in stats["entries"].items():
            assert count == sum(fact.state == state for fact in live)
            assert stats["bytes"][state] == count * BLOCK
        assert stats["writes"] == len(self.writing)
        counters = stats["counters"]
        assert counters["published"] == len(self.facts) == len(self.ledger) + sum(self.ends.values())
        assert {name: counters[name] for name in self.ends} == self.ends
        assert counters["stale_events"] == self.stale

    def wind_up(self) -> None:
        """All writes and leases end and one TTL passes: everything is whole again."""
        for write_id in sorted(self.writing):
            self._write_ends(write_id, ok=write_id % 2 == 0)
        for holder in HOLDERS:
            self._holder_dies(holder)
        self.time_passes(lambda _: TTL)
        self.check_all()
        for notice in self.inbox:
            del self.stage[notice.generation]
        assert self.stage == {}
        assert len(self.ledger) == 0
        assert not any(self.readers.values())
        stats = self.ledger.stats(self.now)
        assert (stats["writes"], stats["holders"], stats["oldest"]) == (0, 0, None)


OFTEN = [World.put, World.pull, World.write_ends, World.lease, World.stage_reads_freed]
SELDOM = [
    World.publish_again,
    World.withdraw,
    World.pull_what_cannot_be_pulled,
    World.write_is_reported_again,
    World.release,
    World.holder_dies,
    World.eager_copy_is_used,
    World.time_passes,
]


def test_long_walks_execute_every_row_that_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: Counter[tuple[State, Event]] = Counter()
    step = Entry.step

    def counted(entry: Entry, event: Event) -> None:
        state = entry.state
        step(entry, event)
        executed[state, event] += 1

    monkeypatch.setattr(Entry, "step", counted)
    for seed in range(4):
        rng = random.Random(seed)
        world = World()
        for turn in range(2000):
            if turn % 100 == 99:
                world.control_process_dies(rng.choice)
            else:
                rng.choice(OFTEN if rng.random() < 0.7 else SELDOM)(world, rng.choice)
            world.check_all()
        world.wind_up()
    # A doomed entry has left the key index and the expiry queue, so these two never reach it.
    unreachable = {(State.DRAINING, Event.EXPIRE), (State.DRAINING, Event.REPLACE)}
    assert {(row.state, row.event) for row in ROWS} - executed.keys() == unreachable


class LedgerMachine(RuleBasedStateMachine):
    """Hypothesis' hands on the world."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @precondition(lambda self: len(self.world.stage) < SLOTS)
    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        self.world.put(_drawer(data))

    @precondition(lambda self: self.world.facts)
    @rule(data=st.data(), event=st.sampled_from([World.pull, World.write_ends]))
    def worker(self, data: st.DataObject, event: Callable[[World, Pick], None]) -> None:
        event(self.world, _drawer(data))

    @precondition(lambda self: self.world.facts)
    @rule(data=st.data(), event=st.sampled_from([World.lease, *SELDOM]))
    def anything(self, data: st.DataObject, event: Callable[[World, Pick], None]) -> None:
        event(self.world, _drawer(data))

    @precondition(lambda self: self.world.inbox)
    @rule(data=st.data())
    def stage_reads_freed(self, data: st.DataObject) -> None:
        self.world.stage_reads_freed(_drawer(data))

    @precondition(lambda self: self.world.facts)
    @rule(data=st.data())
    def control_process_dies(self, data: st.DataObject) -> None:
        self.world.control_process_dies(_drawer(data))

    @invariant()
    def everything_holds(self) -> None:
        self.world.check_all()

    def teardown(self) -> None:
        self.world.wind_up()


def _drawer(data: st.DataObject) -> Pick:
    return lambda choices: data.draw(st.sampled_from(choices))


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
