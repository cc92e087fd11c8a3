"""Doctor's checks of the host itself: memory, limits, CPUs, processes, GPUs and RDMA devices."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Literal

import msgspec

from mori_mp.config import ConnectorConfig
from mori_mp.pins import gpu_address
from mori_mp.shared.errors import MoriMPError, PoolUnbacked
from mori_mp.shared.memory import available_bytes
from mori_mp.shared.pinning import plan
from mori_mp.shared.pool import Pool
from mori_mp.shared.runtime import base_directory
from mori_mp.shared.topology import device_node, format_cpulist, read_topology

Level = Literal["ok", "note", "warning", "broken"]
_MIB = 1 << 20
_FEW_FILES = 4096


class Finding(msgspec.Struct, frozen=True):
    """One result. `fix` says what to do, where there is something to do."""

    area: str
    what: str
    level: Level
    detail: str
    fix: str = ""


# -------------------------------------------------------------------------------- memory
def check_memory() -> Iterator[Finding]:
    """memfd, and what a pool may take."""
    try:
        pool = Pool.create(_MIB, "doctor")
    except PoolUnbacked as exc:
        detail, fix = f"no pool of 1 MiB can be made: {exc}", "end what takes the memory, or raise its limit"
        yield Finding("memory", "memfd", "broken", detail, fix)
        return
    except (OSError, MoriMPError) as exc:
        fix = "allow memfd_create and file sealing (seccomp profile)"
        yield Finding("memory", "memfd", "broken", f"no pool can be made: {exc}", fix)
        return
    try:
        pool.view[:4] = b"pool"
        yield Finding("memory", "memfd", "ok", "made, sealed, mapped and written")
    finally:
        pool.close()
    room = available_bytes()
    want = ConnectorConfig().memory_pool_size
    level: Level = "ok" if room >= want else "warning"
    fix = "" if room >= want else "lower memory_pool_size, or raise the container's memory limit"
    yield Finding("memory", "room for pools", level, f"{room / 2**30:.1f} GiB left on host and cgroup", fix)
    try:
        shm = os.statvfs("/dev/shm")
    except OSError as exc:
        detail = f"{exc}; pools do not use it, torch and vLLM do"
        yield Finding("memory", "/dev/shm", "note", detail, "mount a tmpfs there (docker: --shm-size)")
        return
    free = shm.f_bavail * shm.f_frsize
    detail = f"{free / 2**30:.1f} GiB free; pools are memfds and do not count against it"
    yield Finding("memory", "/dev/shm", "ok", detail)


def check_limits() -> Iterator[Finding]:
    """Resource limits of this process, which its children inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    text = "unlimited" if unlimited else f"{soft / _MIB:.0f} MiB (hard limit {_limit(hard)})"
    if unlimited or not _rdma_devices():
        yield Finding("limits", "memlock", "ok", f"{text}; only RDMA registration needs it")
    else:
        fix = "ulimit -l unlimited (docker: --ulimit memlock=-1), or at least memory_pool_size"
        yield Finding("limits", "memlock", "warning", f"{text}; RDMA registers the whole pool", fix)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files < _FEW_FILES
    fix = f"ulimit -n {_FEW_FILES} or more" if few else ""
    yield Finding("limits", "open files", "warning" if few else "ok", str(files), fix)


def _limit(value: int) -> str:
    return "none" if value == resource.RLIM_INFINITY else f"{value / _MIB:.0f} MiB"


# -------------------------------------------------------------------------------- CPUs and processes
def check_cpus() -> Iterator[Finding]:
    """What pinning has to work with."""
    try:
        topology = read_topology()
    except OSError as exc:
        yield Finding(
            "cpus", "topology", "warning", str(exc), "children run unpinned; set pin: off to accept"
        )
        return
    detail = f"{format_cpulist(topology.allowed)} of {format_cpulist(topology.cpus)}"
    yield Finding("cpus", "allowed CPUs", "ok", detail)
    quota = "none" if topology.quota is None else f"{topology.quota:g} CPUs"
    throttled = topology.quota is not None and topology.quota < len(topology.allowed)
    fix = "give the container a cpuset instead of a quota (docker: --cpuset-cpus), so that pinning pays"
    yield Finding("cpus", "CPU quota", "warning" if throttled else "ok", quota, fix if throttled else "")
    made = plan(topology, workers=ConnectorConfig().num_transfer_workers)
    story = "; ".join(made.reasons) or "a whole core for each process"
    fix = "more CPUs for the stage, fewer workers, or pin: off to accept it (mori-mp pin --explain)"
    yield Finding(
        "cpus", "pinning plan", "warning" if made.degraded else "ok", story, fix if made.degraded else ""
    )


