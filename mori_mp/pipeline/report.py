"""What the operator sees of a run: tables for the terminal and one JSON document for tools.

Everything printed comes from a RunOutcome; rich is used here and nowhere in a stage process.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mori_mp.cli_console import crowded
from mori_mp.pipeline.processes import ProcessRow
from mori_mp.pipeline.runner import RunOutcome, StageReport
from mori_mp.pipeline.stats import EdgeReport, Summary, ratio

_TIME_NAMES = {"put": "put", "usable": "put→usable"}
_QUANTILES = ("p50", "p99")
_DELIVERIES = ("eager", "lease", "push", "landing")


# ------------------------------------------------------------------------------ terminal
def traffic_table(edges: Sequence[EdgeReport], title: str) -> Table:
    """One line for each edge: what travelled, and everything that went wrong."""
    table = Table(title=title, title_justify="left")
    table.add_column("edge")
    for name in ("chunks", "MB", "GB/s", "misses", "retries", "errors", "lost", "corrupt"):
        table.add_column(name, justify="right")
    for edge in edges:
        table.add_row(
            edge.edge,
            str(edge.received.chunks),
            f"{edge.received.bytes / 1e6:.2f}",
            f"{edge.gb_per_s:.3f}",
            str(edge.received.misses),
            str(edge.sent.retries),
            str(edge.sent.errors + edge.received.errors),
            _alarm(edge.lost),
            _alarm(edge.received.wrong()),
        )
    return table


def time_table(edges: Sequence[EdgeReport]) -> Table:
    """put() and put→usable of each edge, in microseconds."""
    table = Table(title="times in µs", title_justify="left")
    table.add_column("edge")
    table.add_column("time")
    for name in ("chunks", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for edge in edges:
        for name, times in zip(_TIME_NAMES.values(), _times(edge), strict=True):
            values = (times.p50, times.p90, times.p99, times.max) if times.count else ()
            cells = [f"{value:.0f}" for value in values] or ["-"] * 4
            table.add_row(edge.edge, name, str(times.count), *cells)
    return table


def stage_table(stages: Sequence[StageReport]) -> Table:
    """One line for each stage: its connector's own account, where health() gives one."""
    table = Table(title="stages", title_justify="left")
    table.add_column("stage")
    for name in ("pid", "CPU s", "close s", "pool used", "deliveries"):
        table.add_column(name, justify="right")
    for stage in stages:
        pool = stage.health.get("pool")
        used = pool.get("used_bytes", "") if isinstance(pool, dict) else ""
        table.add_row(
            str(stage.stage_id), str(stage.pid), _optional(stage.cpu_s), _optional(stage.close_s), str(used),
            _deliveries(stage.health),
        )  # fmt: skip
    return table


def process_table(rows: Sequence[ProcessRow]) -> Table:
    """All processes of the run, as `ps` would list them."""
    table = Table(title="processes during the run", title_justify="left")
    table.add_column("role")
    for name in ("pid", "parent", "RSS MiB", "threads", "CPU s", "CPUs allowed"):
        table.add_column(name, justify="right")
    for row in rows:
        own = row.role == f"stage {row.stage_id}"
        cells = (row.pid, row.parent, f"{row.rss_mib:.1f}", row.threads, f"{row.cpu_s:.2f}", row.cpus)
        table.add_row(row.role if own else f"  {row.role}", *(str(cell) for cell in cells))
    return table


def comparison_table(outcomes: dict[str, RunOutcome]) -> Table:
    """put and put→usable of two runs side by side, and how many times longer the second took."""
    first, second = outcomes
    table = Table(title=f"{first} against {second}, times in µs", title_justify="left")
    for name in ("edge", "time", "quantile"):
        table.add_column(name)
    for name in (first, second, f"{second} / {first}"):
        table.add_column(name, justify="right")
    for row in compare(outcomes):
        for quantile in _QUANTILES:
            values = row[quantile]
            table.add_row(
                row["edge"], _TIME_NAMES[row["time"]], quantile, f"{values[first]:.0f}",
                f"{values[second]:.0f}", _optional(values["ratio"]),
            )  # fmt: skip
    return table


