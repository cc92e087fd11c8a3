"""A stage process with a connector over GPU memory, at the command of a test; see `engine_host.serve`.

Where the GPU runtime is the emulated one, which MORI_MP_GPU_RUNTIME then names, torch does not know its
memory: tensors are CPU tensors over it, and `EmulatedAccelerator` tells the connector which they are.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from engine_host import pattern, serve

from mori_mp import MoriTransferEngineConnector, device_pool
from mori_mp.accelerator import Accelerator
from mori_mp.managed import ManagedBuffer
from mori_mp.workers.engines import gpu_runtime


class EmulatedAccelerator(Accelerator):
    """The GPUs of the emulated HIP runtime. Each has one current stream in a process."""

    _streams: ClassVar[dict[int, int]] = {}

    def __init__(self) -> None:
        self._runtime = gpu_runtime.load(keep_gil=True)  # as torch does in these calls

    def number(self, device: str) -> int:
        return int(device.partition(":")[2] or 0)

    def allocate(self, size: int, number: int) -> torch.Tensor:
        self._runtime.set_device(number)
        address = self._runtime.malloc(size)
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._runtime.pointer_device(tensor.data_ptr()) is not None

    def stream(self, number: int) -> int:
        if number not in self._streams:
            self._runtime.set_device(number)
            self._streams[number] = self._runtime.stream_create()
        return self._streams[number]

    def begin_reading(self, source: torch.Tensor, number: int) -> bool:
        return False


class Stage:
    """The commands. Tensors and buffers stay here, by name."""

    def __init__(self) -> None:
        if os.environ.get("MORI_MP_GPU_RUNTIME"):
            device_pool.Accelerator = EmulatedAccelerator  # type: ignore[misc]
        self._accelerator = device_pool.Accelerator()
        self._connector: MoriTransferEngineConnector | None = None
        self._device = 0
        self._tensors: dict[str, torch.Tensor] = {}
        self._held: dict[str, Any] = {}
        self._stop = threading.Event()
        self._spinner: threading.Thread | None = None

    def make(self, config: dict[str, Any], device: int) -> int:
        """Make the connector, its pool on a device; returns its port."""
        self._device = device
        self._connector = MoriTransferEngineConnector({"memory_pool_device": f"cuda:{device}", **config})
        return self._connector.zmq_port or 0

    def tensor(self, name: str, seed: int, size: int, device: int = -1) -> None:
        """Have a GPU tensor with a pattern."""
        tensor = self._accelerator.allocate(size, self._device if device < 0 else device)
        tensor.copy_(torch.frombuffer(bytearray(pattern(seed, size)), dtype=torch.uint8))
        self._tensors[name] = tensor

    def put(self, key: str, name: str, edge: str = "0_1") -> list[Any]:
        """Put a GPU tensor."""
        return list(self._ours().put(*edge.split("_"), key, self._tensors[name]))

    def put_beside(self, key: str, name: str, method: str, *arguments: Any) -> None:
        """Put a GPU tensor; as soon as it is published, another thread calls a method of ours."""
        hot = self._ours().publisher._hot
        assert hot is not None
        send = hot.send

        def send_and_call(message: Any) -> None:
            hot.send = send  # type: ignore[method-assign]
            send(message)
            thread = threading.Thread(target=getattr(self, method), args=arguments)
            thread.start()
            thread.join()

        hot.send = send_and_call  # type: ignore[method-assign]
        self.put(key, name)

    def put_view(self, key: str, name: str, start: int, step: int) -> list[Any]:
        """Put a strided view of a GPU tensor."""
        return list(self._ours().put("0", "1", key, self._tensors[name][start::step]))

    def put_bytes(self, key: str, seed: int, size: int) -> list[Any]:
        """Put host bytes."""
        return list(self._ours().put("0", "1", key, pattern(seed, size)))

    def put_object(self, key: str, names: list[str]) -> list[Any]:
        """Put an object with GPU tensors in it."""
        payload = {"numbers": [1, 2, 3], "host": torch.arange(5), "gpu": [self._tensors[n] for n in names]}
        return list(self._ours().put("0", "1", key, payload))

    def put_held(self, key: str, held: str, edge: str) -> list[Any]:
        """Put a buffer that came by get()."""
        return list(self._ours().put(*edge.split("_"), key, self._held[held]))

    def get(
        self, key: str, metadata: dict[str, Any] | None, seconds: float, edge: str = "0_1"
    ) -> dict[str, Any] | None:
        """Get a payload and hold it; returns what it is."""
        deadline = time.monotonic() + seconds
        return self._hold(
            key, self._ours().get_with_deadline(*edge.split("_"), key, metadata, deadline=deadline)
        )

    def get_now(self, key: str, metadata: dict[str, Any] | None) -> dict[str, Any] | None:
        """As get(), without a deadline."""
        return self._hold(key, self._ours().get("0", "1", key, metadata))

    def get_until_interrupted(self, key: str, size: int) -> int | None:
        """Get a payload; returns the CRC of the pool's first bytes at the interrupt."""
        try:
            self.get(key, None, 60.0)
        except KeyboardInterrupt:
            return zlib.crc32(bytes(self._pool().tensor[:size].tolist()))
        return None

    def _hold(self, key: str, found: tuple[Any, int] | None) -> dict[str, Any] | None:
        if found is None:
            return None
        self._held[key] = found[0]
        return {"size": found[1], **self._describe(found[0])}

    def digest(self, key: str) -> int:
        """Return the CRC of a held buffer as it is now."""
        return zlib.crc32(self._held[key].to_bytes())

    def read_later(self, key: str) -> None:
        """Enqueue a copy out of a held buffer on the current stream."""
        buffer = self._held[key]
        runtime, stream = gpu_runtime.load(), self._accelerator.stream(self._device)
        runtime.set_device(self._device)
        target = self._accelerator.allocate(buffer.size, self._device)
        self._tensors["read later"] = target
        runtime.memcpy_async(target.data_ptr(), buffer.tensor.data_ptr(), buffer.size, stream)

    def release(self, key: str) -> None:
        self._held.pop(key).release()

    def health(self) -> dict[str, Any]:
        return self._ours().health()

    def cleanup(self, key: str, *edge: str) -> None:
        self._ours().cleanup(key, *edge)

    def collect(self) -> None:
        self._ours().reap_consumed()

    def close(self) -> None:
        self._ours().close()

    def kept(self) -> int:
        """Return how many closed GPU pools this process keeps, as others may still use them."""
        return len(device_pool._never_freed)

    def use_another_stream(self) -> None:
        """Have the current stream of the emulated GPU be a new one."""
        EmulatedAccelerator._streams.pop(self._device, None)

    def copy_in(self, name: str) -> int:
        """Have a tensor copied to the beginning of the pool; returns the event behind it."""
        return self._pool().copy_in(0, self._tensors[name])

    def push_within(self, event: int, size: int) -> int | None:
        """Push what was copied to the beginning of the pool on to its end."""
        pool = self._pool()
        return pool.push(0, size, event, pool.address + pool.size - size)

    def halve_from(self, size: int) -> None:
        """Have copies of at least so many bytes pushed in halves."""
        device_pool._HALVES_BYTES = size

    def port(self) -> int:
        return self._ours().zmq_port or 0

    def signal_control(self, number: int) -> None:
        """Send the control process a signal."""
        heart = self._ours().heart
        assert heart is not None
        os.kill(heart.supervisor.pid, number)

    def reclaim(self) -> dict[str, int]:
        """Take back what is posted, as a get() does that finds no room; returns the GPU pool's figures."""
        self._ours().receiver._reclaim_posts()
        return self._ours().publisher.pool_stats()["device_pool"]

    def digest_of(self, name: str) -> int:
        """Return the CRC of a tensor as it is now."""
        return zlib.crc32(bytes(self._tensors[name].cpu().tolist()))

    def reuse_memory(self, size: int) -> None:
        """Write over whatever memory the GPU's allocator hands out now."""
        self._accelerator.allocate(size, self._device).fill_(0xEE)

    # --------------------------------------------------------------------------- figures
    def spin(self, on: bool) -> None:
        """Start or stop a thread that wants the GIL all the time."""
        if on:
            self._stop.clear()
            self._spinner = threading.Thread(target=lambda: [None for _ in iter(self._stop.is_set, True)])
            self._spinner.start()
        elif self._spinner is not None:
            self._stop.set()
            self._spinner.join()
            self._spinner = None

    def turns_during_puts(self, keys: list[str], name: str) -> int:
        """Put a tensor under each key; returns how often another thread got the GIL that it wants."""
        return self._turns_during(lambda: [self.put(key, name) for key in keys])

    def turns_during_gets(self, keys: list[str]) -> int:
        """Get the payload under each key, which is there, and let go of it; returns as above."""

        def get_all() -> None:
            for key in keys:
                found = self._ours().get("0", "1", key, None)
                assert found is not None
                found[0].release()

        return self._turns_during(get_all)

    def _turns_during(self, action: Callable[[], object]) -> int:
        turns, stop, turned = 0, False, threading.Event()

        def waiter() -> None:
            nonlocal turns
            while not stop:
                time.sleep(0.0002)  # comes back and waits for the GIL
                turns += 1
                turned.set()

        thread, interval = threading.Thread(target=waiter), sys.getswitchinterval()
        thread.start()
        gc.collect()
        gc.disable()
        sys.setswitchinterval(60)  # so that only who gives it up loses it
        try:
            turned.clear()
            turned.wait()  # so that its next wait for the GIL is one of 60 s
            before = turns
            action()
            return turns - before
        finally:
            stop = True
            sys.setswitchinterval(interval)
            gc.enable()
            thread.join()

    def timed_put(self, key: str, name: str, size: int) -> list[Any]:
        """Put the first bytes of a tensor; returns [begin, end, metadata], in CLOCK_MONOTONIC nanoseconds."""
        data = self._tensors[name][:size]
        begin = time.monotonic_ns()
        ok, _, metadata = self._ours().put("0", "1", key, data)
        end = time.monotonic_ns()
        assert ok
        return [begin, end, metadata]

    def timed_get(self, key: str, metadata: dict[str, Any], to_gpu: bool) -> list[int]:
        """Get a payload, and have it on this stage's GPU; returns [nanoseconds, check sum]."""
        found = self._ours().get("0", "1", key, metadata)
        assert found is not None
        buffer = found[0]
        tensor = buffer.tensor.to(f"cuda:{self._device}") if to_gpu else buffer.tensor
        if to_gpu:
            torch.cuda.synchronize(self._device)
        usable = time.monotonic_ns()
        checked = int(tensor[:: max(1, tensor.numel() // 4096)].to(torch.int64).sum())
        buffer.release()
        return [usable, checked]

    def clock(self) -> int:
        """Return CLOCK_MONOTONIC nanoseconds."""
        return time.monotonic_ns()

    def check_sum(self, name: str, size: int) -> int:
        """Return what timed_get() returns for the first bytes of a tensor."""
        tensor = self._tensors[name][:size]
        return int(tensor[:: max(1, size // 4096)].to(torch.int64).sum())

    def time_raw_copies(self, size: int, device: int, count: int) -> list[float]:
        """Time torch's own copies of so many bytes to a device, each synchronised; microseconds."""
        source = self._tensors["figures"][:size]
        target = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
        times = []
        for _ in range(count):
            begin = time.perf_counter_ns()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(self._device)
            torch.cuda.synchronize(device)
            times.append((time.perf_counter_ns() - begin) / 1e3)
        return times

    def _ours(self) -> MoriTransferEngineConnector:
        assert self._connector is not None
        return self._connector

    def _pool(self) -> device_pool.DevicePool:
        pool = self._ours()._pools.device
        assert pool is not None
        return pool

    def _describe(self, found: Any) -> dict[str, Any]:
        if isinstance(found, ManagedBuffer):
            return {
                "digest": zlib.crc32(found.to_bytes()),
                "on_device": self._accelerator.holds(found.tensor),
            }
        tensors = found["gpu"]
        return {
            "digests": [zlib.crc32(bytes(tensor.cpu().tolist())) for tensor in tensors],
            "on_device": [self._accelerator.holds(tensor) for tensor in tensors],
            "rest": [found["numbers"], found["host"].tolist()],
        }


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), Stage())
