"""System calls made while keeping the GIL, and the few that Python 3.10 does not wrap.

Python releases the GIL around every socket call and around ctypes calls through CDLL. Beside a thread that
runs pure Python, getting it back takes one switch interval (5 ms by default), a thousand times the cost of
the call. `put()` therefore makes its few calls through `ctypes.PyDLL`, which keeps the GIL: each one is
non-blocking and takes a few microseconds.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select

KEEP_GIL_BYTES = 4 << 20
"""Copies up to this size keep the GIL (about 1 ms at 4 GB/s, under the switch interval)."""

_MSG_DONTWAIT = 0x40
_MSG_NOSIGNAL = 0x4000

_kept = ctypes.PyDLL(None, use_errno=True)
_released = ctypes.CDLL(None, use_errno=True)

_send = _kept.send
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t
_recv = _kept.recv
_recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_recv.restype = ctypes.c_ssize_t
_poll = _kept.poll
_poll.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int)
_poll.restype = ctypes.c_int
_memmove_kept = _kept.memmove
_memmove_kept.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_kept.restype = None
_memmove_released = _released.memmove
_memmove_released.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_released.restype = None


def copy_memory(dst_addr: int, src_addr: int, nbytes: int) -> None:
    """Copy nbytes bytes between two addresses of this process, keeping the GIL if that is short."""
    if nbytes <= KEEP_GIL_BYTES:
        _memmove_kept(dst_addr, src_addr, nbytes)
    else:
        _memmove_released(dst_addr, src_addr, nbytes)


def try_send(fd: int, message: bytes) -> bool:
    """Send one packet without waiting and without giving up the GIL.

    Returns False when the socket's buffer is full. Raises OSError for anything else (EPIPE or ECONNRESET
    when the peer is gone).
    """
    while True:
        if _send(fd, message, len(message), _MSG_DONTWAIT | _MSG_NOSIGNAL) >= 0:
            return True
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in (errno.EAGAIN, errno.ENOBUFS):
            return False
        raise OSError(code, os.strerror(code))


class _PollFd(ctypes.Structure):
    """struct pollfd."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class Readable:
    """Tells whether a descriptor is readable, without waiting and without giving up the GIL."""

    def __init__(self, fd: int) -> None:
        self._poll = _PollFd(fd, select.POLLIN, 0)
        self._address = ctypes.addressof(self._poll)

    def __call__(self) -> bool:
        """Tell whether it is readable now, or at its end. Raises OSError."""
        while (found := int(_poll(self._address, 1, 0))) < 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
        return found > 0


class PacketReader:
    """Receives packets without waiting and without giving up the GIL; one owner at a time."""

    def __init__(self, max_bytes: int) -> None:
        self._buffer = ctypes.create_string_buffer(max_bytes)
        self._view = memoryview(self._buffer).cast("B")
        self._max_bytes = max_bytes

    def try_recv(self, fd: int) -> bytes | None:
        """Return one packet, None when there is none, b"" when the peer has closed and all has been read."""
        reset = False
        while True:
            n = int(_recv(fd, self._buffer, self._max_bytes, _MSG_DONTWAIT))
            if n >= 0:
                return self._view[:n].tobytes()
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            if code == errno.EAGAIN:
                return None
            if code == errno.ECONNRESET:
                if reset:
                    return b""
                reset = True  # told once, ahead of what the peer sent before its end
                continue
            raise OSError(code, os.strerror(code))
