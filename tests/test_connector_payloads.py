"""Payloads: every kind that a stage may put, through real processes, in every delivery."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np
import pytest
import torch
from connector_support import MIB, Factory, Pair, assert_whole, eventually, pattern
from PIL import Image

from mori_mp import ManagedBuffer
from mori_mp.shared import lane
from mori_mp.shared.errors import PayloadError

pytestmark = pytest.mark.xdist_group("connector_payloads")

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip
EAGER = 4096


class Way(NamedTuple):
    """How the module's pairs deliver, and the receiver's counter that shows it."""

    worker_mode: str
    delivery: str
    eager_bytes: int
    counter: str


WAYS = {
    "process-lease": Way("process", "auto", 0, "lease"),
    "process-landing": Way("process", "landing", 0, "landing"),
    "process-eager": Way("process", "landing", MIB, "eager"),
    "thread-lease": Way("thread", "lease", 0, "lease"),
    "thread-landing": Way("thread", "landing", 0, "landing"),
    "thread-eager": Way("thread", "landing", MIB, "eager"),
}


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def shared_pair(request: pytest.FixtureRequest, module_factory: Factory) -> Iterator[Pair]:
    """A pair for each way; all pools must be whole again when its tests are over."""
    way: Way = request.param
    config = {"worker_mode": way.worker_mode, "delivery": way.delivery, "eager_bytes": way.eager_bytes}
    pair = module_factory.pair(memory_pool_size=8 * MIB, **config)
    yield pair
    pair.assert_whole()
    assert pair.receiver.receiver.counters[way.counter] > 0
    module_factory.close()


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bit for bit: NaN equals itself, -0.0 does not equal 0.0."""
    a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def example(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of all bit patterns that the dtype has room for."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.arange(count, dtype=torch.int64).mul(37).remainder(256).to(torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    return raw.view(dtype).view(shape)


# --------------------------------------------------------------------------------- raw
@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 65536, MIB])
def test_bytes_of_many_sizes(shared_pair: Pair, size: int) -> None:
    payload = pattern(size, size)
    metadata = shared_pair.put(f"b{size}", payload)
    assert metadata["data_size"] == size
    assert metadata["is_fast_path"] is True
    assert shared_pair.wait_bytes(f"b{size}", metadata=metadata) == payload


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_like(shared_pair: Pair, kind: Any) -> None:
    shared_pair.put("kind", kind(b"payload"))
    assert shared_pair.wait_bytes("kind") == b"payload"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_raw_tensor_of_every_dtype(shared_pair: Pair, dtype: torch.dtype) -> None:
    tensor = example(dtype, (3, 5, 2))
    metadata = shared_pair.put("t", tensor)
    assert metadata["data_size"] == tensor.nbytes
    assert metadata["is_fast_path"] is True
    buffer, size = shared_pair.wait("t")
    assert size == tensor.nbytes
    assert isinstance(buffer, ManagedBuffer)
    with buffer:
        assert same_bytes(buffer.as_tensor(dtype, (3, 5, 2)), tensor)


def test_raw_tensors_that_are_not_plain_memory(shared_pair: Pair) -> None:
    base = torch.arange(60, dtype=torch.float32).view(3, 4, 5)
    cases = {
        "0-dim": torch.tensor(3.5),
        "transposed": base.permute(2, 0, 1),
        "sliced": base[:, ::2, 1:],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "requires_grad": torch.ones(7, requires_grad=True) * 2,
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    }
    for name, tensor in cases.items():
        shared_pair.put(name, tensor)
        buffer, _ = shared_pair.wait(name)
        with buffer:
            got = buffer.as_tensor(tensor.dtype, tensor.shape)
            assert same_bytes(got, tensor.detach().resolve_conj().resolve_neg()), name


def test_the_senders_memory_is_free_as_soon_as_put_returns(shared_pair: Pair) -> None:
    tensor = torch.full((100_000,), 7, dtype=torch.uint8)
    shared_pair.put("own", tensor)
    tensor.zero_()
    assert shared_pair.wait_bytes("own") == b"\x07" * 100_000


