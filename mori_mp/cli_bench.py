"""`mori-mp bench`: put() to usable between two processes, worker processes against threads."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from mori_mp.cli_console import crowded, table_console
from mori_mp.config_keys import read_size
from mori_mp.pipeline.command import Delivery, parse_settings
from mori_mp.shared.errors import MoriMPError

if TYPE_CHECKING:
    from mori_mp.bench import Case

_FAILED = 1
_MIN_SIZE, _MAX_SIZE = 8, 1 << 30
_PROCESSES = 4  # two stages, a control process and a worker
_SIZES = "4KiB,64KiB,1MiB,16MiB"


def bench(
    sizes: Annotated[str, typer.Option(help="Payload sizes, comma-separated.")] = _SIZES,
    count: Annotated[
        int, typer.Option(min=1, max=100_000, help="Payloads for each size, state and mode.")
    ] = 100,
    gap_ms: Annotated[float, typer.Option(min=0.0, help="Pause before each put().")] = 2.0,
    busy: Annotated[
        bool, typer.Option(help="Measure with a sender that spins a pure-Python thread, too.")
    ] = True,
    delivery: Annotated[
        Delivery | None, typer.Option(help="delivery: read in place, or written to the receiver.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of both connectors' extra. Repeatable."),
    ] = None,
    json_out: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure put() to usable between two processes of this host, over shm.

    The same traffic with worker_mode process and thread, in turns. Compare the
    ratios (thread / process) of one run; microseconds of different runs or
    machines say little about each other.

    Exit status 0, 1 when a payload is lost or a connector fails, 2 for wrong options.

    Examples:

      mori-mp bench
      mori-mp bench --sizes 1MiB,64MiB --count 50 --delivery landing
      mori-mp bench --no-busy --set eager_bytes=0 --json > bench.json
    """
    from mori_mp import bench as measuring  # imports torch, which the other commands do without

    logging.getLogger("mori_mp").setLevel(logging.WARNING)
    try:
        wanted = [read_size(part.strip()) for part in sizes.split(",")]
        if not all(isinstance(size, int) and _MIN_SIZE <= size <= _MAX_SIZE for size in wanted):
            raise ValueError(sizes)
    except ValueError:
        raise typer.BadParameter(
            f"--sizes wants sizes of 8 bytes to 1 GiB such as 4KiB,1MiB; got {sizes!r}"
        ) from None
    extra = parse_settings(set_ or [])
    if delivery is not None:
        extra["delivery"] = delivery.value
    console = Console(stderr=True)
    try:
        with console.status("starting the sender") as status:
            cases = measuring.run(
                wanted,
                count,
                gap_ms / 1e3,
                measuring.STATES if busy else measuring.STATES[:1],
                extra,
                lambda text: status.update(text),
            )
    except MoriMPError as exc:
        typer.echo(f"mori-mp bench: {exc}", err=True)
        raise typer.Exit(_FAILED) from None
    if json_out:
        machine = {
            "cpus": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "python": sys.version.split()[0],
        }
        told = {"machine": machine, "count": count, "gap_ms": gap_ms, "extra": extra}
        typer.echo(json.dumps({**told, "cases": [msgspec.to_builtins(case) for case in cases]}, indent=1))
    else:
        table_console().print(table(cases))
        if note := crowded(_PROCESSES):
            typer.echo(note)


def table(cases: list[Case]) -> Table:
    """One line for each size and state."""
    made = Table(title="put→usable in µs, and thread / process", title_justify="left")
    made.add_column("size", justify="right")
    made.add_column("sender")
    for name in ("process p50", "p99", "thread p50", "p99", "ratio p50", "ratio p99", "put p50", "thread"):
        made.add_column(name, justify="right")
    for case in cases:
        times = (case.process.p50, case.process.p99, case.thread.p50, case.thread.p99)
        ratios = ("-" if value is None else f"{value:.2f}" for value in (case.ratio_p50, case.ratio_p99))
        made.add_row(
            _size(case.size),
            case.state,
            *(f"{value:.0f}" for value in times),
            *ratios,
            f"{case.put_process.p50:.0f}",
            f"{case.put_thread.p50:.0f}",
        )
    return made


def _size(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size % unit == 0 and size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"
