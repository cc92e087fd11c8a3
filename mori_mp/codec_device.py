"""Objects with GPU tensors in them: the tensors as payloads of their own, from GPU pool to GPU pool.

With `tensor_device: pool` a sender leaves the data of GPU tensors out of an encoded object. In the place of
each there is a map that only mori-mp understands:

    {"__device_tensor__": internal key of its own payload, "nbytes": ..., "dtype": ..., "shape": [...]}

These payloads are published before the object, and fetched while it is decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mori_mp.codec_memory import DTYPES, dense

MARK = "__device_tensor__"

Fetch = Callable[[str, int], torch.Tensor]
"""Gets the payload of a key and of so many bytes, as a 1-D uint8 tensor that nothing else uses.

Raises TensorMissing, CorruptPayload.
"""


class TensorMissing(Exception):
    """A tensor that travels by itself has not come. gone: it never will, else it may be asked for again."""

    def __init__(self, gone: bool) -> None:
        super().__init__(gone)
        self.gone = gone


class DeviceTensors:
    """The GPU tensors of an object that is being encoded, and the internal keys that they get."""

    def __init__(self, key: str, number: int, holds: Callable[[torch.Tensor], bool]) -> None:
        """key: the object's. number: not used for this key before. holds: whether a tensor is left out."""
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._name, _, self._edge = key.rpartition("@")
        self._number = number
        self._holds = holds

    def leave_out(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """Return what stands in the tensor's place; None if it is to be encoded itself."""
        name = str(tensor.dtype).removeprefix("torch.")
        plain = tensor.layout is torch.strided and not tensor.is_nested
        if not plain or not self._holds(tensor) or not tensor.nbytes or name not in DTYPES:
            return None
        key = f"{self._name}#{self._number}.{len(self.tensors)}@{self._edge}"
        self.tensors.append((key, dense(tensor)))
        return {MARK: key, "nbytes": tensor.nbytes, "dtype": name, "shape": list(tensor.shape)}
