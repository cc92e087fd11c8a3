"""Which CPUs the control process and the transfer workers of one connector run on.

`plan` is a pure function of a Topology and of what the operator asked for. Explicit CPU lists win; they are
checked against the allowed CPUs, because sched_setaffinity drops what lies outside without a word. Everything
else is chosen by placement.py, whose docstring gives the policy. `resolve_request` merges the places in which
an operator may ask for something. A child applies its part with affinity.pin_self.

In a plan None means "inherit": that process is not pinned. Text forms spell the same as "none".

`python -m mori_mp.shared.pinning` prints a plan (pin_cli.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mori_mp.shared.errors import PinningError
from mori_mp.shared.placement import Site, Story, Wanted, automatic, locate
from mori_mp.shared.topology import Topology, format_cpulist, parse_cpulist

Mode = Literal["auto", "off", "force"]

_INHERIT = "none"
_JSON_VERSION = 1


# ----------------------------------------------------------------------------------------- plans
@dataclass(frozen=True)
class Plan:
    """CPU sets for one connector's processes.

    `node` is the NUMA node it was made for. `degraded`: it falls short of a whole core for each process, in
    one L3, on that node; `reasons` say how, and what else the planner saw.
    """

    control: frozenset[int] | None
    workers: tuple[frozenset[int] | None, ...]
    node: int | None
    degraded: bool
    reasons: tuple[str, ...]

    @classmethod
    def unpinned(cls, workers: int, reason: str) -> Plan:
        """Return a degraded plan that pins nothing, for example because the topology cannot be read."""
        return cls(None, (None,) * workers, None, True, (reason,))

    @property
    def cpus(self) -> frozenset[int]:
        """Every CPU that some process is pinned to; empty when nothing is pinned."""
        return frozenset[int]().union(*(cpus for cpus in (self.control, *self.workers) if cpus is not None))

    def to_json(self) -> str:
        """Return the plan as a JSON object; CPU sets are kernel CPU lists, null is "not pinned"."""
        document = {
            "version": _JSON_VERSION,
            "control": None if self.control is None else format_cpulist(self.control),
            "workers": [None if cpus is None else format_cpulist(cpus) for cpus in self.workers],
            "node": self.node,
            "degraded": self.degraded,
            "reasons": list(self.reasons),
        }
        return json.dumps(document, indent=2)

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> Plan:
        """Parse what to_json() wrote. PinningError names `source` and the field that is wrong."""
        try:
            document = json.loads(text)
        except ValueError as err:
            raise PinningError(f"{source} is not JSON: {err}") from None
        if not isinstance(document, dict) or document.get("version") != _JSON_VERSION:
            raise PinningError(f"{source} is not a pinning plan of version {_JSON_VERSION}")

        def field(key: str, *kinds: type) -> Any:
            value = document.get(key, ...)
            if type(value) not in kinds:
                raise PinningError(f"{source}: field {key!r} is {'absent' if value is ... else repr(value)}")
            return value

        def cpus(value: object, key: str) -> frozenset[int] | None:
            if value is None:
                return None
            if not isinstance(value, str) or not value.strip():
                raise PinningError(f"{source}: field {key!r} holds {value!r}, neither a CPU list nor null")
            return parse_cpulist(value)

        return cls(
            control=cpus(field("control", str, type(None)), "control"),
            workers=tuple(cpus(item, "workers") for item in field("workers", list)),
            node=field("node", int, type(None)),
            degraded=field("degraded", bool),
            reasons=tuple(str(item) for item in field("reasons", list)),
        )


def format_sets(sets: Iterable[frozenset[int] | None]) -> str:
    """Spell CPU sets as MORI_MP_WORKER_CPUS does: ({31}, None) -> "31|none"."""
    return "|".join(_INHERIT if cpus is None else format_cpulist(cpus) for cpus in sets)


def parse_sets(text: str, name: str) -> tuple[frozenset[int] | None, ...]:
    """Parse "31|28-29|none"; "" is (). PinningError names `name` and the text."""
    sets: list[frozenset[int] | None] = []
    for item in text.split("|") if text.strip() else ():
        try:
            cpus = None if item.strip().lower() == _INHERIT else parse_cpulist(item)
        except PinningError as err:
            raise PinningError(f"{name}={text!r}: {err}") from None
        if cpus is not None and not cpus:
            raise PinningError(f"{name}={text!r} has an empty CPU set; write {_INHERIT!r} for 'do not pin'")
        sets.append(cpus)
    return tuple(sets)


# -------------------------------------------------------------------------------------- planning
def _explicit(
    topology: Topology, name: str, text: str, reserve: frozenset[int], story: Story
) -> tuple[frozenset[int] | None, ...]:
    sets = parse_sets(text, name)
    asked = frozenset[int]().union(*(cpus for cpus in sets if cpus is not None))
    outside = asked - topology.allowed
    if outside:
        raise PinningError(
            f"{name}={text!r}: CPU {format_cpulist(outside)} is not among the CPUs that this process may use "
            f"({format_cpulist(topology.allowed)}), and the kernel would drop it silently. "
            f"Correct {name}, or widen the process's affinity and cpuset."
        )
    if sets:
        story.note(f"{name}={text}: as asked")
    if asked & reserve:
        story.note(f"{name} includes CPU {format_cpulist(asked & reserve)} of the engine's main thread")
    return sets


def plan(
    topology: Topology,
    *,
    workers: int,
    gpu_bdf: str | None = None,
    nic: str | None = None,
    numa_node: int | None = None,
    reserve: frozenset[int] = frozenset(),
    smt: bool = False,
    control_cpus: str = "",
    worker_cpus: str = "",
    mode: Mode = "auto",
    taken: frozenset[int] = frozenset(),
) -> Plan:
    """Plan the CPUs of one control process and `workers` transfer workers.

    gpu_bdf: PCI address.
    nic: RDMA device name, or several separated by commas (the first whose node is known counts).
    numa_node: overrides the devices' node.
    reserve: CPUs of the engine's main thread; their cores are never chosen.
    taken: CPUs in other connectors' plans; their cores (smt: those threads) are not chosen.
    smt: hand out single hardware threads instead of whole cores.
    control_cpus, worker_cpus: "31", "30|29" (one set a worker, or one for all), "none"; they win always.
    mode: "off" pins what is explicit only; "force" pins where "auto" would not.

    Raises PinningError for an explicit CPU outside the allowed ones, a NUMA node that is offline or has no
    allowed CPU, malformed text, or a number of worker sets that is neither 1 nor `workers`.
    """
    if workers < 0:
        raise PinningError(f"workers={workers}: a connector cannot have fewer than 0 transfer workers")
    if mode not in ("auto", "off", "force"):
        raise PinningError(f"pin mode {mode!r} is not auto, off or force")
    story = Story()
    control = _explicit(topology, "control_cpus", control_cpus, reserve, story)
    sets = _explicit(topology, "worker_cpus", worker_cpus, reserve, story)
    if len(control) > 1:
        raise PinningError(f"control_cpus={control_cpus!r}: {len(control)} CPU sets for one control process")
    if len(sets) > 1 and len(sets) != workers:
        raise PinningError(f"worker_cpus={worker_cpus!r}: {len(sets)} CPU sets for {workers} workers")
    if unknown := reserve - frozenset(topology.cpus):
        story.note(f"reserved CPU {format_cpulist(unknown)} is not online")
    want = Wanted(control=not control, workers=0 if sets else workers)
    site = Site(None)
    placed: list[frozenset[int] | None] = [None] * want.cores
    if mode == "off":
        story.note("pinning is off")
    else:
        site = locate(topology, gpu_bdf, nic, numa_node, reserve, story)
        if want.cores:
            placed = automatic(
                topology,
                want,
                site,
                reserve=reserve,
                taken=taken.union(*(cpus for cpus in (*control, *sets) if cpus is not None)),
                smt=smt,
                force=mode == "force",
                story=story,
            )
    return Plan(
        control=control[0] if control else placed[0],
        workers=(sets * workers if len(sets) == 1 else sets) or tuple(placed[want.control :]),
        node=site.node,
        degraded=story.degraded,
        reasons=(*topology.reasons, *story.reasons),
    )


# -------------------------------------------------------------------------------------- requests
@dataclass(frozen=True)
class PinRequest:
    """What the operator asked for, after precedence. `sources` say where each part comes from."""

    mode: Mode = "auto"
    control_cpus: str = ""
    worker_cpus: str = ""
    numa_node: int | None = None
    sources: tuple[str, ...] = ()

    def plan(
        self,
        topology: Topology,
        *,
        workers: int,
        gpu_bdf: str | None = None,
        nic: str | None = None,
        reserve: frozenset[int] = frozenset(),
        smt: bool = False,
        taken: frozenset[int] = frozenset(),
    ) -> Plan:
        """Call plan() with this request; its sources come first among the plan's reasons."""
        made = plan(
            topology,
            workers=workers,
            gpu_bdf=gpu_bdf,
            nic=nic,
            numa_node=self.numa_node,
            reserve=reserve,
            smt=smt,
            control_cpus=self.control_cpus,
            worker_cpus=self.worker_cpus,
            mode=self.mode,
            taken=taken,
        )
        return replace(made, reasons=(*self.sources, *made.reasons))


