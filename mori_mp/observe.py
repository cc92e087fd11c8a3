"""The connectors of this host, seen from outside: their cards, their health documents, and rates between two.

Everything comes from runtime directories (mori_mp.shared.registry) and the documents that control processes
tell there (docs/health-schema.md), so a stage that is stuck is seen like any other. A document may be of
another version or lack a part: what cannot be told is None, never a guess.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil

from mori_mp.shared import registry
from mori_mp.shared.registry import Found, PlanCard

ANSWER_SECONDS = 1.0
_AT_ONCE = 16
_CHILD = "workers/boot.py"  # a stage's own children run it: its control process; workers are grandchildren


class Sample(msgspec.Struct, frozen=True):
    """One connector at one moment. `at` is monotonic seconds; without a document, `error` says why."""

    found: Found
    at: float
    document: dict[str, Any] | None
    error: str = ""

    @property
    def key(self) -> str:
        """Names the connector among those of this host."""
        return self.found.folder.name

    @property
    def status(self) -> str:
        """healthy, degraded or unhealthy, as the document says; without one, starting or unhealthy."""
        if self.document is None:
            return "unhealthy" if self.found.card.serving else "starting"
        return str(self.document.get("status", "unhealthy"))

    @property
    def reason(self) -> str:
        """Why it is not healthy, "" if it is."""
        return self.error or str((self.document or {}).get("error", ""))


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a connector. cpu_percent: 100 is one CPU. CPU sets are cpulists, "" is not pinned."""

    name: str
    pid: int | None
    state: str | None
    cpu_percent: float | None
    rss_bytes: int | None
    threads: int | None
    asked_cpus: str
    cpus: str
    restarts: int | None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What `mori-mp top` tells of a connector. Rates are per second since the sample before, bytes in MB."""

    stage_id: int
    role: str
    engine: str
    endpoint: str
    pid: int
    status: str
    error: str
    puts_per_s: float | None
    mb_per_s: float | None
    published: int | None
    leased: int | None
    in_flight: int | None
    draining: int | None
    pool_percent: float | None
    misses: int | None
    errors: int | None
    restarts: int | None
    processes: list[Process]


def observe(base: Path, timeout: float = ANSWER_SECONDS) -> list[Sample]:
    """Take a sample of every live connector below a base directory, all at once."""
    found = registry.live(base)
    if not found:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(found))) as pool:
        return list(pool.map(lambda each: _ask(each, timeout), found))


def _ask(found: Found, timeout: float) -> Sample:
    try:
        document = registry.read_health(found.health_socket, timeout)
    except (OSError, ValueError) as exc:
        text = f"the control process{_seen(found.card.pid)} does not answer: {str(exc) or type(exc).__name__}"
        if not found.card.serving:
            text = "its control process and workers are being started"
        return Sample(found, time.monotonic(), None, text)
    return Sample(found, time.monotonic(), document)


def _seen(stage_pid: int) -> str:
    """What the kernel says of a stage's control process: " (pid 7, stopped)", "" if none is seen."""
    try:
        for child in psutil.Process(stage_pid).children():
            if any(word.endswith(_CHILD) for word in child.cmdline()):
                return f" (pid {child.pid}, {child.status()})"
    except psutil.Error:  # it ended, or is another user's
        pass
    return ""


def rows(samples: Iterable[Sample], before: Mapping[str, Sample]) -> list[Row]:
    """One row for each sample; `before` holds the samples that rates are measured from, by key."""
    return [_row(sample, before.get(sample.key)) for sample in samples]


