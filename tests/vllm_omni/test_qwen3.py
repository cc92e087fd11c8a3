"""Qwen3-Omni's own stage processors over us give code2wav what they give it over the host's shared memory."""

from __future__ import annotations

from typing import Any

import torch
from omni_support import OURS, Cast

STEPS, FRAMES = 12, 9  # thinker steps; codec frames that the talker makes of each chunk


def run(cast: Cast, name: str) -> list[Any]:
    for stage in (0, 1, 2):
        cast.add(
            "qwen3",
            stage=stage,
            name=name,
            requests={"req-0": 5, "req-1": 6},
            steps=STEPS,
            frames=FRAMES,
            closes=True,
        )
    done = cast.play()
    cast.stages.clear()
    return done


def difference(ours: Any, theirs: Any, where: str = "") -> str:
    """Say where two received values differ; "" if they are the same to the bit."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        same = ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        return "" if same else f"{where}: tensors differ"
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return f"{where}: keys {sorted(ours)} and {sorted(theirs)}"
        found = [difference(ours[key], theirs[key], f"{where}.{key}") for key in ours]
        return next(filter(None, found), "")
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            return f"{where}: {len(ours)} and {len(theirs)} items"
        pairs = zip(ours, theirs, strict=True)
        return next(filter(None, (difference(a, b, f"{where}[{n}]") for n, (a, b) in enumerate(pairs))), "")
    return "" if ours == theirs and type(ours) is type(theirs) else f"{where}: {ours!r} and {theirs!r}"


def test_same_as_shared_memory(cast: Cast) -> None:
    theirs = run(cast, "SharedMemoryConnector")
    ours = run(cast, OURS)
    for stage in (1, 2):
        assert theirs[stage]["ready"]["class"] == "SharedMemoryConnector"
        assert ours[stage]["ready"]["class"] == OURS
        assert ours[stage]["unfinished"] == theirs[stage]["unfinished"] == []
        assert difference(ours[stage]["received"], theirs[stage]["received"]) == "", f"stage {stage}"
    # ... and it is a stream worth comparing: chunks of 25 frames with up to 25 before them, and the rest.
    for chunks in ours[2]["received"].values():
        frames = STEPS * FRAMES - FRAMES
        contexts = [information["meta"]["left_context_size"] for _, information in chunks]
        lengths = [len(codes) // 16 for codes, _ in chunks]
        assert contexts[0] == 0
        assert set(contexts[1:-1]) == {25}
        assert sum(lengths) - sum(contexts) in (frames, frames + FRAMES)
        assert len(chunks) >= 4
