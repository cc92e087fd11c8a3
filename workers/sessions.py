"""Receivers that have said Hello to a control process: who they are, what they subscribe to, their credit.

Pure bookkeeping, no sockets. A session belongs to one socket (its ZMQ routing identity); a receiver that
reconnects comes with a new identity and the same epoch, and its new session replaces the old one.

Credit bounds the payload bytes that Ready notices may have under way to one receiver: each eager payload
takes its size, and gives it back when the receiver settles it or the payload is gone.
"""

from __future__ import annotations

from collections.abc import Iterator

from mori_mp.shared.wire import Hello

MAX_SESSIONS = 1024
MAX_CREDIT_BYTES = 16 << 20


class Session:
    """One receiver. Sizes and credit are bytes. peer, device_peer: the ids of its host and GPU memory."""

    __slots__ = (
        "credit",
        "device_peer",
        "eager",
        "edges",
        "epoch",
        "host_id",
        "identity",
        "lease",
        "peer",
        "pid",
        "posts",
    )

    def __init__(self, identity: bytes, hello: Hello) -> None:
        self.identity = identity
        self.epoch = hello.epoch
        self.pid = hello.pid
        self.host_id = hello.host_id
        self.lease = hello.lease
        self.posts = hello.posts
        self.edges = frozenset(hello.edges)
        self.credit = min(hello.eager_credit, MAX_CREDIT_BYTES)
        self.eager: dict[int, int] = {}
        self.peer: int | None = None
        self.device_peer: int | None = None

    def take_credit(self, generation: int, size: int) -> bool:
        """Reserve credit for an eager payload; False when there is too little left, or it was sent already.

        A repeated notice goes without the bytes, or asking again and again would make us send without end.
        """
        if generation in self.eager or size > self.credit:
            return False
        self.credit -= size
        self.eager[generation] = size
        return True

    def give_credit(self, generation: int) -> bool:
        """Return the credit of an eager payload; tell whether it was one."""
        size = self.eager.pop(generation, 0)
        self.credit += size
        return size > 0


class Sessions:
    """All sessions, by socket identity and by edge."""

    def __init__(self) -> None:
        self._by_identity: dict[bytes, Session] = {}
        self._by_epoch: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_identity.values()))

    def get(self, identity: bytes) -> Session | None:
        """Return the session of a socket, marked as recently used."""
        session = self._by_identity.pop(identity, None)
        if session is not None:
            self._by_identity[identity] = session
        return session

    def peek(self, identity: bytes) -> Session | None:
        """Return the session of a socket, and let that be no use of it."""
        return self._by_identity.get(identity)

    def name_of(self, identity: bytes) -> str:
        """Name who is behind a socket, for logs: a process, or else the socket."""
        session = self.peek(identity)
        return f"pid {session.pid}" if session is not None else f"socket {identity.hex()}"

    def hello(self, identity: bytes, hello: Hello) -> tuple[Session, list[Session]]:
        """Open a session. Returns it and those that it replaced or pushed out, for the caller to end."""
        ended = []
        for old in (self._by_epoch.get(hello.epoch), self._by_identity.get(identity)):
            if old is not None and self.drop(old.identity) is not None:
                ended.append(old)
        while len(self._by_identity) >= MAX_SESSIONS:
            idle = next(iter(self._by_identity))
            dropped = self.drop(idle)
            if dropped is not None:
                ended.append(dropped)
        session = Session(identity, hello)
        for old in ended:
            if (old.identity, old.epoch) == (identity, hello.epoch):
                session.credit, session.eager = old.credit, old.eager  # it has those bytes
        self._by_identity[identity] = session
        self._by_epoch[hello.epoch] = session
        return session, ended

    def drop(self, identity: bytes) -> Session | None:
        """End a session."""
        session = self._by_identity.pop(identity, None)
        if session is not None and self._by_epoch.get(session.epoch) is session:
            del self._by_epoch[session.epoch]
        return session

    def on_edge(self, edge: str) -> list[Session]:
        """List the sessions that subscribe to an edge."""
        return [s for s in self._by_identity.values() if edge in s.edges]

    def of_process(self, pid: int, host_id: str) -> list[Session]:
        """List the sessions of one process."""
        return [s for s in self._by_identity.values() if s.pid == pid and s.host_id == host_id]