@pytest.mark.parametrize("empty", [b"", bytearray(), torch.empty(0), torch.empty(3, 0)], ids=repr)
def test_empty_payloads_are_refused(shared_pair: Pair, empty: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert shared_pair.sender.put("0", "1", "empty", empty) == (False, 0, None)
    assert "empty" in caplog.text
    assert shared_pair.get("empty") is None


# ----------------------------------------------------------------------------- objects
class Chunk(msgspec.Struct):
    """What a stage might send."""

    codes: list[int]
    hidden: torch.Tensor
    note: str = ""


def test_object_with_everything(shared_pair: Pair) -> None:
    image = Image.new("RGB", (5, 4), (10, 20, 30))
    array = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    hidden = torch.randn(4, 8, dtype=torch.bfloat16)
    payload = {
        "hidden": hidden,
        "strided": hidden.t(),
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 3),
        "array": array,
        "image": image,
        "struct": Chunk([1, 2, 3], torch.ones(2)),
        "tuple": (1, "two", None),
        "nested": [{"deep": torch.arange(3)}, True, 1.5, b"raw"],
    }
    metadata = shared_pair.put("object", payload)
    assert metadata["is_fast_path"] is False
    got, size = shared_pair.wait("object", metadata=metadata)
    assert size == metadata["data_size"]
    assert same_bytes(got["hidden"], hidden)
    assert got["hidden"].dtype is torch.bfloat16
    assert same_bytes(got["strided"], hidden.t())
    assert got["strided"].shape == (8, 4)
    assert got["scalar"].shape == ()
    assert got["scalar"].item() == 2.5
    assert got["nothing"].shape == (0, 3)
    assert np.array_equal(got["array"], array)
    assert got["array"].dtype == np.float32
    assert got["image"].mode == "RGB"
    assert got["image"].tobytes() == image.tobytes()
    assert got["struct"]["codes"] == [1, 2, 3]
    assert torch.equal(got["struct"]["hidden"], torch.ones(2))
    assert got["tuple"] == [1, "two", None]
    assert torch.equal(got["nested"][0]["deep"], torch.arange(3))
    assert got["nested"][1:] == [True, 1.5, b"raw"]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_tensor_of_every_dtype_inside_an_object(shared_pair: Pair, dtype: torch.dtype) -> None:
    tensor = example(dtype, (4, 3))
    shared_pair.put("o", {"x": tensor})
    got, _ = shared_pair.wait("o")
    assert got["x"].dtype is dtype
    assert got["x"].shape == (4, 3)
    assert got["x"].device.type == "cpu"
    assert same_bytes(got["x"], tensor)


def test_decoded_tensors_own_their_memory(shared_pair: Pair) -> None:
    """With decode: copy (the default) nothing points into a pool that is written again."""
    shared_pair.put("first", {"x": torch.full((50_000,), 1, dtype=torch.uint8)})
    got, _ = shared_pair.wait("first")
    for number in range(20):
        shared_pair.put(f"next{number}", {"x": torch.full((50_000,), 2, dtype=torch.uint8)})
        shared_pair.wait(f"next{number}")
    assert torch.equal(got["x"], torch.full((50_000,), 1, dtype=torch.uint8))
    got["x"].add_(1)  # writable


def test_empty_containers_are_payloads(shared_pair: Pair) -> None:
    for name, value in {"dict": {}, "list": [], "text": "", "none": None}.items():
        shared_pair.put(name, value)
        assert shared_pair.wait(name)[0] == value


def test_object_that_cannot_be_encoded(shared_pair: Pair) -> None:
    with pytest.raises(PayloadError, match="object"):
        shared_pair.sender.put("0", "1", "bad", {"x": object()})
    assert shared_pair.get("bad") is None
    shared_pair.put("bad", b"good")  # the key is usable
    assert shared_pair.wait_bytes("bad") == b"good"


def test_key_that_is_too_long(shared_pair: Pair) -> None:
    with pytest.raises(PayloadError, match="longer than"):
        shared_pair.sender.put("0", "1", "k" * 2000, b"x")
    longest = "ü" * 500
    shared_pair.put(longest, b"payload")
    assert shared_pair.wait_bytes(longest) == b"payload"


@pytest.mark.parametrize("key", ["a@b", "@", "a@0_1", "", "sp ace\n", "0_1"])
def test_odd_keys(shared_pair: Pair, key: str) -> None:
    shared_pair.put(key, key.encode() + b"!")
    assert shared_pair.wait_bytes(key) == key.encode() + b"!"


# ------------------------------------------------------------------- put twice, in order
def test_put_twice_delivers_the_newer(shared_pair: Pair) -> None:
    shared_pair.put("twice", b"old payload")
    shared_pair.put("twice", b"new")
    while (got := shared_pair.wait_bytes("twice")) != b"new":
        assert got == b"old payload"  # it was here already
    assert shared_pair.get("twice") is None


