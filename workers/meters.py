"""What a control process counts for each edge, and its spans. Pure bookkeeping; times are passed in.

On the hot path a publication costs a look-up of its edge and a few increments, a pull the same and one small
tuple until its answer has been sent: only then is the time of the reply known.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mori_mp.shared import families
from mori_mp.shared.histogram import Edges, Histogram
from mori_mp.shared.messages import Publish
from mori_mp.shared.tracing import Tracer
from mori_mp.shared.wire import edge_of


class SenderEdge:
    """Counters of one edge in the control process; times in microseconds, sizes in bytes."""

    __slots__ = (
        "failed_writes",
        "in_flight",
        "publish",
        "published",
        "published_bytes",
        "reply",
        "size",
        "write",
    )

    def __init__(self) -> None:
        self.published = 0
        self.published_bytes = 0
        self.failed_writes = 0
        self.publish = Histogram()
        self.reply = Histogram()
        self.write = Histogram()
        self.size = families.counted(families.SIZE_BYTES)
        self.in_flight = families.counted(families.IN_FLIGHT_SECONDS)


class _Reply(NamedTuple):
    """A good answer that is about to be sent: when its pull came, and when the answer could be given."""

    key: str
    generation: int
    size: int
    since: float
    began: float


class SenderMeters:
    """See the module's docstring; times are monotonic seconds. export: count for vLLM-Omni's families too."""

    def __init__(self, export: bool = False, tracer: Tracer | None = None) -> None:
        self.edges: Edges[SenderEdge] = Edges(SenderEdge)
        self.export = export
        self.tracer = tracer
        self._replies: list[_Reply] = []

    def published(self, message: Publish, now: float) -> None:
        """A publication that is no replay has been entered."""
        edge = self.edges[edge_of(message.key)]
        edge.published += 1
        edge.published_bytes += message.size
        now_us = int(now * 1e6)
        edge.publish.record(now_us - message.put_us)
        if self.export:
            edge.size.record(message.size)
        if self.tracer is not None:
            self.tracer.add(
                "publish",
                message.put_us * 1000,
                now_us * 1000,
                message.key,
                generation=message.generation,
                size=message.size,
            )

    def asked_for(self, key: str, published_at: float, now: float) -> None:
        """A receiver has pulled a payload, or settled one without a pull; called with export only."""
        self.edges[edge_of(key)].in_flight.record(max(0.0, now - published_at))

    def dispatched(self, write_id: int, key: str, generation: int, since: float, now: float) -> None:
        """A worker has the write of a pull that came at `since`."""
        if self.tracer is not None:
            self.tracer.add("dispatch", _ns(since), _ns(now), key, generation=generation, write_id=write_id)

    def wrote(self, key: str, microseconds: int) -> None:
        """A landing write has ended well."""
        self.edges[edge_of(key)].write.record(microseconds)

    def write_failed(self, key: str) -> None:
        """A landing write has ended badly."""
        self.edges[edge_of(key)].failed_writes += 1

    def replying(self, key: str, generation: int, size: int, since: float, began: float) -> None:
        """A good answer to a pull that came at `since` goes out next; it could be given at `began`."""
        self._replies.append(_Reply(key, generation, size, since, began))

    @property
    def owes(self) -> bool:
        """Whether sent() has anything to note."""
        return bool(self._replies)

    def sent(self, now: float) -> None:
        """Everything that was owed to receivers has been handed to their sockets."""
        for reply in self._replies:
            self.edges[edge_of(reply.key)].reply.record(int((now - reply.since) * 1e6))
            if self.tracer is not None:
                self.tracer.add(
                    "reply",
                    _ns(reply.began),
                    _ns(now),
                    reply.key,
                    generation=reply.generation,
                    size=reply.size,
                )
        self._replies.clear()

    # -------------------------------------------------------------------------- reports
    def report(self) -> dict[str, Any]:
        """Describe every edge for the health document."""
        return {
            name: {
                "published": edge.published,
                "published_bytes": edge.published_bytes,
                "failed_writes": edge.failed_writes,
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
            counts = {families.SIZE_BYTES: edge.size, families.IN_FLIGHT_SECONDS: edge.in_flight}
            found[name] = {family: count.as_dict() for family, count in counts.items() if any(count.buckets)}
        return found


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
