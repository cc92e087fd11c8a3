"""The shared memory pool: seals, descriptors from the wire, backing, the lease board, how much is left."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mori_mp.shared import pool as pool_module
from mori_mp.shared.board import GRANTED, RECORD_BYTES, LeaseBoard
from mori_mp.shared.errors import EngineUnavailable, MoriMPError, PoolUnbacked, WireError
from mori_mp.shared.memory import available_bytes
from mori_mp.shared.pool import (
    BLOCK,
    Pool,
    PoolDescriptor,
    host_id,
    populate,
    prefault,
    process_group_alive,
    total_bytes,
)

SIZE = 16 * BLOCK


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool.create(SIZE, "test")
    yield pool
    pool.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- making --------------------------------------------------------------------------------------------


def test_sizes_are_rounded_down_to_blocks() -> None:
    pool = Pool.create(2 * BLOCK + 100, "test")
    assert pool.size == len(pool.view) == 2 * BLOCK
    assert os.fstat(pool.fd).st_size == total_bytes(2 * BLOCK) == 2 * (BLOCK + RECORD_BYTES)
    pool.close()


def test_a_pool_is_zeroed_writable_and_aligned(pool: Pool) -> None:
    assert bytes(pool.view) == bytes(SIZE)
    assert pool.address % mmap.PAGESIZE == 0
    pool.view[5:10] = b"hello"
    assert os.pread(pool.fd, 5, 5) == b"hello"


@pytest.mark.parametrize("size", [0, BLOCK, 1 << 30])
def test_nobody_can_pull_the_memory_away(pool: Pool, size: int) -> None:
    """A truncated mapping would end every process that touches it by SIGBUS."""
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(pool.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_more_than_there_is_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "available_bytes", lambda: 123_456)
    before = descriptors()
    with pytest.raises(PoolUnbacked, match=rf"memory_pool_size={1 << 20} .*123456 bytes"):
        Pool.create(1 << 20, "test")
    assert descriptors() == before


def test_close_is_idempotent_and_leaves_nothing() -> None:
    before = descriptors()
    pool = Pool.create(SIZE, "test-close")
    pool.close()
    pool.close()
    assert descriptors() == before
    assert "test-close" not in Path("/proc/self/maps").read_text()


def test_the_memory_outlives_the_pool_for_whoever_views_it() -> None:
    pool = Pool.create(SIZE, "test")
    view = pool.view[:5]
    view[:] = b"hello"
    pool.close()
    assert bytes(view) == b"hello"


def test_an_inherited_pool_is_the_same_memory(pool: Pool) -> None:
    attached = Pool.attach(os.dup(pool.fd), pool.size)
    pool.view[:5] = b"hello"
    assert bytes(attached.view[:5]) == b"hello"
    pool.board.grant(3, 7, 42)
    assert attached.board.lessee(3, 7) == 42
    attached.close()


# -- peers ---------------------------------------------------------------------------------------------


def test_a_peer_maps_the_same_memory(pool: Pool) -> None:
    peer = Pool.open_peer(PoolDescriptor.unpack(pool.descriptor().pack()))
    peer.view[SIZE - 3 :] = b"end"
    peer.board.grant(15, 9, 1)
    assert bytes(pool.view[SIZE - 3 :]) == b"end"
    assert pool.board.lessee(15, 9) == 1
    assert (peer.size, peer.name) == (pool.size, pool.name)
    peer.close()


def test_a_pool_of_another_process_is_reached() -> None:
    code = (
        "import sys; from mori_mp.shared.pool import Pool; p = Pool.create(65536, 'child'); "
        "p.view[:5] = b'hello'; sys.stdout.buffer.write(p.descriptor().pack().hex().encode() + b'\\n'); "
        "sys.stdout.flush(); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    desc = PoolDescriptor.unpack(bytes.fromhex(child.stdout.readline().decode()))
    pool = Pool.open_peer(desc)
    child.communicate()
    assert bytes(pool.view[:5]) == b"hello"  # the memory stays when its owner has gone
    with pytest.raises(EngineUnavailable, match="out of reach"):
        Pool.open_peer(desc)
    pool.close()


@pytest.mark.parametrize(("uid", "said"), [(12345, "another user .uid "), (os.geteuid(), "PR_SET_DUMPABLE")])
def test_a_pool_that_may_not_be_opened_is_explained(
    uid: int, said: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> str:
        raise PermissionError(13, "Permission denied", path)

    desc = pool.descriptor()
    host = pool_module.host_id()
    monkeypatch.setattr(pool_module, "host_id", lambda: host)
    monkeypatch.setattr("os.readlink", refuse)
    monkeypatch.setattr("os.geteuid", lambda: uid)
    with pytest.raises(EngineUnavailable, match=said):
        Pool.open_peer(desc)


def change(pool: Pool, **changes: Any) -> PoolDescriptor:
    return msgspec.structs.replace(pool.descriptor(), **changes)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"host_id": "another/host"}, EngineUnavailable),
        ({"pid": 1 << 22}, EngineUnavailable),
        ({"pid": (1 << 63) - 1}, EngineUnavailable),
        ({"fd": 1 << 20}, EngineUnavailable),
        ({"inode": 1}, WireError),
        ({"size": 2 * SIZE}, WireError),
        ({"size": BLOCK}, WireError),
        ({"size": 1 << 62}, WireError),
    ],
)
def test_a_descriptor_that_does_not_match_is_refused(
    pool: Pool, changes: dict[str, Any], error: type[MoriMPError]
) -> None:
    before = descriptors()
    with pytest.raises(error):
        Pool.open_peer(change(pool, **changes))
    assert descriptors() == before


def test_only_pools_are_mapped(pool: Pool, tmp_path: Path) -> None:
    """Whatever file, pipe or memfd a descriptor names: not a byte of it may be written."""
    ordinary = tmp_path / "ordinary"
    ordinary.write_bytes(bytes(total_bytes(SIZE)))
    read_fd, write_fd = os.pipe()
    unsealed = os.memfd_create("mori-mp-pool-fake", os.MFD_ALLOW_SEALING)
    sealless = os.memfd_create("mori-mp-pool-fake")
    foreign = os.memfd_create("something-else", os.MFD_ALLOW_SEALING)
    for fd in (unsealed, sealless, foreign):
        os.ftruncate(fd, total_bytes(SIZE))
    with open(ordinary, "r+b") as file:
        fds = (file.fileno(), read_fd, write_fd, unsealed, sealless, foreign)
        before = descriptors()
        for fd in fds:
            with pytest.raises((WireError, EngineUnavailable)):
                Pool.open_peer(change(pool, fd=fd, inode=os.fstat(fd).st_ino))
        assert descriptors() == before
    for fd in (read_fd, write_fd, unsealed, sealless, foreign):
        os.close(fd)


def test_a_pool_that_cannot_be_mapped_is_out_of_reach(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    desc = pool.descriptor()
    before = descriptors()

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOMEM, "no room")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(EngineUnavailable, match="no room"):
        Pool.open_peer(desc)
    assert descriptors() == before


@pytest.mark.parametrize(
    "changes", [{"size": 0}, {"size": -BLOCK}, {"size": BLOCK + 1}, {"pid": 0}, {"pid": -1}, {"fd": -1}]
)
def test_impossible_descriptors_do_not_decode(pool: Pool, changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        PoolDescriptor.unpack(change(pool, **changes).pack())


def test_a_deeply_nested_descriptor_does_not_decode(pool: Pool) -> None:
    packed = pool.descriptor().pack()
    with pytest.raises(WireError):
        PoolDescriptor.unpack(bytes([packed[0] + 1]) + packed[1:] + b"\x91" * 60_000 + b"\xc0")


@given(st.binary(max_size=80), st.integers(0, 100), st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_descriptor_from_the_wire_does_harm(junk: bytes, at: int, splice: bool) -> None:
    pool = Pool.create(SIZE, "fuzz")
    packed = pool.descriptor().pack()
    payload = packed[:at] + junk + packed[at + len(junk) :] if splice else junk
    try:
        peer = Pool.open_peer(PoolDescriptor.unpack(payload))
    except (WireError, EngineUnavailable):
        pass
    else:
        assert peer.size == pool.size
        peer.close()
    assert bytes(pool.view) == bytes(SIZE)
    pool.close()


def test_host_id_names_boot_and_pid_namespace() -> None:
    boot, namespace = host_id().split("/", 1)
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert namespace == os.readlink("/proc/self/ns/pid")


def test_a_process_group_is_alive_until_all_are_reaped() -> None:
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    )
    assert process_group_alive(child.pid)
    child.communicate(b"\n")
    assert not process_group_alive(child.pid)


# -- backing -------------------------------------------------------------------------------------------


def resident(pool: Pool) -> int:
    return os.fstat(pool.fd).st_blocks * 512


def test_prefault_backs_a_range_and_keeps_what_is_there(pool: Pool) -> None:
    pool.view[:5] = b"hello"
    prefault(pool.fd, 0, 8 * BLOCK)
    assert resident(pool) == 8 * BLOCK
    prefault(pool.fd, 0, 8 * BLOCK)
    assert resident(pool) == 8 * BLOCK
    assert bytes(pool.view[:5]) == b"hello"


def test_prefault_without_populate_allocates(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_MADV_POPULATE_WRITE", 9999)  # as on a kernel before 5.14: EINVAL
    prefault(pool.fd, 4 * BLOCK, 4 * BLOCK)
    assert resident(pool) == 4 * BLOCK


def test_prefault_says_when_there_is_no_memory(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        @staticmethod
        def madvise(address: int, length: int, advice: int) -> int:
            pool_module.ctypes.set_errno(errno.ENOMEM)
            return -1

    monkeypatch.setattr(pool_module, "_libc", Libc)
    with pytest.raises(OSError, match="populating 4096 bytes") as caught:
        prefault(pool.fd, 0, BLOCK)
    assert caught.value.errno == errno.ENOMEM


def test_populate_is_harmless(pool: Pool) -> None:
    pool.view[:5] = b"hello"
    populate(pool.address, SIZE)
    assert bytes(pool.view[:5]) == b"hello"


# -- the lease board -----------------------------------------------------------------------------------


@pytest.fixture
def memory() -> bytearray:
    return bytearray(4 * RECORD_BYTES)


@pytest.fixture
def board(memory: bytearray) -> LeaseBoard:
    return LeaseBoard(memoryview(memory))


def test_an_empty_board_shows_nothing(board: LeaseBoard) -> None:
    assert board.lessee(0, 1) == 0
    assert not board.was_released(0, 1)
    assert board.generation(0) == 0


def test_a_lease_is_granted_then_released(board: LeaseBoard) -> None:
    board.grant(1, 77, 4242)
    assert board.lessee(1, 77) == 4242
    assert not board.was_released(1, 77)
    board.release(1, 77)
    assert board.was_released(1, 77)
    assert board.lessee(1, 77) == 4242  # who it was


def test_records_are_of_one_generation_and_one_slot(board: LeaseBoard, memory: bytearray) -> None:
    board.grant(1, 77, 4242)
    for slot, generation in ((1, 76), (1, 78), (0, 77), (2, 77)):
        board.release(slot, generation)
        assert board.lessee(slot, generation) == 0
        assert not board.was_released(slot, generation)
    assert not board.was_released(1, 77)
    assert memory[:RECORD_BYTES] == bytes(RECORD_BYTES)
    assert memory[2 * RECORD_BYTES :] == bytes(2 * RECORD_BYTES)


def test_the_layout_is_the_documented_one(board: LeaseBoard, memory: bytearray) -> None:
    board.grant(2, (5 << 40) + 7, 4242)
    record = memory[2 * RECORD_BYTES : 3 * RECORD_BYTES]
    assert int.from_bytes(record[:8], sys.byteorder) == (5 << 40) + 7
    assert int.from_bytes(record[8:12], sys.byteorder) == 4242
    assert int.from_bytes(record[12:], sys.byteorder) == GRANTED


def test_an_offer_leases_to_nobody_and_is_cleared(board: LeaseBoard) -> None:
    board.grant(1, 77, 4242)
    board.release(1, 77)
    board.offer(1, 78)
    assert board.generation(1) == 78
    assert board.lessee(1, 78) == 0
    assert not board.was_released(1, 78)
    board.clear(1)
    assert board.generation(1) == 0


def test_a_new_grant_overwrites_an_old_release(board: LeaseBoard) -> None:
    board.grant(1, 77, 4242)
    board.release(1, 77)
    board.grant(1, 78, 99)
    assert board.lessee(1, 77) == 0
    assert not board.was_released(1, 77)
    assert board.lessee(1, 78) == 99
    assert not board.was_released(1, 78)


# -- available memory ----------------------------------------------------------------------------------


class Machine:
    """A fake /proc and cgroup mount."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.cgroup = root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()
        self.free(100_000)
        self.member_of("0::/")

    def free(self, kib: int) -> None:
        text = f"MemTotal: 999999 kB\nMemFree: 1 kB\nMemAvailable:   {kib} kB\n"
        (self.proc / "meminfo").write_text(text)

    def member_of(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("\n".join(lines) + "\n")

    def v2(self, path: str, limit: int | str, use: int, **stat: int) -> None:
        self._write(self.cgroup / path, "memory.max", limit, "memory.current", use, stat)

    def v1(self, path: str, limit: int | str, use: int, **stat: int) -> None:
        folder = self.cgroup / "memory" / path
        self._write(folder, "memory.limit_in_bytes", limit, "memory.usage_in_bytes", use, stat)

    def _write(
        self, folder: Path, limit_name: str, limit: int | str, use_name: str, use: int, stat: dict[str, int]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_name).write_text(f"{limit}\n")
        (folder / use_name).write_text(f"{use}\n")
        (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))

    def available(self) -> int:
        return available_bytes(self.proc, self.cgroup)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


