"""`mori-mp top`: the connectors of this host and their processes, live."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mori_mp import observe
from mori_mp.cli_console import table_console
from mori_mp.observe import Process, Row, Sample
from mori_mp.shared.runtime import base_directory

_NONE_FOUND = 2
_FONT_FACE = re.compile(r"@font-face \{[^}]*\}\s*|Fira Code, ")  # rich names fonts on the network
STYLES = {"healthy": "green", "starting": "cyan", "degraded": "yellow", "unhealthy": "bold red"}
_UNBOUNDED = 10_000  # columns
_WHO = ("stage", "role", "engine", "endpoint", "status")
_NUMBERS = (
    "puts/s",
    "MB/s",
    "published",
    "leased",
    "in flight",
    "pool %",
    "misses",
    "errors",
    "restarts",
)

RuntimeDir = Annotated[
    Path | None,
    typer.Option(
        help="Where connectors keep their runtime directories: their `runtime_dir`. Default: "
        "$MORI_MP_RUNTIME_DIR, else $XDG_RUNTIME_DIR/mori-mp, else /tmp/mori-mp-UID.",
    ),
]


def top(
    once: Annotated[bool, typer.Option("--once", help="Measure for one interval, print, and end.")] = False,
    json_out: Annotated[bool, typer.Option("--json", help="As --once, in JSON.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two looks.")] = 1.0,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="As --once, and write what is printed as an image.")
    ] = None,
    runtime_dir: RuntimeDir = None,
) -> None:
    """Show the connectors of this host that listen, and their processes.

    Asks the control processes, not the stages: a stage that is stuck shows too.
    Run it as the stages' user, in their container. Ctrl-C ends it. Into a pipe
    or a file it prints table after table.

    Rates are those since the last look. "published" to "in flight" count
    payloads, "misses" get() calls that found nothing (a stage that polls has
    many), "restarts" deaths of control and workers that were made good.

    Exit status 0; with --once or --json, 2 if there is no connector.

    Examples:

      mori-mp top
      mori-mp top --once --interval 5
      mori-mp top --json | jq '.connectors[] | {stage_id, puts_per_s, pool_percent}'
    """
    base = runtime_dir or base_directory()
    if once or json_out or svg is not None:
        raise typer.Exit(_print_once(base, interval, json_out, svg))
    console = table_console()
    with suppress(KeyboardInterrupt):
        views = _views(base, interval, console)
        if not console.is_terminal:  # where nothing can be redrawn, each look is printed as it comes
            for tables in views:
                console.print(tables)
        with Live(next(views), console=console, auto_refresh=False) as live:
            for tables in views:
                live.update(tables, refresh=True)


def _views(base: Path, interval: float, console: Console) -> Iterator[Group | Text]:
    """What there is to see, now and after each interval, for ever."""
    before: dict[str, Sample] = {}
    while True:
        samples = observe.observe(base)
        yield view(observe.rows(samples, before), base, console)
        before = {sample.key: sample for sample in samples}
        time.sleep(interval)


def _print_once(base: Path, interval: float, json_out: bool, svg: Path | None) -> int:
    before = {sample.key: sample for sample in observe.observe(base)}
    if before:
        time.sleep(interval)
    samples: list[Sample] = observe.observe(base)
    found = observe.rows(samples, before)
    if json_out:
        typer.echo(json.dumps({"connectors": [msgspec.to_builtins(row) for row in found]}, indent=1))
    else:
        console = table_console(record=svg is not None)
        console.print(view(found, base, console))
        if svg is not None:
            image = console.export_svg(title="mori-mp top")
            svg.write_text(_FONT_FACE.sub("", image), encoding="utf-8")
    return 0 if found else _NONE_FOUND


def view(found: Sequence[Row], base: Path, console: Console) -> Group | Text:
    """The tables, as wide as the console allows, and what is wrong below them."""
    if not found:
        return Text(
            f"No connector listens below {base}. Stages of another user, container or runtime_dir do not "
            f"show here; see --runtime-dir."
        )
    troubles = [
        Text(f"stage {row.stage_id} (pid {row.pid}): {row.error}", style=STYLES.get(row.status, ""))
        for row in found
        if row.error
    ]
    tables = [connector_table(found), process_table(found)]
    if max(_width(table, console) for table in tables) > console.width:
        who = connector_table(found, _WHO, compact=True)
        numbers = connector_table(found, ("stage", *_NUMBERS), compact=True)
        numbers.title = "traffic"
        tables = [who, numbers, process_table(found, compact=True)]
    return Group(*tables, *troubles)


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(width=_UNBOUNDED)).maximum


def _table(title: str, compact: bool) -> Table:
    if compact:
        return Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    return Table(title=title, title_justify="left")


def connector_table(
    found: Sequence[Row], names: Sequence[str] = (*_WHO, *_NUMBERS), compact: bool = False
) -> Table:
    """One line for each connector, with the columns named."""
    table = _table(f"connectors at {time.strftime('%H:%M:%S')}", compact)
    for name in names:
        table.add_column(name, no_wrap=name in _WHO, justify="right" if name in _NUMBERS else "left")
    for row in found:
        cells = _connector_cells(row)
        table.add_row(*(cells[name] for name in names))
    return table


def _connector_cells(row: Row) -> dict[str, Text | str]:
    return {
        "stage": str(row.stage_id),
        "role": row.role,
        "engine": row.engine,
        "endpoint": Text(row.endpoint.removeprefix("tcp://")),
        "status": Text(row.status, style=STYLES.get(row.status, "")),
        "puts/s": _number(row.puts_per_s, 1),
        "MB/s": _number(row.mb_per_s, 2),
        "published": _number(row.published),
        "leased": _number(row.leased),
        "in flight": _number(row.in_flight),
        "pool %": _number(row.pool_percent, 1),
        "misses": _number(row.misses),
        "errors": _alarm(row.errors),
        "restarts": _alarm(row.restarts),
    }


def process_table(found: Sequence[Row], compact: bool = False) -> Table:
    """One line for each process of a connector."""
    table = _table("processes", compact)
    table.add_column("stage")
    table.add_column("process", no_wrap=True)
    for name in ("pid", "CPU %", "RSS MiB", "threads", "restarts"):
        table.add_column(name, justify="right")
    for name in ("state", "CPUs asked", "CPUs"):
        table.add_column(name, no_wrap=name == "state")
    for row in found:
        for process in row.processes:
            table.add_row(str(row.stage_id), *_process_cells(process))
    return table


def _process_cells(process: Process) -> list[Text | str]:
    resident = None if process.rss_bytes is None else process.rss_bytes / 2**20
    return [
        process.name,
        "-" if process.pid is None else str(process.pid),
        _number(process.cpu_percent, 1),
        _number(resident, 0),
        _number(process.threads),
        _alarm(process.restarts),
        process.state or "-",
        process.asked_cpus or "any",
        process.cpus or "-",
    ]


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _alarm(value: int | None) -> Text:
    return Text(_number(value), style="bold red" if value else "")
