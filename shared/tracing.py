"""Per-transfer spans, as a trace that Perfetto and chrome://tracing read. Off unless `trace_path` is set.

    put       stage      put() from call to return
    publish   control    from the call of put() until the publication is in the ledger
    pull      receiver   from the request until the sender's answer
    dispatch  control    from a pull's arrival until a worker has the job
    write     worker     from taking the job until the bytes have landed
    reply     control    until the answer has left: since the write ended, or for a lease since the pull came
    usable    receiver   from a payload known to be there until get() returns it; a pull lies inside

Every process has a `Tracer`, which keeps spans in memory and appends them to a part file of its own now and
then; what a killed process had not yet appended is lost with it. The stage merges the parts when it closes.
All times are CLOCK_MONOTONIC, one clock for all processes of a host: nanoseconds here, microseconds in the
trace. A process keeps its first MAX_SPANS spans and counts the rest.

Spans of one thread are complete events; those of the control process and of workers overlap, so they are
asynchronous ones. put and usable of one payload are joined by a flow.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mori_mp.shared.files import write_whole

logger = logging.getLogger(__name__)

MAX_SPANS = 20_000
_FLUSH_AT = 512
_SORT = {"stage": 0, "control": 1, "worker": 2}


def parts_folder(trace_path: Path) -> Path:
    """Where the parts of a trace gather until they are merged."""
    return trace_path.with_name(trace_path.name + ".parts")


class Tracer:
    """The spans of one process; in worker_mode thread, of one loop. Thread-safe.

    role is "stage", "control" or "worker"; name is what the viewer shows. thread: the loop is one thread of a
    process that has another Tracer, so that only its thread gets a name. epoch: the connector's.
    """

    def __init__(self, folder: Path, role: str, name: str, *, epoch: str, thread: bool = False) -> None:
        self._file = folder / f"{epoch}-{os.getpid()}-{threading.get_native_id()}-{role}.jsonl"
        self._head = {"pid": os.getpid(), "role": role, "name": name, "epoch": epoch, "thread": thread}
        self._spans: deque[tuple[Any, ...]] = deque()
        self._threads: dict[int, str] = {}
        self._count = 0
        self._broken = False
        self._flushing = threading.Lock()
        self.dropped = 0

    def add(
        self,
        name: str,
        begin_ns: int,
        end_ns: int,
        key: str,
        *,
        generation: int = 0,
        size: int = 0,
        write_id: int = 0,
        epoch: str = "",
    ) -> None:
        """Record one span. epoch: the sender's, where it is not this connector's own."""
        if self._count >= MAX_SPANS:
            self.dropped += 1
            return
        self._count += 1
        tid = threading.get_native_id()
        if tid not in self._threads:
            self._threads[tid] = threading.current_thread().name
        self._spans.append((name, begin_ns, end_ns, tid, key, generation, size, write_id, epoch))
        if len(self._spans) >= _FLUSH_AT:
            self.flush()

    def flush(self, *, end: bool = False) -> None:
        """Append what has gathered to the part file; a failure is logged once and ends the tracing."""
        if self._broken or not self._flushing.acquire(blocking=False):
            return
        try:
            lines = []
            while self._spans:
                lines.append(json.dumps(self._spans.popleft()))
            if not lines and not (end and self._count):
                return
            head = json.dumps({**self._head, "threads": self._threads, "dropped": self.dropped})
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with open(self._file, "a", encoding="utf-8") as file:
                file.write("\n".join([head, *lines, ""]))
        except OSError as exc:
            self._broken = True
            self._count = MAX_SPANS
            logger.error("no trace of this process: %s cannot be written: %s", self._file, exc)
        finally:
            self._flushing.release()

    def close(self) -> None:
        """Append the rest, and how many spans were dropped."""
        self.flush(end=True)


# ---------------------------------------------------------------------------- merging
class _Part:
    """One part file, read."""

    def __init__(self, text: str) -> None:
        self.head: dict[str, Any] = {}
        self.spans: list[list[Any]] = []
        for line in text.splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue  # its process was killed in the middle of it
            if isinstance(found, dict):
                self.head = found  # the newest one knows all threads
            elif isinstance(found, list):
                self.spans.append(found)


def merge_parts(folder: Path, epoch: str) -> dict[str, Any]:
    """Make one trace of the part files of one connector; the files stay."""
    files = sorted(folder.glob(f"{epoch}-*.jsonl"))
    parts = [_Part(path.read_text(encoding="utf-8", errors="replace")) for path in files]
    parts = [part for part in parts if part.head]
    _name_writes(parts)
    events = [event for part in parts for event in _names(part)]
    ids = iter(range(1, 1 << 62))
    for part in parts:
        for span in part.spans:
            events.extend(_span_events(part, span, ids))
    events.extend(_flows(parts))
    return document(events, sum(part.head["dropped"] for part in parts))


def _name_writes(parts: list[_Part]) -> None:
    """Give each write the key of its dispatch: the nearest one, since a new control process counts anew."""
    dispatched: dict[int, list[list[Any]]] = {}
    for part in parts:
        for span in part.spans:
            if span[0] == "dispatch":
                dispatched.setdefault(span[7], []).append(span)
    for part in parts:
        for span in part.spans:
            near = dispatched.get(span[7]) if span[0] == "write" else None
            if near:
                distances = [abs(other[2] - span[1]) for other in near]
                span[4:7] = near[distances.index(min(distances))][4:7]


def document(events: Iterable[dict[str, Any]], dropped: int) -> dict[str, Any]:
    """Wrap trace events in the JSON object format."""
    return {
        "traceEvents": list(events),
        "displayTimeUnit": "ms",
        "otherData": {"clock": "CLOCK_MONOTONIC", "dropped_spans": dropped},
    }


def join(traces: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Make one trace of several whole ones, of processes on one host."""
    found = list(traces)
    return document(
        (event for number, trace in enumerate(found) for event in _renumbered(number, trace)),
        sum(trace["otherData"]["dropped_spans"] for trace in found),
    )


