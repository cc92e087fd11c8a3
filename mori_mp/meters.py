"""What a stage counts for each edge that it receives from: the part of observing that lies on get()'s path.

A get() that delivers takes a few readings of the clock and increments a few fixed counters. Spans, and the
histograms of vLLM-Omni's metric families, cost nothing unless they were asked for. What is sent is counted in
the control process (mori_mp.workers.meters), which has more time than the stage.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mori_mp.shared import families
from mori_mp.shared.histogram import Edges, Histogram
from mori_mp.shared.tracing import Tracer

if TYPE_CHECKING:
    from mori_mp.wanted import Wanted


class StageEdge:
    """Counters of one edge in the stage; times in microseconds, sizes in bytes."""

    __slots__ = ("fetch", "get", "received_bytes", "rx")

    def __init__(self) -> None:
        self.get = Histogram()
        self.fetch = Histogram()
        self.received_bytes = 0
        self.rx = families.counted(families.RX_SECONDS)


class StageMeters:
    """See the module's docstring; times are CLOCK_MONOTONIC ns. export: count vLLM-Omni's families too."""

    def __init__(self, export: bool = False, tracer: Tracer | None = None) -> None:
        self.edges: Edges[StageEdge] = Edges(StageEdge)
        self.tracer = tracer
        self._export = export
        self._more = export or tracer is not None

    def got(self, name: str, began_ns: int, size: int) -> None:
        """A get() on an edge that began at began_ns returns a payload."""
        edge = self.edges[name]
        edge.get.record((time.monotonic_ns() - began_ns) // 1000)
        edge.received_bytes += size

    def fetched(self, wanted: Wanted, known_ns: int, size: int, generation: int, epoch: str) -> None:
        """A payload that was known to be there at known_ns is usable now; epoch is its sender's."""
        now = time.monotonic_ns()
        edge = self.edges[wanted.edge]
        edge.fetch.record((now - known_ns) // 1000)
        if self._more:
            if self._export:
                edge.rx.record((now - known_ns) / 1e9)
            if self.tracer is not None:
                self.tracer.add(
                    "usable", known_ns, now, wanted.key, generation=generation, size=size, epoch=epoch
                )

    # -------------------------------------------------------------------------- reports
    def report(self) -> dict[str, Any]:
        """Describe every edge for the health document."""
        return {
            name: {
                "received": edge.get.count,
                "received_bytes": edge.received_bytes,
                "get": edge.get.as_dict(),
                "fetch": edge.fetch.as_dict(),
            }
            for name, edge in list(self.edges.items())
        }

    def transfer_families(self) -> dict[str, Any]:
        """Return the counts of vLLM-Omni's families, by edge; empty unless they are exported."""
        if not self._export:
            return {}
        edges = list(self.edges.items())
        return {name: {families.RX_SECONDS: edge.rx.as_dict()} for name, edge in edges if edge.get.count}