def print_outcome(console: Console, outcome: RunOutcome, title: str, *, show_processes: bool) -> None:
    """Tables where there was traffic, notes of the edges, and the verdict."""
    if outcome.streamed:
        console.print(traffic_table(outcome.edges, title))
        console.print(time_table(outcome.edges))
        console.print(stage_table(outcome.stages))
        if note := crowded(len(outcome.processes)):
            console.print(Text(note, style="dim"), soft_wrap=True)
    if show_processes:
        console.print(process_table(outcome.processes))
    # One line each however long they are: they are for searching and copying.
    for edge in outcome.edges:
        for note in [*edge.sent.notes, *edge.received.notes]:
            console.print(Text(f"edge {edge.edge}: {note}", style="yellow"), soft_wrap=True)
    for problem in outcome.problems:
        console.print(Text(f"FAIL {problem}", style="bold red"), soft_wrap=True)
    if outcome.ok:
        chunks = sum(edge.received.chunks for edge in outcome.edges)
        verdict = f"PASS {chunks} chunks, all right, nothing left over ({outcome.wall_s:.1f} s)"
        console.print(Text(verdict, style="green"), soft_wrap=True)


class LiveView:
    """Observer of a run: a table that follows it, and the stages' own output where asked for."""

    def __init__(self, console: Console, title: str, *, live: bool, echo: bool) -> None:
        self._console = console
        self._title = title
        self._echo = echo
        self._live = Live(console=console, auto_refresh=False, transient=True) if live else None

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def progress(self, edges: list[EdgeReport]) -> None:
        if self._live is not None:
            tables = Group(traffic_table(edges, self._title), time_table(edges))
            self._live.update(tables, refresh=True)

    def stage_line(self, stage_id: int, line: str) -> None:
        if self._echo:
            self._console.print(Text(line, style="dim"), soft_wrap=True)


# ---------------------------------------------------------------------------------- JSON
def as_document(outcome: RunOutcome) -> dict[str, Any]:
    """The outcome as JSON values; `ok` says whether the run passed."""
    document: dict[str, Any] = msgspec.to_builtins(outcome)
    return {"ok": outcome.ok, **document}


def compare(outcomes: dict[str, RunOutcome]) -> list[dict[str, Any]]:
    """Rows {edge, time, p50, p99}; a quantile holds both runs' microseconds and `ratio`, second / first.

    time is "put" or "usable".
    """
    (first, a), (second, b) = outcomes.items()
    rows = []
    for left, right in zip(a.edges, b.edges, strict=True):
        for time, one, two in zip(_TIME_NAMES, _times(left), _times(right), strict=True):
            row: dict[str, Any] = {"edge": left.edge, "time": time}
            for quantile in _QUANTILES:
                x, y = getattr(one, quantile), getattr(two, quantile)
                row[quantile] = {first: x, second: y, "ratio": ratio(y, x)}
            rows.append(row)
    return rows


# ------------------------------------------------------------------------------- details
def _times(edge: EdgeReport) -> tuple[Summary, Summary]:
    return edge.sent.put_us, edge.received.usable_us


def _alarm(count: int) -> Text:
    return Text(str(count), style="bold red" if count else "")


def _optional(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _deliveries(health: dict[str, Any]) -> str:
    """How the payloads that a stage received got there, as its connector counted: `lease 40, eager 12`."""
    receiver = health.get("receiver")
    counters = receiver.get("counters") if isinstance(receiver, dict) else None
    if not isinstance(counters, dict):
        return ""
    return ", ".join(f"{kind} {counters[kind]}" for kind in _DELIVERIES if counters.get(kind))
