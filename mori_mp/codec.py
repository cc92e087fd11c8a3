"""The payload codec: Python objects as bytes in the pool and back.

The format is vLLM-Omni's OmniSerializer: msgpack, with tensors, arrays and images as marked maps, so either
end of an edge may be the in-tree connector. Three things are different inside:

- `plan()` encodes everything but the data of tensors, arrays and images, and knows the exact size; the data
  is then copied once, from where it is into the pool slot (`Plan.write_into_address`).
- Tensor data starts at a multiple of 64 bytes from the start of the payload, so `decode(copy=False)` can
  give views of a pool slot; `decode(copy=True)` copies it once, into memory of its own.
- Both keep the GIL where they can: nothing below 4 MiB releases it for host tensors, because getting it back
  beside a busy thread takes 5 ms. (Exceptions: strided or device tensors when written, views of more than
  one dimension, float8 and other dtypes that DLPack lacks when decoded.)

Modules: codec_encode (plan), codec_decode (decode), codec_memory (addresses, tensors over raw memory),
codec_device (GPU tensors that travel by themselves), codec_image (PIL), codec_omni (vLLM's output objects).
"""

from __future__ import annotations

from mori_mp.codec_decode import decode
from mori_mp.codec_device import DeviceTensors, Fetch, TensorMissing
from mori_mp.codec_encode import MAX_BIN_BYTES, HostSegment, Plan, Segment, TensorSegment, plan
from mori_mp.codec_memory import ALIGNMENT, check_plain, dense, raw_view

__all__ = [
    "ALIGNMENT",
    "MAX_BIN_BYTES",
    "DeviceTensors",
    "Fetch",
    "HostSegment",
    "Plan",
    "Segment",
    "TensorMissing",
    "TensorSegment",
    "check_plain",
    "decode",
    "dense",
    "plan",
    "raw_view",
]