def _row(sample: Sample, before: Sample | None) -> Row:
    card, document = sample.found.card, sample.document or {}
    earlier = (before.document or {}) if before is not None else {}
    spent = sample.at - before.at if before is not None else 0.0
    entries = _part(document, "sender", "ledger", "entries")
    pool = _part(document, "pool")
    return Row(
        stage_id=card.stage_id,
        role=card.role,
        engine=card.engine,
        endpoint=card.endpoint,
        pid=card.pid,
        status=sample.status,
        error=sample.reason,
        puts_per_s=_rate(published(document), published(earlier), spent),
        mb_per_s=_rate(
            published(document, "published_bytes"), published(earlier, "published_bytes"), spent, 1e-6
        ),
        published=_int(entries.get("published")),
        leased=_int(entries.get("leased")),
        in_flight=_int(entries.get("in_flight")),
        draining=_int(entries.get("draining")),
        pool_percent=_fullest(pool, _part(document, "device_pool")),
        misses=_int(_part(document, "receiver", "counters").get("misses")),
        errors=_int(document.get("errors")),
        restarts=_restarts(document),
        processes=_processes(document, earlier, spent, card.plan),
    )


def _fullest(*pools: Mapping[str, Any]) -> float | None:
    """Return how full the fuller one of a connector's pools is, in percent."""
    known = [_percent(pool.get("used_bytes"), pool.get("size")) for pool in pools]
    return max((percent for percent in known if percent is not None), default=None)


def published(document: Mapping[str, Any], what: str = "published") -> int | None:
    """Sum a count of the control process over all edges; None where the document has none."""
    edges = document.get("edges")
    if not isinstance(edges, Mapping):
        return None
    return sum(_int(edge.get(what)) or 0 for edge in edges.values() if isinstance(edge, Mapping))


def _rate(now: int | None, then: int | None, seconds: float, scale: float = 1.0) -> float | None:
    if now is None or then is None or seconds <= 0:
        return None
    # A new control process counts from zero: everything it has counted is new.
    return (now - then if now >= then else now) * scale / seconds


def _processes(
    document: Mapping[str, Any], earlier: Mapping[str, Any], seconds: float, plan: PlanCard
) -> list[Process]:
    spent = {entry.get("pid"): entry.get("cpu_s") for entry in _entries(earlier)}
    return [_process(entry, spent.get(entry.get("pid")), seconds, plan) for entry in _entries(document)]


def _process(entry: Mapping[str, Any], cpu_s_before: Any, seconds: float, plan: PlanCard) -> Process:
    cpu_s, index = entry.get("cpu_s"), entry.get("index")
    # The card is rewritten when a plan is applied to running processes; their set-up is not.
    asked = entry.get("asked_cpus")
    if entry.get("role") == "control":
        asked = plan.control
    elif entry.get("role") == "worker" and isinstance(index, int) and 0 <= index < len(plan.workers):
        asked = plan.workers[index]
    percent = entry.get("cpu_percent")
    if seconds > 0 and isinstance(cpu_s, (int, float)) and isinstance(cpu_s_before, (int, float)):
        percent = max(0.0, cpu_s - cpu_s_before) * 100 / seconds
    name = str(entry.get("role", "process"))
    return Process(
        name=name if index is None else f"{name} {index}",
        pid=_int(entry.get("pid")),
        state="thread" if entry.get("thread") else entry.get("state"),
        cpu_percent=round(float(percent), 1) if isinstance(percent, (int, float)) else None,
        rss_bytes=_int(entry.get("rss_bytes")),
        threads=_int(entry.get("threads")),
        asked_cpus=str(asked or ""),
        cpus=str(entry.get("cpus") or ""),
        restarts=_int(entry.get("restarts")),
    )


def _restarts(document: Mapping[str, Any]) -> int | None:
    """Deaths that were made good, of the control process and of workers."""
    control = _int(document.get("control_restarts"))
    workers = [_int(e.get("restarts")) or 0 for e in _entries(document) if e.get("role") == "worker"]
    return None if control is None and not workers else (control or 0) + sum(workers)


def _entries(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = document.get("processes")
    return [entry for entry in found if isinstance(entry, Mapping)] if isinstance(found, list) else []


def _part(document: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    part: Any = document
    for name in path:
        part = part.get(name) if isinstance(part, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _percent(part: Any, whole: Any) -> float | None:
    if not isinstance(part, int) or not isinstance(whole, int) or not whole:
        return None
    return round(part * 100 / whole, 1)
