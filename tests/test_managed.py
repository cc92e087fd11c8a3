"""ManagedBuffer: views, validation, exactly-once release, finalization."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import pytest
import torch
from interleave import run_with_intruder

from mori_mp import managed as managed_module
from mori_mp.managed import ManagedBuffer

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


class Releases:
    """An on_release callback that counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).repeat(16)


@pytest.fixture
def releases() -> Releases:
    return Releases()


def test_attributes_and_bytes(pool: torch.Tensor, releases: Releases) -> None:
    buffer = ManagedBuffer(pool, 512, 100, releases)
    assert (buffer.offset, buffer.size) == (512, 100)
    assert buffer.pool_tensor is pool
    assert not buffer.released
    assert buffer.to_bytes() == bytes(range(100))
    assert "512" in repr(buffer)
    assert "100" in repr(buffer)
    assert releases.count == 0


def test_tensor_is_a_flat_zero_copy_view(pool: torch.Tensor, releases: Releases) -> None:
    buffer = ManagedBuffer(pool, 256, 7, releases)
    view = buffer.tensor
    assert view.dtype == torch.uint8
    assert view.shape == (7,)
    assert view.data_ptr() == pool.data_ptr() + 256
    pool[258] = 99
    assert view[2] == 99
    view[0] = 77
    assert pool[256] == 77
    assert buffer.to_bytes() == bytes([77, 1, 99, 3, 4, 5, 6])


def test_to_bytes_is_a_copy(pool: torch.Tensor, releases: Releases) -> None:
    buffer = ManagedBuffer(pool, 0, 3, releases)
    data = buffer.to_bytes()
    pool.zero_()
    assert data == b"\x00\x01\x02"


def test_the_pool_may_be_a_part_of_a_larger_tensor(releases: Releases) -> None:
    whole = torch.arange(200, dtype=torch.uint8)
    buffer = ManagedBuffer(whole[64:], 16, 4, releases)
    assert buffer.to_bytes() == bytes([80, 81, 82, 83])
    assert buffer.as_tensor(torch.uint8, (2, 2)).tolist() == [[80, 81], [82, 83]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (2, 1, 4)], ids=str)
def test_as_tensor_views_every_dtype(
    pool: torch.Tensor, releases: Releases, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    size = torch.Size(shape).numel() * dtype.itemsize
    buffer = ManagedBuffer(pool, 128, size, releases)
    tensor = buffer.as_tensor(dtype, shape)
    assert tensor.dtype == dtype
    assert tensor.shape == shape
    assert tensor.data_ptr() == pool.data_ptr() + 128
    assert tensor.is_contiguous()


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([[True, False], [False, True]]),
        torch.tensor([1.5, -2.0, float("inf")], dtype=torch.bfloat16),
        torch.tensor([0.5, -1.0, 448.0]).to(torch.float8_e4m3fn),
        torch.tensor([0.25, -8.0]).to(torch.float8_e5m2),
        torch.tensor([[1 + 2j, -3j]], dtype=torch.complex64),
        torch.tensor([1 - 1j], dtype=torch.complex128),
        torch.tensor([[-1, 1 << 40]], dtype=torch.int64),
        torch.tensor([65535], dtype=torch.uint16),
        torch.tensor(3.25, dtype=torch.float64),
        torch.tensor(True),
    ],
    ids=lambda values: f"{values.dtype}{tuple(values.shape)}",
)
def test_as_tensor_gives_the_values_back(
    pool: torch.Tensor, releases: Releases, values: torch.Tensor
) -> None:
    raw = values.reshape(-1).view(torch.uint8)
    pool[64 : 64 + raw.numel()] = raw
    buffer = ManagedBuffer(pool, 64, raw.numel(), releases)
    got = buffer.as_tensor(values.dtype, values.shape)
    assert got.shape == values.shape
    # Widened to compare: not every dtype has an equality kernel.
    wide = torch.complex128 if values.is_complex() else torch.float64
    assert torch.equal(got.to(wide), values.to(wide))


def test_as_tensor_writes_through(pool: torch.Tensor, releases: Releases) -> None:
    buffer = ManagedBuffer(pool, 0, 16, releases)
    buffer.as_tensor(torch.int32, [2, 2])[1, 1] = -1
    assert pool[12:16].tolist() == [255] * 4


def test_as_tensor_takes_any_sequence_of_integers(pool: torch.Tensor, releases: Releases) -> None:
    buffer = ManagedBuffer(pool, 0, 24, releases)
    for shape in ((2, 3), [2, 3], torch.Size([2, 3]), (torch.tensor(2), torch.tensor(3))):
        assert buffer.as_tensor(torch.float32, shape).shape == (2, 3)
    with pytest.raises(TypeError):
        buffer.as_tensor(torch.float32, (2.0, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(-1,), (4, -1), (-2, -2)], ids=str)
