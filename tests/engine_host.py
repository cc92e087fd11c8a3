"""A process that runs a transfer engine, or owns memory for one, at the command of a test.

Run by `engine_rig`, under whichever interpreter the engine needs, with a socket as its one
argument: standard output is Mori's log. A command is a msgpack array [method, arguments...]; the answer is
[result] or [error class, text]. It imports nothing but the standard library, msgspec and mori_mp.
"""

from __future__ import annotations

import gc
import os
import random
import socket
import sys
import threading
import time
import zlib
from typing import Any

import msgspec

from mori_mp.shared.errors import MoriMPError
from mori_mp.shared.pool import Pool
from mori_mp.workers import engines
from mori_mp.workers.engines import gpu_runtime, mori_api
from mori_mp.workers.engines.base import Engine, LocalMemory, Passive, Transfer
from mori_mp.workers.engines.gpu_pool import BorrowedPool, LentPool
from mori_mp.workers.engines.gpu_runtime import GpuRuntime

_LENGTH_BYTES = 8
_PATTERN_BYTES = (1 << 20) - 3  # odd, so that a misplaced copy does not look right
_CHUNK_BYTES = 64 << 20
MAX_PUT_BYTES = 1 << 20


def send(link: socket.socket, message: object) -> None:
    """Send one message."""
    body = msgspec.msgpack.encode(message)
    link.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)


def receive(link: socket.socket) -> Any:
    """Receive one message. Raises EOFError when the other end is gone."""
    return msgspec.msgpack.decode(_exactly(link, int.from_bytes(_exactly(link, _LENGTH_BYTES), "little")))


def _exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise EOFError("the other end is gone")
        data += part
    return bytes(data)


