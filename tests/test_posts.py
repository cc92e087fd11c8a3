"""Posts: the records, who may change them, and what a malicious or dying peer can do."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import msgspec
import pytest

from mori_mp.shared import memfd, ordering, posts
from mori_mp.shared.errors import EngineUnavailable, WireError
from mori_mp.shared.posts import FILLED, FREE, POSTED, RECORDS, WRITING, Filled, Posts, PostsDescriptor

KEY = b"req_0_7@0_1"


@pytest.fixture
def ours() -> Iterator[Posts]:
    board = Posts.create("test")
    yield board
    board.close()


@pytest.fixture
def theirs(ours: Posts) -> Iterator[Posts]:
    """The sender's end: another opening of the same memfd, as in another process."""
    board = Posts.open_peer(PostsDescriptor.unpack(ours.descriptor(b"", "s0").pack()))
    yield board
    board.close()


def test_a_posted_slot_is_filled_and_found(ours: Posts, theirs: Posts) -> None:
    ours.post(3, 8192, 4096)
    assert theirs.states() == [FREE] * 3 + [POSTED] + [FREE] * (RECORDS - 4)
    assert (theirs.fitting(4096, 4097), theirs.offset(3)) == (3, 8192)
    assert theirs.begin(3, 1)
    assert ours.states()[3] == WRITING
    assert ours.filled(3) is None
    theirs.fill(3, KEY, 41, 1000, 9)
    assert ours.filled(3) == Filled(3, 41, 1000, 9)
    assert ours.holds(3, KEY)
    assert not ours.holds(3, KEY[:-1])
    assert not ours.holds(3, KEY[:-1] + b"2")
    ours.free(3)
    assert ours.filled(3) is None


def test_every_record_is_its_own(ours: Posts, theirs: Posts) -> None:
    for record in range(RECORDS):
        ours.post(record, record << 40, (record + 1) << 30)
    for record in range(RECORDS):
        assert theirs.fitting((record << 30) + 1, 1 << 40) == record
        assert theirs.begin(record, 1)
        theirs.fill(record, b"k%d" % record * 100, (1 << 62) + record, record << 35, record - 1)
    for record in range(RECORDS):
        assert ours.filled(record) == Filled(record, (1 << 62) + record, record << 35, record - 1)
        assert ours.holds(record, b"k%d" % record * 100)
        assert theirs.offset(record) == record << 40


def test_the_smallest_posted_slot_that_fits_is_found(ours: Posts, theirs: Posts) -> None:
    for record, room in enumerate((8192, 4096, 8192, 1 << 20)):
        ours.post(record, record << 20, room)
    assert theirs.begin(1, 1)
    assert theirs.fitting(4096, 1 << 30) in (0, 2)
    assert theirs.fitting(8193, 1 << 30) == 3
    assert theirs.fitting(8193, 1 << 20) is None
    assert theirs.fitting((1 << 20) + 1, 1 << 30) is None
    theirs.cancel(1)
    assert theirs.fitting(4096, 1 << 30) == 1


@pytest.mark.parametrize("state", [FREE, WRITING, FILLED])
def test_only_a_posted_record_is_begun_or_revoked(ours: Posts, theirs: Posts, state: int) -> None:
    if state != FREE:
        ours.post(0, 0, 4096)
        assert theirs.begin(0, 1)
    if state == FILLED:
        theirs.fill(0, KEY, 1, 1, 0)
    assert not theirs.begin(0, 1)
    assert not ours.revoke(0)
    assert ours.states()[0] == state


def test_a_revoked_slot_is_not_begun(ours: Posts, theirs: Posts) -> None:
    ours.post(0, 0, 4096)
    assert ours.revoke(0)
    assert not theirs.begin(0, 1)
    ours.post(0, 4096, 4096)  # the lock has gone again
    assert theirs.begin(0, 1)


def test_a_slot_that_is_posted_again_with_less_room_is_not_begun(ours: Posts, theirs: Posts) -> None:
    ours.post(0, 0, 8192)
    assert theirs.fitting(8192, 1 << 30) == 0
    assert ours.revoke(0)
    ours.post(0, 8192, 4096)
    assert not theirs.begin(0, 8192)
    assert ours.revoke(0)  # the lock has gone again
    ours.post(0, 8192, 8192)
    assert theirs.begin(0, 8192)


