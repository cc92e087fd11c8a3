"""Choosing cores for the processes of one connector: the automatic half of pinning.py, pure functions only.

The NUMA node is the GPU's, else the NIC's. The physical core of the engine's main thread is blocked out, and
every process gets a physical core of its own, counted down from the high end of one L3 domain, because
engines and interrupts gather at the low end. GPUs of one node start at different L3 domains, so that
connectors which do not know of each other seldom collide. With too few cores this steps down, recording why:

    1. one L3, a core for each process
    2. one L3, the control process on the second hardware thread of the last worker's core
    3. several L3s of the node, a core for each process; else the control process on the last worker's core
    4. the same with the cores of other nodes
    5. no pinning: likewise where fewer than 4 CPUs are allowed or a CPU quota tells of a shared pool, because
       a crowded or throttled CPU is better chosen by the scheduler

"force" replaces step 5 by several processes to a core. A reserved core is never chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mori_mp.shared.errors import PinningError
from mori_mp.shared.topology import Topology, device_node, format_cpulist, normalize_bdf

MIN_CPUS = 4
_FAR = 255  # the distance of a node whose distance firmware does not give
_SHARED_CORE = "too few cores: the control process shares the core of the last worker"


@dataclass
class Story:
    """Collects reasons; a step down also marks the plan as degraded."""

    reasons: list[str] = field(default_factory=list)
    degraded: bool = False

    def note(self, reason: str) -> None:
        self.reasons.append(reason)

    def degrade(self, reason: str) -> None:
        self.reasons.append(reason)
        self.degraded = True


@dataclass(frozen=True)
class Wanted:
    """Which processes need a place: the control process or not, and how many workers."""

    control: bool
    workers: int

    @property
    def cores(self) -> int:
        return self.workers + self.control


@dataclass(frozen=True)
class Site:
    """Where to look. `rank`: how many L3 domains to skip, counted from the high end of the node."""

    node: int | None
    rank: int = 0


@dataclass(frozen=True)
class _Unit:
    """A place for one process: a physical core, or one hardware thread of it."""

    cpus: frozenset[int]
    core: frozenset[int]
    node: int | None
    domain: frozenset[int]  # CPUs behind one L3
    whole: bool  # no thread of the core is left to strangers
    isolated: bool

    @property
    def prime(self) -> bool:
        return self.whole and not self.isolated


# ------------------------------------------------------------------------------------- the node
def _found_devices(
    topology: Topology, gpu_bdf: str | None, nic: str | None, story: Story
) -> list[tuple[int, str]]:
    """Return (node, PCI address) of each device whose node is known, the GPU first."""
    devices: list[tuple[str, str]] = []
    if gpu_bdf:
        bdf = normalize_bdf(gpu_bdf)
        devices.append((f"GPU {bdf}", bdf))
    for item in (nic or "").split(","):
        if name := item.strip().partition(":")[0]:  # a port number may follow
            devices.append((f"NIC {name}", topology.nics.get(name, "")))
    found: list[tuple[int, str]] = []
    for label, bdf in devices:
        node, how = device_node(topology, bdf) if bdf else (None, "sysfs knows no such RDMA device on PCI")
        if node is None:
            story.note(f"{label}: NUMA node unknown, {how}")
        else:
            story.note(f"{label}: node {node}, from {how}")
            found.append((node, bdf))
    if len({node for node, _ in found}) > 1:
        story.note(f"the devices are on different nodes: node {found[0][0]} counts")
    return found


def locate(
    topology: Topology,
    gpu_bdf: str | None,
    nic: str | None,
    numa_node: int | None,
    reserve: frozenset[int],
    story: Story,
) -> Site:
    """Find the node to pin to. PinningError for an explicit node that is offline or has no allowed CPU."""
    found = _found_devices(topology, gpu_bdf, nic, story)
    if numa_node is not None:
        cpus = topology.nodes.get(numa_node)
        if cpus is None:
            online = format_cpulist(topology.nodes) or "none known"
            raise PinningError(f"NUMA node {numa_node} is not online (online nodes: {online})")
        if not cpus & topology.allowed:
            raise PinningError(
                f"NUMA node {numa_node} (CPUs {format_cpulist(cpus) or 'none'}) has none of the CPUs that "
                f"this process may use ({format_cpulist(topology.allowed)}). Widen the cpuset or drop it."
            )
        story.note(f"node {numa_node}: as asked")
        found.insert(0, (numa_node, next((bdf for node, bdf in found if node == numa_node), "")))
    if found:
        node, bdf = found[0]
        alike = topology.gpus if bdf in topology.gpus else tuple(topology.nics.values())
        peers = sorted({peer for peer in alike if device_node(topology, peer)[0] == node})
        return Site(node, peers.index(bdf) if bdf in peers else 0)
    if gpu_bdf or nic:
        story.degrade("no device's NUMA node is known: CPUs are chosen without regard to NUMA")
        return Site(None)
    engine = {topology.cpus[cpu].node for cpu in reserve if cpu in topology.cpus}
    populated: set[int | None] = {node for node, cpus in topology.nodes.items() if cpus}
    for nodes, why in (
        (engine, "the engine's main thread runs there"),
        (populated, "no other node has CPUs"),
    ):
        only = next(iter(nodes)) if len(nodes) == 1 else None
        if only is not None:
            story.note(f"node {only}: {why}")
            return Site(only)
    story.note("no GPU, NIC or NUMA node is given: CPUs are chosen without regard to NUMA")
    return Site(None)


# ------------------------------------------------------------------------------------- the cores
def _domain(topology: Topology, cpu: int) -> frozenset[int]:
    """The L3 domain of a CPU. One that spans a single core (virtual machines) says nothing: take the node."""
    entry = topology.cpus[cpu]
    if entry.l3 is not None and not entry.l3 <= entry.core:
        return entry.l3
    return frozenset(topology.cpus) if entry.node is None else topology.nodes[entry.node]


def _units(topology: Topology, reserve: frozenset[int], taken: frozenset[int], smt: bool) -> list[_Unit]:
    """Return the free places, best first: whole cores before others, then from the high end."""
    units: list[_Unit] = []
    for core in {topology.cpus[cpu].core for cpu in topology.allowed}:
        threads = (core & topology.allowed) - taken
        if core & reserve or not threads or (core & taken and not smt):
            continue
        first = min(threads)
        isolated = bool(threads & topology.isolated)
        # The scheduler balances nothing on isolated CPUs: a second one in the set would stay idle.
        place = frozenset({first}) if isolated else threads
        places = [frozenset({cpu}) for cpu in threads] if smt else [place]
        node, domain = topology.cpus[first].node, _domain(topology, first)
        units += [_Unit(cpus, core, node, domain, smt or threads == core, isolated) for cpus in places]
    return sorted(units, key=lambda unit: (not unit.prime, -min(unit.core), -min(unit.cpus)))


def _groups(topology: Topology, units: Sequence[_Unit], site: Site) -> list[list[_Unit]]:
    """Units by L3 domain: near nodes first, in each node from the high end after `rank` domains."""

    def order(node: int | None) -> tuple[int, int]:
        high_first = 1 if node is None else -node
        if site.node is None or node == site.node:
            return 0, high_first
        return _FAR if node is None else topology.distances.get((site.node, node), _FAR), high_first

    groups: list[list[_Unit]] = []
    for node in sorted({unit.node for unit in units}, key=order):
        # Rotated over all domains of the node, allowed or not, so that every process counts alike.
        cpus = frozenset(topology.cpus) if node is None else topology.nodes[node]
        domains = sorted({_domain(topology, cpu) for cpu in cpus}, key=lambda d: (-min(d), len(d)))
        start = site.rank % len(domains)
        for domain in domains[start:] + domains[:start]:
            group = [unit for unit in units if unit.node == node and unit.domain == domain]
            if group:
                groups.append(group)
    return groups


def _assign(units: Sequence[_Unit], want: Wanted, share: bool) -> list[_Unit] | None:
    """Return a unit for each process, the control process's first, or None when there are too few."""
    if not share:
        return list(units[: want.cores]) if len(units) >= want.cores else None
    if not want.control or not 0 < want.workers <= len(units):
        return None
    return [units[want.workers - 1], *units[: want.workers]]