HOST = 100_000 * 1024


def test_without_a_limit_the_host_decides(machine: Machine) -> None:
    assert machine.available() == HOST
    machine.v2("", "max", 5000)
    assert machine.available() == HOST


def test_v2_limit_less_use(machine: Machine) -> None:
    machine.member_of("0::/app")
    machine.v2("app", 50_000, 20_000)
    assert machine.available() == 30_000


def test_v2_page_cache_that_can_be_dropped_is_no_use(machine: Machine) -> None:
    machine.member_of("0::/app")
    machine.v2("app", 50_000, 20_000, anon=1, active_file=4, inactive_file=8_000)
    assert machine.available() == 38_000


def test_v2_the_tightest_level_decides(machine: Machine) -> None:
    machine.member_of("0::/outer/middle/inner")
    machine.v2("outer", 50_000, 20_000)
    machine.v2("outer/middle", 40_000, 39_000)
    machine.v2("outer/middle/inner", "max", 10)
    assert machine.available() == 1_000


def test_the_host_decides_when_it_has_less_than_the_limit(machine: Machine) -> None:
    machine.free(3)
    machine.v2("", 50_000, 0)
    assert machine.available() == 3 * 1024


def test_more_use_than_limit_is_nothing(machine: Machine) -> None:
    machine.v2("", 50_000, 60_000)
    assert machine.available() == 0


