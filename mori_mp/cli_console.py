"""The console that commands print their tables to."""

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