def _fit(groups: Sequence[Sequence[_Unit]], want: Wanted, story: Story) -> list[_Unit] | None:
    """Steps 1 to 3 of the module's docstring over one pool of cores."""
    by_quality = sorted(groups, key=lambda group: sum(unit.prime for unit in group) < want.cores)
    for group in by_quality:
        if (units := _assign(group, want, share=False)) is not None:
            return units
    for group in by_quality:
        units = _assign(group, want, share=True)
        if units is not None and len(units[0].cpus) > 1:
            story.degrade(_SHARED_CORE)
            return units
    # Fill near nodes first, then large L3s (to span few), and take broken cores last.
    nodes = list(dict.fromkeys(group[0].node for group in groups))
    by_size = sorted(groups, key=lambda group: (nodes.index(group[0].node), -len(group)))
    flat = sorted((unit for group in by_size for unit in group), key=lambda unit: not unit.prime)
    for share in (False, True):
        if (units := _assign(flat, want, share)) is not None:
            domains = len({unit.domain for unit in units})
            if domains > 1:
                story.degrade(f"no L3 domain has {want.cores} free cores: spread over {domains} domains")
            if share:
                story.degrade(_SHARED_CORE)
            return units
    return None


def _place(groups: list[list[_Unit]], want: Wanted, site: Site, story: Story) -> list[_Unit] | None:
    local = [group for group in groups if site.node is None or group[0].node == site.node]
    chosen = _fit(local, want, story)
    if chosen is None and len(local) < len(groups):
        chosen = _fit(groups, want, story)
        if chosen is not None:
            free = sum(map(len, local))
            story.degrade(
                f"node {site.node} has {free} free cores for {want.cores} processes: other nodes used"
            )
    return chosen


