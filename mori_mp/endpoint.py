"""Addresses: what `host: auto` means, and whether one can be listened on."""

from __future__ import annotations

import socket
from functools import lru_cache

from mori_mp.shared.errors import StartupError
from mori_mp.shared.listening import cannot_listen

AUTO_HOSTS = frozenset({"", "auto", "*", "0.0.0.0", "::"})


@lru_cache(maxsize=256)
def resolve_host(host: str | None) -> str:
    """Return host, or this machine's address on its default route where host is an `auto` word.

    Sender and receiver of one machine resolve `auto` alike, which is how a receiver whose sender_host is
    `auto` finds its sender.
    """
    if host is not None and host.strip().lower() not in AUTO_HOSTS:
        return host.strip()
    return local_address()


@lru_cache(maxsize=1)
def local_address() -> str:
    """Return the source address of this machine's default route, or loopback if it has none.

    Connecting a UDP socket sends nothing; it only makes the kernel choose a route. Looked up once, since
    get() asks each time.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 80))
            return str(probe.getsockname()[0])
        except OSError:
            pass
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def check_bindable(host: str, port: int, key: str = "zmq_port") -> None:
    """Raise StartupError when nothing could listen on host:port now. Port 0 is always to be had.

    key: the configuration key that the port comes from.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As a listener would: connections of an earlier one that linger do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as exc:
        raise StartupError(cannot_listen(host, port, exc.errno, exc.strerror or str(exc), key)) from exc
