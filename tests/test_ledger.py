"""The buffer ledger: every cell of its table, its deliveries, and late, repeated and impossible messages."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import pytest

from mori_mp.shared.errors import IllegalTransition
from mori_mp.workers.ledger import Action, Freed, Gone, Ledger, Visible
from mori_mp.workers.ledger_table import (
    EVENT_DOCS,
    HISTORY,
    REFUSALS,
    ROWS,
    STATE_DOCS,
    TRANSITIONS,
    Delivery,
    Entry,
    Event,
    LeaseReply,
    Reason,
    State,
    to_dot,
)

KEY = "req_0_0@0_1"
BLOCK = 4096
HOLDER, OTHER = 101, 202


def publish(
    ledger: Ledger, generation: int = 1, key: str = KEY, now: float = 0.0, **more: Any
) -> list[Action]:
    """Publish one block; each generation has its own slot unless told otherwise."""
    slot = more.pop("slot", generation)
    return ledger.publish(key, generation, slot * BLOCK, BLOCK, True, slot, now, True, **more)


def freed(generation: int, reason: Reason, key: str = KEY) -> Freed:
    return Freed(generation, generation, generation * BLOCK, BLOCK, key, reason)


# -- the table -------------------------------------------------------------------------------------


class Outside(Enum):
    """What the ledger does with an event that the table has no row for."""

    RAISES = auto()  # impossible: IllegalTransition, nothing changed
    REFUSED = auto()  # a lease at the wrong time
    AS_CONSUMED = auto()  # a release of a lease that only an earlier control process knew
    STALE = auto()  # late: counted, ignored
    NOTHING = auto()  # the event does not concern the entry


WRITE_EVENTS = (Event.WRITE_DONE, Event.LAST_WRITE_DONE, Event.WRITE_FAILED, Event.LAST_WRITE_FAILED)

OUTSIDE: dict[tuple[State, Event], Outside] = {
    **{(state, event): Outside.RAISES for state in (State.PUBLISHED, State.LEASED) for event in WRITE_EVENTS},
    (State.LEASED, Event.PULL): Outside.RAISES,
    (State.DRAINING, Event.PULL): Outside.RAISES,
    (State.IN_FLIGHT, Event.LEASE): Outside.REFUSED,
    (State.PUBLISHED, Event.RELEASED): Outside.AS_CONSUMED,
    (State.IN_FLIGHT, Event.RELEASED): Outside.AS_CONSUMED,
    (State.PUBLISHED, Event.HOLDER_GONE): Outside.NOTHING,
    (State.IN_FLIGHT, Event.HOLDER_GONE): Outside.NOTHING,
    **{(State.FREED, event): Outside.STALE for event in Event},
    (State.FREED, Event.HOLDER_GONE): Outside.NOTHING,
    (State.FREED, Event.EXPIRE): Outside.NOTHING,
    (State.FREED, Event.REPLACE): Outside.NOTHING,
}


def bring(state: State, event: Event) -> tuple[Ledger, Entry]:
    """A ledger with generation 1 in `state`, with the readers that `event` is about."""
    ledger = Ledger()
    publish(ledger)
    entry = ledger.lookup(KEY)
    assert entry is not None
    writes = 2 if event in (Event.WRITE_DONE, Event.WRITE_FAILED) else 1
    by_lease = state is State.LEASED or (
        state is State.DRAINING and event in (Event.LEASE, Event.RELEASED, Event.HOLDER_GONE)
    )
    if by_lease:
        assert ledger.grant_lease(1, HOLDER)
    elif state is not State.PUBLISHED:
        for write_id in range(writes):
            ledger.start_write(1, write_id)
    if state is State.DRAINING:
        ledger.withdraw(1)
    elif state is State.FREED:
        for write_id in range(writes):
            ledger.finish_write(write_id, True)
    assert entry.state is state
    return ledger, entry


def fire(ledger: Ledger, event: Event) -> Any:
    """Make `event` happen to generation 1 through the public methods."""
    if event in WRITE_EVENTS:
        # Write 0 where there is one, else the end of a write that never started.
        return ledger.finish_write(0, event in (Event.WRITE_DONE, Event.LAST_WRITE_DONE))
    methods: dict[Event, Callable[[], Any]] = {
        Event.PULL: lambda: ledger.start_write(1, 9),
        Event.LEASE: lambda: ledger.grant_lease(1, HOLDER),
        Event.CONSUMED: lambda: ledger.consumed(1),
        Event.RELEASED: lambda: ledger.release(1, HOLDER),
        Event.HOLDER_GONE: lambda: ledger.holder_gone(HOLDER),
        Event.WITHDRAW: lambda: ledger.withdraw(1),
        Event.EXPIRE: lambda: ledger.expire(1000.0, 300.0),
        Event.REPLACE: lambda: publish(ledger, 2, now=1.0),
    }
    return methods[event]()


def test_every_cell_of_the_table_is_decided() -> None:
    inside = {(row.state, row.event) for row in ROWS}
    assert len(inside) == len(ROWS), "a cell has two rows"
    assert not inside & OUTSIDE.keys()
    assert inside | OUTSIDE.keys() == {(state, event) for state in State for event in Event}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.state.name}-{row.event.name}")
def test_a_row_of_the_table_is_executed(row: Any) -> None:
    ledger, entry = bring(row.state, row.event)
    fire(ledger, row.event)
    assert entry.state is row.target
    assert TRANSITIONS[row.state][row.event] is row.target


@pytest.mark.parametrize(("state", "event"), OUTSIDE, ids=lambda value: value.name)
def test_an_event_outside_the_table(state: State, event: Event) -> None:
    ledger, entry = bring(state, event)
    stale = ledger.counters["stale_events"]
    outcome = OUTSIDE[state, event]
    if outcome is Outside.RAISES:
        before = (entry.history[:], entry.writes, entry.holder, ledger.stats(0.0))
        with pytest.raises(IllegalTransition):
            fire(ledger, event)
        assert (entry.history, entry.writes, entry.holder, ledger.stats(0.0)) == before
    elif outcome is Outside.REFUSED:
        assert fire(ledger, event) is REFUSALS[state]
        assert ledger.counters["refused_leases"] == 1
    elif outcome is Outside.AS_CONSUMED:
        fire(ledger, event)
        assert entry.state is TRANSITIONS[state][Event.CONSUMED]
        assert entry.reason is Reason.CONSUMED
        assert entry.via is Delivery.LEASE
        return
    else:
        assert not [action for action in fire(ledger, event) or () if not isinstance(action, Visible)]
        assert ledger.counters["stale_events"] == stale + (outcome is Outside.STALE)
    assert entry.state is state


@pytest.mark.parametrize("state", [State.IN_FLIGHT, State.LEASED, State.DRAINING, State.FREED])
def test_a_lease_is_refused_to_anyone_but_its_holder(state: State) -> None:
    ledger, entry = bring(state, Event.LEASE)
    assert ledger.grant_lease(1, OTHER) is REFUSALS[state]
    assert not REFUSALS[state]
    assert entry.holder != OTHER


def test_the_table_is_documented_and_ends_everywhere_in_freed() -> None:
    assert set(STATE_DOCS) == set(State) == set(TRANSITIONS)
    assert set(EVENT_DOCS) == set(Event)
    assert all(row.why for row in ROWS)
    assert not TRANSITIONS[State.FREED]
    reaches = {State.FREED}
    for _ in State:
        reaches |= {state for state in State if reaches & set(TRANSITIONS[state].values())}
    assert reaches == set(State)


def test_only_an_idle_buffer_or_the_end_of_its_last_reader_frees() -> None:
    frees: dict[State, set[Event]] = {state: set() for state in State}
    for row in ROWS:
        if row.target is State.FREED:
            frees[row.state].add(row.event)
    assert frees == {
        State.PUBLISHED: {Event.CONSUMED, Event.WITHDRAW, Event.EXPIRE, Event.REPLACE},
        State.IN_FLIGHT: {Event.LAST_WRITE_DONE},
        State.LEASED: {Event.RELEASED, Event.HOLDER_GONE},
        State.DRAINING: {
            Event.LAST_WRITE_DONE,
            Event.LAST_WRITE_FAILED,
            Event.RELEASED,
            Event.HOLDER_GONE,
        },
        State.FREED: set(),
    }


def test_dot_has_every_row() -> None:
    text = to_dot()
    edges = {}
    for line in text.splitlines():
        if " -> " in line and "dashed" not in line:
            ends, label = line.strip().split(" [label=")
            edges[ends] = label.rstrip('"];').lstrip('"').split("\\n")
    assert edges.pop("start -> PUBLISHED") == ["PUBLISH"]
    drawn = {(*ends.split(" -> "), name) for ends, names in edges.items() for name in names}
    assert drawn == {(row.state.name, row.target.name, row.event.name) for row in ROWS}
    assert text.count("dashed") == len(REFUSALS) - 1
    assert text.startswith("digraph")
    assert text.rstrip().endswith("}")


# -- deliveries and dooms --------------------------------------------------------------------------


def test_replacing_an_idle_buffer_tells_in_order() -> None:
    ledger = Ledger()
    publish(ledger, 1)
    actions = publish(ledger, 2)
    entry = ledger.lookup(KEY)
    assert entry is not None
    assert entry.generation == 2
    assert actions == [Gone(KEY, 1, Reason.REPLACED), freed(1, Reason.REPLACED), Visible(entry)]


def test_a_replaced_buffer_in_flight_finishes_from_its_own_memory() -> None:
    ledger = Ledger()
    publish(ledger, 1)
    ledger.start_write(1, 0)
    actions = publish(ledger, 2)
    assert [type(action) for action in actions] == [Gone, Visible]
    current = ledger.lookup(KEY)
    assert current is not None
    assert current.generation == 2
    # The first generation was delivered, so that is what is counted.
    assert ledger.finish_write(0, True) == [freed(1, Reason.CONSUMED)]
    assert ledger.counters["delivered_landing"] == 1
    assert ledger.counters["replaced"] == 0


def test_a_failed_write_makes_the_entry_available_again() -> None:
    ledger = Ledger()
    publish(ledger)
    ledger.start_write(1, 0)
    ledger.start_write(1, 1)
    assert ledger.finish_write(0, False) == []
    entry = ledger.lookup(KEY)
    assert entry is not None
    assert ledger.finish_write(1, False) == [Visible(entry)]
    assert entry.state is State.PUBLISHED
    ledger.start_write(1, 2)
    assert ledger.finish_write(2, True) == [freed(1, Reason.CONSUMED)]
    assert ledger.counters["failed_writes"] == 2
    assert ledger.counters["retried_writes"] == 1


def test_a_failed_write_of_a_doomed_entry_frees_it_for_the_first_reason() -> None:
    ledger = Ledger()
    publish(ledger)
    ledger.start_write(1, 0)
    assert ledger.expire(300.0, 300.0) == [Gone(KEY, 1, Reason.EXPIRED)]
    assert ledger.withdraw(1) == []
    assert ledger.finish_write(0, False) == [freed(1, Reason.EXPIRED)]
    assert ledger.counters["expired"] == 1
    assert ledger.counters["withdrawn"] == 0


def test_a_delivery_is_not_reported_as_gone() -> None:
    ledger = Ledger()
    publish(ledger)
    assert ledger.consumed(1) == [freed(1, Reason.CONSUMED)]
    publish(ledger, 2)
    assert ledger.grant_lease(2, HOLDER)
    assert ledger.withdraw(2) == []
    assert ledger.release(2, HOLDER) == [freed(2, Reason.CONSUMED)]
    assert ledger.counters["delivered_eager"] == ledger.counters["delivered_lease"] == 1


def test_the_first_delivery_is_the_one_that_counts() -> None:
    ledger = Ledger()
    publish(ledger)
    ledger.start_write(1, 0)
    assert ledger.consumed(1) == []
    assert ledger.lookup(KEY) is None
    assert ledger.finish_write(0, True) == [freed(1, Reason.CONSUMED)]
    assert ledger.counters["delivered_eager"] == 1
    assert ledger.counters["delivered_landing"] == 0


def test_a_lease_hides_the_entry_from_everyone_else() -> None:
    ledger = Ledger()
    publish(ledger)
    assert [entry.generation for entry in ledger.visible()] == [1]
    assert ledger.grant_lease(1, HOLDER) is LeaseReply.GRANTED
    assert ledger.lookup(KEY) is None
    assert ledger.lookup(KEY, holder=OTHER) is None
    assert ledger.lookup(KEY, holder=HOLDER) is ledger.find(1)
    assert list(ledger.visible()) == []
    assert ledger.grant_lease(1, HOLDER) is LeaseReply.GRANTED  # the reply was lost
    assert [entry.generation for entry in ledger.leased()] == [1]


def test_a_lease_outlives_its_ttl_and_its_key() -> None:
    ledger = Ledger()
    publish(ledger, 1)
    ledger.grant_lease(1, HOLDER)
    assert ledger.expire(1e6, 300.0) == []
    publish(ledger, 2, now=1e6)
    ledger.consumed(1)
    assert [entry.generation for entry in ledger.leased()] == [1]
    assert ledger.grant_lease(1, HOLDER)  # the reply was lost, and the lease still stands
    assert ledger.release(1, OTHER) == []
    assert ledger.release(1, HOLDER) == [freed(1, Reason.CONSUMED)]


def test_a_dead_holder_ends_all_its_leases_and_no_others() -> None:
    ledger = Ledger()
    for generation, holder in ((1, HOLDER), (2, OTHER), (3, HOLDER)):
        publish(ledger, generation, key=f"k{generation}")
        ledger.grant_lease(generation, holder)
    ledger.withdraw(3)
    assert ledger.holder_gone(HOLDER) == [
        freed(1, Reason.ABANDONED, "k1"),
        freed(3, Reason.WITHDRAWN, "k3"),
    ]
    assert ledger.holder_gone(HOLDER) == []
    assert [entry.holder for entry in ledger.leased()] == [OTHER]
    assert ledger.counters["abandoned"] == ledger.counters["withdrawn"] == 1


def test_expiry_takes_the_old_in_order_and_leaves_the_young() -> None:
    ledger = Ledger()
    for generation in range(1, 5):
        publish(ledger, generation, key=f"k{generation}", now=float(generation))
    assert ledger.expire(10.9, 10.0) == []
    actions = ledger.expire(12.0, 10.0)
    assert [action.generation for action in actions if isinstance(action, Freed)] == [1, 2]
    assert [entry.generation for entry in ledger.visible()] == [3, 4]


def test_a_publication_dated_back_expires_after_those_before_it() -> None:
    ledger = Ledger()
    publish(ledger, 1, key="k1", now=100.0)
    publish(ledger, 2, key="k2", now=50.0)
    assert ledger.expire(109.0, 10.0) == []
    assert [action.generation for action in ledger.expire(110.0, 10.0) if isinstance(action, Freed)] == [1, 2]


# -- late, repeated and impossible -----------------------------------------------------------------


def test_publishing_again_changes_nothing_alive_or_freed() -> None:
    ledger = Ledger()
    publish(ledger)
    ledger.start_write(1, 0)
    assert publish(ledger) == []
    assert ledger.find(1) is not None
    ledger.finish_write(0, True)
    assert publish(ledger) == []
    assert ledger.lookup(KEY) is None
    assert ledger.counters["published"] == ledger.counters["stale_events"] == 1
    # The slot's next publication makes the old one no newer.
    publish(ledger, 2, slot=1)
    ledger.consumed(2)
    assert publish(ledger) == []
    assert len(ledger) == 0


def test_an_older_generation_never_takes_the_key() -> None:
    ledger = Ledger()
    publish(ledger, 7)
    assert publish(ledger, 3) == [freed(3, Reason.REPLACED)]
    current = ledger.lookup(KEY)
    assert current is not None
    assert current.generation == 7


def test_a_recorded_lease_is_replayed_without_showing_the_entry() -> None:
    ledger = Ledger()
    assert publish(ledger, 1, holder=HOLDER) == []
    assert ledger.lookup(KEY) is None
    assert publish(ledger, 1, holder=HOLDER) == []
    assert ledger.release(1, HOLDER) == [freed(1, Reason.CONSUMED)]
    assert [type(action) for action in publish(ledger, 2, holder=0)] == [Visible]


def test_a_replayed_lease_is_safe_from_a_newer_generation_that_came_first() -> None:
    ledger = Ledger()
    publish(ledger, 7)
    assert publish(ledger, 3, holder=HOLDER) == []
    assert ledger.holder_gone(HOLDER) == [freed(3, Reason.REPLACED)]


def test_restoring_a_lease() -> None:
    ledger = Ledger()
    publish(ledger)
    assert ledger.restore_lease(1, HOLDER)
    assert ledger.restore_lease(1, HOLDER)
    with pytest.raises(IllegalTransition, match="202"):
        ledger.restore_lease(1, OTHER)
    assert not ledger.restore_lease(99, HOLDER)
    assert ledger.counters["stale_events"] == 1
    publish(ledger, 2)
    ledger.start_write(2, 0)
    with pytest.raises(IllegalTransition):
        ledger.restore_lease(2, OTHER)
    with pytest.raises(IllegalTransition):
        publish(ledger, 2, holder=OTHER)


def test_a_repeated_report_is_stale_and_an_unknown_write_is_not() -> None:
    ledger = Ledger()
    publish(ledger)
    ledger.start_write(1, 5)
    with pytest.raises(IllegalTransition, match="outstanding"):
        ledger.start_write(1, 5)
    ledger.finish_write(5, False)
    assert ledger.finish_write(5, True) == []
    assert ledger.counters["stale_events"] == 1
    ledger.start_write(1, 3)  # as put back by a restart: unused, though not the highest
    assert ledger.finish_write(5, True) == []
    with pytest.raises(IllegalTransition, match="<write 6>"):
        ledger.finish_write(6, True)
    assert ledger.find(1) is not None


@pytest.mark.parametrize(
    "again",
    [
        {"key": "other@0_1"},
        {"slot": 2},
    ],
)
def test_a_live_generation_cannot_change(again: dict[str, Any]) -> None:
    ledger = Ledger()
    publish(ledger)
    with pytest.raises(IllegalTransition, match="PUBLISH again"):
        publish(ledger, 1, **again)


def test_a_live_slot_cannot_be_published_on() -> None:
    ledger = Ledger()
    publish(ledger)
    with pytest.raises(IllegalTransition, match="generation 2 on its slot 1"):
        publish(ledger, 2, key="other@0_1", slot=1)
    assert len(ledger) == 1


def test_a_lease_needs_a_process() -> None:
    ledger = Ledger()
    publish(ledger)
    with pytest.raises(IllegalTransition):
        ledger.grant_lease(1, 0)
    with pytest.raises(IllegalTransition):
        publish(ledger, 2, holder=-1)
    assert len(ledger) == 1
    assert ledger.lookup(KEY) is not None


def test_an_illegal_event_tells_the_story() -> None:
    ledger = Ledger()
    publish(ledger)
    for write_id in range(HISTORY):
        ledger.start_write(1, write_id)
        ledger.finish_write(write_id, False)
    ledger.grant_lease(1, HOLDER)
    with pytest.raises(IllegalTransition) as caught:
        ledger.start_write(1, 99)
    error = caught.value
    assert (error.key, error.generation, error.state, error.event) == (KEY, 1, "LEASED", "PULL")
    assert len(error.history) == HISTORY
    assert error.history[-3:] == ("PULL -> IN_FLIGHT", "LAST_WRITE_FAILED -> PUBLISHED", "LEASE -> LEASED")
    ledger.release(1, HOLDER)
    assert error.history[-1] == "LEASE -> LEASED"  # a story does not go on after it was told


def test_stats() -> None:
    ledger = Ledger()
    publish(ledger, 1, key="k1", now=1.0)
    publish(ledger, 2, key="k2", now=2.0)
    publish(ledger, 3, key="k3", now=3.0)
    ledger.grant_lease(1, HOLDER)
    ledger.start_write(2, 0)
    ledger.start_write(2, 1)
    stats = ledger.stats(11.0)
    assert stats["entries"] == {"published": 1, "in_flight": 1, "leased": 1, "draining": 0}
    assert stats["bytes"] == {"published": BLOCK, "in_flight": BLOCK, "leased": BLOCK, "draining": 0}
    assert (stats["writes"], stats["holders"]) == (2, 1)
    assert stats["oldest"] == {
        "key": "k1",
        "generation": 1,
        "state": "leased",
        "age_s": 10.0,
        "history": ["PUBLISH -> PUBLISHED", "LEASE -> LEASED"],
    }
    assert Ledger().stats(0.0)["oldest"] is None