def test_replaced_while_it_is_read(shared_pair: Pair) -> None:
    shared_pair.put("read", pattern(5000, 1))
    buffer, _ = shared_pair.wait("read")
    shared_pair.put("read", pattern(6000, 2))
    newer, _ = shared_pair.wait("read")
    with buffer, newer:
        assert buffer.to_bytes() == pattern(5000, 1)
        assert newer.to_bytes() == pattern(6000, 2)


def test_same_key_on_two_edges(shared_pair: Pair) -> None:
    assert shared_pair.sender.put("0", "1", "k", b"for 1")[0]
    assert shared_pair.sender.put("0", "2", "k", b"for 2")[0]
    assert shared_pair.wait_bytes("k") == b"for 1"
    shared_pair.sender.cleanup("k", "0", "2")


# ------------------------------------------------------------------------ ManagedBuffer
def test_own_buffer_is_published_where_it_lies(make_connector: Factory) -> None:
    """A middle stage passes on what it received: same offset, no second slot, safe to release at once."""
    first = make_connector.sender(delivery="landing", eager_bytes=0, worker_mode="thread")
    middle = make_connector(
        "dual", stage_id=1, sender_host="127.0.0.1", sender_zmq_port=first.zmq_port, worker_mode="thread",
        delivery="landing", eager_bytes=0,
    )  # fmt: skip
    last = make_connector.receiver(middle.zmq_port or 0, stage_id=2, from_stage=1, to_stage=2)
    payload = pattern(9000)
    assert first.put("0", "1", "k", payload)[0]
    buffer, _ = Pair(first, middle).wait("k")
    used = middle.slots.stats()["used_bytes"]
    ok, size, metadata = middle.put("1", "2", "k", buffer)
    assert (ok, size) == (True, 9000)
    assert metadata is not None
    assert metadata["is_fast_path"] is True
    assert middle.slots.stats()["used_bytes"] == used
    published = middle.publisher.replay()[0]
    assert (published.offset, published.size) == (buffer.offset, buffer.size)

    # A second publication of the same block is a copy: one block carries one publication.
    assert middle.put("1", "2", "copy", buffer)[0]
    assert middle.slots.stats()["used_bytes"] == 2 * used

    buffer.release()  # while it is published
    assert middle.slots.stats()["used_bytes"] == 2 * used
    for number in range(4):  # nobody may get the block meanwhile
        other = middle.slots.alloc(9000)
        assert other != published.offset
        middle.slots.give_back(other)
        del number
    for key in ("k", "copy"):
        found = last.get_with_deadline("1", "2", key, deadline=_soon())
        assert found is not None
        with found[0] as got:
            assert got.to_bytes() == payload
    assert_whole(first, middle, last)


def _soon() -> float:
    import time

    return time.monotonic() + 10


def test_own_buffer_can_be_read_while_and_after_it_is_published(make_connector: Factory) -> None:
    first = make_connector.sender(delivery="landing", eager_bytes=0, worker_mode="thread")
    middle = make_connector(
        "dual", stage_id=1, sender_host="127.0.0.1", sender_zmq_port=first.zmq_port, worker_mode="thread",
        delivery="landing", eager_bytes=0,
    )  # fmt: skip
    first.put("0", "1", "k", pattern(5000))
    buffer, _ = Pair(first, middle).wait("k")
    middle.put("1", "2", "k", buffer)
    middle.cleanup("k", "1", "2")
    eventually(lambda: (middle.reap_consumed(), middle.publisher.outstanding == 0)[1], "withdrawn")
    for _ in range(4):
        assert middle.slots.alloc(5000) != buffer.offset
    assert buffer.to_bytes() == pattern(5000)
    buffer.release()


def test_foreign_buffer_is_copied(shared_pair: Pair) -> None:
    memory = torch.arange(256, dtype=torch.uint8).repeat(64)
    released = threading.Event()
    foreign = ManagedBuffer(memory, 4096, 5000, released.set)
    shared_pair.put("foreign", foreign)
    memory.zero_()
    assert not released.is_set()  # it stays its owner's
    got = shared_pair.wait_bytes("foreign")
    assert got == bytes(range(256)) * 19 + bytes(range(136))
    foreign.release()


def test_buffer_of_the_host_is_recognised(shared_pair: Pair) -> None:
    class ManagedBuffer:  # vllm-omni's own class has this name and this attribute
        tensor = torch.arange(100, dtype=torch.uint8)

    shared_pair.put("host", ManagedBuffer())
    assert shared_pair.wait_bytes("host") == bytes(range(100))