def _renumbered(number: int, trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Keep the ids of one trace's asynchronous spans apart from another's; flows join traces on purpose."""
    for event in trace["traceEvents"]:
        yield {**event, "id": f"{number}.{event['id']}"} if event["ph"] in "be" else event


def _names(part: _Part) -> Iterator[dict[str, Any]]:
    head = part.head
    if not head["thread"]:
        yield _meta(head["pid"], 0, "process_name", name=head["name"])
        yield _meta(head["pid"], 0, "process_sort_index", sort_index=_SORT.get(head["role"], 9))
    for tid, name in head["threads"].items():
        yield _meta(head["pid"], int(tid), "thread_name", name=head["name"] if head["thread"] else name)


def _meta(pid: int, tid: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": what, "args": args}


def _span_events(part: _Part, span: list[Any], ids: Iterator[int]) -> Iterator[dict[str, Any]]:
    name, begin, end, tid, key, generation, size, write_id, _ = span
    args = {"key": key, "generation": generation, "bytes": size, "write": write_id}
    event = {
        "name": name,
        "cat": "transfer",
        "pid": part.head["pid"],
        "tid": tid,
        "ts": begin / 1000,
        "args": {what: value for what, value in args.items() if value},
    }
    if part.head["role"] == "stage":
        yield {**event, "ph": "X", "dur": max(0, end - begin) / 1000}
        return
    ident = str(next(ids))
    yield {**event, "ph": "b", "id": ident}
    yield {**event, "ph": "e", "id": ident, "ts": max(begin, end) / 1000, "args": {}}


def _flows(parts: list[_Part]) -> Iterator[dict[str, Any]]:
    """An arrow from the put of a payload to where it became usable, by sender epoch and generation."""
    for part in parts:
        if part.head["role"] != "stage":
            continue
        for name, begin, end, tid, _key, generation, _size, _write, epoch in part.spans:
            if name in ("put", "usable") and generation:
                event = {
                    "name": "payload",
                    "cat": "payload",
                    "id": f"{epoch or part.head['epoch']}:{generation}",
                    "pid": part.head["pid"],
                    "tid": tid,
                    "ts": (begin + end) / 2000,  # inside its span, which it belongs to
                }
                yield {**event, "ph": "s"} if name == "put" else {**event, "ph": "f", "bp": "e"}


def remove_parts(folder: Path, epoch: str) -> None:
    """Take the part files of one connector away, and the folder if nothing else is in it."""
    for path in folder.glob(f"{epoch}-*.jsonl"):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


class TraceFile:
    """The trace of one connector: its stage's Tracer, the folder of all parts, and the file they become."""

    def __init__(self, path: Path, stage: int, epoch: str) -> None:
        self.path = path
        self.folder = parts_folder(path)
        self.tracer = Tracer(self.folder, "stage", f"stage {stage}", epoch=epoch)
        self._epoch = epoch

    def finish(self) -> None:
        """Merge the parts, once all processes have ended; without any span no file is written."""
        self.tracer.close()
        try:
            trace = merge_parts(self.folder, self._epoch)
            if trace["traceEvents"]:
                write_whole(self.path, json.dumps(trace, separators=(",", ":")).encode())
            remove_parts(self.folder, self._epoch)
        except OSError as exc:
            logger.error("trace %s cannot be written: %s; its parts are in %s", self.path, exc, self.folder)
            return
        dropped = trace["otherData"]["dropped_spans"]
        if dropped:
            text = "trace %s lacks %d spans: a process keeps its first %d"
            logger.warning(text, self.path, dropped, MAX_SPANS)