def _cpus_text(value: object, name: str) -> str:
    """Normalize a CPU list from YAML or the environment; a lone CPU in YAML is an int."""
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "auto")):
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise PinningError(f"{name}={value!r} is not a CPU list such as 28-31 or 31|29")
    return format_sets(parse_sets(str(value), name))


def _node_number(value: object, name: str) -> int | None:
    text = str(value).strip().lower()
    if value is None or text in ("", "auto", "-1"):
        return None
    if isinstance(value, bool) or not (text.isascii() and text.isdecimal()):
        raise PinningError(f"{name}={value!r} is not a NUMA node number (-1 is automatic)")
    return int(text)


def _pin_value(value: object, name: str) -> PinRequest:
    """Read auto, off, force or a plan file, which counts as explicit CPU lists."""
    text = "off" if value is False else str(value if value is not None else "auto").strip()  # YAML: bare off
    word = text.lower()
    if word in ("", "auto"):
        return PinRequest()
    if word == "off":
        return PinRequest(mode="off")
    if word == "force":
        return PinRequest(mode="force")
    if "/" not in text and not word.endswith(".json"):
        raise PinningError(
            f"{name}={text!r} is not auto, off, force or a plan file (with a / or ending in .json)"
        )
    try:
        made = Plan.from_json(Path(text).read_text(encoding="utf-8"), source=f"{name}={text}")
    except (OSError, UnicodeDecodeError) as err:
        raise PinningError(f"{name}={text!r}: the plan file cannot be read ({err})") from None
    return PinRequest(control_cpus=format_sets((made.control,)), worker_cpus=format_sets(made.workers))


