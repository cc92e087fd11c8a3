"""A block of TCP ports that no other pipeline run on this machine will choose.

A run needs one base port and the next few above it (stage numbers are added to it). The block is reserved
by an abstract unix socket named after it, which the kernel drops with the process: two runs can never hold
the same block, and nothing is left over. Each port is also bound once, to skip blocks that anything else
uses. Blocks lie below the ephemeral range, so that outgoing connections do not land in them.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path
from types import TracebackType

from mori_mp.shared.errors import StartupError

BLOCK = 16
_LOWEST = 20000
_DEFAULT_EPHEMERAL = 32768
_ATTEMPTS = 200


class PortBlock:
    """A reserved block; `base` is its first port. Hold it open for as long as the ports are needed."""

    def __init__(self, host: str = "127.0.0.1", reach: int = BLOCK) -> None:
        """Reserve a block of BLOCK ports on an IPv4 or IPv6 address; StartupError when none is free.

        reach: how many ports from base on are to lie below the ephemeral range; not all are reserved.
        """
        ceiling = _ephemeral_start() - reach
        choose = random.SystemRandom()
        for _ in range(_ATTEMPTS):
            base = choose.randrange(_LOWEST, ceiling, BLOCK)
            lock = _reserve(base)
            if lock is None:
                continue
            if all(_is_free(host, port) for port in range(base, base + BLOCK)):
                self.base = base
                self._lock = lock
                return
            lock.close()
        raise StartupError(
            f"no {BLOCK} consecutive free ports on {host} between {_LOWEST} and {ceiling}: "
            f"give one with --set zmq_port=PORT"
        )

    def close(self) -> None:
        """Let go of the block."""
        self._lock.close()

    def __enter__(self) -> PortBlock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


def _reserve(base: int) -> socket.socket | None:
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0mori-mp-pipeline-ports-{base}")
    except OSError:
        lock.close()
        return None
    return lock


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _ephemeral_start() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:
        return _DEFAULT_EPHEMERAL
    start = int(text.split()[0])
    return start if start > _LOWEST + 64 * BLOCK else 65536