def test_as_tensor_refuses_negative_dimensions(
    pool: torch.Tensor, releases: Releases, shape: tuple[int, ...]
) -> None:
    # (-2, -2) multiplies to the right size, and (-1,) is what torch itself would infer.
    buffer = ManagedBuffer(pool, 0, 16, releases)
    with pytest.raises(ValueError, match="negative"):
        buffer.as_tensor(torch.float32, shape)


@pytest.mark.parametrize("shape", [(), (3,), (5,), (4, 2), (0,), (4, 0)], ids=str)
def test_as_tensor_refuses_another_size(
    pool: torch.Tensor, releases: Releases, shape: tuple[int, ...]
) -> None:
    buffer = ManagedBuffer(pool, 0, 16, releases)
    with pytest.raises(ValueError, match="16"):
        buffer.as_tensor(torch.float32, shape)


@pytest.mark.parametrize(
    ("dtype", "offset"),
    [(torch.float32, 2), (torch.int16, 1), (torch.complex128, 8), (torch.float64, 4)],
    ids=str,
)
def test_as_tensor_refuses_a_misaligned_offset(
    pool: torch.Tensor, releases: Releases, dtype: torch.dtype, offset: int
) -> None:
    buffer = ManagedBuffer(pool, offset, 16, releases)
    with pytest.raises(RuntimeError, match=f"offset {offset} .*not aligned"):
        buffer.as_tensor(dtype, (16 // dtype.itemsize,))
    assert buffer.as_tensor(torch.uint8, (16,)).tolist() == list(range(offset, offset + 16))


def test_as_tensor_refuses_a_misaligned_base_address(releases: Releases) -> None:
    raw = bytearray(80)
    base = torch.frombuffer(raw, dtype=torch.uint8).data_ptr()
    # Storage that starts one byte past a multiple of eight: offsets alone look aligned.
    pool = torch.frombuffer(raw, dtype=torch.uint8, offset=(1 - base) % 8)
    assert pool.data_ptr() % 8 == 1
    buffer = ManagedBuffer(pool, 8, 16, releases)
    with pytest.raises(RuntimeError, match="not aligned"):
        buffer.as_tensor(torch.float64, (2,))


def test_as_tensor_refuses_a_view_that_torch_cannot_express(releases: Releases) -> None:
    raw = bytearray(80)
    base = torch.frombuffer(raw, dtype=torch.uint8).data_ptr()
    pool = torch.frombuffer(raw, dtype=torch.uint8, offset=(1 - base) % 8)
    # The address is aligned, the offset in the storage is not.
    buffer = ManagedBuffer(pool, 7, 16, releases)
    assert buffer.tensor.data_ptr() % 8 == 0
    with pytest.raises(RuntimeError, match="offset 7 of the pool is not aligned"):
        buffer.as_tensor(torch.float64, (2,))


def test_an_empty_buffer_has_empty_views(pool: torch.Tensor, releases: Releases) -> None:
    buffer = ManagedBuffer(pool, pool.numel(), 0, releases)
    assert buffer.to_bytes() == b""
    assert buffer.tensor.shape == (0,)
    assert buffer.as_tensor(torch.float32, (0, 3)).shape == (0, 3)


def test_release_runs_the_callback_once(pool: torch.Tensor, releases: Releases) -> None:
    buffer = ManagedBuffer(pool, 0, 16, releases)
    buffer.release()
    assert buffer.released
    assert releases.count == 1
    buffer.release()
    with buffer:
        pass
    del buffer
    gc.collect()
    assert releases.count == 1


def test_a_released_buffer_cannot_be_read(pool: torch.Tensor, releases: Releases) -> None:
    buffer = ManagedBuffer(pool, 32, 16, releases)
    buffer.release()
    reads: list[Callable[[], object]] = [
        lambda: buffer.tensor,
        lambda: buffer.as_tensor(torch.uint8, (16,)),
        buffer.to_bytes,
    ]
    for read in reads:
        with pytest.raises(RuntimeError, match="offset 32 has been released"):
            read()
    assert (buffer.offset, buffer.size) == (32, 16)
    assert buffer.pool_tensor is pool
    assert "released" in repr(buffer)


def test_context_manager_releases_also_on_error(pool: torch.Tensor, releases: Releases) -> None:
    with ManagedBuffer(pool, 0, 4, releases) as buffer:
        assert buffer.to_bytes() == b"\x00\x01\x02\x03"
        assert releases.count == 0
    assert releases.count == 1
    with pytest.raises(KeyError), ManagedBuffer(pool, 0, 4, releases):
        raise KeyError("consumer failed")
    assert releases.count == 2


def test_the_last_reference_releases(pool: torch.Tensor, releases: Releases) -> None:
    buffer = ManagedBuffer(pool, 0, 4, releases)
    del buffer
    gc.collect()
    assert releases.count == 1

    cycle: list[object] = [ManagedBuffer(pool, 0, 4, releases)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert releases.count == 2


def test_threads_racing_to_release_run_the_callback_once(pool: torch.Tensor) -> None:
    for _ in range(30):
        releases = Releases()
        buffer = ManagedBuffer(pool, 0, 4, releases)
        start = threading.Barrier(6)

        def release(buffer: ManagedBuffer = buffer, start: threading.Barrier = start) -> None:
            start.wait()
            buffer.release()

        threads = [threading.Thread(target=release) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert releases.count == 1


def test_of_two_racing_releases_exactly_one_runs_the_callback(pool: torch.Tensor) -> None:
    """A second release at every bytecode of the first."""

    def race(moment: int) -> int:
        releases = Releases()
        buffer = ManagedBuffer(pool, 0, 4, releases)

        def intrude(position: int) -> None:
            if position == moment:
                buffer.release()

        _, bytecodes = run_with_intruder(buffer.release, managed_module.__file__, intrude)
        assert releases.count == 1, f"at bytecode {moment}"
        return bytecodes

    bytecodes = race(-1)
    assert bytecodes > 5
    for moment in range(bytecodes):
        race(moment)


def test_a_callback_may_release_again(pool: torch.Tensor) -> None:
    seen: list[bool] = []

    def on_release() -> None:
        seen.append(buffer.released)
        buffer.release()

    buffer = ManagedBuffer(pool, 0, 4, on_release)
    buffer.release()
    assert seen == [True]


def test_a_failing_callback_reaches_the_caller_once(pool: torch.Tensor) -> None:
    def on_release() -> None:
        raise OSError("control process is gone")

    buffer = ManagedBuffer(pool, 0, 4, on_release)
    with pytest.raises(OSError, match="control process is gone"):
        buffer.release()
    assert buffer.released
    buffer.release()


def test_a_failing_callback_in_the_finalizer_is_logged(
    pool: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    def on_release() -> None:
        raise OSError("control process is gone")

    buffer = ManagedBuffer(pool, 96, 4, on_release)
    with caplog.at_level(logging.ERROR, logger="mori_mp.managed"):
        del buffer
        gc.collect()
    (record,) = caplog.records
    assert "offset 96" in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], OSError)


def test_the_finalizer_of_a_half_built_object_is_silent() -> None:
    # An exception in __del__ would become a warning, which is an error here.
    buffer = ManagedBuffer.__new__(ManagedBuffer)
    del buffer
    gc.collect()


@pytest.mark.parametrize(
    ("offset", "size"), [(-1, 4), (0, -1), (4096, 1), (4090, 7), (0, 4097), (1 << 70, 1)], ids=str
)
def test_a_slot_outside_the_pool_is_refused_and_not_released(
    pool: torch.Tensor, releases: Releases, offset: int, size: int
) -> None:
    with pytest.raises(ValueError, match="does not lie inside"):
        ManagedBuffer(pool, offset, size, releases)
    gc.collect()
    assert releases.count == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(64, dtype=torch.int8),
        torch.zeros(8, 8, dtype=torch.uint8),
        torch.zeros(64, dtype=torch.uint8)[::2],
    ],
    ids=["dtype", "two-dimensional", "strided"],
)
def test_a_tensor_that_is_no_pool_is_refused(tensor: torch.Tensor, releases: Releases) -> None:
    with pytest.raises(ValueError, match="contiguous 1-D uint8"):
        ManagedBuffer(tensor, 0, 4, releases)
    assert releases.count == 0


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_duplicated(
    pool: torch.Tensor, releases: Releases, duplicate: Callable[[object], object]
) -> None:
    buffer = ManagedBuffer(pool, 0, 4, releases)
    with pytest.raises(TypeError, match=r"to_bytes\(\)"):
        duplicate(buffer)
    assert releases.count == 0
    assert not buffer.released


def test_interpreter_shutdown_with_live_buffers_is_quick_and_silent() -> None:
    """At shutdown daemon threads stop where they are, with the locks they hold: no callback may run then."""
    script = textwrap.dedent(
        """
        import threading
        import torch
        from mori_mp.managed import ManagedBuffer

        lock = threading.Lock()
        lock.acquire()  # for ever, as if by a stopped thread
        pool = torch.zeros(64, dtype=torch.uint8)
        buffer = ManagedBuffer(pool, 0, 4, lock.acquire)
        cycle = [ManagedBuffer(pool, 8, 4, lock.acquire)]
        cycle.append(cycle)
        half_built = ManagedBuffer.__new__(ManagedBuffer)
        print("done")
        """
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
