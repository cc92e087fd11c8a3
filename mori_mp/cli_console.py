"""The console that commands print their tables to, and what they say alike."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console

_WIDE = 240  # columns


def table_console(**options: Any) -> Console:
    """Make a console as wide as its terminal.

    A pipe or a file has no width; rich would take 80 columns for it and cut what grep is to find, so it gets
    a wide one, unless COLUMNS says otherwise.
    """
    console = Console(**options)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = _WIDE
    return console


def crowded(processes: int) -> str:
    """Return what to think of times that so many processes were measured with on this machine's CPUs."""
    cpus = len(os.sched_getaffinity(0))
    if cpus >= processes:
        return ""
    return (
        f"Measured on {cpus} CPUs, fewer than the {processes} processes that take turns here: these are "
        f"times of the scheduler as much as of transfers."
    )
