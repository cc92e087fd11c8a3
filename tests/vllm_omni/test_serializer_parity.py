"""Whatever vllm-omni's OmniSerializer knows reads the same, whichever end encodes and whichever decodes.

The properties need vLLM-Omni in their process: omni_parity.py has those of values, mixed freely, and
omni_parity_outputs.py those of payloads between stages and of output objects with any of their fields set.
"""

from __future__ import annotations

import pytest
from omni_child import check
from omni_support import Host


@pytest.mark.parametrize("name", ["any_values", "what_neither_end_takes", "large_values", "bitmaps"])
def test_values(host: Host, name: str) -> None:
    check("omni_parity", name)


@pytest.mark.parametrize(
    "name",
    [
        "the_payload_between_stages",
        "output_objects",
        "completions_within",
        "maps_that_have_some_of_the_keys",
    ],
)
def test_outputs(host: Host, name: str) -> None:
    check("omni_parity_outputs", name)
