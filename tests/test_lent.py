"""A sender's pool read in place: one reader per payload and process; the mapping goes with the last."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from mori_mp.lent import LentPool
from mori_mp.managed import ManagedBuffer
from mori_mp.shared.claims import Claims
from mori_mp.shared.errors import WireError
from mori_mp.shared.pool import BLOCK, Pool

generations = itertools.count(1)


class Sender:
    """A pool, and the control process's hold on it."""

    def __init__(self) -> None:
        self.pool = Pool.create(8 * BLOCK, f"sender-{next(generations)}")
        self.claims = Claims(self.pool.fd)
        self.settled: list[str] = []

    def map(self) -> LentPool:
        """As a receiver does."""
        return LentPool(Pool.open_peer(self.pool.descriptor()))

    def settle(self, what: str) -> Callable[[], None]:
        return lambda: self.settled.append(what)

    def may_free(self, slot: int) -> bool:
        if not self.claims.exclude(slot):
            return False
        self.claims.drop(slot)
        return True


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    sender.pool.close()


@pytest.fixture
def lent(sender: Sender) -> Iterator[LentPool]:
    lent = sender.map()
    yield lent
    lent.retire()


def mappings(sender: Sender) -> int:
    with open("/proc/self/maps") as maps:
        return sum(sender.pool.name in line for line in maps)


def opened(buffer: ManagedBuffer | None) -> ManagedBuffer:
    assert buffer is not None
    return buffer


# -- bounds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "size"), [(-1, 10), (0, 0), (0, -1), (0, 8 * BLOCK + 1), (8 * BLOCK, 1), (1 << 62, 1)]
)
def test_a_payload_outside_the_pool_is_refused(lent: LentPool, offset: int, size: int) -> None:
    for read in (
        lambda: lent.view(offset, size),
        lambda: lent.lease(offset, size, 1, lambda: None),
        lambda: lent.claim(offset, size, 1, lambda: None),
    ):
        with pytest.raises(WireError):
            read()


# -- leases --------------------------------------------------------------------------------------------


def test_a_lease_is_read_in_place_and_its_end_is_on_the_board(sender: Sender, lent: LentPool) -> None:
    sender.pool.view[BLOCK : BLOCK + 5] = b"hello"
    sender.pool.board.grant(1, 7, os.getpid())
    buffer = opened(lent.lease(BLOCK, 5, 7, sender.settle("lease")))
    assert bytes(lent.view(BLOCK, 5)) == buffer.to_bytes() == b"hello"
    assert not sender.pool.board.was_released(1, 7)
    assert sender.settled == []
    buffer.release()
    assert sender.pool.board.was_released(1, 7)
    assert sender.settled == ["lease"]


def test_a_lease_granted_twice_is_read_once(sender: Sender, lent: LentPool) -> None:
    sender.pool.board.grant(0, 7, os.getpid())
    buffer = opened(lent.lease(0, 5, 7, sender.settle("first")))
    other = sender.map()  # of another connector in this process
    assert other.lease(0, 5, 7, sender.settle("second")) is None
    assert not sender.pool.board.was_released(0, 7)
    buffer.release()
    assert lent.lease(0, 5, 7, sender.settle("third")) is None
    assert sender.settled == ["first"]
    other.retire()


# -- offers --------------------------------------------------------------------------------------------


def test_an_offer_is_kept_for_its_reader(sender: Sender, lent: LentPool) -> None:
    sender.pool.board.offer(2, 9)
    buffer = opened(lent.claim(2 * BLOCK, 100, 9, sender.settle("claim")))
    assert not sender.may_free(2)
    assert sender.may_free(1)
    buffer.release()
    assert sender.may_free(2)
    assert sender.settled == ["claim"]


def test_an_offer_that_has_gone_is_not_read(sender: Sender, lent: LentPool) -> None:
    sender.pool.board.offer(2, 10)
    assert lent.claim(2 * BLOCK, 100, 9, sender.settle("claim")) is None
    sender.pool.board.offer(2, 9)
    assert sender.claims.exclude(2)  # just being freed
    assert lent.claim(2 * BLOCK, 100, 9, sender.settle("claim")) is None
    sender.claims.drop(2)
    assert sender.settled == []
    assert sender.may_free(2)
    # Had the sender died before it told anyone, its successor would offer it again.
    opened(lent.claim(2 * BLOCK, 100, 9, sender.settle("claim"))).release()


def test_a_claim_that_comes_too_late_does_not_end_that_of_a_newer_payload(
    sender: Sender, lent: LentPool
) -> None:
    """The notice of a payload that is gone may be tried while its slot's next one is being read."""
    sender.pool.board.offer(2, 10)
    buffer = opened(lent.claim(2 * BLOCK, 100, 10, sender.settle("newer")))
    assert lent.claim(2 * BLOCK, 100, 9, sender.settle("late")) is None
    assert not sender.may_free(2)
    buffer.release()
    assert sender.may_free(2)
    assert sender.settled == ["newer"]
    sender.pool.board.offer(2, 11)
    opened(lent.claim(2 * BLOCK, 100, 11, sender.settle("next"))).release()


