"""Claims: who reads an offered payload in place, kept by the kernel.

A sender offers a payload to a receiver on its host by telling it where in the pool it lies, or in the GPU
pool, whose slots are numbered behind those of the host pool. Nobody reserves anything for that, so the sender
may still withdraw or expire it. Before it reads, the receiver claims the payload with a shared lock on the
byte of the host pool's memfd that has the payload's slot number; before the memory is freed, the control
process takes that lock exclusively for a moment. One of them is first:

    receiver first   the control process keeps the memory until the claim is dropped
    control first    the board no longer shows the generation, so the claim is too late and dropped

The locks are open file description locks (fcntl(2), F_OFD_SETLK): they belong to the receiver's own opening
of the memfd, the kernel drops them when it dies, and no message about them can get lost. Locking is
non-blocking and keeps the GIL (about 3 microseconds).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

_libc = ctypes.PyDLL(None, use_errno=True)
_fcntl = _libc.fcntl
_fcntl.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
_fcntl.restype = ctypes.c_int


class _Flock(ctypes.Structure):
    """struct flock of the 64-bit Linux ABIs."""

    _fields_ = (
        ("l_type", ctypes.c_short),
        ("l_whence", ctypes.c_short),
        ("l_start", ctypes.c_int64),
        ("l_len", ctypes.c_int64),
        ("l_pid", ctypes.c_int),
    )


class Claims:
    """The locks of one opening of a pool's memfd. Thread-safe, since each call is one system call."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def take(self, slot: int) -> bool:
        """Claim a slot for reading; False if the control process is just freeing it."""
        return self._lock(fcntl.F_RDLCK, slot)

    def drop(self, slot: int) -> None:
        """End a claim."""
        self._lock(fcntl.F_UNLCK, slot)

    def exclude(self, slot: int) -> bool:
        """Lock every reader out of a slot until drop(); False if there is one."""
        return self._lock(fcntl.F_WRLCK, slot)

    def _lock(self, kind: int, slot: int) -> bool:
        lock = _Flock(kind, os.SEEK_SET, slot, 1, 0)
        while _fcntl(self._fd, fcntl.F_OFD_SETLK, ctypes.byref(lock)) != 0:
            code = ctypes.get_errno()
            if code in (errno.EAGAIN, errno.EACCES):
                return False
            if code != errno.EINTR:
                raise OSError(code, f"locking slot {slot} of a pool: {os.strerror(code)}")
        return True
