"""What one get() asks for, read from its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mori_mp.endpoint import resolve_host
from mori_mp.shared.errors import SenderUnknown
from mori_mp.shared.wire import MAX_PAYLOAD_BYTES, edge_name, internal_key


class Wanted(NamedTuple):
    """One get(): internal key, edge, sender endpoint, and the size in bytes if the metadata has it."""

    key: str
    edge: str
    host: str
    port: int
    size: int
    fast_path: bool


def read_wanted(
    from_stage: str, to_stage: str, key: str, metadata: Any, sender: tuple[str | None, int | None]
) -> tuple[Wanted, str]:
    """Return what a get() asks for, and what is wrong with its metadata, "" for nothing.

    metadata: as get() takes it. sender: host and port to ask where it names none.
    Raises SenderUnknown.
    """
    found: Mapping[str, Any] = metadata if isinstance(metadata, (dict, Mapping)) else {}
    nested = found.get(key)
    if nested is not None and isinstance(nested, Mapping):
        found = nested
    host, port = found.get("source_host"), found.get("source_port")
    if not port:
        host, port = sender
    if not port:
        raise SenderUnknown(
            f"get of {key!r} ({from_stage} -> {to_stage}): no sender is known. Pass put()'s metadata, "
            f"set sender_host and sender_zmq_port, or call update_sender_info()."
        )
    size, odd = found.get("data_size") or 0, ""
    if not isinstance(size, int) or not 0 <= size <= MAX_PAYLOAD_BYTES:
        odd = f"get of {key!r}: its metadata names {size!r:.40} bytes, which is ignored"
        size = 0
    wanted = Wanted(
        internal_key(key, from_stage, to_stage),
        edge_name(from_stage, to_stage),
        resolve_host(host),
        int(port),
        int(size),
        bool(found.get("is_fast_path", False)),
    )
    return wanted, odd
