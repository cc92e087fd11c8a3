"""The block of knobs and counters of a process that runs on the libraries built here; see knobs.h."""

from __future__ import annotations

import mmap
import os
import re
import struct
from pathlib import Path

_SLOT_BYTES = 8
_HEADER = Path(__file__).resolve().with_name("knobs.h")


def _names(macro: str) -> list[str]:
    lines = re.search(rf"#define {macro}\(X\)((?:.*\\\n)*.*)", _HEADER.read_text())
    assert lines is not None
    return re.findall(r"X\((\w+)\)", lines.group(1))


_SLOTS = {name: slot for slot, name in enumerate(_names("KNOBS") + _names("COUNTERS"))}


class Block:
    """A block in a file; processes started with `environment` use it."""

    def __init__(self, path: Path) -> None:
        self.environment = {"HIPEMU_BLOCK": str(path)}
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        os.ftruncate(fd, len(_SLOTS) * _SLOT_BYTES)
        self._map = mmap.mmap(fd, len(_SLOTS) * _SLOT_BYTES)
        os.close(fd)

    def __getitem__(self, name: str) -> int:
        (value,) = struct.unpack_from("<q", self._map, _SLOTS[name] * _SLOT_BYTES)
        return int(value)

    def __setitem__(self, name: str, value: int) -> None:
        struct.pack_into("<q", self._map, _SLOTS[name] * _SLOT_BYTES, value)

    def close(self) -> None:
        self._map.close()
