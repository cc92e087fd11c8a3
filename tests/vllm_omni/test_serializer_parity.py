"""Whatever vllm-omni's OmniSerializer knows reads the same, whichever end encodes and whichever decodes.

tests/test_codec.py has tensors, arrays and scalars in lists and dicts, each image mode, and one of each
output object. Here is what else the serializer knows, mixed freely, and the output objects with any of their
fields set; omni_parity.py has the properties, which need vLLM-Omni in their process.
"""

from __future__ import annotations

import pytest
from omni_child import check
from omni_support import Host


@pytest.mark.timeout(300)  # the import of vllm-omni
@pytest.mark.parametrize(
    "name",
    [
        "any_values",
        "what_neither_end_takes",
        "the_payload_between_stages",
        "output_objects",
        "maps_that_have_some_of_the_keys",
    ],
)
def test_property(host: Host, name: str) -> None:
    check("omni_parity", name)
