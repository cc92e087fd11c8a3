"""Qwen2.5-Omni in chunks: our processors, the host's chunk adapters, our connector (omni_qwen2_5.py)."""

from __future__ import annotations

import pytest
from omni_child import check
from omni_support import Host


@pytest.mark.parametrize(
    "name",
    [
        "thinker_chunks",
        "codec_chunks",
        "what_is_computed_again",
        "requests_that_cannot_be_streamed",
        "registration",
    ],
)
def test_qwen2_5(host: Host, name: str) -> None:
    check("omni_qwen2_5", name)
