"""The other end of the wire, written out by hand: a v1 receiver, a v1 sender, a v2 receiver.

They use raw sockets and msgspec, so that a fault of mori_mp's own client code cannot hide one of its server
code, and the other way round.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import zmq

from mori_mp.shared.errors import EngineUnavailable
from mori_mp.shared.pool import Pool, PoolDescriptor, host_id
from mori_mp.workers import engines

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode
MAGIC = b"mmp2"
TIMEOUT_MS = 10_000


class V1Client:
    """A receiver of the in-tree protocol: one REQ socket, one request at a time, landing in a pool."""

    def __init__(self, port: int, pool_bytes: int = 1 << 20) -> None:
        self.pool = Pool.create(pool_bytes, "test-v1")
        passive = engines.receive("shm", self.pool, {})
        self.engine_desc, self.mem_desc = passive.engine_desc, passive.mem_desc
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.REQ)
        self.socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def ask(self, payload: bytes) -> bytes:
        """Send a request as it is."""
        self.socket.send(payload)
        return self.socket.recv()

    def query(self, key: str) -> dict[str, Any] | None:
        """Ask for a payload's size; None when it is not there."""
        reply = self.ask(b"query_info" + encode({"request_id": key}))
        return None if reply == b"info_not_found" else decode(reply)

    def pull(self, key: str, length: int, offset: int = 0, **changes: Any) -> bytes:
        """Have a payload written into the pool."""
        request = {
            "request_id": key,
            "engine_desc_packed": self.engine_desc,
            "mem_desc_packed": self.mem_desc,
            "dst_offset": offset,
            "length": length,
        }
        return self.ask(encode({**request, **changes}))

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Read the pool."""
        return bytes(self.pool.view[offset : offset + size])

    def close(self) -> None:
        self.socket.close()
        self._context.term()
        self.pool.close()


class V1Sender:
    """A sender that answers as the in-tree class does: a ROUTER, and the write done before `trans_done`.

    payloads: what it has, by internal key. While `held` is set, pulls are taken but neither carried out nor
    answered; `let_go()` does it then. `failing`: keys whose pull ends with `trans_error`.
    """

    def __init__(self, port: int = 0) -> None:
        self.payloads: dict[str, tuple[bytes, bool]] = {}
        self.held = threading.Event()
        self.failing: set[str] = set()
        self.requests: list[Any] = []
        self._kept: list[tuple[bytes, dict[str, Any]]] = []
        self._let_go = threading.Event()
        self._stop = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        if port:
            self._router.bind(f"tcp://127.0.0.1:{port}")
        self.port: int = port or self._router.bind_to_random_port("tcp://127.0.0.1")
        self._thread = threading.Thread(target=self._run, name="test-v1-sender")
        self._thread.start()

    def let_go(self) -> None:
        """Carry out and answer the pulls that were held."""
        self.held.clear()
        self._let_go.set()

    @property
    def holding(self) -> int:
        """Pulls that wait for let_go()."""
        return len(self._kept)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._let_go.is_set():
                self._let_go.clear()
                while self._kept:
                    identity, request = self._kept.pop(0)
                    self._reply(identity, self._write(request))
            if self._router.poll(5):
                frames = self._router.recv_multipart()
                self._serve(frames[0], frames[-1])

    def _serve(self, identity: bytes, payload: bytes) -> None:
        if payload.startswith(b"query_info"):
            key = decode(payload[len(b"query_info") :])["request_id"]
            self.requests.append(("query", key))
            found = self.payloads.get(key)
            if found is None:
                self._reply(identity, b"info_not_found")
            else:
                answer = {"request_id": key, "data_size": len(found[0]), "is_fast_path": found[1]}
                self._reply(identity, encode(answer))
            return
        try:
            request = decode(payload)
            assert set(request) >= {"request_id", "dst_offset", "length"}
        except (msgspec.DecodeError, AssertionError, TypeError):
            self._reply(identity, b"trans_error")
            return
        self.requests.append(("pull", request["request_id"]))
        if self.held.is_set():
            self._kept.append((identity, request))
        else:
            self._reply(identity, self._write(request))

    def _write(self, request: dict[str, Any]) -> bytes:
        key, length = request["request_id"], request["length"]
        found = self.payloads.get(key)
        if found is None or len(found[0]) != length or key in self.failing:
            return b"trans_error"
        if not self.land(request, found[0]):
            return b"trans_error"
        del self.payloads[key]
        return b"trans_done"

    def land(self, request: dict[str, Any], data: bytes) -> bool:
        """Write a payload where a pull wants it; False if that is out of reach."""
        try:
            target = Pool.open_peer(PoolDescriptor.unpack(request["mem_desc_packed"]))
        except EngineUnavailable:  # the receiver has closed meanwhile
            return False
        target.view[request["dst_offset"] : request["dst_offset"] + len(data)] = data
        target.close()
        return True

    def _reply(self, identity: bytes, word: bytes) -> None:
        self._router.send_multipart([identity, b"", word])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._router.close(0)
        self._context.term()


class V2Client:
    """A receiver of our own protocol with nothing behind it: one DEALER, messages as msgpack arrays."""

    def __init__(self, port: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, tag: str, *fields: Any) -> None:
        """Send one message."""
        self.socket.send(MAGIC + encode([tag, *fields]))

    def hello(self, pid: int, *, lease: bool = True, edges: tuple[str, ...] = (), **more: Any) -> list[Any]:
        """Open a session and return its Welcome."""
        fields = {
            "corr": 1, "version": 2, "epoch": f"test-{id(self)}", "pid": pid, "host_id": host_id(),
            "engine_desc": b"", "mem_desc": b"", "edges": list(edges), "eager_credit": 0, "lease": lease,
        }  # fmt: skip
        self.send("hello", *{**fields, **more}.values())
        return self.expect("welcome")

    def receive(self) -> list[Any]:
        """Return the next message as a list, its tag first."""
        frames = self.socket.recv_multipart()
        assert len(frames) == 1, frames
        assert frames[0].startswith(MAGIC), frames
        message: list[Any] = decode(frames[0][len(MAGIC) :])
        return message

    def expect(self, tag: str) -> list[Any]:
        """Return the next message of a kind; others are passed over."""
        while True:
            message = self.receive()
            if message[0] == tag:
                return message

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@contextmanager
def endless_message(port: int, nbytes: int) -> Iterator[socket.socket]:
    """Send so many bytes in frames of one ZMQ message that never ends, over a socket that stays open."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
        # A message before the peer's own READY would be an error of the handshake, and end the connection.
        greeting = connection.recv(64 + 2, socket.MSG_WAITALL)
        connection.recv(greeting[-1], socket.MSG_WAITALL)
        size = 60_000
        frame = b"\x03" + size.to_bytes(8, "big") + bytes(size)  # flags: long, and more to come
        with suppress(ConnectionError):  # it may end us before we are done
            for _ in range(nbytes // size):
                connection.sendall(frame)
        yield connection
