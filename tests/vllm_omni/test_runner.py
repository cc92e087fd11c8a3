"""Whole payloads through the model runner's transport, and KV caches through the KV manager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omni_support import OURS, OWN, Cast

KV_OFFSET = 100
REQUESTS = {"req-a": 1, "req-b": 2}


def assert_thinker_payload(payload: Any) -> None:
    """What Qwen3-Omni's thinker2talker_full_payload makes of nine prompt rows and three output tokens."""
    assert payload["embed"]["prefill"].dtype == torch.bfloat16
    assert payload["embed"]["prefill"].shape == payload["hidden_states"]["output"].shape == (8, 64)
    assert payload["ids"]["all"][-3:] == [21, 22, 23]
    assert bool(payload["meta"]["finished"])


def test_full_payload(cast: Cast) -> None:
    """The runner's background thread receives what the sending runner sends whole.

    One request's sender is the deploy file's, the other's is the one that the engine names.
    """
    endpoint = {"req-b": {"host": "127.0.0.1", "zmq_port": cast.base_port}}
    for stage in (0, 1):
        cast.add(
            "full_payload", stage=stage, name=OURS, requests=REQUESTS, sender_info=endpoint, closes=False
        )
    received = cast.play()[1]["received"]
    assert set(received) == set(REQUESTS)
    for payload in received.values():
        assert_thinker_payload(payload)
    first, second = (received[name]["embed"]["prefill"] for name in REQUESTS)
    assert not torch.equal(first, second)


def test_synchronous_receive(cast: Cast) -> None:
    """recv_stage_payload() waits; for a payload that never comes, as long as it is told."""
    cast.add("full_payload", stage=0, name=OURS, requests=REQUESTS, closes=False)
    cast.add(
        "synchronous",
        stage=1,
        name=OURS,
        requests={**REQUESTS, "req-never": 3},
        sender={"host": "127.0.0.1", "zmq_port": cast.base_port},
        seconds=5.0,
        closes=False,
    )
    found = cast.play()[1]
    assert found["received"].pop("req-never") is None
    assert found["seconds"]["req-never"] >= 5.0
    for payload in found["received"].values():
        assert_thinker_payload(payload)


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        (OURS, (1, 1)),
        (OURS, (1, 2)),
        (OURS, (1, 1, 1)),
        (OURS, (2, 2, 1)),
        (OWN, (2, 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_kv_caches(cast: Cast, name: str, tp: tuple[int, ...]) -> None:
    """Each receiving rank gets its heads from the ranks that have them, by host and base port alone."""
    for stage, ranks in enumerate(tp):
        for rank in range(ranks):
            cast.add(
                "kv",
                {"LOCAL_RANK": str(rank), "MORI_MP_TAKEOVER": "1" if name == OURS else "0"},
                stage=stage,
                name=name,
                tp=tp,
                sender={"host": "127.0.0.1", "zmq_port": cast.base_port + KV_OFFSET + stage - 1},
                seconds=10.0,
                closes=False,
            )
    for stage, found in zip(cast.stages, cast.play(), strict=True):
        assert found["ready"]["class"] == OURS
        wanted = {"req-call": "", "req-update": ""} if stage.plan["stage"] else {}
        assert found["problems"] == wanted, stage.plan
