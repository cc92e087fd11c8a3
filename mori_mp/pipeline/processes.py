"""The processes of a run: stages, and whatever their connectors start beneath them.

Descendants are found while they are still attached to a stage, and remembered by (pid, start time), so that
one which outlives its stage, and is then nobody's child, is still found afterwards.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import psutil

_BOOT = "workers/boot.py"
_WAIT_STEP_S = 0.02


class ProcessRow(msgspec.Struct, kw_only=True):
    """One process, as a line of `ps`."""

    stage_id: int
    role: str
    """`stage 1`, or `control`, `worker 0` and the like for a process beneath it."""
    pid: int
    parent: int
    rss_mib: float
    """Resident memory; a pool that several processes map counts in each of them."""
    threads: int
    cpus: str
    """The affinity mask as a kernel cpulist."""
    cpu_s: float


class ProcessWatch:
    """Remembers every process that was ever seen beneath the stages."""

    def __init__(self) -> None:
        self._seen: dict[int, psutil.Process] = {}

    def look(self, stages: dict[int, int]) -> list[ProcessRow]:
        """One row for each live process of the stages (stage id -> pid), children under their stage."""
        rows = []
        for stage_id, pid in sorted(stages.items()):
            try:
                stage = psutil.Process(pid)
                family = [stage, *stage.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            for process in family:
                self._seen.setdefault(process.pid, process)
                row = _row(process, stage_id, f"stage {stage_id}" if process is stage else _role(process))
                if row is not None:
                    rows.append(row)
        return rows

    def survivors(self, timeout_s: float) -> list[str]:
        """Processes of the run that are still alive after up to timeout_s, described for a message."""
        until = time.monotonic() + timeout_s
        while True:
            alive = [process for process in self._seen.values() if _runs(process)]
            if not alive or time.monotonic() >= until:
                return [f"process {process.pid} ({_role(process)})" for process in alive]
            time.sleep(_WAIT_STEP_S)

    def kill_survivors(self) -> None:
        """SIGKILL what is left; psutil makes sure that the pid was not reused."""
        for process in self._seen.values():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


def allowed_cpus(pid: int) -> str:
    """`Cpus_allowed_list` of a process, or "" when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("Cpus_allowed_list")), "")


def _row(process: psutil.Process, stage_id: int, role: str) -> ProcessRow | None:
    try:
        with process.oneshot():
            times = process.cpu_times()
            return ProcessRow(
                stage_id=stage_id,
                role=role,
                pid=process.pid,
                parent=process.ppid(),
                rss_mib=round(process.memory_info().rss / 2**20, 1),
                threads=process.num_threads(),
                cpus=allowed_cpus(process.pid),
                cpu_s=round(times.user + times.system, 2),
            )
    except psutil.NoSuchProcess:
        return None


def _role(process: psutil.Process) -> str:
    """What a child is, from its command line.

    Children of mori-mp carry a label behind boot.py: `worker stage=0 port=50051 index=1` is `worker 1`.
    """
    try:
        command = process.cmdline()
    except psutil.Error:
        return "gone"
    for index, word in enumerate(command):
        if word.endswith(_BOOT):
            label = command[index + 1 :]
            numbers = [word.removeprefix("index=") for word in label if word.startswith("index=")]
            return " ".join([*label[:1], *numbers]) or "mori-mp child"
    return " ".join(command[:3]) or "zombie"


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