def test_v2_in_a_container_that_shows_its_own_part_only(machine: Machine) -> None:
    """The path is the host's, the mount shows the container's cgroup as its root."""
    machine.member_of("0::/kubepods/pod1/container1")
    machine.v2("", 50_000, 20_000)
    assert machine.available() == 30_000


def test_v1_limit_less_use(machine: Machine) -> None:
    machine.member_of("5:cpu,cpuacct:/app", "4:memory:/app/part", "1:name=systemd:/x", "0::/x")
    machine.v1("", 9223372036854771712, 10)
    machine.v1("app", 60_000, 20_000, total_inactive_file=5_000, inactive_file=1)
    machine.v1("app/part", 50_000, 10_000)
    assert machine.available() == 40_000


def test_v1_memory_beside_other_controllers(machine: Machine) -> None:
    machine.member_of("4:hugetlb,memory:/app")
    machine.v1("app", 60_000, 20_000)
    assert machine.available() == 40_000


def test_without_cgroups_the_host_decides(machine: Machine) -> None:
    (machine.proc / "self" / "cgroup").unlink()
    assert machine.available() == HOST


def test_a_limit_without_statistics_counts_all_use(machine: Machine) -> None:
    machine.v2("", 50_000, 20_000)
    (machine.cgroup / "memory.stat").unlink()
    assert machine.available() == 30_000


def test_a_kernel_without_memavailable_is_an_error(machine: Machine) -> None:
    (machine.proc / "meminfo").write_text("MemTotal: 5 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        machine.available()


def test_this_machine_has_memory() -> None:
    assert available_bytes() > 0