def _why_not(topology: Topology) -> str | None:
    """Why pinning would hurt here, if it would."""
    allowed = topology.allowed
    if len(allowed) < MIN_CPUS:
        return f"{len(allowed)} allowed CPUs ({format_cpulist(allowed)}) are fewer than {MIN_CPUS}"
    if topology.quota is not None and topology.quota < len(allowed):
        return f"a quota of {topology.quota:g} CPUs on {len(allowed)} allowed ones tells of a shared pool"
    return None


def automatic(
    topology: Topology,
    want: Wanted,
    site: Site,
    *,
    reserve: frozenset[int],
    taken: frozenset[int],
    smt: bool,
    force: bool,
    story: Story,
) -> list[frozenset[int] | None]:
    """Return a CPU set for each wanted process, the control process's first; None is "not pinned"."""
    obstacle = _why_not(topology)
    if obstacle is not None:
        story.degrade(obstacle + (": pinned by force" if force else ": not pinned"))
        if not force:
            return [None] * want.cores
    units = _units(topology, reserve, taken, smt)
    chosen = _place(_groups(topology, units, site), want, site, story)
    if chosen is None and force:
        places = units or _units(topology, reserve, frozenset(), smt)
        flat = [unit for group in _groups(topology, places, site) for unit in group]
        if flat:
            chosen = [flat[index % len(flat)] for index in range(want.cores)]
            story.degrade(f"{want.cores} processes on {len(set(chosen))} cores by force")
    if chosen is None:
        story.degrade(
            f"{len(units)} free cores for {want.cores} processes: not pinned (allowed CPUs "
            f"{format_cpulist(topology.allowed)}, reserved {format_cpulist(reserve) or 'none'}, "
            f"taken {format_cpulist(taken) or 'none'})"
        )
        return [None] * want.cores
    for unit in dict.fromkeys(chosen):
        cpus = format_cpulist(unit.cpus)
        if unit.isolated:
            story.note(f"CPU {cpus} is isolated from load balancing: one CPU for the process, not its core")
        elif not unit.whole:
            story.degrade(f"only CPUs {cpus} of the core {format_cpulist(unit.core)} are allowed")
    return [unit.cpus for unit in chosen]
