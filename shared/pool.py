"""The host-memory pool: one memfd that a stage owns and its workers, and same-host peers, map whole.

Layout of the memfd, size being memory_pool_size rounded down to whole blocks of 4096 bytes:

    0 ............................. size ............................. size + blocks * 16
    payload bytes, 4096-aligned     lease board: one record per block (see shared.board)

A stage with a GPU pool has the records of that one's blocks on the same board, behind those of the host pool.

Peers on its host open it as `shared.memfd` says.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import msgspec

from mori_mp.shared import memfd
from mori_mp.shared.board import RECORD_BYTES, LeaseBoard
from mori_mp.shared.errors import EngineUnavailable, PoolUnbacked, WireError
from mori_mp.shared.memfd import host_id
from mori_mp.shared.memory import available_bytes

BLOCK = 4096
PREFAULT_STEP = 32 << 20
_NAME = "mori-mp-pool-"
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap module before 3.14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PoolDescriptor(msgspec.Struct, array_like=True, frozen=True):
    """Memory descriptor of a pool: what a peer on the same host needs to map it.

    size: bytes of host memory; device_bytes: of the GPU pool beside it, 0 for none.
    """

    name: str
    size: int
    pid: int
    fd: int
    inode: int
    host_id: str
    device_bytes: int = 0

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> PoolDescriptor:
        """Decode a descriptor from the wire. Raises WireError."""
        try:
            desc = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
            raise WireError(f"undecodable memory descriptor of {len(data)} bytes: {exc}") from None
        if desc.size <= 0 or desc.size % BLOCK or desc.pid <= 0 or desc.fd < 0:
            raise WireError(f"impossible memory descriptor {desc}")
        return desc


class Pool:
    """A mapped pool. The creator and every attached process hold one; close() unmaps."""

    def __init__(self, fd: int, size: int, name: str) -> None:
        self.fd = fd
        self.size = size
        self.name = name
        total = os.fstat(fd).st_size
        self.device_bytes = (total - size) // RECORD_BYTES * BLOCK - size
        self._map = mmap.mmap(fd, total)
        view = memoryview(self._map)
        self.view = view[:size]
        self.board = LeaseBoard(view[size:])
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)

    @classmethod
    def create(cls, size: int, label: str, device_bytes: int = 0) -> Pool:
        """Make a pool of size bytes, beside a GPU pool of device_bytes (both rounded down to blocks).

        Raises PoolUnbacked, naming the size, when the host or cgroup has not that much memory left:
        a memfd beyond it would end in an out-of-memory kill at some later first touch.
        """
        size = size // BLOCK * BLOCK
        total = total_bytes(size, device_bytes)
        room = available_bytes()
        if total > room:
            key = "host_pool_size" if device_bytes else "memory_pool_size"
            raise PoolUnbacked(
                f"{key}={size} bytes ({size / 2**30:.2f} GiB) cannot be backed: {room} bytes "
                f"({room / 2**30:.2f} GiB) of memory are left on this host or in this container's cgroup. "
                f"Lower {key} or raise the memory limit."
            )
        name = _NAME + label
        fd = memfd.create(name, total)
        try:
            return cls(fd, size, name)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, size: int) -> Pool:
        """Map a pool whose memfd this process inherited; takes over fd."""
        return cls(fd, size, "inherited")

    @classmethod
    def open_peer(cls, desc: PoolDescriptor) -> Pool:
        """Map another stage's pool on this host.

        Raises EngineUnavailable when it cannot be reached (another host, another PID namespace, gone).
        """
        if desc.host_id != host_id():
            raise EngineUnavailable(
                f"pool {desc.name} lies on another host or in another PID namespace; shm reaches only "
                f"processes of one host that share a PID namespace. Use backend_type rdma between hosts."
            )
        total = total_bytes(desc.size, desc.device_bytes)
        fd = memfd.open_peer(f"pool {desc.name}", _NAME, desc.pid, desc.fd, desc.inode, total)
        try:
            return cls(fd, desc.size, desc.name)
        except OSError as exc:  # no room to map it
            os.close(fd)
            raise EngineUnavailable(
                f"pool {desc.name} of process {desc.pid} cannot be mapped: {exc}"
            ) from exc
        except BaseException:
            os.close(fd)
            raise

    def descriptor(self) -> PoolDescriptor:
        """Describe this pool to peers; valid while this process has it open."""
        inode = os.fstat(self.fd).st_ino
        return PoolDescriptor(self.name, self.size, os.getpid(), self.fd, inode, host_id(), self.device_bytes)

    def close(self) -> None:
        """Close the memfd and let go of the mapping; idempotent.

        The mapping itself goes when the last view of it does: a tensor made by torch.frombuffer holds a
        reference but no buffer lock, so unmapping here could pull the memory away under a user's tensor.
        """
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
            del self._anchor, self.board, self.view, self._map


def total_bytes(size: int, device_bytes: int = 0) -> int:
    """Return the length of the memfd behind a pool of size bytes, lease board included."""
    return size + (size // BLOCK + device_bytes // BLOCK) * RECORD_BYTES


def prefault(fd: int, offset: int, length: int) -> None:
    """Have the kernel back a range of a memfd with zeroed pages, on the calling thread's NUMA node.

    The range is mapped, populated and unmapped again, so that the caller's resident set stays small.
    Releases the GIL. Raises OSError (ENOMEM, ENOSPC) when the memory is not there.
    """
    window = mmap.mmap(fd, length, offset=offset)
    anchor = ctypes.c_char.from_buffer(window)
    try:
        if _libc.madvise(ctypes.addressof(anchor), length, _MADV_POPULATE_WRITE) == 0:
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise OSError(code, f"populating {length} bytes at {offset} of a pool: {os.strerror(code)}")
    finally:
        del anchor
        window.close()
    os.posix_fallocate(fd, offset, length)  # kernels before 5.14


def populate(address: int, length: int) -> None:
    """Map already backed pages into this process ahead of their first use; best effort, releases the GIL."""
    _libc.madvise(address, length, _MADV_POPULATE_WRITE)


def process_group_alive(group: int) -> bool:
    """Tell whether any process of a process group is left (zombies count until they are reaped)."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


__all__ = [
    "BLOCK",
    "PREFAULT_STEP",
    "Pool",
    "PoolDescriptor",
    "host_id",
    "populate",
    "prefault",
    "process_group_alive",
    "total_bytes",
]