def pattern(seed: int, size: int) -> bytes:
    """Make size pseudo-random bytes, quickly also where they are many."""
    block = random.Random(seed).randbytes(min(size, _PATTERN_BYTES))
    return (block * (size // max(1, len(block)) + 1))[:size]


class Host:
    """The commands. Addresses never leave the process: memory is named by offsets into the one it has."""

    def __init__(self) -> None:
        self._runtime: GpuRuntime | None = None
        self._pool: Pool | None = None
        self._memory = LocalMemory(0, 0)
        self._lent: LentPool | None = None
        self._borrowed: BorrowedPool | None = None
        self._passive: list[Passive] = []
        self._engine: Engine | None = None
        self._transfers: dict[int, Transfer] = {}
        self._stream = 0
        self._staging = 0
        self._spare = 0

    # -------------------------------------------------------------------------- memory
    def host_memory(self, size: int) -> None:
        self._pool = Pool.create(size, "engine-test")
        self._memory = LocalMemory.of(self._pool)

    def gpu_memory(self, size: int, device: int, offset: int) -> None:
        """Allocate offset + size bytes and use the last size of them."""
        self._gpu().set_device(device)
        self._memory = LocalMemory(self._gpu().malloc(offset + size) + offset, size, device)

    def lend(self, events: int) -> bytes:
        """Export the memory; returns the packed descriptor."""
        self._lent = LentPool(self._gpu(), self._memory, events)
        return self._lent.descriptor.pack()

    def borrow(self, packed: bytes) -> None:
        """Import another process's memory as this one's."""
        self._borrowed = BorrowedPool(packed)
        self._memory = self._borrowed.memory
        self._runtime = self._borrowed.runtime

    def give_back(self) -> None:
        if self._borrowed is not None:
            self._borrowed.close()

    def fill(self, seed: int) -> None:
        """Fill the memory with a pattern."""
        self.poke(0, pattern(seed, self._memory.size))

    def poke(self, offset: int, data: bytes) -> None:
        if self._pool is not None:
            self._pool.view[offset : offset + len(data)] = data
            return
        view = (gpu_runtime.ctypes.c_char * len(data)).from_buffer_copy(data)
        self._gpu().memcpy(self._memory.address + offset, gpu_runtime.ctypes.addressof(view), len(data))

    def peek(self, offset: int, size: int) -> bytes:
        if self._pool is not None:
            return bytes(self._pool.view[offset : offset + size])
        view = gpu_runtime.ctypes.create_string_buffer(size)
        self._gpu().memcpy(gpu_runtime.ctypes.addressof(view), self._memory.address + offset, size)
        return view.raw

    def digests(self, offsets: list[int], sizes: list[int]) -> list[int]:
        """Return a checksum of each range."""
        found = []
        for offset, size in zip(offsets, sizes, strict=True):
            crc = 0
            for at in range(0, size, _CHUNK_BYTES):
                crc = zlib.crc32(self.peek(offset + at, min(_CHUNK_BYTES, size - at)), crc)
            found.append(crc)
        return found

    def put(self, event: int, offset: int, data: bytes) -> None:
        """As a stage does: enqueue a copy into the lent pool, record an event behind it, wait for neither."""
        assert self._lent is not None
        runtime = self._gpu()
        runtime.set_device(self._memory.device)
        if not self._stream:
            self._stream = runtime.stream_create()
        if not self._staging:
            self._staging = runtime.malloc(MAX_PUT_BYTES)
        source = gpu_runtime.ctypes.create_string_buffer(data, len(data))
        runtime.memcpy(self._staging, gpu_runtime.ctypes.addressof(source), len(data))
        runtime.memcpy_async(self._memory.address + offset, self._staging, len(data), self._stream)
        runtime.event_record(self._lent.events[event].handle, self._stream)

    # ----------------------------------------------------------------------- receiving
    def receive(self, engine: str, options: dict[str, Any]) -> tuple[bytes, bytes]:
        """Make the memory reachable; returns the packed engine and memory descriptors."""
        memory = self._pool if self._pool is not None else self._memory
        self._passive.append(engines.receive(engine, memory, options))
        return self._passive[-1].engine_desc, self._passive[-1].mem_desc

    def use_key(self, key: str) -> None:
        """Have Mori engines made from now on use one key, as careless peers do."""
        mori_api.new_key = lambda: key

    # ------------------------------------------------------------------------- writing
    def load(self, engine: str, options: dict[str, Any]) -> int:
        """Make the engine over the memory; returns its depth."""
        self._engine = engines.load(engine, self._memory, options)
        assert self._engine.name == engine
        return self._engine.depth

    def load_over_wrong_memory(self, engine: str) -> None:
        """Make an engine over memory that it cannot use."""
        buffer = gpu_runtime.ctypes.create_string_buffer(4096)
        address = gpu_runtime.ctypes.addressof(buffer)
        engines.load(engine, LocalMemory(address, 4096, 0 if engine == "shm" else -1), {})

    def add_peer(self, peer: int, engine_desc: bytes, mem_desc: bytes) -> None:
        self._loaded().add_peer(peer, engine_desc, mem_desc)

    def drop_peer(self, peer: int) -> None:
        self._loaded().drop_peer(peer)

    def submit(
        self, peer: int, local: list[int], remote: list[int], sizes: list[int], event: int = -1
    ) -> int:
        """Start a write, after an event of the borrowed pool if one is given; returns its number."""
        after = self._borrowed.events[event] if event >= 0 and self._borrowed is not None else None
        number = len(self._transfers) + 1
        self._transfers[number] = self._loaded().submit(peer, local, remote, sizes, number, after)
        return number

    def submit_outside(self, peer: int, field: str, value: str) -> None:
        """Submit one segment with a number that msgpack does not carry."""
        segment = {"local": [0], "remote": [0], "sizes": [1], field: [int(value)]}
        self._loaded().submit(peer, segment["local"], segment["remote"], segment["sizes"], 1)

    def poll(self, number: int) -> bool:
        return self._transfers[number].poll()

    def finish(self, number: int, seconds: float = 30.0) -> None:
        """Poll a write until it has ended."""
        transfer, deadline = self._transfers[number], time.monotonic() + seconds
        while not transfer.poll():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a write has not ended after {seconds} s")

    def write(self, peer: int, local: list[int], remote: list[int], sizes: list[int]) -> None:
        """Submit and finish."""
        self.finish(self.submit(peer, local, remote, sizes))

    def forget_transfers(self) -> None:
        """Drop the transfer objects, ended or not."""
        self._transfers.clear()
        gc.collect()

    def close_engine(self) -> float:
        """Close the engine; returns the seconds it took."""
        begin = time.monotonic()
        self._loaded().close()
        self._engine = None
        gc.collect()
        return time.monotonic() - begin

    def submit_in_fork(self, peer: int) -> str:
        """Submit in a forked child; returns what it said."""
        engine = self._loaded()
        source, sink = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                engine.submit(peer, [0], [0], [1], 1)
                said = "submitted"
            except MoriMPError as exc:
                said = str(exc)
            os.write(sink, said.encode())
            os._exit(0)
        os.close(sink)
        with os.fdopen(source) as text:
            said = text.read()
        os.waitpid(child, 0)
        return said

    def add_garbage(self, engine_desc: bytes, mem_desc: bytes, count: int, seed: int) -> dict[str, int]:
        """Add peers from damaged descriptors; returns how often which error came ("added" for none)."""
        dice = random.Random(seed)
        outcomes: dict[str, int] = {}
        for _ in range(count):
            damaged = [_damage(dice, engine_desc), _damage(dice, mem_desc)]
            if dice.random() < 0.3:
                damaged[dice.randrange(2)] = (engine_desc, mem_desc)[dice.randrange(2)]
            try:
                self.add_peer(999, *damaged)
                self.drop_peer(999)
                outcome = "added"
            except MoriMPError as exc:
                outcome = type(exc).__name__
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        return outcomes

    # ------------------------------------------------------------------------ looking in
    def backend_config(self, backend: str, options: dict[str, Any]) -> dict[str, str]:
        """Return what options make of Mori's own configuration object."""
        config = mori_api.backend_config(mori_api.load_api(), backend, options)
        return {name: str(getattr(config, name)) for name in dir(config) if not name.startswith("_")}

    def environment(self, name: str) -> str:
        return os.environ.get(name, "")

    def has_module(self, name: str) -> bool:
        return name in sys.modules

    # --------------------------------------------------------------------------- figures
    def time_writes(self, peer: int, size: int, count: int) -> list[float]:
        """Time writes of one segment; microseconds each, submit to seen ended."""
        engine, times = self._loaded(), []
        for number in range(count):
            begin = time.perf_counter_ns()
            transfer = engine.submit(peer, [0], [0], [size], number)
            while not transfer.poll():
                pass
            times.append((time.perf_counter_ns() - begin) / 1e3)
        return times

    def time_puts(self, size: int, count: int, busy: bool) -> list[float]:
        """Time the enqueuing half of put(): a copy inside the GPU and an event record, holding the GIL."""
        assert self._lent is not None
        runtime = gpu_runtime.load(self._gpu().kind, self._gpu().path, keep_gil=True)
        runtime.set_device(self._memory.device)
        source, stream, times = runtime.malloc(size), runtime.stream_create(), []
        event, stop = self._lent.events[0].handle, threading.Event()
        spinner = threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)])
        if busy:
            spinner.start()
        for _ in range(count):
            begin = time.perf_counter_ns()
            runtime.memcpy_async(self._memory.address, source, size, stream)
            runtime.event_record(event, stream)
            times.append((time.perf_counter_ns() - begin) / 1e3)
        stop.set()
        if busy:
            spinner.join()
        runtime.stream_synchronize(stream)
        runtime.stream_destroy(stream)
        runtime.free(source)
        return times

    def queue_copies(self, event: int, count: int) -> None:
        """Keep a stream busy with whole-memory copies, record an event behind them, and do not wait."""
        assert self._lent is not None
        runtime = self._gpu()
        runtime.set_device(self._memory.device)
        if not self._stream:
            self._stream = runtime.stream_create()
        if not self._spare:
            self._spare = runtime.malloc(self._memory.size)
        for _ in range(count):
            runtime.memcpy_async(self._spare, self._memory.address, self._memory.size, self._stream)
        runtime.event_record(self._lent.events[event].handle, self._stream)

    def time_raw_copies(self, device: int, size: int, count: int) -> list[float]:
        """Time plain peer copies to memory that this process allocates on a device; microseconds each."""
        runtime = self._gpu()
        runtime.set_device(device)
        target = runtime.malloc(size)
        runtime.set_device(self._memory.device)
        if device != self._memory.device:
            runtime.enable_peer_access(device)
        stream, times = runtime.stream_create(), []
        for _ in range(count):
            begin = time.perf_counter_ns()
            runtime.memcpy_peer_async(target, device, self._memory.address, self._memory.device, size, stream)
            runtime.stream_synchronize(stream)
            times.append((time.perf_counter_ns() - begin) / 1e3)
        runtime.stream_destroy(stream)
        runtime.free(target)
        return times

    # ---------------------------------------------------------------------------- inside
    def _gpu(self) -> GpuRuntime:
        if self._runtime is None:
            self._runtime = gpu_runtime.load()
        return self._runtime

    def _loaded(self) -> Engine:
        assert self._engine is not None
        return self._engine


