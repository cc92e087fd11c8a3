"""Prometheus metrics of one connector: one collector over its health document.

Imported only where `prometheus_port` is set, because it needs prometheus-client (extra `metrics`) and makes a
control process some 7 MiB larger. There is nothing to keep up to date between two scrapes: a scrape makes a
health document, and `families` turns it into samples. Counters of the control process start from zero with a
new one, which Prometheus takes as a reset.

Labels: `stage` on everything; `edge`, `cause`, `worker` where they apply; `process` on what is told of each
process. FAMILIES is the list of all names, for dashboards and for the documentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mori_mp.shared.families import BOUNDS
from mori_mp.shared.faults import CAUSES
from mori_mp.shared.histogram import BUCKETS, upper_us

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LAST_BOUND = 26  # 2^26 us are 67 s; longer ones are in +Inf
_STATUSES = ("healthy", "degraded", "unhealthy")

# name -> (kind, what it is, labels beside `stage`); counters are named here without their _total.
FAMILIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "mori_mp_status": ("gauge", "1 for the connector's present status, 0 for the others.", ("status",)),
    "mori_mp_stage_report_age_seconds": ("gauge", "Age of what the stage process has told.", ()),
    "mori_mp_puts": ("counter", "Payloads that put() has accepted.", ()),
    "mori_mp_gets": ("counter", "Payloads that get() has returned.", ()),
    "mori_mp_get_misses": ("counter", "get() calls that found nothing yet.", ()),
    "mori_mp_published_payloads": ("counter", "Payloads published, by edge.", ("edge",)),
    "mori_mp_published_bytes": ("counter", "Bytes published, by edge.", ("edge",)),
    "mori_mp_received_payloads": ("counter", "Payloads received, by edge.", ("edge",)),
    "mori_mp_received_bytes": ("counter", "Bytes received, by edge.", ("edge",)),
    "mori_mp_deliveries": ("counter", "Payloads received, by how: eager, lease, push, landing.", ("cause",)),
    "mori_mp_payloads_ended": ("counter", "Published payloads that ended, by how.", ("cause",)),
    "mori_mp_faults": ("counter", "What went wrong, by cause.", ("cause",)),
    "mori_mp_log_lines_suppressed": ("counter", "Fault lines that the log's rate limit held back.", ()),
    "mori_mp_put_seconds": ("histogram", "put(): allocating, encoding, copying.", ("edge",)),
    "mori_mp_put_to_publish_seconds": ("histogram", "put() to its entry in the control process.", ("edge",)),
    "mori_mp_pull_reply_seconds": ("histogram", "Arrival of a pull to its good answer.", ("edge",)),
    "mori_mp_write_seconds": ("histogram", "A worker's write, from job to end.", ("edge",)),
    "mori_mp_get_seconds": ("histogram", "get() that returned a payload, waiting included.", ("edge",)),
    "mori_mp_fetch_seconds": ("histogram", "From a payload known to be there until usable.", ("edge",)),
    "mori_mp_pool_size_bytes": ("gauge", "Size of the memory pool.", ()),
    "mori_mp_pool_used_bytes": ("gauge", "Bytes of the pool in use.", ()),
    "mori_mp_pool_largest_free_bytes": ("gauge", "Largest payload that fits now.", ()),
    "mori_mp_pool_quarantined_bytes": ("gauge", "Landing slots that a late write may still reach.", ()),
    "mori_mp_device_pool_size_bytes": ("gauge", "Size of the GPU pool.", ()),
    "mori_mp_device_pool_used_bytes": ("gauge", "Bytes of the GPU pool in use.", ()),
    "mori_mp_device_pool_largest_free_bytes": ("gauge", "Largest GPU payload that fits now.", ()),
    "mori_mp_ledger_payloads": ("gauge", "Published payloads by state.", ("state",)),
    "mori_mp_ledger_bytes": ("gauge", "Published bytes by state.", ("state",)),
    "mori_mp_sessions": ("gauge", "Receivers that have said hello.", ()),
    "mori_mp_queue_depth": ("gauge", "What waits, by queue.", ("queue",)),
    "mori_mp_process_up": ("gauge", "1 while the process runs and is ready.", ("process", "worker")),
    "mori_mp_process_restarts": ("counter", "Replacements of a process.", ("process", "worker")),
    "mori_mp_process_uptime_seconds": ("gauge", "Since the process started.", ("process", "worker")),
    "mori_mp_process_cpu_seconds": ("counter", "User and system time.", ("process", "worker")),
    "mori_mp_process_resident_memory_bytes": ("gauge", "Resident memory.", ("process", "worker")),
    "mori_mp_process_shared_memory_bytes": ("gauge", "Of it, shared.", ("process", "worker")),
    "mori_mp_process_threads": ("gauge", "Threads.", ("process", "worker")),
    "mori_mp_process_open_fds": ("gauge", "Open descriptors.", ("process", "worker")),
    "mori_mp_process_context_switches": (
        "counter",
        "Context switches of the main thread.",
        ("process", "worker", "kind"),
    ),
}
_SIMPLE = {  # name -> path in the document
    "mori_mp_stage_report_age_seconds": ("stage", "age_s"),
    "mori_mp_puts": ("puts",),
    "mori_mp_gets": ("gets",),
    "mori_mp_get_misses": ("receiver", "counters", "misses"),
    "mori_mp_log_lines_suppressed": ("faults", "suppressed_log_lines"),
    "mori_mp_pool_size_bytes": ("pool", "size"),
    "mori_mp_pool_used_bytes": ("pool", "used_bytes"),
    "mori_mp_pool_largest_free_bytes": ("pool", "largest_free"),
    "mori_mp_pool_quarantined_bytes": ("pool", "quarantined_bytes"),
    "mori_mp_device_pool_size_bytes": ("device_pool", "size"),
    "mori_mp_device_pool_used_bytes": ("device_pool", "used_bytes"),
    "mori_mp_device_pool_largest_free_bytes": ("device_pool", "largest_free"),
    "mori_mp_sessions": ("sender", "sessions"),
}
_BY_KEY = {  # name -> path of a dict whose keys become the last label
    "mori_mp_ledger_payloads": ("sender", "ledger", "entries"),
    "mori_mp_ledger_bytes": ("sender", "ledger", "bytes"),
    "mori_mp_queue_depth": ("queues",),
}
_ENDS = (
    "delivered_eager",
    "delivered_lease",
    "delivered_landing",
    "withdrawn",
    "expired",
    "replaced",
    "abandoned",
)
_PER_EDGE = {
    "mori_mp_published_payloads": "published",
    "mori_mp_published_bytes": "published_bytes",
    "mori_mp_received_payloads": "received",
    "mori_mp_received_bytes": "received_bytes",
}
_LATENCIES = {
    "mori_mp_put_seconds": "put",
    "mori_mp_put_to_publish_seconds": "publish",
    "mori_mp_pull_reply_seconds": "reply",
    "mori_mp_write_seconds": "write",
    "mori_mp_get_seconds": "get",
    "mori_mp_fetch_seconds": "fetch",
}
_PER_PROCESS = {
    "mori_mp_process_restarts": "restarts",
    "mori_mp_process_uptime_seconds": "uptime_s",
    "mori_mp_process_cpu_seconds": "cpu_s",
    "mori_mp_process_resident_memory_bytes": "rss_bytes",
    "mori_mp_process_shared_memory_bytes": "shared_bytes",
    "mori_mp_process_threads": "threads",
    "mori_mp_process_open_fds": "fds",
}
_KINDS = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}

Samples = Iterator[tuple[Sequence[str], Any]]
"""(labels beside stage, value); for a histogram the value is (cumulative buckets, sum)."""


def exposed_names() -> set[str]:
    """Every sample name that a scrape can have."""
    names: set[str] = set()
    for name, (kind, _, _) in FAMILIES.items():
        suffixes = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}[kind]
        names.update(name + suffix for suffix in suffixes)
    for name in BOUNDS:
        names.update(name + suffix for suffix in ("_bucket", "_sum", "_count"))
    return names


class Metrics(Collector):
    """The collector; `text` is what a scrape gets."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._document: Mapping[str, Any] = {}
        self._transfers: Sequence[Mapping[str, Any]] = ()
        self._registry.register(self)

    def text(self, document: Mapping[str, Any], transfers: Sequence[Mapping[str, Any]] = ()) -> bytes:
        """Render a health document. transfers: the counts of vLLM-Omni's families, by edge and name."""
        self._document, self._transfers = document, transfers
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield every family that the document has something for."""
        if self._document:
            yield from families(self._document)
            yield from transfer_families(self._transfers)


def families(document: Mapping[str, Any]) -> Iterator[Metric]:
    """Turn a health document into metric families."""
    stage = str(document.get("stage_id", -1))
    for name, (kind, text, labels) in FAMILIES.items():
        family = _KINDS[kind](name, text, labels=["stage", *labels])
        for more, value in _samples(name, document):
            if value is None:
                continue
            if kind == "histogram":
                family.add_metric([stage, *more], buckets=value[0], sum_value=value[1])
            else:
                family.add_metric([stage, *more], value)
        if family.samples:
            yield family


def _samples(name: str, document: Mapping[str, Any]) -> Samples:
    if name in _SIMPLE:
        yield (), _at(document, _SIMPLE[name])
    elif name in _BY_KEY:
        for key, value in (_at(document, _BY_KEY[name]) or {}).items():
            yield (key,), value
    elif name in _PER_EDGE:
        for edge, counts in document.get("edges", {}).items():
            yield (edge,), counts[_PER_EDGE[name]]
    elif name in _LATENCIES:
        for edge, counts in document.get("edges", {}).items():
            found = counts["latency_us"][_LATENCIES[name]]
            if found["count"]:
                yield (edge,), _log2(found)
    elif name in _PER_PROCESS:
        for row in document.get("processes", ()):
            yield _process(row), row.get(_PER_PROCESS[name])
    else:
        yield from _special(name, document)


def _special(name: str, document: Mapping[str, Any]) -> Samples:
    if name == "mori_mp_status":
        for status in _STATUSES:
            yield (status,), int(document.get("status") == status)
    elif name == "mori_mp_faults":
        # From zero, because rate() and increase() do not see the step with which a series begins.
        counts = {**dict.fromkeys(CAUSES, 0), **(_at(document, ("faults", "counts")) or {})}
        for cause, count in counts.items():
            yield (cause,), count
    elif name == "mori_mp_deliveries":
        counters = _at(document, ("receiver", "counters")) or {}
        for how in ("eager", "lease", "push", "landing"):
            yield (how,), counters.get(how)
    elif name == "mori_mp_payloads_ended":
        counters = _at(document, ("sender", "ledger", "counters")) or {}
        for cause in _ENDS:
            yield (cause,), counters.get(cause)
    elif name == "mori_mp_process_up":
        for row in document.get("processes", ()):
            yield _process(row), int(row["pid"] is not None and row["ready"] and not row["stale"])
    elif name == "mori_mp_process_context_switches":
        for row in document.get("processes", ()):
            for kind in ("voluntary", "involuntary"):
                yield (*_process(row), kind), row.get(f"{kind}_switches")
    else:
        raise AssertionError(f"no source for {name}")


def transfer_families(parts: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Turn counts of vLLM-Omni's families, {edge: {name: counts}}, into metrics."""
    for name, bounds in BOUNDS.items():
        family = HistogramMetricFamily(
            name, "As vLLM-Omni's family of this name.", labels=["from_stage", "to_stage"]
        )
        for part in parts:
            for edge, counts in part.items():
                if name in counts:
                    sender, _, receiver = edge.partition("_")
                    buckets = _cumulative([*map(str, bounds), "+Inf"], counts[name]["buckets"])
                    family.add_metric([sender, receiver], buckets=buckets, sum_value=counts[name]["sum"])
        if family.samples:
            yield family


def _log2(histogram: Mapping[str, Any]) -> tuple[list[tuple[str, float]], float]:
    counts = [*histogram["buckets"], *[0] * BUCKETS][:BUCKETS]
    counts[_LAST_BOUND + 1 :] = [sum(counts[_LAST_BOUND + 1 :])]
    bounds = [str(upper_us(bucket) / 1e6) for bucket in range(_LAST_BOUND + 1)]
    return _cumulative([*bounds, "+Inf"], counts), histogram["sum_us"] / 1e6


def _cumulative(bounds: Sequence[str], counts: Sequence[int]) -> list[tuple[str, float]]:
    total, found = 0, []
    for bound, count in zip(bounds, counts, strict=True):
        total += count
        found.append((bound, float(total)))
    return found


def _process(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["role"], "" if row["index"] is None else str(row["index"])


def _at(document: Mapping[str, Any], path: Sequence[str]) -> Any:
    place: Any = document
    for name in path:
        place = place.get(name) if isinstance(place, Mapping) else None
    return place