def test_released_buffer_is_refused(shared_pair: Pair) -> None:
    buffer = ManagedBuffer(torch.zeros(4096, dtype=torch.uint8), 0, 10, lambda: None)
    buffer.release()
    with pytest.raises(RuntimeError, match="released"):
        shared_pair.sender.put("0", "1", "released", buffer)


def test_dropped_buffers_give_their_slots_back(shared_pair: Pair) -> None:
    for number in range(5):
        shared_pair.put(f"d{number}", pattern(3000, number))
        shared_pair.wait(f"d{number}")
    gc.collect()
    shared_pair.assert_whole()


# ------------------------------------------------------------------------- eager border
@pytest.mark.parametrize("size", [EAGER - 1, EAGER, EAGER + 1])
def test_the_eager_border(make_connector: Factory, size: int) -> None:
    # Where the sender lends, a small raw payload may be offered in place instead.
    pair = make_connector.pair(eager_bytes=EAGER, worker_mode="thread", delivery="landing")
    pair.put("k", pattern(size))
    assert pair.wait_bytes("k") == pattern(size)
    assert pair.receiver.receiver.counters["eager"] == (size <= EAGER)
    assert pair.receiver.receiver.counters["landing"] == (size > EAGER)
    pair.assert_whole()


def test_eager_credit_bounds_what_is_under_way(
    make_connector: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More small payloads than credit: the rest is fetched, none is lost."""

    def unreachable(path: str) -> NoReturn:
        raise OSError(path)

    monkeypatch.setattr(lane, "connect", unreachable)  # over a lane, payloads like these are not eager
    pair = make_connector.pair(eager_bytes=MIB, memory_pool_size=32 * MIB, worker_mode="thread")
    pair.put("first", b"x")
    pair.wait_bytes("first")  # the session stands
    for number in range(20):
        pair.put(f"k{number}", pattern(MIB, number))
    for number in range(20):
        assert pair.wait_bytes(f"k{number}") == pattern(MIB, number)
    counters = pair.receiver.receiver.counters
    assert 0 < counters["eager"] < 20
    assert counters["lease"] == 21 - counters["eager"]
    pair.assert_whole()


# ---------------------------------------------------------------------------- decode: view
def test_decoded_views_hold_their_memory(make_connector: Factory) -> None:
    pair = make_connector.pair(
        delivery="landing", eager_bytes=0, worker_mode="thread", receiver={"decode": "view"}
    )
    pair.put("k", {"x": torch.arange(5000), "y": torch.ones(10)})
    got, _ = pair.wait("k")
    x, y = got["x"], got["y"]
    del got
    used = pair.receiver.slots.stats()["used_bytes"]
    assert used > 0
    del y
    gc.collect()
    assert pair.receiver.slots.stats()["used_bytes"] == used  # x still lies there
    assert torch.equal(x, torch.arange(5000))
    del x
    pair.assert_whole()


# --------------------------------------------------------------------------- large ones
@pytest.mark.parametrize("delivery", ["lease", "landing"])
def test_some_mebibytes(make_connector: Factory, delivery: str) -> None:
    pair = make_connector.pair(delivery=delivery, memory_pool_size=64 * MIB, num_transfer_workers=2)
    tensor = torch.arange(6 * MIB, dtype=torch.int64)
    pair.put("big", tensor)
    buffer, size = pair.wait("big")
    assert size == 48 * MIB
    with buffer:
        assert torch.equal(buffer.as_tensor(torch.int64, (6 * MIB,)), tensor)
    del buffer
    pair.assert_whole()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_payload_beyond_two_gibibytes(make_connector: Factory) -> None:
    """Sizes and offsets beyond 2^31, with stamps at the places where 32-bit arithmetic would go wrong."""
    size = (1 << 31) + 4097
    pair = make_connector.pair(
        memory_pool_size=size + MIB, delivery="landing", worker_mode="thread", receiver={"prefault": False}
    )
    tensor = torch.zeros(size, dtype=torch.uint8)
    stamps = {0: 1, (1 << 31) - 1: 2, 1 << 31: 3, size - 1: 4}
    for place, value in stamps.items():
        tensor[place] = value
    metadata = pair.put("huge", tensor)
    del tensor
    buffer, got = pair.wait("huge", 200, metadata)
    assert got == size
    with buffer:
        view = buffer.tensor
        assert {place: int(view[place]) for place in stamps} == stamps
        assert int(view.count_nonzero()) == len(stamps)
        del view
    del buffer
    pair.assert_whole()
