"""The health document: put together from the stage's part, the control process's part and /proc.

docs/health-schema.md is its contract. `compose` is pure and used on both sides: by the stage in health(), and
by the control process for its socket, its dumps and its metrics, so that all of them say the same. A part
that did not answer is passed in as it was last told, with its age; nothing here waits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mori_mp.shared.faults import RECENT
from mori_mp.shared.procinfo import UNKNOWN, ProcessTable
from mori_mp.shared.topology import format_cpulist

SCHEMA = 1
MAX_DOCUMENT_BYTES = 1 << 20
_LEAST_KEYS = (
    "schema",
    "time",
    "reporter",
    "reason",
    "status",
    "error",
    "host",
    "role",
    "stage_id",
    "engine",
)
_HALTED = ("stopped", "tracing-stop")  # psutil's names
_SEND_TIMES = ("put", "publish", "reply", "write")
_GET_TIMES = ("get", "fetch")
_EMPTY: dict[str, Any] = {"count": 0, "sum_us": 0, "buckets": []}


class Part(NamedTuple):
    """What one side has said of itself, and how old that is in seconds; stale: it did not answer just now."""

    report: Mapping[str, Any] | None
    age_s: float = 0.0
    stale: bool = False


@dataclass(frozen=True)
class Child:
    """What is known of a child without asking it."""

    role: str
    index: int | None
    pid: int | None
    ready: bool
    stale: bool
    uptime_s: float | None
    restarts: int
    asked_cpus: str


SILENT_SECONDS = 30.0
"""A sender that leaves a receiver's question without an answer for longer degrades the receiver's status."""


# -------------------------------------------------------------------------- the document
def compose(
    stage: Part, sender: Part | None, processes: Sequence[Mapping[str, Any]], *, reporter: str
) -> dict[str, Any]:
    """Join the parts. sender None: this connector has no control process, and needs none."""
    told = dict(stage.report or {})
    edges_there = told.pop("edges", {})
    stage_faults = told.pop("faults", {})
    queues = dict(told.pop("queues", {}))
    failed, pool_error = told.pop("failed", ""), told.pop("pool_error", "")
    told.pop("transfer_families", None)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "time": round(time.time(), 3),
        "reporter": reporter,
        "status": "healthy",
        **told,
        "stage": {"stale": stage.stale, "age_s": round(stage.age_s, 3)},
    }
    said: dict[str, Any] = {}
    if sender is not None:
        said = dict(sender.report or {})
        if "metrics" in said:
            document["metrics"] = said.pop("metrics")
    edges_here = said.pop("edges", {})
    sender_faults = said.pop("faults", {})
    backlog = said.pop("freed_backlog", None)
    if sender is not None:
        document["sender"] = {
            **said,
            "stale": sender.stale,
            "age_s": None if sender.report is None else round(sender.age_s, 3),
        }
        queues.update(
            freed_backlog=backlog,
            parked_pulls=said.get("parked"),
            jobs_queued=said.get("jobs_queued"),
            jobs_under_way=said.get("jobs_under_way"),
        )
    document.update(
        queues=queues,
        processes=list(processes),
        edges=_edges(edges_here, edges_there),
        faults=_faults(stage_faults, sender_faults),
    )
    status, error = _status(failed, pool_error, _halted(processes), stage, sender)
    if status == "healthy" and (error := _unreached(told)):
        status = "degraded"
    document["status"] = status
    if error:
        document["error"] = error
    return document


def _halted(processes: Sequence[Mapping[str, Any]]) -> str:
    """Name the processes that a signal or a debugger has stopped: the kernel knows before they are missed."""
    found = []
    for row in processes:
        if row["state"] in _HALTED:
            name = row["role"] if row["index"] is None else f"{row['role']} {row['index']}"
            found.append(f"{name} (pid {row['pid']})")
    return f"stopped by a signal or a debugger: {', '.join(found)}" if found else ""


def _unreached(told: Mapping[str, Any]) -> str:
    """Name the senders that a receiver has asked in vain for long."""
    senders = told.get("receiver", {}).get("senders", ())
    found = [
        f"{sender['address']} has not answered for {sender['silent_s']:.0f} s"
        for sender in senders
        if sender.get("silent_s", 0.0) > SILENT_SECONDS
    ]
    return "sender " + ", ".join(found) if found else ""


def _status(failed: str, pool_error: str, halted: str, stage: Part, sender: Part | None) -> tuple[str, str]:
    if failed:
        return "unhealthy", failed
    if pool_error or halted:
        return "degraded", pool_error or halted
    if sender is not None and (sender.stale or sender.report is None):
        return "degraded", "the control process does not answer"
    if sender is not None and sender.report is not None:
        down = [str(worker["index"]) for worker in sender.report["workers"] if not worker["ready"]]
        if down:
            return "degraded", f"transfer worker {', '.join(down)} is not up"
    if stage.stale:
        return "degraded", "the stage does not answer its control process"
    return "healthy", ""


def _edges(here: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    """Join what the control process (here) and the stage (there) count for each edge."""
    joined = {}
    for edge in sorted({*here, *there}):
        sent, got = here.get(edge, {}), there.get(edge, {})
        joined[edge] = {
            **{name: sent.get(name, 0) for name in ("published", "published_bytes", "failed_writes")},
            **{name: got.get(name, 0) for name in ("received", "received_bytes")},
            "latency_us": {
                **{name: sent.get(name, _EMPTY) for name in _SEND_TIMES},
                **{name: got.get(name, _EMPTY) for name in _GET_TIMES},
            },
        }
    return joined


def _faults(*parts: Mapping[str, Any]) -> dict[str, Any]:
    counts: dict[str, int] = {}
    recent: list[dict[str, Any]] = []
    suppressed = 0
    for part in parts:
        for cause, count in part.get("counts", {}).items():
            counts[cause] = counts.get(cause, 0) + count
        recent.extend(part.get("recent", ()))
        suppressed += part.get("suppressed_log_lines", 0)
    recent.sort(key=lambda fault: float(fault["time"]))
    return {"counts": counts, "recent": recent[-RECENT:], "suppressed_log_lines": suppressed}


# ------------------------------------------------------------------------- the processes
def process_rows(
    table: ProcessTable, stage_pid: int, stage_uptime_s: float, children: Sequence[Child]
) -> list[dict[str, Any]]:
    """Describe the stage and its children; a child with the stage's pid is a thread of it."""
    stage = Child("stage", None, stage_pid, True, False, round(stage_uptime_s, 3), 0, "")
    with table.lock:
        table.keep_only([child.pid for child in (stage, *children) if child.pid is not None])
        return [_row(table, child, stage_pid) for child in (stage, *children)]


