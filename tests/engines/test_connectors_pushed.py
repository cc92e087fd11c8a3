"""Payloads that put() pushes into slots which their receiver has posted."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from connector_support import eventually
from engine_rig import MB, GpuStage, HostError
from engine_stages import Stages, crc, used

from mori_mp.device_pool import EVENTS

SIZE = 300_000


def pushed(receiver: GpuStage) -> int:
    return int(receiver("health")["receiver"]["counters"]["push"])


def posted(stage: GpuStage) -> int:
    return int(stage("health")["device_pool"]["posted_bytes"])


def send(sender: GpuStage, receiver: GpuStage, key: str, seed: int, size: int = SIZE) -> dict[str, Any]:
    """Have one payload go across, checked and let go of."""
    sender("tensor", key, seed, size)
    _, _, metadata = sender("put", key, key)
    found = receiver("get", key, metadata, 20.0)
    assert found == {"size": size, "digest": crc(seed, size), "on_device": True}
    receiver("release", key)
    return dict(metadata)


def acquaint(sender: GpuStage, receiver: GpuStage, size: int = SIZE) -> None:
    """Send payloads until they are pushed: the sender has to hear of posts first."""
    for number in range(200):
        before = pushed(receiver)
        send(sender, receiver, f"acquaint-{number}", number, size)
        if pushed(receiver) > before:
            return
    raise AssertionError("no payload was pushed")


def begin_held_push(stages: Stages, seed: int) -> tuple[GpuStage, GpuStage, dict[str, Any]]:
    """Have "k" put and pushed, whose copies do not begin yet; returns sender, receiver and its metadata."""
    sender, receiver = stages.pair()
    acquaint(sender, receiver)
    sender("tensor", "x", seed, SIZE)
    sender.block["hold"] = 1
    _, _, metadata = sender("put", "k", "x")
    return sender, receiver, metadata


def test_payloads_are_pushed_once_sizes_are_known(stages: Stages) -> None:
    sender, receiver = stages.pair()
    acquaint(sender, receiver)
    before = pushed(receiver)
    for number in range(20):
        send(sender, receiver, f"k{number}", 100 + number)
    assert pushed(receiver) == before + 20
    assert sender("health")["sender"]["counters"]["pushed"] >= before + 20
    eventually(lambda: (sender("collect"), used(sender) == 0)[1], "every payload settled")
    assert used(receiver) == 0
    assert posted(receiver) > 0
    assert receiver("health")["faults"]["counts"] == {}


def test_sizes_may_change(stages: Stages) -> None:
    sender, receiver = stages.pair()
    for number, size in enumerate([1, 5000, 3 * MB, 70_000, 3 * MB, 3 * MB, 3 * MB, 1, 1, 4096, 4097] * 3):
        send(sender, receiver, f"k{number}", number, size)
    assert posted(receiver) <= 4 * MB
    assert used(receiver) == 0


def test_payloads_ahead_of_the_receiver_arrive_in_their_own_slots(stages: Stages) -> None:
    """More are put than slots are posted; those that are not pushed come another way."""
    sender, receiver = stages.pair()
    acquaint(sender, receiver)
    for number in range(12):
        sender("tensor", f"k{number}", 200 + number, SIZE)
        sender("put", f"k{number}", f"k{number}")
    for number in reversed(range(12)):
        found = receiver("get", f"k{number}", None, 20.0)
        assert found is not None
        assert found["digest"] == crc(200 + number, SIZE)
    assert 1 < pushed(receiver) < 13


def test_a_push_that_fails_costs_nothing_but_the_push(held_stages: Stages) -> None:
    sender, receiver = held_stages.pair()
    acquaint(sender, receiver)
    before = pushed(receiver)
    sender("tensor", "x", 9, SIZE)
    sender.block["fail_copy"] = 2  # the first is the one into the pool
    ok, _, metadata = sender("put", "k", "x")
    assert ok
    assert receiver("get", "k", metadata, 10.0)["digest"] == crc(9, SIZE)
    receiver("release", "k")
    assert pushed(receiver) == before
    eventually(lambda: (sender("collect"), used(sender) == 0)[1], "settled")


def test_a_push_does_not_wait_for_another_stream(held_stages: Stages) -> None:
    """Pushes have one stream: behind one that is stalled, what comes on another stream is offered."""
    sender, receiver = held_stages.pair()
    acquaint(sender, receiver)
    before = sender("health")["sender"]["counters"]["pushed"]
    sender("tensor", "x", 9, SIZE)
    sender.block["hold"] = 1
    sender("put", "stalled", "x")
    sender("put", "behind", "x")
    sender("use_another_stream")
    sender("put", "other", "x")
    eventually(lambda: receiver("health")["queues"]["ready_notices"] == 3, "all announced")
    assert sender("health")["sender"]["counters"]["pushed"] == before + 2
    sender.block["hold"] = 0
    for key in ("other", "stalled", "behind"):
        assert receiver("get", key, None, 10.0)["digest"] == crc(9, SIZE)
        receiver("release", key)
    sender("put", "later", "x")
    assert receiver("get", "later", None, 10.0)["digest"] == crc(9, SIZE)
    assert sender("health")["sender"]["counters"]["pushed"] == before + 3


def test_large_payloads_are_pushed_in_halves(held_stages: Stages) -> None:
    """The first half of the way across begins when half of the way into the pool is done."""
    sender, receiver = held_stages.pair()
    acquaint(sender, receiver)
    for halve_from, copies in ((SIZE + 1, 2), (SIZE, 4)):
        sender("halve_from", halve_from)
        for number in range(5):
            before = sender.block["copies"], pushed(receiver)
            send(sender, receiver, f"{copies}-{number}", number)
            assert (sender.block["copies"], pushed(receiver)) == (before[0] + copies, before[1] + 1)


def test_a_half_of_another_payload_is_not_waited_for(held_stages: Stages) -> None:
    """The event of a copy that was made in halves, and not pushed, is that of a small one later."""
    sender, receiver = held_stages.pair()
    acquaint(sender, receiver)
    sender("tensor", "x", 9, SIZE)
    sender("halve_from", SIZE)
    sender("put", "large", "x", "0_2")
    sender("cleanup", "large")
    sender("halve_from", SIZE + 1)
    for number in range(EVENTS - 1):
        sender("put", f"small-{number}", "x", "0_2")
        sender("cleanup", f"small-{number}")
    before = sender.block["copies"]
    send(sender, receiver, "k", 10)
    assert sender.block["copies"] == before + 2


def test_a_half_of_a_copy_that_fails_is_not_taken_for_that_of_the_one_before(held_stages: Stages) -> None:
    """Two threads put: the second fails in the middle before the first pushes."""
    sender, _ = held_stages.pair()
    sender("tensor", "x", 9, SIZE)
    sender("halve_from", SIZE)
    event = sender("copy_in", "x")
    sender("use_another_stream")
    sender.block["fail_copy"] = 2
    with pytest.raises(HostError, match="hipMemcpyAsync failed"):
        sender("copy_in", "x")
    before = sender.block["copies"]
    assert sender("push_within", event, SIZE) is not None
    assert sender.block["copies"] == before + 1


def test_put_and_get_keep_the_gil(stages: Stages) -> None:
    """Beside a busy thread each time that it is given up may cost a switch interval, 5 ms."""
    sender, receiver = stages.pair()
    acquaint(sender, receiver)
    sender("tensor", "x", 3, SIZE)
    before = sender("health")["sender"]["counters"]["pushed"]
    turns = 0
    for number in range(20):
        keys = [f"k{number}-{one}" for one in range(3)]
        turns += sender("turns_during_puts", keys, "x")
        turns += receiver("turns_during_gets", keys)
    assert sender("health")["sender"]["counters"]["pushed"] - before > 40
    assert turns <= 3  # a real torch gives it up now and then


def test_tensors_of_objects_are_pushed(stages: Stages) -> None:
    sender, receiver = stages.pair(tensor_device="pool")
    for number in range(40):
        sender("tensor", "a", number, SIZE)
        sender("tensor", "b", number + 1, SIZE)
        _, _, metadata = sender("put_object", f"k{number}", ["a", "b"])
        found = receiver("get", f"k{number}", metadata, 20.0)
        assert found["digests"] == [crc(number, SIZE), crc(number + 1, SIZE)]
        if pushed(receiver) >= 4:
            break
    else:
        raise AssertionError("no tensor was pushed")


def test_a_pushed_payload_that_is_withdrawn_is_not_to_be_had(stages: Stages) -> None:
    sender, receiver = stages.pair()
    acquaint(sender, receiver)
    sender("tensor", "x", 7, SIZE)
    sender("signal_control", signal.SIGSTOP)  # nobody but the stage itself tells that it is gone
    sender("put", "k", "x")
    sender("cleanup", "k")
    assert receiver("get", "k", None, 0.3) is None
    sender("signal_control", signal.SIGCONT)
    eventually(lambda: (sender("collect"), used(sender) == 0)[1], "slot free")
    send(sender, receiver, "next", 8)


@pytest.mark.parametrize("beside", [("cleanup", "k"), ("put", "k", "new")], ids=["withdrawn", "replaced"])
def test_a_pushed_payload_that_is_gone_before_its_receiver_is_told_is_not_to_be_had(
    stages: Stages, beside: tuple[str, ...]
) -> None:
    sender, receiver = stages.pair()
    acquaint(sender, receiver)
    sender("tensor", "old", 7, SIZE)
    sender("tensor", "new", 8, 5000)  # no slot is posted for these
    sender("signal_control", signal.SIGSTOP)  # nobody but the stage itself tells that it is gone
    sender("put_beside", "k", "old", *beside)
    assert receiver("get", "k", None, 0.3) is None
    sender("signal_control", signal.SIGCONT)
    sender("collect")
    send(sender, receiver, "next", 9)


def test_of_two_payloads_under_a_key_the_newer_one_is_got(stages: Stages) -> None:
    sender, receiver = stages.pair()
    acquaint(sender, receiver)
    sender("tensor", "old", 7, SIZE)
    sender("tensor", "new", 8, SIZE)
    sender("put", "k", "old")
    sender("put", "k", "new")
    assert receiver("get", "k", None, 10.0)["digest"] == crc(8, SIZE)
    receiver("release", "k")
    eventually(lambda: (sender("collect"), used(sender) == 0)[1], "both gone")


def test_a_pushed_payload_that_is_replaced_by_one_that_is_not_is_not_got(stages: Stages) -> None:
    sender, receiver = stages.pair()
    acquaint(sender, receiver)
    sender("tensor", "old", 7, SIZE)
    sender("tensor", "new", 8, 5000)  # no slot is posted for these
    sender("signal_control", signal.SIGSTOP)  # so that the old one is not announced by itself
    sender("put", "k", "old")
    sender("put", "k", "new")
    assert receiver("get", "k", None, 0.3) is None
    sender("signal_control", signal.SIGCONT)
    assert receiver("get", "k", None, 10.0)["digest"] == crc(8, 5000)
    receiver("release", "k")
    eventually(lambda: (sender("collect"), used(sender) == 0)[1], "both gone")


def test_posts_give_way_to_a_payload_that_needs_the_pool(stages: Stages) -> None:
    sender, receiver = stages.pair()
    acquaint(sender, receiver)
    for number in range(3):  # these lie in posted slots, and nobody asks for them yet
        sender("tensor", f"k{number}", number, SIZE)
        sender("put", f"k{number}", f"k{number}")
    sender("tensor", "large", 9, 6 * MB)
    _, _, metadata = sender("put", "large", "large")
    found = receiver("get", "large", metadata, 20.0)
    assert found == {"size": 6 * MB, "digest": crc(9, 6 * MB), "on_device": True}
    receiver("release", "large")
    for number in range(3):
        assert receiver("get", f"k{number}", None, 20.0)["digest"] == crc(number, SIZE)


def test_posts_give_way_to_a_payload_that_is_put(stages: Stages) -> None:
    sender, port = stages.make(0, role="sender", zmq_port=0, stage_id=0)
    upstream = {"from_stage": 0, "to_stage": 1, "sender_host": "127.0.0.1", "sender_zmq_port": port}
    middle, _ = stages.make(1, role="dual", zmq_port=0, stage_id=1, **upstream)
    acquaint(sender, middle, MB)
    for number in range(4):
        send(sender, middle, f"k{number}", number, MB)
    middle("get", "nothing", None, 0.05)  # posts what is still to be posted
    assert posted(middle) == 4 * MB
    middle("tensor", "large", 9, 6 * MB)
    ok, _, _ = middle("put", "large", "large", "1_2")
    assert ok


def test_what_is_posted_to_a_sender_that_has_gone_gives_way(stages: Stages) -> None:
    sender, receiver = stages.pair()
    acquaint(sender, receiver, MB)
    for number in range(4):
        send(sender, receiver, f"k{number}", number, MB)
    receiver("get", "nothing", None, 0.05)  # posts what is still to be posted
    assert posted(receiver) == 4 * MB
    port = sender("port")
    sender.end()
    successor, _ = stages.make(0, role="sender", zmq_port=port, stage_id=0)
    send(successor, receiver, "large", 9, 6 * MB)
    assert used(receiver) == 0


def test_what_a_sender_that_has_gone_had_pushed_is_let_go_of(stages: Stages) -> None:
    sender, receiver = stages.pair()
    acquaint(sender, receiver, MB)
    receiver("get", "nothing", None, 0.05)  # posts what is still to be posted
    for number in range(3):  # nobody asks for these
        sender("tensor", f"k{number}", number, MB)
        sender("put", f"k{number}", f"k{number}")
    port = sender("port")
    sender.end()
    successor, _ = stages.make(0, role="sender", zmq_port=port, stage_id=0)
    send(successor, receiver, "next", 9, MB)
    receiver("get", "nothing", None, 0.05)
    assert used(receiver) == 0
    assert receiver("reclaim")["used_bytes"] == 0


def test_a_second_receiver_on_the_edge_ends_the_pushing(stages: Stages) -> None:
    sender, receiver = stages.pair()
    acquaint(sender, receiver)
    port = sender("port")
    other, _ = stages.make(
        1,
        role="receiver",
        stage_id=1,
        from_stage=0,
        to_stage=1,
        sender_host="127.0.0.1",
        sender_zmq_port=port,
    )
    eventually(lambda: sender("health")["sender"]["sessions"] == 2, "both known")
    pushes: list[int] = []

    def send_to_the_other() -> list[int]:
        number = len(pushes)
        sender("tensor", "x", number, SIZE)
        _, _, metadata = sender("put", f"k{number}", "x")
        assert other("get", f"k{number}", metadata, 20.0)["digest"] == crc(number, SIZE)
        pushes.append(sender("health")["sender"]["counters"]["pushed"])
        return pushes[-2:]

    def told() -> bool:
        last = send_to_the_other()
        return len(last) == 2 and last[0] == last[1]

    eventually(told, "the stage is told")
    for _ in range(4):
        send_to_the_other()
    assert pushes[-1] == pushes[-5]


def test_without_leases_nothing_is_pushed(stages: Stages) -> None:
    sender, receiver = stages.pair(delivery="landing")
    for number in range(5):
        send(sender, receiver, f"k{number}", number)
    assert (pushed(receiver), posted(receiver)) == (0, 0)


def test_pushing_goes_on_when_the_control_process_is_replaced(stages: Stages) -> None:
    sender, receiver = stages.pair()
    acquaint(sender, receiver)
    sender("tensor", "x", 3, SIZE)
    sender("put", "before", "x")
    sender("signal_control", signal.SIGKILL)
    assert receiver("get", "before", None, 20.0)["digest"] == crc(3, SIZE)
    receiver("release", "before")
    acquaint(sender, receiver)

    def settled() -> bool:
        receiver("health")  # takes in what the new one says of payloads that were settled with the old one
        sender("collect")
        return used(sender) == 0

    eventually(settled, "every payload settled", 20.0)


def test_a_stalled_push_keeps_deadlines_and_loses_nothing(held_stages: Stages) -> None:
    sender, receiver, _ = begin_held_push(held_stages, 4)
    before = pushed(receiver)
    assert receiver("get", "k", None, 0.3) is None
    sender.block["hold"] = 0
    assert receiver("get", "k", None, 10.0)["digest"] == crc(4, SIZE)
    assert pushed(receiver) == before + 1


def test_a_sender_that_dies_in_a_push_leaves_the_pool_whole(held_stages: Stages) -> None:
    sender, receiver, _ = begin_held_push(held_stages, 4)
    sender.end()
    assert receiver("get", "k", None, 0.3) is None
    assert used(receiver) == 0


def test_what_is_posted_to_a_sender_is_not_filled_by_its_successor(stages: Stages) -> None:
    """The receiver would take the successor's events for those of the one that has gone."""
    sender, receiver = stages.pair()
    acquaint(sender, receiver)
    port = sender("port")
    sender.end()
    successor, _ = stages.make(0, role="sender", zmq_port=port, stage_id=0)
    receiver("get", "nothing", None, 0.3)
    eventually(lambda: successor("health")["sender"]["sessions"] > 0, "known")
    for number in range(3):
        successor("tensor", f"k{number}", number, SIZE)
        successor("put", f"k{number}", f"k{number}")
    assert successor("health")["sender"]["counters"]["pushed"] == 0
    for number in range(3):
        assert receiver("get", f"k{number}", None, 20.0)["digest"] == crc(number, SIZE)
        receiver("release", f"k{number}")
    acquaint(successor, receiver)


