"""A receiver's mailbox: notices in every order that connections, restarts and other threads can make."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator

import pytest

from mori_mp import mailbox as mailbox_module
from mori_mp.mailbox import MAX_MISSED, Mailbox, claim
from mori_mp.shared.wire import Gone, Ready

KEY = "req_0_0@0_1"


def ready(generation: int = 5, data: bytes = b"", key: str = KEY) -> Ready:
    return Ready(key, generation, 100, True, memoryview(data))


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox()


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Have threads change over as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_a_notice_is_found_until_it_is_taken(mailbox: Mailbox) -> None:
    notice = ready()
    assert mailbox.get(KEY) is None
    assert mailbox.deliver(notice) == []
    assert mailbox.get(KEY) is notice
    assert len(mailbox) == 1
    assert mailbox.take(notice)
    assert mailbox.get(KEY) is None
    assert not mailbox.take(notice)


def test_a_delivery_that_failed_can_be_put_back(mailbox: Mailbox) -> None:
    notice = ready()
    mailbox.deliver(notice)
    mailbox.take(notice)
    mailbox.put_back(notice)
    assert mailbox.get(KEY) is notice


def test_what_is_put_back_does_not_hide_a_newer_one(mailbox: Mailbox) -> None:
    old, new = ready(5), ready(6)
    mailbox.deliver(old)
    mailbox.take(old)
    mailbox.deliver(new)
    mailbox.put_back(old)
    assert mailbox.get(KEY) is new


def test_the_newest_generation_counts(mailbox: Mailbox) -> None:
    old, new = ready(5), ready(6)
    mailbox.deliver(old)
    mailbox.deliver(new)
    mailbox.deliver(old)  # late
    assert mailbox.get(KEY) is new
    assert not mailbox.take(old)
    assert mailbox.get(KEY) is new


def test_a_repeated_notice_without_the_bytes_does_not_lose_them(mailbox: Mailbox) -> None:
    mailbox.deliver(ready(5, b"payload"))
    mailbox.deliver(ready(5))
    found = mailbox.get(KEY)
    assert found is not None
    assert bytes(found.data) == b"payload"


def test_a_repeated_notice_may_bring_the_bytes(mailbox: Mailbox) -> None:
    mailbox.deliver(ready(5))
    mailbox.deliver(ready(5, b"payload"))
    found = mailbox.get(KEY)
    assert found is not None
    assert bytes(found.data) == b"payload"


@pytest.mark.parametrize(("generation", "left"), [(5, 0), (4, 1), (6, 1)])
def test_gone_names_a_generation(mailbox: Mailbox, generation: int, left: int) -> None:
    mailbox.deliver(ready(5))
    mailbox.withdraw(Gone(KEY, generation, "expired"))
    assert len(mailbox) == left
    mailbox.withdraw(Gone("never heard of", 1, "expired"))


def test_what_was_taken_is_not_delivered_twice(mailbox: Mailbox) -> None:
    """A restarted control process announces again what its predecessor was not told about."""
    assert mailbox.mark_taken(5)
    assert not mailbox.mark_taken(5)
    assert mailbox.deliver(ready(5)) == [5]
    assert mailbox.get(KEY) is None
    assert mailbox.deliver(ready(6)) == []
    assert mailbox.get(KEY) is not None


def test_a_notice_of_what_was_taken_without_one_needs_no_answer(mailbox: Mailbox) -> None:
    assert mailbox.get(KEY) is None
    assert mailbox.take_unannounced(KEY, 5)
    assert mailbox.collect_missed() == []
    assert mailbox.deliver(ready(5)) == []
    assert mailbox.get(KEY) is None
    assert mailbox.deliver(ready(5)) == [5]  # repeated, so our settling may have been lost


def test_a_notice_that_has_come_goes_with_its_payload(mailbox: Mailbox) -> None:
    mailbox.deliver(ready(5))
    assert mailbox.take_unannounced(KEY, 5)
    assert mailbox.get(KEY) is None
    assert mailbox.deliver(ready(5)) == [5]


def test_a_newer_notice_is_none_of_what_was_taken(mailbox: Mailbox) -> None:
    mailbox.deliver(ready(6))
    assert mailbox.take_unannounced(KEY, 5)
    found = mailbox.get(KEY)
    assert found is not None
    assert found.generation == 6


def test_another_control_process_is_answered_anew(mailbox: Mailbox) -> None:
    assert mailbox.take_unannounced(KEY, 5)
    mailbox.renew()
    assert mailbox.deliver(ready(5)) == [5]


def test_misses_are_collected_once(mailbox: Mailbox) -> None:
    mailbox.get("a")
    mailbox.get("b")
    mailbox.get("a")
    assert mailbox.collect_missed() == ["a", "b"]
    assert mailbox.collect_missed() == []


def test_what_came_or_was_forgotten_is_not_asked_for(mailbox: Mailbox) -> None:
    for key in ("came", "forgotten", "missing"):
        mailbox.get(key)
    mailbox.deliver(ready(5, key="came"))
    mailbox.forget("forgotten")
    assert mailbox.collect_missed() == ["missing"]


def test_all_is_bounded(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_module, "MAX_NOTICES", 10)
    monkeypatch.setattr(mailbox_module, "MAX_TAKEN", 10)
    for i in range(50):
        mailbox.deliver(ready(i + 1, key=f"k{i}"))
        mailbox.mark_taken(1000 + i)
        mailbox.get(f"missing {i}")
    assert len(mailbox) == 10
    assert mailbox.get("k49") is not None
    assert mailbox.get("k39") is None
    assert mailbox.deliver(ready(1000, key="x")) == []  # forgotten
    assert mailbox.deliver(ready(1049, key="y")) == [1049]
    assert len(mailbox.collect_missed()) == MAX_MISSED


def test_one_of_many_threads_takes_a_notice(mailbox: Mailbox, busy_threads: None) -> None:
    notices = [ready(i + 1, key=f"k{i}") for i in range(300)]
    for notice in notices:
        mailbox.deliver(notice)
    won: list[int] = []

    def take_all() -> None:
        won.extend(notice.generation for notice in notices if mailbox.take(notice))

    threads = [threading.Thread(target=take_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [notice.generation for notice in notices]


def test_a_newer_notice_is_not_lost_to_whoever_takes_the_old_one(
    mailbox: Mailbox, busy_threads: None
) -> None:
    """The control process replaces a key while a getter is at it."""
    rounds = 2000
    mailbox.deliver(ready(1))
    taken: list[int] = []

    def take() -> None:
        while not taken or taken[-1] < rounds:
            notice = mailbox.get(KEY)
            if notice is not None and mailbox.take(notice):
                taken.append(notice.generation)

    thread = threading.Thread(target=take)
    thread.start()
    for generation in range(2, rounds + 1):
        mailbox.deliver(ready(generation))
        mailbox.withdraw(Gone(KEY, generation - 1, "replaced"))
    thread.join(60)
    assert not thread.is_alive(), "the last notice has been lost"
    assert taken == sorted(set(taken))


def test_one_of_many_threads_claims(busy_threads: None) -> None:
    claims: OrderedDict[int, object] = OrderedDict()
    won: list[int] = []
    threads = [
        threading.Thread(target=lambda: won.extend(i for i in range(500) if claim(claims, i, 1000)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(500))


def test_claims_are_bounded() -> None:
    claims: OrderedDict[int, object] = OrderedDict()
    assert all(claim(claims, i, 10) for i in range(100))
    assert list(claims) == list(range(90, 100))