def worker_child(worker: Mapping[str, Any], stale: bool) -> Child:
    """Describe a worker from its entry in the control process's part."""
    return Child(
        "worker",
        worker["index"],
        worker["pid"],
        worker["ready"],
        stale,
        worker["uptime_s"],
        worker["restarts"],
        format_cpulist(worker["asked_cpus"]),
    )


def _row(table: ProcessTable, child: Child, stage_pid: int) -> dict[str, Any]:
    thread = child.role != "stage" and child.pid == stage_pid
    numbers = dict(UNKNOWN) if thread or child.pid is None else table.read(child.pid)
    return {
        "role": child.role,
        "index": child.index,
        "pid": child.pid,
        "thread": thread,
        "ready": child.ready,
        "stale": child.stale,
        "uptime_s": None if child.pid is None else child.uptime_s,
        "restarts": child.restarts,
        "asked_cpus": child.asked_cpus,
        **numbers,
    }


# ------------------------------------------------------------------------------ its size
def fit(document: dict[str, Any], limit: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Encode a document in at most `limit` bytes with a newline: lists are cut, then all but the head."""
    text = _encode(document)
    if len(text) <= limit:
        return text
    for keep in (8, 0):
        document = {**document, "truncated": True}
        for path in (("faults", "recent"), ("receiver", "senders"), ("pinning", "reasons"), ("processes",)):
            _shorten(document, path, keep)
        document["edges"] = dict(list(document.get("edges", {}).items())[:keep])
        text = _encode(document)
        if len(text) <= limit:
            return text
    head = {name: document[name] for name in _LEAST_KEYS if name in document}
    if "error" in head:
        head["error"] = str(head["error"])[:200]
    return _encode({**head, "truncated": True})


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), default=str).encode() + b"\n"


def _shorten(document: dict[str, Any], path: tuple[str, ...], keep: int) -> None:
    """Replace a list inside a document by its last `keep` items; the dicts on the way are copied."""
    *way, last = path
    place = document
    for name in way:
        inner = place.get(name)
        if not isinstance(inner, dict):
            return
        place[name] = dict(inner)
        place = place[name]
    found = place.get(last)
    if isinstance(found, list):
        place[last] = found[-keep:] if keep else []