def test_whoever_locks_first_is_right(ours: Posts, theirs: Posts) -> None:
    ours.post(0, 0, 4096)
    assert theirs.lock(0)
    assert not ours.revoke(0)
    theirs.unlock(0)
    assert ours.lock(0)
    assert not theirs.begin(0, 1)
    ours.unlock(0)
    assert theirs.begin(0, 1)


def test_a_cancelled_record_is_posted_as_before(ours: Posts, theirs: Posts) -> None:
    ours.post(0, 0, 4096)
    assert theirs.begin(0, 1)
    theirs.cancel(0)
    assert ours.revoke(0)


def test_a_withdrawal_means_one_generation(ours: Posts, theirs: Posts) -> None:
    ours.post(0, 0, 4096)
    theirs.begin(0, 1)
    theirs.fill(0, KEY, 5, 100, 2)
    filled = ours.filled(0)
    assert filled is not None
    assert not ours.is_withdrawn(filled)
    theirs.withdraw(0, 5)
    assert ours.is_withdrawn(filled)
    assert not ours.is_withdrawn(filled._replace(generation=6))


def test_a_copy_known_to_be_over_has_no_event(ours: Posts, theirs: Posts) -> None:
    ours.post(0, 0, 4096)
    theirs.begin(0, 1)
    theirs.fill(0, KEY, 5, 100, 2)
    theirs.set_over(0)
    assert ours.filled(0) == Filled(0, 5, 100, -1)


def test_a_sender_that_dies_while_it_fills_leaves_the_record_unlocked(ours: Posts) -> None:
    """WRITING then tells the receiver that a copy may be under way, and to wait for the process's end."""
    ours.post(0, 0, 4096)
    desc = ours.descriptor(b"", "s0")
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        Posts.open_peer(desc).begin(0, 1)
        os.write(tell, b"x")
        signal.pause()
    assert os.read(told, 1) == b"x"
    assert not ours.lock(0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert ours.lock(0)
    ours.unlock(0)
    assert not ours.revoke(0)
    assert ours.states()[0] == WRITING
    os.close(told)
    os.close(tell)


def test_a_descriptor_of_something_else_is_refused(ours: Posts) -> None:
    desc = ours.descriptor(b"gpu", "s0")
    assert PostsDescriptor.unpack(desc.pack()) == desc
    with pytest.raises(EngineUnavailable, match="another host"):
        Posts.open_peer(msgspec.structs.replace(desc, host_id="elsewhere"))
    with pytest.raises(WireError, match="does not match"):
        Posts.open_peer(msgspec.structs.replace(desc, inode=desc.inode + 1))
    with pytest.raises(EngineUnavailable, match="out of reach"):
        Posts.open_peer(msgspec.structs.replace(desc, fd=1 << 20))
    short = memfd.create("mori-mp-posts-short", 4096)
    inode = os.fstat(short).st_ino
    with pytest.raises(WireError, match="does not match"):
        Posts.open_peer(msgspec.structs.replace(desc, fd=short, inode=inode))
    os.close(short)
    for junk in (b"", b"\xff", msgspec.msgpack.encode([0, 1, 2, "h", b"", ""]), msgspec.msgpack.encode([1])):
        with pytest.raises(WireError):
            PostsDescriptor.unpack(junk)


def test_the_state_is_written_last_and_read_first(
    ours: Posts, theirs: Posts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the processor does not keep the order by itself."""
    seen: list[tuple[int, int | None]] = []
    reader = Posts.open_peer(ours.descriptor(b"", "s0"))

    def look() -> None:
        seen.append((reader._states[0], reader._offsets[0] if not reader._generations[0] else None))

    monkeypatch.setattr(posts, "fence", look)
    ours.post(0, 8192, 4096)
    assert seen == [(FREE, 8192)]
    assert theirs.begin(0, 4096)
    assert seen.pop() == (POSTED, 8192)
    theirs.fill(0, KEY, 41, 1000, 9)
    assert seen[1:] == [(WRITING, None)]
    assert reader.holds(0, KEY)
    reads = [lambda: ours.states()[0] == FILLED, lambda: ours.filled(0) == Filled(0, 41, 1000, 9)]
    for count, read in enumerate(reads, 3):
        assert read()
        assert len(seen) == count
    reader.close()


def test_a_fence_can_be_had_on_any_machine() -> None:
    ordering._fence()
    ordering.fence()
