"""Moving the children of a running connector to other CPUs: `pin_topology.sh --apply`, `mori-mp pin --apply`.

Affinity set from outside pins one thread only, so every thread of a process is set, in rounds until a round
finds no new one; threads that start later inherit their starter's mask. The masks are read back, because the
kernel silently drops CPUs outside a process's cpuset. It takes the same user (or CAP_SYS_NICE).

The connector's card is rewritten, so that others keep clear of its new CPUs. Its children's set-up is not:
one that dies and is replaced starts on the CPUs that it was first given.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mori_mp.shared import registry
from mori_mp.shared.errors import PinningError
from mori_mp.shared.pinning import Plan
from mori_mp.shared.registry import Found, PlanCard
from mori_mp.shared.topology import format_cpulist

_ANSWER_SECONDS = 2.0
_ROUNDS = 10


@dataclass(frozen=True)
class Children:
    """The running children of a connector; workers in the order of their indices."""

    found: Found
    control: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Moved:
    """What became of one process. `effective` is the union of its threads' masks, read back."""

    name: str
    pid: int
    threads: int
    asked: frozenset[int] | None
    effective: frozenset[int]

    @property
    def done(self) -> bool:
        """Tell whether it has what was asked for."""
        return self.asked is None or self.effective == self.asked


def find(target: str, base: Path) -> Children:
    """Find the one connector that `target` names: its stage's or control process's pid, or its stage id.

    Raises PinningError when there is none, or more than one, or it has no processes of its own.
    """
    if not (target.isascii() and target.isdecimal()):
        raise PinningError(f"--apply {target!r}: neither a pid nor a stage id")
    number = int(target)
    every = [(found, _children(found)) for found in registry.live(base)]
    hits = [
        (found, children)
        for found, children in every
        if number in (found.card.stage_id, found.card.pid, children.control if children else None)
    ]
    if len(hits) != 1:
        told = ", ".join(f"stage {f.card.stage_id} pid {f.card.pid}" for f, _ in hits or every) or "none"
        what = "several connectors" if hits else "no connector"
        raise PinningError(f"--apply {target}: {what} below {base} (found: {told}); name one by its pid")
    found, children = hits[0]
    if found.card.worker_mode == "thread":
        raise PinningError(
            f"--apply {target}: stage {found.card.stage_id} runs its workers as threads "
            f"(worker_mode: thread); they share the stage's CPUs"
        )
    if children is None:
        raise PinningError(
            f"--apply {target}: the control process of stage {found.card.stage_id} does not answer at "
            f"{found.health_socket}, so its workers are not known; try again, or see mori-mp health"
        )
    return children


def _children(found: Found) -> Children | None:
    try:
        document = registry.read_health(found.health_socket, _ANSWER_SECONDS)
        listed = document["processes"]
        (control,) = [entry["pid"] for entry in listed if entry["role"] == "control"]
        workers = {e["index"]: e["pid"] for e in listed if e["role"] == "worker" and e["pid"] is not None}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Children(found, control, tuple(workers[index] for index in sorted(workers)))


def apply(children: Children, made: Plan) -> list[Moved]:
    """Pin a connector's processes as planned, and note it in the connector's card.

    Raises PinningError when the plan is for another number of workers or a process cannot be pinned.
    """
    if len(made.workers) != len(children.workers):
        raise PinningError(
            f"the plan has {len(made.workers)} workers, stage {children.found.card.stage_id} runs "
            f"{len(children.workers)}; plan with --workers {len(children.workers)}"
        )
    moved = [_move("control", children.control, made.control)]
    moved += [
        _move(f"worker {index}", pid, cpus)
        for index, (pid, cpus) in enumerate(zip(children.workers, made.workers, strict=True))
    ]
    card = children.found.card
    sets = [None if cpus is None else format_cpulist(cpus) for cpus in (made.control, *made.workers)]
    news = PlanCard(
        control=sets[0],
        workers=sets[1:],
        node=made.node,
        degraded=made.degraded,
        reasons=[*made.reasons, "applied to the running processes"],
    )
    registry.write(children.found.folder, msgspec.structs.replace(card, plan=news))
    return moved


def _move(name: str, pid: int, cpus: frozenset[int] | None) -> Moved:
    try:
        threads = _threads(pid)
        if cpus is not None:
            _pin_all(pid, cpus)
            threads = _threads(pid)
        effective = frozenset[int]().union(*(mask for tid in threads if (mask := _mask(tid)) is not None))
    except ProcessLookupError:
        raise PinningError(f"{name} (pid {pid}) has ended") from None
    except PermissionError:
        raise PinningError(
            f"{name} (pid {pid}) belongs to another user: run this as the stage's user, or with CAP_SYS_NICE"
        ) from None
    except OSError as exc:
        raise PinningError(
            f"{name} (pid {pid}) cannot be pinned to {format_cpulist(cpus or ())} ({exc.strerror}): none of "
            f"these CPUs is online and inside its cpuset"
        ) from None
    return Moved(name, pid, len(threads), cpus, effective)


def _pin_all(pid: int, cpus: frozenset[int]) -> None:
    seen: set[int] = set()
    for _ in range(_ROUNDS):
        fresh = set(_threads(pid)) - seen
        if not fresh:
            return
        for tid in fresh:
            try:
                os.sched_setaffinity(tid, cpus)
            except ProcessLookupError:  # this thread has ended
                if tid == pid:
                    raise
        seen |= fresh


def _threads(pid: int) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:
        raise ProcessLookupError from None


def _mask(tid: int) -> set[int] | None:
    try:
        return os.sched_getaffinity(tid)
    except ProcessLookupError:
        return None
