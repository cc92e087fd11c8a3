"""Replicas of a stage: ports 1024 apart, and no chunk of one in the other's stream."""

from __future__ import annotations

from omni_support import OURS, STRIDE, Cast


def test_two_replicas_side_by_side(cast: Cast) -> None:
    """Each replica's receiver finds its own sender, with the same request ids in both."""
    for replica in (0, 1):
        for stage in (0, 1):
            cast.add(
                "chunks",
                {"VLLM_OMNI_REPLICA_ID": str(replica)},
                stage=stage,
                name=OURS,
                requests={"req-0": 10 * replica, "req-1": 10 * replica + 1},
                chunks=8,
                last_stage=1,
                closes=True,
            )
    for stage, found in zip(cast.stages, cast.play(), strict=True):
        assert found["wrong"] == [], stage.plan
        assert set(found["got"].values()) == {8}, stage.plan
        assert found["closed"]["send_failures"] == {}


def test_one_receiver_of_two_replicas(cast: Cast) -> None:
    """The engine tells the receiver of each request which replica has it."""
    requests = {"req-0": 3, "req-1": 4}
    for replica, (name, number) in enumerate(requests.items()):
        cast.add(
            "chunks",
            {"VLLM_OMNI_REPLICA_ID": str(replica)},
            stage=0,
            name=OURS,
            requests={name: number},
            chunks=8,
            closes=True,
        )
    endpoints = {
        name: {"host": "127.0.0.1", "zmq_port": cast.base_port + STRIDE * replica}
        for replica, name in enumerate(requests)
    }
    cast.add(
        "chunks",
        stage=1,
        name=OURS,
        requests=requests,
        chunks=8,
        last_stage=1,
        sender_info=endpoints,
        closes=True,
    )
    found = cast.play()[-1]
    assert found["wrong"] == []
    assert found["got"] == {"req-0": 8, "req-1": 8}
    addresses = {sender["address"] for sender in found["closed"]["health"]["receiver"]["senders"]}
    assert {f"tcp://127.0.0.1:{cast.base_port + STRIDE * replica}" for replica in (0, 1)} <= addresses
