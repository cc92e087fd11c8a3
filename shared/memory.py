"""How much memory this process may still take, from /proc and the cgroup it lives in. Bytes throughout."""

from __future__ import annotations

from pathlib import Path


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that can be taken without swapping or an out-of-memory kill.

    The smallest of MemAvailable and, for every cgroup level above this process that has a limit, limit
    minus use (page cache that can be dropped does not count as use).
    """
    bounds = [_mem_available(proc)]
    for folder in _memory_cgroups(proc, cgroup):
        room = _room(folder)
        if room is not None:
            bounds.append(room)
    return max(0, min(bounds))


def _mem_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{proc}/meminfo has no MemAvailable line")


def _memory_cgroups(proc: Path, root: Path) -> list[Path]:
    """List the cgroup folders with memory control that hold this process, innermost first."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root
        elif "memory" in controllers.split(","):
            base = root / "memory"
        else:
            continue
        # In a container the path may be the host's while the mount shows only our own part of the tree.
        inner = base / path.lstrip("/")
        here = inner if inner.is_dir() else base
        while True:
            folders.append(here)
            if here == base:
                break
            here = here.parent
    return folders


def _room(folder: Path) -> int | None:
    for limit_name, use_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _read_int(folder / limit_name)
        use = _read_int(folder / use_name)
        if limit is None or use is None:
            continue
        return limit - use + _stat_value(folder / "memory.stat", cache_key)
    return None


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit


def _stat_value(path: Path, key: str) -> int:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except OSError:
        pass
    return 0