_HOLDER = (
    "import os, sys; fd = os.memfd_create('mori-mp-doctor'); os.write(fd, b'seen'); print(fd, flush=True);"
    "sys.stdin.read()"
)


def check_processes() -> Iterator[Finding]:
    """The PID namespace, and whether one process may open another's memory through /proc/<pid>/fd."""
    space = _link("/proc/self/ns/pid")
    if _link("/proc/self") != str(os.getpid()):
        fix = "mount /proc of this PID namespace (unshare --mount-proc; docker: do not bind the host's /proc)"
        detail = f"/proc is not that of this namespace ({space})"
        yield Finding("processes", "PID namespace", "broken", detail, fix)
        return
    detail = f"{space}; stages that share memory must have the same (docker: --pid=container:NAME)"
    yield Finding("processes", "PID namespace", "ok", detail)
    yama = _read("/proc/sys/kernel/yama/ptrace_scope")
    with subprocess.Popen(
        [sys.executable, "-S", "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        path = f"/proc/{holder.pid}/fd/{holder.stdout.readline().strip()}"
        try:
            with open(path, "rb") as file:
                seen = file.read(4) == b"seen"
        except OSError as exc:
            fix = "run all stages as one user, without PR_SET_DUMPABLE 0 or hidepid; allow ptrace reads"
            detail = f"{path}: {exc.strerror} (yama ptrace_scope {yama or 'absent'})"
            yield Finding("processes", "peer memory", "broken", detail, fix)
        else:
            detail = f"opens through /proc/<pid>/fd (yama ptrace_scope {yama or 'absent'})"
            yield Finding("processes", "peer memory", "ok" if seen else "broken", detail)


def check_runtime_directory() -> Iterator[Finding]:
    """Whether sockets can be made where connectors make them."""
    base = base_directory()
    parent = base if base.exists() else base.parent
    fix = "set MORI_MP_RUNTIME_DIR to a short path that this user may write"
    try:
        info = parent.lstat()
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=parent):
            pass
    except OSError as exc:
        yield Finding("processes", "runtime directory", "broken", f"{base}: {exc}", fix)
        return
    if parent == base and info.st_uid != os.getuid():
        detail = f"{base} belongs to user {info.st_uid}"
        yield Finding("processes", "runtime directory", "broken", detail, fix)
        return
    yield Finding("processes", "runtime directory", "ok", str(base))


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError as exc:
        return f"unreadable: {exc.strerror}"


# -------------------------------------------------------------------------------- devices
def check_devices() -> Iterator[Finding]:
    """GPUs as torch sees them and RDMA devices as sysfs does, each with its NUMA node."""
    import torch

    topology = read_topology()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(count):
        address, story = gpu_address(f"cuda:{number}")
        node, how = device_node(topology, address) if address else (None, "; ".join(story))
        name = torch.cuda.get_device_name(number)
        where = f"node {node} ({how})" if node is not None else f"NUMA node unknown: {how}"
        yield Finding("devices", f"cuda:{number}", "ok", f"{name} at {address or 'unknown address'}, {where}")
    access = torch.cuda.can_device_access_peer
    apart = [
        f"cuda:{one} and cuda:{other}"
        for one, other in combinations(range(count), 2)
        if not (access(one, other) and access(other, one))
    ]
    if apart:
        fix = "place stages with GPU pools on others (NVLink, XGMI, one PCIe switch), or keep host pools"
        yield Finding("devices", "peer access", "warning", f"none between {', '.join(apart)}", fix)
    elif count > 1:
        yield Finding("devices", "peer access", "ok", "all GPUs reach each other")
    if not count:
        seen = len(topology.gpus)
        if seen:
            detail = f"sysfs shows {seen}, torch {torch.__version__} none"
            fix = "install the ROCm or CUDA build of torch; check *_VISIBLE_DEVICES, /dev/kfd, /dev/nvidia*"
            yield Finding("devices", "GPUs", "warning", detail, fix)
        else:
            yield Finding("devices", "GPUs", "note", "none: pools lie in host memory")
    nics = topology.nics or dict.fromkeys(_rdma_devices(), "")
    for name, address in nics.items():
        node, how = device_node(topology, address) if address else (None, "its PCI address is unknown")
        where = f"node {node} ({how})" if node is not None else f"NUMA node unknown: {how}"
        yield Finding("devices", name, "ok", f"RDMA at {address or 'unknown address'}, {where}")
    if not nics:
        yield Finding("devices", "RDMA", "note", "none: stages must share a host")


def _rdma_devices() -> list[str]:
    try:
        return sorted(os.listdir("/sys/class/infiniband"))
    except OSError:
        return []
