"""Streamed chunks 0 -> 1 -> 2 through vLLM-Omni's chunk adapter: all there, once, in order, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from omni_support import FACADE, OURS, OWN, Cast


def pipeline(
    cast: Cast,
    requests: int,
    chunks: int,
    name: str = OURS,
    sender_info: bool = False,
    env: Mapping[str, str] | None = None,
    in_tree: tuple[int, ...] = (),
    **plan: Any,
) -> list[Any]:
    """Run the three stages of the shipped deploy file; those named in in_tree with the host's own class."""
    for stage in (0, 1, 2):
        endpoint = {"*": {"host": "127.0.0.1", "zmq_port": cast.base_port + stage - 1}}
        theirs: dict[str, Any] = {}
        if stage in in_tree:
            # One connector a stage: its runner's sender would have the port that the scheduler's wants.
            theirs = {"stand_in": FACADE, "runner": False, "extra": cast.extra(backend_type="rdma")}
        cast.add(
            "chunks",
            {"MORI_MP_TAKEOVER": "0"} if stage in in_tree else env,
            stage=stage,
            name=name,
            requests={f"req-{n}": n for n in range(requests)},
            chunks=chunks,
            sender_info=endpoint if sender_info and stage else {},
            closes=True,
            **{**plan, **theirs},
        )
    return cast.play()


def assert_all_arrived(done: list[Any], chunks: int) -> None:
    """Every stage saw every chunk, and nothing went wrong or was left in a pool."""
    for stage, found in enumerate(done):
        assert found["wrong"] == [], f"stage {stage}"
        assert set(found["got"].values()) == {chunks}, f"stage {stage}: {found['got']}"
        closed = found["closed"]
        assert closed["send_failures"] == {}
        assert closed["receive_failures"] == {}
        assert closed["close_s"] < 5


def assert_ours(done: list[Any], requests: int, chunks: int) -> None:
    """Our connectors did it, without a failure, and their pools are whole."""
    for stage, found in enumerate(done):
        assert found["ready"]["class"] == OURS
        health = found["closed"]["health"]
        assert health["status"] == "healthy", health
        assert health["engine"] == "shm"
        assert (health["errors"], health["timeouts"]) == (0, 0), health
        assert health["puts"] == (requests * chunks if stage < 2 else 0)
        assert health["gets"] == (requests * chunks if stage > 0 else 0)


@pytest.mark.parametrize("sender_info", [False, True], ids=["configured", "sender-info"])
def test_three_stages(cast: Cast, sender_info: bool) -> None:
    """With the endpoints of the deploy file, and with those that the engine gives each request."""
    done = pipeline(cast, 4, 20, sender_info=sender_info)
    assert_all_arrived(done, 20)
    assert_ours(done, 4, 20)


def test_three_busy_stages(cast: Cast) -> None:
    """A thread in every stage holds the GIL whenever it can."""
    done = pipeline(cast, 2, 10, busy=True)
    assert_all_arrived(done, 10)
    assert_ours(done, 2, 10)


def test_own_name(cast: Cast) -> None:
    """MoriMPConnector has its ports and roles computed as the in-tree names have, without the takeover."""
    done = pipeline(cast, 2, 5, name=OWN, env={"MORI_MP_TAKEOVER": "0"})
    assert_all_arrived(done, 5)
    assert_ours(done, 2, 5)


@pytest.mark.parametrize("in_tree", [(0,), (2,), (0, 2)], ids=["sender", "receiver", "both"])
def test_beside_the_in_tree_class(cast: Cast, in_tree: tuple[int, ...]) -> None:
    """Stages before and after ours that still have the host's own class, unmodified, over Mori's facade."""
    done = pipeline(cast, 2, 5, in_tree=in_tree)
    assert_all_arrived(done, 5)
    modules = [found["ready"]["module"].partition(".")[0] for found in done]
    assert modules == ["vllm_omni" if stage in in_tree else "mori_mp" for stage in (0, 1, 2)]


def test_many_requests(cast: Cast) -> None:
    """Sixteen streams of two hundred chunks, sent without a pause: the pool must hold what waits."""
    done = pipeline(cast, 16, 200, extra=cast.extra(memory_pool_size=256 << 20), seconds=55.0)
    assert_all_arrived(done, 200)
    assert_ours(done, 16, 200)


def test_host_without_us(cast: Cast) -> None:
    """The same stages over the host's shared memory: what is asked of us is what the host does."""
    done = pipeline(cast, 2, 5, name="SharedMemoryConnector")
    assert_all_arrived(done, 5)
    assert done[0]["ready"]["class"] == "SharedMemoryConnector"