def _damage(dice: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(dice.randint(0, 5)):
        damaged[dice.randrange(len(damaged))] = dice.randrange(256)
    return bytes(damaged[: dice.randint(0, len(damaged))] if dice.random() < 0.4 else damaged)


def serve(link: socket.socket, host: object) -> None:
    """Carry out the commands of a test, the methods of host, until it hangs up."""
    send(link, ["ready"])
    while True:
        try:
            method, *arguments = receive(link)
        except EOFError:
            return
        try:
            answer = [getattr(host, method)(*arguments)]
        except Exception as exc:
            answer = [type(exc).__name__, str(exc)]
        send(link, answer)


def nurse(link: socket.socket, engine: str) -> None:
    """Fork hosts on request, from a process that has imported all that they need and touched no GPU.

    ["start", environment] with a socket -> [pid]; ["wait", pid] -> [exit status].
    """
    if engine in mori_api.BACKENDS:
        mori_api.load_api()
    send(link, ["ready"])
    while True:
        head, sockets, _, _ = socket.recv_fds(link, _LENGTH_BYTES, 1)
        if not head:
            return
        head += _exactly(link, _LENGTH_BYTES - len(head)) if len(head) < _LENGTH_BYTES else b""
        command, argument = msgspec.msgpack.decode(_exactly(link, int.from_bytes(head, "little")))
        if command == "wait":
            send(link, [os.waitstatus_to_exitcode(os.waitpid(argument, 0)[1])])
            continue
        child = os.fork()
        if child == 0:
            link.close()
            os.environ.update(argument)
            serve(socket.socket(fileno=sockets[0]), Host())
            return
        os.close(sockets[0])
        send(link, [child])


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    if len(sys.argv) > 2:
        nurse(link, sys.argv[2])
    else:
        serve(link, Host())


if __name__ == "__main__":
    main()
