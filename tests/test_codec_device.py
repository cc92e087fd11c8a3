"""GPU tensors in objects: left out, and put together again. "GPU" is what the test says it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mori_mp.codec import DeviceTensors, TensorMissing, decode, plan
from mori_mp.codec_device import MARK
from mori_mp.shared.errors import CorruptPayload

KEY = "req_0_0@0_1"


def on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.numel() % 2 == 1


class Store:
    """The payloads that tensors have become, by key."""

    def __init__(self, apart: DeviceTensors) -> None:
        self._data = {
            key: tensor.detach().contiguous().view(-1).view(torch.uint8) for key, tensor in apart.tensors
        }
        self.asked: list[str] = []

    def __call__(self, key: str, nbytes: int) -> torch.Tensor:
        self.asked.append(key)
        found = self._data[key]
        assert found.numel() == nbytes
        return found.clone()


def test_gpu_tensors_travel_by_themselves_and_others_inside() -> None:
    gpu, host = torch.arange(5, dtype=torch.bfloat16), torch.arange(4)
    apart = DeviceTensors(KEY, 7, on_gpu)
    payload = plan({"gpu": [gpu, gpu], "host": host, "n": 1}, apart).to_bytes()
    assert [key for key, _ in apart.tensors] == ["req_0_0#7.0@0_1", "req_0_0#7.1@0_1"]
    store = Store(apart)
    found = decode(payload, fetch=store)
    assert all(torch.equal(one, gpu) and one.dtype == gpu.dtype for one in found["gpu"])
    assert torch.equal(found["host"], host)
    assert store.asked == [key for key, _ in apart.tensors]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(9).reshape(3, 3).t(),
        torch.arange(9.0)[::3],
        torch.tensor(True),
        torch.tensor([1 + 2j, 3 - 1j, 5]).conj(),
        torch.tensor([1.0], requires_grad=True),
    ],
    ids=["transposed", "strided", "0-dim", "conjugated", "requires_grad"],
)
def test_every_form_of_tensor(tensor: torch.Tensor) -> None:
    apart = DeviceTensors(KEY, 1, on_gpu)
    payload = plan([tensor], apart).to_bytes()
    assert len(apart.tensors) == 1
    (found,) = decode(payload, fetch=Store(apart))
    assert torch.equal(found, tensor.detach().resolve_conj())


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.arange(3).to_sparse()], ids=["empty", "sparse"])
def test_what_has_no_plain_bytes_is_left_to_the_object(tensor: torch.Tensor) -> None:
    apart = DeviceTensors(KEY, 1, lambda _: True)
    assert apart.leave_out(tensor) is None
    assert apart.tensors == []


def test_a_missing_tensor_is_said_to_whom_it_concerns() -> None:
    def fetch(key: str, nbytes: int) -> torch.Tensor:
        raise TensorMissing(gone=False)

    payload = plan([torch.arange(3)], DeviceTensors(KEY, 1, on_gpu)).to_bytes()
    with pytest.raises(TensorMissing):
        decode(payload, fetch=fetch)


def test_an_end_without_gpus_does_not_understand_it() -> None:
    payload = plan([torch.arange(3)], DeviceTensors(KEY, 1, on_gpu)).to_bytes()
    with pytest.raises(CorruptPayload, match="travels by itself"):
        decode(payload)


_odd = st.one_of(
    st.none(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.text(max_size=5),
    st.lists(st.integers(-2, 9), max_size=3),
)


@given(st.fixed_dictionaries({MARK: _odd, "nbytes": _odd, "dtype": _odd, "shape": _odd}))
def test_forged_marks_are_corrupt_payloads(mark: dict[str, Any]) -> None:
    with pytest.raises(CorruptPayload):
        decode(plan([mark]).to_bytes(), fetch=lambda key, nbytes: torch.zeros(3, dtype=torch.uint8))
