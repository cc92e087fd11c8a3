"""Whom the stage is told to push to."""

from __future__ import annotations

import pytest

from mori_mp.shared.posts import PostsDescriptor
from mori_mp.shared.wire import Hello
from mori_mp.workers.identity import Identity
from mori_mp.workers.sessions import Sessions
from mori_mp.workers.targets import Targets

US = Identity("s0", 1, 1, "host", "cuda_ipc", b"memory", True, "", b"gpu pool")


def hello(epoch: str, posts: bytes, *edges: str, host: str = "host", lease: bool = True) -> Hello:
    return Hello(1, 2, epoch, 10, host, b"", b"", list(edges), 0, lease, b"", b"", posts)


def posts_of(receiver: int, epoch: str = US.epoch) -> bytes:
    return PostsDescriptor(receiver, 3, 4, "host", b"", epoch).pack()


def told(targets: Targets) -> dict[str, bytes]:
    pending = dict(targets.pending)
    targets.pending.clear()
    return pending


def test_the_only_receiver_of_an_edge_is_pushed_to() -> None:
    sessions = Sessions()
    targets = Targets(US, sessions)
    first, _ = sessions.hello(b"1", hello("r1", b"", "0_1", "0_2"))
    targets.update(first.edges)
    assert told(targets) == {"0_1": b"", "0_2": b""}
    first, _ = sessions.hello(b"1", hello("r1", posts_of(1), "0_1", "0_2"))
    targets.update(first.edges)
    assert told(targets) == {"0_1": posts_of(1), "0_2": posts_of(1)}
    targets.update(first.edges)
    assert told(targets) == {}


def test_with_two_receivers_on_an_edge_neither_is() -> None:
    sessions = Sessions()
    targets = Targets(US, sessions)
    for name, edges in (("1", ["0_1", "0_2"]), ("2", ["0_1"])):
        session, _ = sessions.hello(name.encode(), hello(name, posts_of(int(name)), *edges))
        targets.update(session.edges)
    assert told(targets) == {"0_1": b"", "0_2": posts_of(1)}
    sessions.drop(b"1")
    targets.update(["0_1", "0_2"])
    assert told(targets) == {"0_1": posts_of(2), "0_2": b""}


def test_an_edge_that_nobody_listens_to_is_forgotten() -> None:
    sessions = Sessions()
    targets = Targets(US, sessions)
    session, _ = sessions.hello(b"1", hello("r1", posts_of(1), "0_1"))
    targets.update(session.edges)
    sessions.drop(b"1")
    targets.update(["0_1"])
    assert told(targets) == {"0_1": b""}
    session, _ = sessions.hello(b"1", hello("r1", posts_of(1), "0_1"))
    targets.update(session.edges)
    assert told(targets) == {"0_1": posts_of(1)}


def test_only_receivers_that_may_map_our_memory_are() -> None:
    for other in (hello("r", posts_of(1), "0_1", host="far"), hello("r", posts_of(1), "0_1", lease=False)):
        sessions = Sessions()
        targets = Targets(US, sessions)
        session, _ = sessions.hello(b"1", other)
        targets.update(session.edges)
        assert told(targets) == {"0_1": b""}


def test_a_sender_without_a_gpu_pool_tells_nothing() -> None:
    sessions = Sessions()
    targets = Targets(US._replace(device_desc=b""), sessions)
    session, _ = sessions.hello(b"1", hello("r1", posts_of(1), "0_1"))
    targets.update(session.edges)
    assert told(targets) == {}


@pytest.mark.parametrize("posts", [posts_of(1, "before"), b"junk"], ids=["predecessor's", "junk"])
def test_only_slots_that_are_posted_to_us_are_filled(posts: bytes) -> None:
    sessions = Sessions()
    targets = Targets(US, sessions)
    session, _ = sessions.hello(b"1", hello("r1", posts, "0_1"))
    targets.update(session.edges)
    assert told(targets) == {"0_1": b""}
