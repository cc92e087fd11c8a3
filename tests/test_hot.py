"""The stage's hot channel: order, a full kernel buffer, and the death of its other end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mori_mp.shared import messages
from mori_mp.shared.messages import Freed, HotToControl, Publish, Withdraw
from mori_mp.workers.hot import HotChannel


class Control:
    """The control process's end."""

    def __init__(self) -> None:
        self.theirs, self.socket = messages.socketpair()
        self.socket.setblocking(False)

    def heard(self) -> list[HotToControl]:
        heard: list[HotToControl] = []
        while True:
            try:
                packet = self.socket.recv(messages.MAX_PACKET_BYTES)
            except BlockingIOError:
                return heard
            if not packet:
                return heard
            heard.append(messages.hot_to_control.decode(packet))

    def frees(self, *generations: int) -> None:
        self.socket.send(messages.encode(Freed(list(generations))))


@pytest.fixture
def channel() -> Iterator[HotChannel]:
    channel = HotChannel()
    yield channel
    channel.close()


@pytest.fixture
def control(channel: HotChannel) -> Iterator[Control]:
    control = Control()
    channel.replace(control.theirs, list)
    yield control
    control.socket.close()


def publish(generation: int, key: str = "k@0_1") -> Publish:
    return Publish(key, generation, 4096 * generation, 100, True)


def waiter(channel: HotChannel) -> threading.Event:
    """Start a thread in wait(), which would last a minute; the event is set when it returns."""
    returned = threading.Event()

    def run() -> None:
        channel.wait(60.0)
        returned.set()

    threading.Thread(target=run, daemon=True).start()
    return returned


def test_a_wait_ends_with_freed_memory(channel: HotChannel, control: Control) -> None:
    returned = waiter(channel)
    assert not returned.wait(0.05)
    control.frees(1)
    assert returned.wait(10)


def test_a_wait_beside_a_dead_control_process_ends_with_its_successor(
    channel: HotChannel, control: Control
) -> None:
    control.socket.close()
    returned = waiter(channel)
    assert not returned.wait(0.05)
    successor = Control()
    channel.replace(successor.theirs, list)
    assert returned.wait(10)
    successor.socket.close()


def test_a_wait_has_an_end(channel: HotChannel, control: Control) -> None:
    channel.wait(0.01)
    control.socket.close()
    channel.wait(0.01)


def fill(channel: HotChannel) -> int:
    """Publish until the kernel takes no more, and a few beyond that; returns how many."""
    sent = 0
    while channel.backlog < 5:
        sent += 1
        channel.send(publish(sent, "k" * 500))
        assert sent < 100_000
    return sent


def test_messages_go_out_at_once_and_in_order(channel: HotChannel, control: Control) -> None:
    channel.send(publish(1))
    channel.send(Withdraw([1]))
    channel.send(publish(2))
    assert control.heard() == [publish(1), Withdraw([1]), publish(2)]
    assert channel.backlog == 0


def test_freed_generations_are_drained_once(channel: HotChannel, control: Control) -> None:
    assert channel.drain() == []
    control.frees(1, 2)
    control.frees(3)
    assert channel.drain() == [1, 2, 3]
    assert channel.drain() == []


def test_what_the_kernel_does_not_take_waits_in_order(channel: HotChannel, control: Control) -> None:
    sent = fill(channel)
    heard = control.heard()
    assert len(heard) == sent - channel.backlog
    channel.send(Withdraw([1]))  # must not overtake the backlog
    channel.drain()
    heard += control.heard()
    assert [m.generation for m in heard if isinstance(m, Publish)] == list(range(1, sent + 1))
    assert heard[-1] == Withdraw([1])
    assert channel.backlog == 0


def test_drain_sends_what_waits(channel: HotChannel, control: Control) -> None:
    fill(channel)
    control.heard()
    channel.drain()
    assert channel.backlog == 0


def test_without_a_control_process_messages_wait(channel: HotChannel) -> None:
    assert channel.fileno() == -1
    channel.send(publish(1))
    assert channel.backlog == 1
    assert channel.drain() == []
    control = Control()
    channel.replace(control.theirs, lambda: [publish(1)])
    assert control.heard() == [publish(1)]
    control.socket.close()


