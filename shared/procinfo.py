"""What the kernel says of a process: memory, CPU, threads, descriptors. The process itself is not asked.

psutil is imported by the first report, not before: a control process that nobody asks stays smaller. Only
files that never wait for the process are read (not cmdline or smaps, which need its memory lock).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mori_mp.shared.topology import format_cpulist

if TYPE_CHECKING:
    import psutil

NUMBERS = (
    "state",
    "cpus",
    "numa_node",
    "cpu_percent",
    "cpu_s",
    "rss_bytes",
    "shared_bytes",
    "threads",
    "fds",
    "voluntary_switches",
    "involuntary_switches",
)
"""The keys of ProcessTable.read()."""

UNKNOWN: dict[str, Any] = dict.fromkeys(NUMBERS)


def numa_node(cpus: Iterable[int], sysfs_root: str = "/sys") -> int | None:
    """Return the one NUMA node that all these CPUs belong to; None if they are several or none is known."""
    nodes: set[int] = set()
    for cpu in cpus:
        try:
            names = os.listdir(f"{sysfs_root}/devices/system/cpu/cpu{cpu}")
        except OSError:
            return None
        nodes.update(int(name[4:]) for name in names if name.startswith("node") and name[4:].isdecimal())
    return nodes.pop() if len(nodes) == 1 else None


def startup_line(
    role: str, *, engine: str, device: str, cpus: frozenset[int], endpoint: str, **more: object
) -> str:
    """The line that every process of a connector logs when it is up; cpus is its effective mask."""
    node = numa_node(cpus)
    fields = {
        "role": role,
        **more,
        "pid": os.getpid(),
        "engine": engine,
        "device": device,
        "node": "unknown" if node is None else node,
        "cpus": format_cpulist(cpus),
        "endpoint": endpoint or "none",
    }
    return "up: " + " ".join(f"{name}={value}" for name, value in fields.items())


class ProcessTable:
    """Reads processes repeatedly, so that CPU use is that since the last time. Use it under its `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._known: dict[int, tuple[psutil.Process, float, float]] = {}  # pid -> process, CPU s, as of
        self._nodes: dict[str, int | None] = {}

    def read(self, pid: int) -> dict[str, Any]:
        """Describe a process by NUMBERS; all None when it is gone or not ours to look at."""
        import psutil

        try:
            process, cpu_before, before = self._known.get(pid) or self._meet(psutil.Process(pid))
            if not process.is_running():  # the pid is another process's now
                process, cpu_before, before = self._meet(psutil.Process(pid))
            with process.oneshot():
                times = process.cpu_times()
                memory = process.memory_info()
                switches = process.num_ctx_switches()
                affinity = process.cpu_affinity() or []
                now, cpu_s = time.monotonic(), times.user + times.system
                found = {
                    "state": process.status(),
                    "cpus": format_cpulist(affinity),
                    "cpu_percent": round(100 * max(0.0, cpu_s - cpu_before) / max(now - before, 1e-3), 1),
                    "cpu_s": round(cpu_s, 3),
                    "rss_bytes": memory.rss,
                    "shared_bytes": memory.shared,
                    "threads": process.num_threads(),
                    "fds": process.num_fds(),
                    "voluntary_switches": switches.voluntary,
                    "involuntary_switches": switches.involuntary,
                }
        except psutil.Error:
            self._known.pop(pid, None)
            return dict(UNKNOWN)
        self._known[pid] = (process, cpu_s, now)
        found["numa_node"] = self._node(str(found["cpus"]), affinity)
        return found

    def keep_only(self, pids: Iterable[int]) -> None:
        """Forget all other processes."""
        keep = set(pids)
        for pid in [pid for pid in self._known if pid not in keep]:
            del self._known[pid]

    def _meet(self, process: psutil.Process) -> tuple[psutil.Process, float, float]:
        """The first reading is compared with the process's start."""
        age = max(0.0, time.time() - process.create_time())
        return process, 0.0, time.monotonic() - age

    def _node(self, text: str, cpus: Iterable[int]) -> int | None:
        if text not in self._nodes:
            self._nodes[text] = numa_node(cpus)
        return self._nodes[text]