def resolve_request(values: Mapping[str, object], env: Mapping[str, str]) -> PinRequest:
    """Merge the YAML extra with the environment, each field from the strongest place that sets it.

    Strongest first: control_cpus, worker_cpus and numa_node in `values`; pin in `values`;
    MORI_MP_CONTROL_CPUS, MORI_MP_WORKER_CPUS and MORI_MP_NUMA_NODE; MORI_MP_PIN. "auto", "", None and node -1
    set nothing, so they let weaker places speak; "off" silences them.

    Raises PinningError naming the place and the text.
    """

    def lists(source: Mapping[str, object], names: tuple[str, str, str], where: str) -> PinRequest:
        control, workers, node = names
        return PinRequest(
            control_cpus=_cpus_text(source.get(control), where + control),
            worker_cpus=_cpus_text(source.get(workers), where + workers),
            numa_node=_node_number(source.get(node), where + node),
        )

    yaml = "YAML extra "
    variables = ("MORI_MP_CONTROL_CPUS", "MORI_MP_WORKER_CPUS", "MORI_MP_NUMA_NODE")
    result = PinRequest()
    for where, layer in (
        ("the YAML extra", lists(values, ("control_cpus", "worker_cpus", "numa_node"), yaml)),
        ("pin in the YAML extra", _pin_value(values.get("pin"), yaml + "pin")),
        ("MORI_MP_*", lists(env, variables, "")),
        ("MORI_MP_PIN", _pin_value(env.get("MORI_MP_PIN"), "MORI_MP_PIN")),
    ):
        news: dict[str, Any] = {}
        for name, unset in (("mode", "auto"), ("control_cpus", ""), ("worker_cpus", ""), ("numa_node", None)):
            value = getattr(layer, name)
            if getattr(result, name) == unset and value != unset:
                news[name] = value
        said = tuple(f"{name} is set by {where}" for name in news)
        result = replace(result, **news, sources=(*result.sources, *said))
        if result.mode == "off":
            break
    return result


if __name__ == "__main__":
    from mori_mp.shared.pin_cli import main

    raise SystemExit(main())
