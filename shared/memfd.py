"""Shared memory by memfd: made by one process, opened by others of its host through /proc/<pid>/fd.

A memfd is sealed against shrinking and growing, so no process that maps it can be hit by SIGBUS because
another one truncated it. Whoever opens it checks name, seals and size before it trusts the mapping. That
needs the same host, PID namespace and user, which `host_id` stands for.
"""

from __future__ import annotations

import fcntl
import os

from mori_mp.shared.errors import EngineUnavailable, WireError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create(name: str, size: int) -> int:
    """Return the descriptor of a new memfd of size bytes, sealed; raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd
    except BaseException:
        os.close(fd)
        raise


def open_peer(what: str, prefix: str, pid: int, fd: int, inode: int, size: int) -> int:
    """Open a memfd of another process of this host; what names it in errors, its own name begins with prefix.

    Raises EngineUnavailable when it is out of reach, WireError when it is not what was described.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        link = os.readlink(path)
        if not link.startswith(f"/memfd:{prefix}"):
            raise WireError(f"{what}: descriptor {fd} of process {pid} is {link!r}, which is none")
        ours = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        why = _forbidden(pid) if isinstance(exc, PermissionError) else str(exc)
        raise EngineUnavailable(f"{what} of process {pid} is out of reach: {why}") from exc
    try:
        stat = os.fstat(ours)
        seals = fcntl.fcntl(ours, fcntl.F_GET_SEALS)
        if stat.st_ino != inode or stat.st_size != size or seals & _SEALS != _SEALS:
            raise WireError(f"{what} does not match what process {pid} has open as descriptor {fd}")
        return ours
    except OSError as exc:  # no memfd
        os.close(ours)
        raise EngineUnavailable(f"{what} of process {pid} cannot be mapped: {exc}") from exc
    except BaseException:
        os.close(ours)
        raise


def _forbidden(pid: int) -> str:
    """Why this process may not open the files of another one."""
    try:
        with open(f"/proc/{pid}/status") as status:
            owner = next(int(line.split()[1]) for line in status if line.startswith("Uid:"))
    except OSError as exc:
        return str(exc)
    if owner != os.geteuid():
        return f"it belongs to another user (uid {owner}, this is {os.geteuid()}); run all stages as one user"
    return "its files are closed to others (PR_SET_DUMPABLE 0, ptrace rules); see mori-mp doctor"


def host_id() -> str:
    """Name this host and PID namespace: the reach of /proc/<pid>/fd."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