def test_messages_to_a_dead_control_process_are_left_to_the_replay(
    channel: HotChannel, control: Control
) -> None:
    control.socket.close()
    channel.send(publish(1))
    assert channel.backlog == 0
    assert channel.drain() == []
    second = Control()
    channel.replace(second.theirs, lambda: [publish(1), publish(2)])
    channel.send(publish(3))
    assert second.heard() == [publish(1), publish(2), publish(3)]
    second.socket.close()


def test_what_was_freed_before_death_is_told_and_not_replayed(channel: HotChannel, control: Control) -> None:
    control.frees(1, 3)
    control.socket.close()
    second = Control()
    assert channel.replace(second.theirs, lambda: [publish(1), publish(2), publish(3)]) == [1, 3]
    assert second.heard() == [publish(2)]
    assert channel.drain() == []
    second.socket.close()


def test_what_another_thread_has_drained_but_not_yet_noted_is_not_replayed(
    channel: HotChannel, control: Control
) -> None:
    """Its memory may hold something else by the time the new control process hears of it."""
    control.frees(1)
    assert channel.drain() == [1]
    second = Control()
    assert channel.replace(second.theirs, lambda: [publish(1), publish(2)]) == []
    assert second.heard() == [publish(2)]
    second.socket.close()


def test_a_publication_made_during_the_change_is_told_to_the_new_one(
    channel: HotChannel, control: Control
) -> None:
    """It is recorded, then sent; sent to the dead one, it must be in the replay, or go out after it."""
    recorded: list[Publish] = [publish(1)]
    second = Control()

    def put() -> None:
        recorded.append(publish(2))
        channel.send(publish(2))

    def replay() -> list[HotToControl]:
        listed: list[HotToControl] = list(recorded)
        thread.start()
        thread.join(0.05)
        assert thread.is_alive(), "the message went out between the list and the change"
        return listed

    thread = threading.Thread(target=put)
    channel.replace(second.theirs, replay)
    thread.join(10)
    assert second.heard() == [publish(1), publish(2)]
    second.socket.close()


def test_a_backlog_for_the_dead_one_is_not_sent_to_its_successor(
    channel: HotChannel, control: Control
) -> None:
    fill(channel)
    second = Control()
    channel.replace(second.theirs, lambda: [publish(7)])
    assert second.heard() == [publish(7)]
    second.socket.close()


def test_a_replay_larger_than_the_kernels_buffer_is_sent_in_pieces(channel: HotChannel) -> None:
    control = Control()
    replay = [publish(n, "k" * 500) for n in range(1, 20_001)]
    channel.replace(control.theirs, lambda: replay)
    assert channel.backlog > 0
    heard: list[HotToControl] = []
    while channel.backlog:
        heard += control.heard()
        channel.drain()
    assert heard + control.heard() == replay
    control.socket.close()


def test_threads_do_not_mix_their_messages(channel: HotChannel, control: Control) -> None:
    def send(first: int) -> None:
        for generation in range(first, first + 500):
            channel.send(publish(generation))

    threads = [threading.Thread(target=send, args=(first,)) for first in (1000, 2000, 3000)]
    for thread in threads:
        thread.start()
    heard: list[HotToControl] = []
    while any(thread.is_alive() for thread in threads):
        heard += control.heard()
    channel.drain()
    heard += control.heard()
    generations = [m.generation for m in heard if isinstance(m, Publish)]
    for first in (1000, 2000, 3000):
        assert [g for g in generations if first <= g < first + 1000] == list(range(first, first + 500))


def test_close_is_final_and_repeatable(channel: HotChannel, control: Control) -> None:
    channel.close()
    channel.close()
    assert channel.fileno() == -1
    assert control.socket.recv(100) == b""
    assert channel.drain() == []


def test_the_socket_of_the_dead_one_is_closed(channel: HotChannel, control: Control) -> None:
    second = Control()
    channel.replace(second.theirs, list)
    assert control.socket.recv(100) == b""
    assert control.theirs.fileno() == -1
    second.socket.close()
