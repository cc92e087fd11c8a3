"""Runtime directories: one per connector, holding its Unix sockets; only its user may enter.

$MORI_MP_RUNTIME_DIR, else $XDG_RUNTIME_DIR/mori-mp, else /tmp/mori-mp-<uid>
    <stage pid>-<epoch>/      made by the stage, removed by close(), or by its control process when the
                              stage dies; a leftover of both dying at once is swept by the next connector
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
from pathlib import Path

from mori_mp.shared.errors import ConfigError

logger = logging.getLogger(__name__)

_OURS = re.compile(r"(\d+)-[0-9a-f]{12}")  # pid and epoch; nothing else in a base is ours to remove
_MAX_SOCKET_PATH = 107  # sun_path less its terminating zero
_LONGEST_NAME = len("/lane-999.sock")


def base_directory(configured: str = "") -> Path:
    """Return where runtime directories of this user go; configured wins."""
    if configured:
        return Path(configured)
    if os.environ.get("MORI_MP_RUNTIME_DIR"):
        return Path(os.environ["MORI_MP_RUNTIME_DIR"])
    if os.environ.get("XDG_RUNTIME_DIR"):
        return Path(os.environ["XDG_RUNTIME_DIR"]) / "mori-mp"
    return Path(f"/tmp/mori-mp-{os.getuid()}")


def create(epoch: str, configured: str = "") -> Path:
    """Make a connector's runtime directory. Raises ConfigError when that cannot be."""
    base = base_directory(configured)
    folder = base / f"{os.getpid()}-{epoch}"
    if len(os.fsencode(folder)) + _LONGEST_NAME > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"runtime_dir {base} is too long for Unix sockets ({_MAX_SOCKET_PATH} bytes in all); set "
            f"runtime_dir or MORI_MP_RUNTIME_DIR to a shorter path"
        )
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = base.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            raise ConfigError(f"runtime_dir {base} is not a directory of user {os.getuid()}; set another one")
        folder.mkdir(mode=0o700)
    except OSError as exc:
        raise ConfigError(f"runtime_dir {base} cannot be used: {exc}; set another one") from exc
    sweep(base)
    return folder


def sweep(base: Path) -> list[Path]:
    """Remove the directories of stages that are gone; returns them."""
    swept = []
    for folder in base.iterdir():
        ours = _OURS.fullmatch(folder.name)
        if ours is None or folder.is_symlink() or Path(f"/proc/{ours[1]}").exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)
        logger.debug("removed the runtime directory that process %s left behind", ours[1])
        swept.append(folder)
    return swept
