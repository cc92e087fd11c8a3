"""The life of a published buffer, as a table.

Theory of operation
-------------------
A stage publishes a range of its send pool under a key; the control process then decides when that range may
be handed out again. Each publication has a *generation*, unique and increasing per stage, and walks once
through this machine::

    PUBLISHED --- PULL ---------------------------> IN_FLIGHT
    PUBLISHED --- LEASE --------------------------> LEASED
    PUBLISHED --- doomed -------------------------> FREED
    IN_FLIGHT --- LAST_WRITE_DONE ----------------> FREED
    IN_FLIGHT --- LAST_WRITE_FAILED --------------> PUBLISHED
    IN_FLIGHT --- WRITE_DONE, doomed -------------> DRAINING
    LEASED ------ RELEASED, HOLDER_GONE ----------> FREED
    LEASED ------ doomed -------------------------> DRAINING
    DRAINING ---- last write or the lease ended --> FREED

Here *doomed* is WITHDRAW, EXPIRE, REPLACE, or CONSUMED (a receiver has an eager copy); `ROWS` has every row.

Three rules give the table its shape.

* *Mark, then free.* WITHDRAW, EXPIRE and REPLACE free an idle buffer at once. A buffer that is being read is
  only marked (DRAINING, with a reason) and freed by the event that ends the last read, so a range is never
  handed out under a landing write or a lease.
* *A failed write costs nothing.* When the last outstanding write fails the entry is PUBLISHED again, so that
  the receiver can retry; only a delivery or a doom ends an entry.
* *One way of reading at a time.* A lease hides the entry from everyone else and is refused while writes are
  outstanding. DRAINING therefore waits for writes or for one lease, never for both.

Who fires which event is in `EVENT_DOCS`. An event that is neither in the table nor refused (`REFUSALS`)
cannot happen unless the control process is wrong, and raises IllegalTransition. An event for a generation
that is FREED is not an error, since messages can be late: `mori_mp.workers.ledger` counts it as stale and
ignores it.

The diagrams in the documentation are generated from this module (`to_dot()`).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from mori_mp.shared.errors import IllegalTransition


class State(str, Enum):
    """Where a publication stands. `STATE_DOCS` says where its bytes live and who may touch them."""

    PUBLISHED = "published"
    IN_FLIGHT = "in_flight"
    LEASED = "leased"
    DRAINING = "draining"
    FREED = "freed"


class Event(str, Enum):
    """What can happen to a publication. `EVENT_DOCS` says who fires it."""

    PULL = "pull"
    LEASE = "lease"
    WRITE_DONE = "write_done"
    LAST_WRITE_DONE = "last_write_done"
    WRITE_FAILED = "write_failed"
    LAST_WRITE_FAILED = "last_write_failed"
    CONSUMED = "consumed"
    RELEASED = "released"
    HOLDER_GONE = "holder_gone"
    WITHDRAW = "withdraw"
    EXPIRE = "expire"
    REPLACE = "replace"


class Reason(str, Enum):
    """Why a publication ended."""

    CONSUMED = "consumed"  # a receiver has the payload, by whichever delivery
    WITHDRAWN = "withdrawn"  # the stage took it back before anyone had it
    EXPIRED = "expired"  # nobody fetched it within the TTL
    REPLACED = "replaced"  # a newer generation was published under the key
    ABANDONED = "abandoned"  # the lease holder died before it released the buffer


class Delivery(str, Enum):
    """How a receiver got the payload."""

    LANDING = "landing"  # a worker wrote it into the receiver's slot
    LEASE = "lease"  # the receiver read it in place, under a lease or a claim
    EAGER = "eager"  # the receiver used the copy that came with the READY notice


class LeaseReply(Enum):
    """Answer to a lease request; true only when the lease was granted."""

    GRANTED = "granted"
    WRITING = "writing"  # refused: landing writes are out; ask again, or wait for the write to end
    HELD = "held"  # refused: another process holds the lease
    DOOMED = "doomed"  # refused: the entry is waiting to be freed
    GONE = "gone"  # refused: freed already, or never published here

    def __bool__(self) -> bool:
        return self is LeaseReply.GRANTED


class Row(NamedTuple):
    """One transition and the reason for it."""

    state: State
    event: Event
    target: State
    why: str


class StateDoc(NamedTuple):
    """Where the bytes of an entry live in a state, who may touch them, and who can find the entry."""

    where: str
    access: str
    visible: str


_S, _E = State, Event

ROWS: tuple[Row, ...] = (
    Row(_S.PUBLISHED, _E.PULL, _S.IN_FLIGHT, "the first landing write starts"),
    Row(_S.PUBLISHED, _E.LEASE, _S.LEASED, "idle, so one process on this host may read it in place"),
    Row(_S.PUBLISHED, _E.CONSUMED, _S.FREED, "the receiver has the eager copy and nobody reads the pool"),
    Row(_S.PUBLISHED, _E.WITHDRAW, _S.FREED, "idle, nothing to wait for"),
    Row(_S.PUBLISHED, _E.EXPIRE, _S.FREED, "idle, nothing to wait for"),
    Row(_S.PUBLISHED, _E.REPLACE, _S.FREED, "idle, nothing to wait for"),
    #
    Row(_S.IN_FLIGHT, _E.PULL, _S.IN_FLIGHT, "a retry may overtake the report of the write it repeats"),
    Row(_S.IN_FLIGHT, _E.WRITE_DONE, _S.DRAINING, "delivered, but other writes still read the buffer"),
    Row(_S.IN_FLIGHT, _E.LAST_WRITE_DONE, _S.FREED, "delivered and idle"),
    Row(_S.IN_FLIGHT, _E.WRITE_FAILED, _S.IN_FLIGHT, "other writes may still deliver it"),
    Row(_S.IN_FLIGHT, _E.LAST_WRITE_FAILED, _S.PUBLISHED, "nobody has it: available again, for a retry"),
    Row(_S.IN_FLIGHT, _E.CONSUMED, _S.DRAINING, "the eager copy won; the writes still read the buffer"),
    Row(_S.IN_FLIGHT, _E.WITHDRAW, _S.DRAINING, "only marked: the writes still read the buffer"),
    Row(_S.IN_FLIGHT, _E.EXPIRE, _S.DRAINING, "only marked: the writes still read the buffer"),
    Row(_S.IN_FLIGHT, _E.REPLACE, _S.DRAINING, "only marked: the writes finish from their own memory"),
    #
    Row(_S.LEASED, _E.LEASE, _S.LEASED, "the holder asks again after a lost reply: same lease"),
    Row(_S.LEASED, _E.RELEASED, _S.FREED, "delivered, and its only reader is done"),
    Row(_S.LEASED, _E.HOLDER_GONE, _S.FREED, "its only reader is dead"),
    Row(_S.LEASED, _E.CONSUMED, _S.DRAINING, "an eager copy was used; the holder still reads the buffer"),
    Row(_S.LEASED, _E.WITHDRAW, _S.DRAINING, "only marked: the holder still reads the buffer"),
    Row(_S.LEASED, _E.EXPIRE, _S.DRAINING, "only marked: a lease has no time limit but its holder's life"),
    Row(_S.LEASED, _E.REPLACE, _S.DRAINING, "only marked: the holder still reads the buffer"),
    #
    Row(
        _S.DRAINING, _E.LEASE, _S.DRAINING, "the holder asks again after a lost reply: its lease still stands"
    ),
    Row(_S.DRAINING, _E.WRITE_DONE, _S.DRAINING, "other writes still read the buffer"),
    Row(_S.DRAINING, _E.WRITE_FAILED, _S.DRAINING, "other writes still read the buffer"),
    Row(_S.DRAINING, _E.LAST_WRITE_DONE, _S.FREED, "the last reader is done"),
    Row(_S.DRAINING, _E.LAST_WRITE_FAILED, _S.FREED, "the last reader is done; no retry, it is doomed"),
    Row(_S.DRAINING, _E.RELEASED, _S.FREED, "the last reader is done"),
    Row(_S.DRAINING, _E.HOLDER_GONE, _S.FREED, "the last reader is dead"),
    Row(_S.DRAINING, _E.CONSUMED, _S.DRAINING, "delivered after all; the readers are not done"),
    Row(_S.DRAINING, _E.WITHDRAW, _S.DRAINING, "doomed already"),
    Row(_S.DRAINING, _E.EXPIRE, _S.DRAINING, "doomed already"),
    Row(_S.DRAINING, _E.REPLACE, _S.DRAINING, "doomed already"),
)

TRANSITIONS: dict[State, dict[Event, State]] = {
    state: {row.event: row.target for row in ROWS if row.state is state} for state in State
}

# LEASE is the one event that a peer may rightly ask for at the wrong moment: it is refused, not illegal. In
# LEASED and DRAINING this is the answer to a process that does not hold the lease.
REFUSALS: dict[State, LeaseReply] = {
    State.IN_FLIGHT: LeaseReply.WRITING,
    State.LEASED: LeaseReply.HELD,
    State.DRAINING: LeaseReply.DOOMED,
    State.FREED: LeaseReply.GONE,
}

STATE_DOCS: dict[State, StateDoc] = {
    State.PUBLISHED: StateDoc(
        where="The stage's send pool, [offset, offset + size).",
        access="The control process reads it to make the eager copy; the stage must not write it.",
        visible="Everyone.",
    ),
    State.IN_FLIGHT: StateDoc(
        where="The stage's send pool, and partly the landing slots of one or more receivers.",
        access="Transfer workers read it; the stage must not write it.",
        visible="Everyone: a receiver that lost its reply may pull again.",
    ),
    State.LEASED: StateDoc(
        where="The stage's send pool, mapped by the holder.",
        access="The holder reads it in place, for as long as it lives; the stage must not write it.",
        visible="The holder only.",
    ),
    State.DRAINING: StateDoc(
        where="The stage's send pool.",
        access="The transfer workers or the holder that read it before it was doomed; no new readers.",
        visible="Nobody; the key may already name a newer generation.",
    ),
    State.FREED: StateDoc(
        where="Nowhere: the range is the stage's allocator's again.",
        access="The stage, once it has seen the freed notice.",
        visible="Nobody; events for this generation are stale.",
    ),
}

EVENT_DOCS: dict[Event, str] = {
    Event.PULL: "The control process hands a landing write to a transfer worker.",
    Event.LEASE: "A process on this host asks to read in place, or a restart finds its lease recorded.",
    Event.WRITE_DONE: "A worker reports that a write has landed while others are outstanding.",
    Event.LAST_WRITE_DONE: "As WRITE_DONE, for the only outstanding write.",
    Event.WRITE_FAILED: "A worker reports that a write has ended without landing, or is dead and fenced.",
    Event.LAST_WRITE_FAILED: "As WRITE_FAILED, for the only outstanding write.",
    Event.CONSUMED: (
        "A receiver reports that it used the eager copy, or that it released a lease which an earlier "
        "control process granted."
    ),
    Event.RELEASED: "The lease holder is done reading.",
    Event.HOLDER_GONE: "The lease holder's process is dead.",
    Event.WITHDRAW: "The stage takes the publication back (cleanup, close).",
    Event.EXPIRE: "The publication is as old as the TTL.",
    Event.REPLACE: "A newer generation was published under the same key.",
}


# The table with the line that each transition leaves in the history; made once, because every event needs it.
_STEPS: dict[State, dict[Event, tuple[State, str]]] = {
    state: {event: (target, f"{event.name} -> {target.name}") for event, target in row.items()}
    for state, row in TRANSITIONS.items()
}
HISTORY = 8  # events that an entry remembers


class Entry:
    """One publication and where it stands in the table. Callers read it; only the ledger changes it.

    offset and size are bytes in the stage's send pool, published_at is monotonic seconds, slot is the index
    on the lease board. The ledger only carries `owned` (whether the connector allocated the range), `device`
    (whether it lies in the GPU pool) and `event` (which event of that it is complete behind, -1 for none).
    """

    __slots__ = (
        "device",
        "event",
        "failures",
        "fast_path",
        "generation",
        "history",
        "holder",
        "key",
        "offset",
        "owned",
        "published_at",
        "reason",
        "size",
        "slot",
        "state",
        "via",
        "writes",
    )

    def __init__(
        self,
        key: str,
        generation: int,
        offset: int,
        size: int,
        fast_path: bool,
        slot: int,
        published_at: float,
        owned: bool,
        device: bool = False,
        event: int = -1,
    ) -> None:
        self.device = device
        self.event = event
        self.key = key
        self.generation = generation
        self.offset = offset
        self.size = size
        self.fast_path = fast_path
        self.slot = slot
        self.published_at = published_at
        self.owned = owned
        self.state = State.PUBLISHED
        self.reason: Reason | None = None  # why it is doomed or has ended
        self.via: Delivery | None = None  # how the payload first reached a receiver
        self.writes = 0  # landing writes outstanding
        self.failures = 0  # landing writes that failed
        self.holder: int | None = None  # process id of the lease holder
        self.history: list[str] = ["PUBLISH -> PUBLISHED"]  # the last HISTORY events, oldest first

    def __repr__(self) -> str:
        return f"<Entry {self.key!r} generation {self.generation} {self.state.name} {self.size} bytes>"

    def step(self, event: Event) -> None:
        """Move along the table and note it in the history. Raises IllegalTransition and changes nothing."""
        step = _STEPS[self.state].get(event)
        if step is None:
            raise self.illegal(event.name)
        self.state, line = step
        history = self.history
        history.append(line)
        if len(history) > HISTORY:
            del history[0]

    def illegal(self, event: str) -> IllegalTransition:
        """The error for an event that cannot happen to this entry now."""
        return IllegalTransition(self.key, self.generation, self.state.name, event, self.history)


def to_dot() -> str:
    """The table as a Graphviz digraph; dashed edges are refused lease requests."""
    lines = [
        "digraph buffer_ledger {",
        "  rankdir=LR;",
        '  node [shape=box, style=rounded, fontname="Helvetica"];',
        '  edge [fontname="Helvetica", fontsize=10];',
        "  start [shape=point];",
    ]
    for state in State:
        outline = ", peripheries=2" if not TRANSITIONS[state] else ""
        tooltip = STATE_DOCS[state].access
        lines.append(f'  {state.name} [tooltip="{tooltip}"{outline}];')
    lines.append(f'  start -> {State.PUBLISHED.name} [label="PUBLISH"];')
    for state, row in TRANSITIONS.items():
        by_target: dict[State, list[str]] = {}
        for event, target in row.items():
            by_target.setdefault(target, []).append(event.name)
        for target, names in by_target.items():
            label = "\\n".join(names)
            lines.append(f'  {state.name} -> {target.name} [label="{label}"];')
    for state, reply in REFUSALS.items():
        if TRANSITIONS[state]:
            lines.append(
                f'  {state.name} -> {state.name} [style=dashed, label="LEASE refused: {reply.value}"];'
            )
    lines.append("}")
    return "\n".join(lines) + "\n"