def test_claims_of_many_threads_on_one_slot_keep_its_payload(sender: Sender, lent: LentPool) -> None:
    """Each slot sees payload after payload; late claims come for all of them."""
    stop = threading.Event()
    freed_under: list[int] = []

    def late() -> None:
        generation = 1
        while not stop.is_set():
            generation += 1
            late_one = lent.claim(2 * BLOCK, 100, -generation, sender.settle("late"))
            assert late_one is None

    threads = [threading.Thread(target=late) for _ in range(3)]
    for thread in threads:
        thread.start()
    for generation in range(100, 400):
        sender.pool.board.offer(2, generation)
        buffer = lent.claim(2 * BLOCK, 100, generation, sender.settle("read"))
        if buffer is not None:
            if sender.may_free(2):
                freed_under.append(generation)
            buffer.release()
    stop.set()
    for thread in threads:
        thread.join()
    assert freed_under == []


@pytest.mark.parametrize("same_mapping", [True, False])
def test_a_second_claim_does_not_end_the_first(sender: Sender, lent: LentPool, same_mapping: bool) -> None:
    """The lock belongs to the mapping: whoever lets go first would let go for both."""
    sender.pool.board.offer(2, 9)
    buffer = opened(lent.claim(2 * BLOCK, 100, 9, sender.settle("first")))
    other = lent if same_mapping else sender.map()
    assert other.claim(2 * BLOCK, 100, 9, sender.settle("second")) is None
    assert not sender.may_free(2)
    assert sender.settled == []
    buffer.release()
    assert sender.may_free(2)
    if not same_mapping:
        other.retire()


@pytest.mark.parametrize("same_mapping", [True, False])
def test_a_lease_of_what_is_read_under_a_claim_ends_at_once(
    sender: Sender, lent: LentPool, same_mapping: bool
) -> None:
    """Nobody in this process would ever release it otherwise."""
    sender.pool.board.offer(2, 9)
    buffer = opened(lent.claim(2 * BLOCK, 100, 9, sender.settle("claim")))
    sender.pool.board.grant(2, 9, os.getpid())
    other = lent if same_mapping else sender.map()
    assert other.lease(2 * BLOCK, 100, 9, sender.settle("lease")) is None
    assert sender.settled == ["lease"]
    assert sender.pool.board.was_released(2, 9)
    assert not sender.may_free(2)
    buffer.release()
    assert sender.may_free(2)
    if not same_mapping:
        other.retire()


def test_the_death_of_a_reader_ends_its_claim(sender: Sender) -> None:
    """The kernel drops the locks of an opening that is closed."""
    pool = Pool.open_peer(sender.pool.descriptor())
    assert Claims(pool.fd).take(3)
    assert not sender.may_free(3)
    pool.close()
    assert sender.may_free(3)


# -- the end -------------------------------------------------------------------------------------------


def test_a_retired_pool_is_unmapped_when_the_last_buffer_ends(sender: Sender) -> None:
    before = mappings(sender)
    lent = sender.map()
    sender.pool.board.offer(0, 3)
    sender.pool.board.grant(1, 4, os.getpid())
    claimed = opened(lent.claim(0, 10, 3, sender.settle("claim")))
    leased = opened(lent.lease(BLOCK, 10, 4, sender.settle("lease")))
    lent.retire()
    claimed.release()
    assert lent.view(BLOCK, 10)
    assert mappings(sender) == before + 1
    leased.release()
    del claimed, leased
    assert mappings(sender) == before
    assert sender.settled == ["claim", "lease"]


def test_a_retired_pool_is_not_read_any_more(sender: Sender) -> None:
    lent = sender.map()
    sender.pool.board.offer(0, 3)
    lent.retire()
    lent.retire()
    for read in (lent.lease, lent.claim):
        with pytest.raises(WireError, match="gone"):
            read(0, 10, next(generations), lambda: None)


def test_many_threads_end_their_buffers_at_once(sender: Sender) -> None:
    before = mappings(sender)
    for _ in range(20):
        lent = sender.map()
        buffers = []
        for slot in range(8):
            generation = 1000 + next(generations)
            sender.pool.board.offer(slot, generation)
            buffers.append(opened(lent.claim(slot * BLOCK, 10, generation, lambda: None)))
        lent.retire()
        start = threading.Barrier(len(buffers))

        def end(buffer: ManagedBuffer, start: threading.Barrier = start) -> None:
            start.wait()
            buffer.release()

        threads = [threading.Thread(target=end, args=(buffer,)) for buffer in buffers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del buffers, threads
    assert mappings(sender) == before
    assert all(sender.may_free(slot) for slot in range(8))
