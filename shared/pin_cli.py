"""The command line of pinning: print a plan for this machine or a recorded one, run a command inside it, or
apply it to a running connector.

It changes nothing except in --exec, where this process pins itself before it becomes CMD, and in --apply
(mori_mp.shared.repin, which alone needs mori-mp's dependencies installed). It shows what is chosen
automatically: MORI_MP_* variables are not read (they would echo an earlier answer), only mentioned. Plans and
formats go to standard output, everything said to a human beside them to standard error.

Exit status: 0 ok, 1 usage (or an impossible request), 2 unreadable topology, 3 degraded under --strict.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mori_mp.shared import runtime
from mori_mp.shared.affinity import pin_self
from mori_mp.shared.errors import MoriMPError, PinningError
from mori_mp.shared.pinning import Plan, format_sets, plan
from mori_mp.shared.topology import (
    Topology,
    TopologyError,
    format_cpulist,
    normalize_bdf,
    parse_cpulist,
    read_topology,
)

OK, USAGE, UNREADABLE, DEGRADED = 0, 1, 2, 3
_FORMATS = ("json", "table", "env", "numactl")
_REQUEST_VARIABLES = ("MORI_MP_CONTROL_CPUS", "MORI_MP_WORKER_CPUS", "MORI_MP_NUMA_NODE", "MORI_MP_PIN")
_GPU_FILTERS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def _parser(prog: str) -> _Parser:
    parser = _Parser(
        prog=prog,
        description="Plan the CPUs of a mori-mp connector's control process and transfer workers.",
        allow_abbrev=False,
        epilog="exit status: 0 ok, 1 usage, 2 unreadable topology, 3 degraded plan with --strict",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="plan file for MORI_MP_PIN (default off a terminal)"
    )
    form.add_argument("--table", action="store_true", help="table for people (default on a terminal)")
    form.add_argument("--env", action="store_true", help='export lines for a shell: eval "$(... --env)"')
    form.add_argument("--numactl", action="store_true", help="a numactl prefix with all of the plan's CPUs")
    form.add_argument("--format", choices=_FORMATS, help="the same, as `mori-mp pin` spells it")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="transfer workers (default 2)")
    parser.add_argument("--plan", metavar="FILE", type=Path, help="take this plan file instead of planning")
    parser.add_argument(
        "--force", action="store_true", help="pin even where it is unwise (few CPUs, a quota)"
    )
    parser.add_argument(
        "--gpu",
        metavar="I|BDF",
        help="GPU by number (KFD order on AMD, PCI order on NVIDIA, before *_VISIBLE_DEVICES) or PCI address",
    )
    parser.add_argument("--nic", metavar="DEV", help="RDMA device, as in /sys/class/infiniband")
    parser.add_argument("--reserve", metavar="CPULIST", default="", help="CPUs of the engine's main thread")
    parser.add_argument("--smt", action="store_true", help="hand out hardware threads, not whole cores")
    parser.add_argument(
        "--sysfs-root",
        metavar="DIR",
        type=Path,
        help="read a recorded sysfs tree; what belongs to the process is read from DIR/proc",
    )
    parser.add_argument("--strict", action="store_true", help="exit 3 when the plan is degraded")
    parser.add_argument("--explain", action="store_true", help="say on standard error what was found and why")
    parser.add_argument(
        "--apply",
        metavar="PID|STAGE",
        help="pin the children of a running connector as planned (same user, same container) and check it; "
        "--workers is then as many as it runs",
    )
    parser.add_argument(
        "--runtime-dir",
        metavar="DIR",
        type=Path,
        help="--apply: the connector's runtime_dir (default: as connectors choose it)",
    )
    parser.add_argument(
        "--exec",
        action="store_true",
        dest="run",
        help="last option: -- CMD [ARG...] is run on the plan's CPUs",
    )
    return parser


def _gpu_address(topology: Topology, text: str) -> str:
    if not (text.isascii() and text.isdecimal()):
        return normalize_bdf(text)
    if int(text) >= len(topology.gpus):
        found = ", ".join(topology.gpus) or "none"
        raise PinningError(f"--gpu {text}: sysfs shows {len(topology.gpus)} GPUs ({found})")
    return topology.gpus[int(text)]


def _rows(topology: Topology, made: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("process", "CPUs", "node", "L3 domain")]
    processes = [("control", made.control), *((f"worker {i}", cpus) for i, cpus in enumerate(made.workers))]
    for name, cpus in processes:
        if cpus is None:
            rows.append((name, "not pinned", "", ""))
            continue
        nodes = {str(topology.cpus[cpu].node) for cpu in cpus}
        domains = {format_cpulist(topology.cpus[cpu].l3 or ()) or "unknown" for cpu in cpus}
        rows.append((name, format_cpulist(cpus), " ".join(sorted(nodes)), " ".join(sorted(domains))))
    return rows


def _table(topology: Topology, made: Plan) -> str:
    rows = _rows(topology, made)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines.append(
        f"node {'unknown' if made.node is None else made.node}, {'degraded' if made.degraded else 'ok'}"
    )
    return "\n".join([*lines, *(f"- {reason}" for reason in made.reasons)])


def _env(topology: Topology, made: Plan) -> str:
    lines = [f"export MORI_MP_CONTROL_CPUS={format_sets((made.control,))}"]
    if made.workers:
        lines.append(f"export MORI_MP_WORKER_CPUS='{format_sets(made.workers)}'")
    if made.node is not None and topology.nodes[made.node] & topology.allowed:
        lines.append(f"export MORI_MP_NUMA_NODE={made.node}")
    return "\n".join(lines)


def _numactl(made: Plan) -> str:
    words = ["numactl"]
    if made.cpus:
        words.append(f"--physcpubind={format_cpulist(made.cpus)}")
    words.append("--localalloc" if made.node is None else f"--preferred={made.node}")
    return " ".join(words)


def explanation(topology: Topology, made: Plan) -> list[str]:
    """Say what sysfs shows of a machine, and the reasons of a plan."""
    cores = {cpu.core for cpu in topology.cpus.values()}
    domains = {cpu.l3 for cpu in topology.cpus.values() if cpu.l3 is not None}
    nodes = [f"{node}: {format_cpulist(cpus) or 'no CPUs'}" for node, cpus in topology.nodes.items()]
    return [
        f"{len(topology.cpus)} online CPUs, {len(cores)} cores, {len(domains)} L3 domains",
        f"NUMA nodes: {'; '.join(nodes) or 'unknown'}",
        f"allowed CPUs: {format_cpulist(topology.allowed)}",
        f"isolated CPUs: {format_cpulist(topology.isolated) or 'none'}",
        f"CPU quota: {'none' if topology.quota is None else f'{topology.quota:g} CPUs'}",
        f"GPUs: {', '.join(topology.gpus) or 'none'}",
        f"RDMA devices: {', '.join(f'{name} at {bdf}' for name, bdf in topology.nics.items()) or 'none'}",
        *(f"- {reason}" for reason in made.reasons),
    ]


def _environment_notes(gpu: str | None) -> list[str]:
    notes = [f"{name} is set; it is not read here" for name in _REQUEST_VARIABLES if os.environ.get(name)]
    if gpu is not None and gpu.isdecimal():
        filters = [f"{name}={os.environ[name]}" for name in _GPU_FILTERS if os.environ.get(name)]
        notes += [
            f"{setting} renumbers GPUs for programs; --gpu {gpu} counts all of them" for setting in filters
        ]
    return notes


def _say(prog: str, lines: Sequence[str]) -> None:
    for line in lines:
        print(f"{prog}: {line}", file=sys.stderr)


def _become(command: list[str], made: Plan) -> NoReturn:
    effective = pin_self(made.cpus or None)
    if made.cpus and effective != made.cpus:
        raise PinningError(
            f"asked for CPUs {format_cpulist(made.cpus)}, the kernel gave {format_cpulist(effective)}"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(command[0], command)
    except OSError as err:
        raise OSError(err.errno, f"--exec: cannot run {command[0]!r}: {err.strerror}") from err


def _planned(
    topology: Topology,
    options: argparse.Namespace,
    workers: int | None = None,
    taken: frozenset[int] = frozenset(),
) -> Plan:
    """Read --plan, or plan as the options say; `workers` wins over --workers."""
    if options.plan is not None:
        return Plan.from_json(options.plan.read_text(encoding="utf-8"), source=str(options.plan))
    return plan(
        topology,
        workers=options.workers if workers is None else workers,
        gpu_bdf=None if options.gpu is None else _gpu_address(topology, options.gpu),
        nic=options.nic,
        reserve=parse_cpulist(options.reserve),
        smt=options.smt,
        mode="force" if options.force else "auto",
        taken=taken,
    )


def _apply(prog: str, topology: Topology, options: argparse.Namespace) -> int:
    """Pin the children of a running connector, and print asked and effective CPUs of each."""
    try:
        from mori_mp.shared import registry, repin
    except ModuleNotFoundError as err:
        raise PinningError(f"--apply needs an environment with mori-mp installed ({err})") from None
    base = options.runtime_dir or runtime.base_directory()
    children = repin.find(options.apply, base)
    with registry.planning(base):
        taken = registry.taken_cpus(base, but=children.found.folder)
        made = _planned(topology, options, len(children.workers), taken)
        if not made.cpus:
            raise PinningError("the plan pins nothing: " + "; ".join(made.reasons))
        if options.strict and made.degraded:
            _say(prog, ["degraded plan, not applied", *(f"- {reason}" for reason in made.reasons)])
            return DEGRADED
        moved = repin.apply(children, made)
    if made.degraded or options.explain:
        _say(prog, [f"- {reason}" for reason in made.reasons])
    for each in moved:
        asked = "not asked" if each.asked is None else f"asked {format_cpulist(each.asked)}"
        threads = f"{each.threads} thread" + ("s" if each.threads != 1 else "")
        print(f"{each.name}  pid {each.pid}  {threads}  {asked}  effective {format_cpulist(each.effective)}")
    missed = [each.name for each in moved if not each.done]
    if missed:
        _say(prog, [f"{', '.join(missed)}: the kernel gave other CPUs than asked; compare the cpuset"])
    return USAGE if missed else OK


def main(argv: Sequence[str] | None = None, prog: str = "pin_topology") -> int:
    """Run the command line and return its exit status; usage errors raise SystemExit(1)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command: list[str] = []
    if "--exec" in arguments:  # everything behind it belongs to the command
        cut = arguments.index("--exec") + 1
        arguments, command = arguments[:cut], arguments[cut:]
        command = command[1:] if command[:1] == ["--"] else command
    parser = _parser(prog)
    options = parser.parse_args(arguments)
    if options.format is not None:
        setattr(options, options.format, True)
    root: Path | None = options.sysfs_root
    if options.run and not command:
        parser.error("--exec needs a command: --exec -- CMD [ARG...]")
    if options.run and root is not None:
        parser.error("--exec pins on this machine; it cannot use a recorded tree (--sysfs-root)")
    if options.apply is not None and (options.run or root is not None):
        parser.error("--apply pins running processes of this machine: without --exec and --sysfs-root")
    try:
        topology = read_topology() if root is None else read_topology(root, root / "proc")
    except TopologyError as err:
        _say(parser.prog, [str(err)])
        return UNREADABLE
    try:
        if options.apply is not None:
            return _apply(parser.prog, topology, options)
        made = _planned(topology, options)
        notes = _environment_notes(options.gpu)
        if options.explain:
            notes += explanation(topology, made)
        elif made.degraded and (options.env or options.numactl or options.run):  # the others show the reasons
            notes += ["degraded plan", *(f"- {reason}" for reason in made.reasons)]
        _say(parser.prog, notes)
        status = DEGRADED if options.strict and made.degraded else OK
        if options.run:
            return status if status != OK else _become(command, made)
    except (MoriMPError, OSError) as err:
        _say(parser.prog, [str(err)])
        return USAGE
    if options.env:
        print(_env(topology, made))
    elif options.numactl:
        print(_numactl(made))
    elif options.table or (not options.json and sys.stdout.isatty()):
        print(_table(topology, made))
    else:
        print(made.to_json())
    return status
