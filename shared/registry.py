"""The connectors of this host, as their runtime directories tell: a card, `connector.json`, in each.

Theory of operation. A stage that starts a control process writes a card into its runtime directory: who it
is, where it listens, which CPUs its children were given. Two kinds of readers use it: tools (`mori-mp top`),
and other stages that are about to plan their own CPUs and keep clear of what is taken. Planning is therefore
done under a lock on the base directory, which the kernel drops with its holder, and leaves no file behind:

    planning(base):  read the other cards -> plan -> write one's own card

A card counts while its stage lives: the pid with the start time that the card names, so that a reused pid
does not bring a dead connector back. Cards are small JSON files, replaced whole; one that cannot be read is
passed over with a debug line, since its writer may be ending at this moment.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from mori_mp.shared.errors import PinningError, StartupError
from mori_mp.shared.topology import parse_cpulist

logger = logging.getLogger(__name__)

VERSION = 1
CARD = "connector.json"
HEALTH_SOCKET = "health.sock"
MAX_CARD_BYTES = 64 << 10
MAX_HEALTH_BYTES = 1 << 20
LOCK_SECONDS = 5.0
_LOCK_STEP_SECONDS = 0.01


class PlanCard(msgspec.Struct, frozen=True, kw_only=True):
    """The CPU plan of a connector's children: kernel cpulists, None where a process is not pinned."""

    control: str | None
    workers: list[str | None]
    node: int | None
    degraded: bool
    reasons: list[str]


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What a connector says of itself. Times are Unix seconds, sizes bytes.

    serving: its control process and workers have been up; before that it is starting.
    """

    version: int = VERSION
    stage_id: int
    role: str
    pid: int
    start_ticks: int
    started: float
    engine: str
    endpoint: str
    serving: bool
    worker_mode: str
    pool_device: str
    pool_size: int
    plan: PlanCard


class Found(msgspec.Struct, frozen=True):
    """A card and the runtime directory that it lies in."""

    folder: Path
    card: Card

    @property
    def health_socket(self) -> Path:
        """Where the control process of this connector tells its state."""
        return self.folder / HEALTH_SOCKET


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces
    return None if fields[0] == "Z" else int(fields[19])


def write(folder: Path, card: Card) -> None:
    """Write or replace the card of a runtime directory; nobody ever reads half of it. Raises StartupError."""
    fresh = folder / f"{CARD}.new"
    try:
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(card), indent=1) + b"\n")
        fresh.replace(folder / CARD)
    except OSError as exc:
        raise StartupError(f"{folder / CARD} cannot be written: {exc}; set another runtime_dir") from exc


def live(base: Path) -> list[Found]:
    """Find the connectors below a base directory whose stage is alive, by stage, the oldest first.

    A base directory of another user holds none: its cards could say anything. Root may look everywhere.
    """
    try:
        if os.getuid() not in (0, base.stat().st_uid):
            logger.warning("%s belongs to another user: passed over", base)
            return []
        folders = sorted(entry for entry in base.iterdir() if entry.name.partition("-")[0].isdigit())
    except OSError:
        return []
    found = [Found(folder, card) for folder in folders if (card := _read(folder)) is not None]
    found = [each for each in found if start_ticks(each.card.pid) == each.card.start_ticks]
    return sorted(found, key=lambda each: (each.card.stage_id, each.card.started))


def _read(folder: Path) -> Card | None:
    try:
        with open(folder / CARD, "rb") as file:
            card = msgspec.json.decode(file.read(MAX_CARD_BYTES), type=Card)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as exc:
        logger.debug("%s is passed over: %s", folder / CARD, exc)
        return None
    return card if card.version == VERSION else None


def taken_cpus(base: Path, but: Path | None = None) -> frozenset[int]:
    """Return the CPUs in the plans of the live connectors below base, one directory left out."""
    taken: set[int] = set()
    for found in live(base):
        if found.folder == but:
            continue
        plan = found.card.plan
        for cpus in (plan.control, *plan.workers):
            try:
                taken |= parse_cpulist(cpus or "")
            except PinningError as exc:
                logger.warning("%s: %s", found.folder / CARD, exc)
    return frozenset(taken)


@contextmanager
def planning(base: Path) -> Iterator[bool]:
    """Hold the lock under which connectors plan their CPUs; yields False if it was not to be had in time.

    Whoever goes on without it may choose the CPUs that another connector is choosing now; it must say so.
    """
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while (held := _try_lock(fd)) is None and time.monotonic() < deadline:
            time.sleep(_LOCK_STEP_SECONDS)  # flock() has no time-out of its own
        yield bool(held)
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool | None:
    """Take the lock; None: another has it, False: this file system has no such locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as exc:
        logger.warning("cannot lock the base of runtime directories: %s", exc)
        return False
    return True


def _timeval(seconds: float) -> bytes:
    microseconds = max(1, int(seconds * 1e6))
    return struct.pack("ll", microseconds // 1_000_000, microseconds % 1_000_000)


def read_health(socket_path: Path, timeout: float) -> dict[str, Any]:
    """Read the health document of a control process (docs/health-schema.md).

    Raises OSError when nobody listens there or the answer does not come within timeout seconds, ValueError
    when it is no such document.
    """
    deadline = time.monotonic() + timeout
    text = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        # A non-blocking connect() fails at once where the listener's queue is full; a blocking one waits.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout))
        try:
            client.connect(os.fspath(socket_path))
        except BlockingIOError:
            raise TimeoutError("timed out in the queue") from None
        client.settimeout(max(0.001, deadline - time.monotonic()))
        while part := client.recv(1 << 16):
            text += part
            if len(text) > MAX_HEALTH_BYTES:
                raise ValueError(f"{socket_path} tells more than {MAX_HEALTH_BYTES} bytes")
            client.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        document = msgspec.json.decode(text)
    except msgspec.DecodeError as exc:
        raise ValueError(f"{socket_path} tells no JSON document: {exc}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{socket_path} tells no JSON object")
    return document