def test_a_receiver_that_dies_takes_nothing_along(held_stages: Stages) -> None:
    sender, receiver, metadata = begin_held_push(held_stages, 5)
    receiver.end()
    sender.block["hold"] = 0
    successor, _ = held_stages.make(1, role="receiver", stage_id=1)
    assert successor("get", "k", metadata, 20.0)["digest"] == crc(5, SIZE)
    successor("release", "k")
    acquaint(sender, successor)
    eventually(lambda: (sender("collect"), used(sender) == 0)[1], "every payload settled")


def test_a_slot_that_a_push_still_goes_into_is_nobody_elses(held_stages: Stages) -> None:
    """The payload is withdrawn and the whole pool is asked for: the copy is still to come."""
    sender, receiver, _ = begin_held_push(held_stages, 6)
    sender("cleanup", "k")
    sender("put_bytes", "host", 1, 10)
    receiver("get", "host", None, 10.0)  # what was posted is still as it was
    free = receiver("reclaim")
    assert free["largest_free"] < free["size"]
    assert used(receiver) > 0
    sender.block["hold"] = 0
    eventually(lambda: used(receiver) == 0, "slot free")


def test_a_sender_that_closes_in_a_push_keeps_its_memory(held_stages: Stages) -> None:
    sender, receiver, _ = begin_held_push(held_stages, 6)
    sender("close")
    sender("reuse_memory", 8 * MB)
    sender.block["hold"] = 0
    eventually(lambda: receiver("reclaim")["used_bytes"] == 0, "slot free")


def test_a_receiver_that_closes_in_a_push_keeps_its_memory(held_stages: Stages) -> None:
    sender, receiver, _ = begin_held_push(held_stages, 6)
    receiver("close")
    receiver("tensor", "mine", 70, 8 * MB)
    sender.block["hold"] = 0
    eventually(lambda: (sender("collect"), sender("digest_of", "x") == crc(6, SIZE))[1], "copy over")
    assert receiver("digest_of", "mine") == crc(70, 8 * MB)


@pytest.mark.parametrize("closes", ["sender", "receiver"])
def test_who_closes_in_a_push_that_ends_keeps_nothing(held_stages: Stages, closes: str) -> None:
    sender, receiver = held_stages.pair()
    acquaint(sender, receiver)
    sender("tensor", "x", 6, SIZE)
    sender.block["latency_us"] = 200_000  # of each of the two copies
    sender("put", "k", "x")
    stage = sender if closes == "sender" else receiver
    stage("close")
    assert stage("kept") == 0
