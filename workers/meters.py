"""What a control process counts for each edge, and its spans. Pure bookkeeping; times are passed in.

On the hot path a publication costs a look-up of its edge and a few increments, a pull the same and one small
tuple until its answer has been sent: only then is the time of the reply known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mori_mp.shared import families
from mori_mp.shared.histogram import Edges, Histogram
from mori_mp.shared.messages import Publish
from mori_mp.shared.tracing import Tracer
from mori_mp.shared.wire import edge_of

if TYPE_CHECKING:
    from mori_mp.workers.ledger_table import Entry


class SenderEdge:
    """Counters of one edge in the control process; times in microseconds, sizes in bytes."""

    __slots__ = (
        "failed_writes",
        "in_flight",
        "publish",
        "published_bytes",
        "put",
        "reply",
        "size",
        "tx",
        "write",
    )

    def __init__(self) -> None:
        self.published_bytes = 0
        self.failed_writes = 0
        self.put = Histogram()
        self.publish = Histogram()
        self.reply = Histogram()
        self.write = Histogram()
        self.tx = families.counted(families.TX_SECONDS)
        self.size = families.counted(families.SIZE_BYTES)
        self.in_flight = families.counted(families.IN_FLIGHT_SECONDS)


class SenderMeters:
    """See the module's docstring; times are monotonic seconds. export: count for vLLM-Omni's families too."""

    def __init__(self, export: bool = False, tracer: Tracer | None = None) -> None:
        self.edges: Edges[SenderEdge] = Edges(SenderEdge)
        self.export = export
        self.tracer = tracer
        self._more = export or tracer is not None
        self.replies: list[tuple[Histogram, float]] = []
        """Good answers that go out next: where their times are counted, and when their pulls came."""
        self._spans: list[tuple[str, int, int, float]] = []  # of these: key, generation, bytes, since

    def published(self, message: Publish, now: float) -> None:
        """A publication that is no replay has been entered."""
        key = message.key
        edge = self.edges[key[key.rfind("@") + 1 :]]
        edge.published_bytes += message.size
        publish, spent = edge.publish, int(now * 1e6) - message.put_us
        publish.buckets[spent.bit_length()] += 1
        publish.total += spent
        put, took = edge.put, message.took_us
        put.buckets[took.bit_length()] += 1
        put.total += took
        if self._more:
            self._published(message, edge, now)

    def _published(self, message: Publish, edge: SenderEdge, now: float) -> None:
        if self.export:
            edge.size.record(message.size)
            edge.tx.record(message.took_us / 1e6)
        if self.tracer is not None:
            generation, size = message.generation, message.size
            self.tracer.add(
                "publish", message.put_us * 1000, _ns(now), message.key, generation=generation, size=size
            )

    def asked_for(self, key: str, published_at: float, now: float) -> None:
        """A receiver has pulled a payload, or settled one without a pull; called with export only."""
        self.edges[edge_of(key)].in_flight.record(max(0.0, now - published_at))

    def dispatched(self, write_id: int, key: str, generation: int, since: float, now: float) -> None:
        """A worker has the write of a pull that came at `since`."""
        if self.tracer is not None:
            self.tracer.add("dispatch", _ns(since), _ns(now), key, generation=generation, write_id=write_id)

    def lent(self, entry: Entry, since: float) -> None:
        """The good answer to a pull that came at `since` goes out next: a lease."""
        self.replies.append((self.edges[edge_of(entry.key)].reply, since))
        if self.tracer is not None:
            self._spans.append((entry.key, entry.generation, entry.size, since))

    def landed(self, entry: Entry, since: float, microseconds: int, now: float) -> None:
        """The same, for a landing write that took its worker so long."""
        key = entry.key
        edge = self.edges[key[key.rfind("@") + 1 :]]
        write = edge.write
        write.buckets[microseconds.bit_length()] += 1
        write.total += microseconds
        self.replies.append((edge.reply, since))
        if self.tracer is not None:
            self._spans.append((entry.key, entry.generation, entry.size, now))

    def write_failed(self, key: str) -> None:
        """A landing write has ended badly."""
        self.edges[edge_of(key)].failed_writes += 1

    def sent(self, now: float) -> None:
        """The answers have been handed to their sockets."""
        for reply, since in self.replies:
            spent = int((now - since) * 1e6)
            reply.buckets[spent.bit_length()] += 1
            reply.total += spent
        self.replies.clear()
        if self.tracer is not None:
            for key, generation, size, since in self._spans:
                self.tracer.add("reply", _ns(since), _ns(now), key, generation=generation, size=size)
            self._spans.clear()

    # -------------------------------------------------------------------------- reports
    def report(self) -> dict[str, Any]:
        """Describe every edge for the health document."""
        return {
            name: {
                "published": edge.publish.count,
                "published_bytes": edge.published_bytes,
                "failed_writes": edge.failed_writes,
                "put": edge.put.as_dict(),
                "publish": edge.publish.as_dict(),
                "reply": edge.reply.as_dict(),
                "write": edge.write.as_dict(),
            }
            for name, edge in self.edges.items()
        }

    def transfer_families(self) -> dict[str, Any]:
        """Return the counts of vLLM-Omni's families, by edge; empty unless they are exported."""
        if not self.export:
            return {}
        found = {}
        for name, edge in self.edges.items():
            counts = {
                families.SIZE_BYTES: edge.size,
                families.TX_SECONDS: edge.tx,
                families.IN_FLIGHT_SECONDS: edge.in_flight,
            }
            found[name] = {family: count.as_dict() for family, count in counts.items() if any(count.buckets)}
        return found


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
