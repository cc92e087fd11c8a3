"""Files that operators name in the configuration: placeholders in their paths, and writing them whole."""

from __future__ import annotations

import os
from pathlib import Path

PLACEHOLDERS = frozenset({"{pid}", "{stage}"})


def expand(path: str, *, pid: int, stage: int) -> Path:
    """Put the stage's pid and number into a configured path: `{pid}`, `{stage}`. Other braces stay."""
    return Path(path.replace("{pid}", str(pid)).replace("{stage}", str(stage)))


def write_whole(path: Path, text: bytes) -> None:
    """Replace a file so that nobody reads half of it; missing folders are made. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fresh.write_bytes(text)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
