"""Why an address cannot be listened on, in words: for the control process and whoever asks beforehand."""

from __future__ import annotations

import errno
import socket


def cannot_listen(host: str, port: int, code: int | None, reason: str, key: str = "zmq_port") -> str:
    """The message for a bind() of host:port that failed with an errno and its text; key sets the port."""
    where = f"cannot listen on {host}:{port}"
    if code == errno.EADDRINUSE:
        return f"{where}: {reason}. Another program has this port; change {key}."
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as exc:
        return f"{where}: {host!r} does not resolve ({exc.strerror}); set host to an address of this machine."
    if code in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"{where}: {host} is not an address of this machine; change host."
    return f"{where}: {reason}."
