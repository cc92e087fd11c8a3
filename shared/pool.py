"""The host-memory pool: one memfd that a stage owns and its workers, and same-host peers, map whole.

Layout of the memfd, size being memory_pool_size rounded down to whole blocks of 4096 bytes:

    0 ............................. size ............................. size + blocks * 16
    payload bytes, 4096-aligned     lease board: one record per block (see shared.board)

A stage with a GPU pool has the records of that one's blocks on the same board, behind those of the host pool.

The memfd is sealed against shrinking and growing, so no process that maps it can be hit by SIGBUS because
another one truncated it. A peer opens it through /proc/<pid>/fd/<fd> and checks name, seals and size before
it trusts the mapping. That needs the same host, PID namespace and user, which `host_id` stands for.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os

import msgspec

from mori_mp.shared.board import RECORD_BYTES, LeaseBoard
from mori_mp.shared.errors import EngineUnavailable, PoolUnbacked, WireError
from mori_mp.shared.memory import available_bytes

BLOCK = 4096
PREFAULT_STEP = 32 << 20
_NAME = "mori-mp-pool-"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
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
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, total)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
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
        path = f"/proc/{desc.pid}/fd/{desc.fd}"
        try:
            link = os.readlink(path)
            if not link.startswith(f"/memfd:{_NAME}"):
                raise WireError(f"{desc} names {link!r}, which is no pool")
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            why = _forbidden(desc.pid) if isinstance(exc, PermissionError) else str(exc)
            raise EngineUnavailable(f"pool {desc.name} of process {desc.pid} is out of reach: {why}") from exc
        try:
            stat = os.fstat(fd)
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if (
                stat.st_ino != desc.inode
                or stat.st_size != total_bytes(desc.size, desc.device_bytes)
                or seals & _SEALS != _SEALS
            ):
                raise WireError(f"{desc} does not match what process {desc.pid} has open there")
            return cls(fd, desc.size, desc.name)
        except OSError as exc:  # no memfd, or no room to map it
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


def host_id() -> str:
    """Name this host and PID namespace: the reach of /proc/<pid>/fd."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


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
