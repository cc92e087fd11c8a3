"""`mori-mp topology` and `mori-mp pin`: what the machine is like, and which CPUs a connector's children get.

Both are a face of mori_mp.shared.pin_cli, which `pin_topology.sh` runs without this command's dependencies.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from mori_mp.cli_console import table_console
from mori_mp.shared import pin_cli
from mori_mp.shared.topology import Topology, TopologyError, device_node, format_cpulist, read_topology

SysfsRoot = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Read a recorded sysfs tree instead; what belongs to the process from DIR/proc."
    ),
]


class Format(str, Enum):
    """How a plan is printed."""

    json = "json"
    table = "table"
    env = "env"
    numactl = "numactl"


def topology(
    json_out: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    sysfs_root: SysfsRoot = None,
) -> None:
    """Show NUMA nodes, caches, CPUs, GPUs and RDMA devices, and what this process may use of them.

    Exit status 0, or 2 when sysfs cannot be read.

    Examples:

      mori-mp topology
      mori-mp topology --json | jq .gpus
    """
    try:
        found = read_topology() if sysfs_root is None else read_topology(sysfs_root, sysfs_root / "proc")
    except TopologyError as exc:
        typer.echo(f"mori-mp topology: {exc}", err=True)
        raise typer.Exit(pin_cli.UNREADABLE) from None
    document = as_document(found)
    if json_out:
        typer.echo(json.dumps(document, indent=1))
        return
    console = table_console()
    for table in (_nodes(document), _devices(document)):
        console.print(table)
    quota = document["quota"]
    for line in (
        f"allowed CPUs: {document['allowed']} of {document['online']}",
        f"isolated CPUs: {document['isolated'] or 'none'}",
        f"CPU quota: {'none' if quota is None else f'{quota:g} CPUs'}",
        *(f"- {reason}" for reason in document["reasons"]),
    ):
        console.print(Text(line))


def as_document(found: Topology) -> dict[str, Any]:
    """The topology as JSON has it; CPU sets are kernel cpulists."""
    devices = [("gpu", str(index), bdf) for index, bdf in enumerate(found.gpus)]
    devices += [("rdma", name, bdf) for name, bdf in found.nics.items()]
    told = []
    for kind, name, bdf in devices:
        node, how = device_node(found, bdf)
        told.append({"kind": kind, "name": name, "pci": bdf, "node": node, "how": how})
    return {
        "online": format_cpulist(found.cpus),
        "allowed": format_cpulist(found.allowed),
        "isolated": format_cpulist(found.isolated),
        "quota": found.quota,
        "nodes": [_node(found, node, cpus) for node, cpus in found.nodes.items()],
        "gpus": [device for device in told if device["kind"] == "gpu"],
        "rdma": [device for device in told if device["kind"] == "rdma"],
        "reasons": list(found.reasons),
    }


def _node(found: Topology, node: int, cpus: frozenset[int]) -> dict[str, Any]:
    members = [found.cpus[cpu] for cpu in sorted(cpus)]
    domains = {cpu.l3 for cpu in members if cpu.l3 is not None}
    return {
        "node": node,
        "cpus": format_cpulist(cpus),
        "allowed": format_cpulist(cpus & found.allowed),
        "cores": len({cpu.core for cpu in members}),
        "l3": [format_cpulist(domain) for domain in sorted(domains, key=min)],
    }


def _nodes(document: dict[str, Any]) -> Table:
    table = Table(title="NUMA nodes", title_justify="left")
    for name in ("node", "CPUs", "allowed", "cores", "L3 domains"):
        table.add_column(name, overflow="fold")
    for node in document["nodes"]:
        shown = f"{len(node['l3'])}: {'; '.join(node['l3'])}" if node["l3"] else "unknown"
        table.add_row(
            str(node["node"]), node["cpus"] or "none", node["allowed"] or "none", str(node["cores"]), shown
        )
    return table


def _devices(document: dict[str, Any]) -> Table:
    table = Table(title="devices", title_justify="left")
    for name in ("device", "PCI address", "node", "from"):
        table.add_column(name)
    for device in document["gpus"] + document["rdma"]:
        label = f"GPU {device['name']}" if device["kind"] == "gpu" else device["name"]
        node = "unknown" if device["node"] is None else str(device["node"])
        table.add_row(label, device["pci"], node, device["how"])
    if not table.rows:
        table.add_row("none", "", "", "")
    return table


def pin(
    workers: Annotated[int, typer.Option(min=0, max=64, help="num_transfer_workers.")] = 2,
    gpu: Annotated[
        str | None, typer.Option(metavar="I|BDF", help="GPU by number as sysfs counts, or by PCI address.")
    ] = None,
    nic: Annotated[str | None, typer.Option(metavar="DEV", help="RDMA device.")] = None,
    reserve: Annotated[
        str, typer.Option(metavar="CPULIST", help="CPUs of the engine's main thread; their cores stay free.")
    ] = "",
    smt: Annotated[bool, typer.Option("--smt", help="Hand out hardware threads, not whole cores.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Pin even where it is unwise.")] = False,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take this plan file instead of planning.")
    ] = None,
    form: Annotated[
        Format | None,
        typer.Option(
            "--format", help="json is a plan file; env is for a shell's eval. Default: by terminal."
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say on stderr what was found and why.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 3 when the plan is degraded.")] = False,
    apply: Annotated[
        str | None,
        typer.Option(
            metavar="PID|STAGE",
            help="Move the control process and workers of this running connector to the plan's CPUs. "
            "As many --workers as it runs.",
        ),
    ] = None,
    sysfs_root: SysfsRoot = None,
    runtime_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="--apply: the connector's runtime_dir.")
    ] = None,
) -> None:
    """Plan the CPUs of a connector's control process and workers, or move a running connector's.

    Without --apply nothing is changed: the plan is printed, as a file for
    MORI_MP_PIN (json), for a shell (env) or for people (table).

    --apply pins every thread of the children and reads the masks back. It keeps
    clear of the CPUs of other connectors of this host. It needs the stages' user
    (or CAP_SYS_NICE) and container. A child that dies later is replaced on the
    CPUs it was first given: to make a plan last, set `pin`, or MORI_MP_PIN.

    Exit status 0: ok. 1: impossible. 2: sysfs unreadable. 3: degraded, with --strict.

    Examples:

      mori-mp pin --gpu 3 --workers 4 --explain
      mori-mp pin --gpu 3 --format json > plan.json; MORI_MP_PIN=./plan.json vllm serve ...
      mori-mp pin --apply 1 --gpu 1        # the connector of stage 1
      mori-mp pin --apply 4711 --plan ./plan.json
    """
    words = ["--workers", str(workers)]
    for name, value in (
        ("--gpu", gpu),
        ("--nic", nic),
        ("--plan", plan),
        ("--apply", apply),
        ("--sysfs-root", sysfs_root),
        ("--runtime-dir", runtime_dir),
    ):
        words += [] if value is None else [name, str(value)]
    words += ["--reserve", reserve] if reserve else []
    flags = {"--smt": smt, "--force": force, "--explain": explain, "--strict": strict}
    words += [name for name, given in flags.items() if given]
    words += [] if form is None else [f"--{form.value}"]
    raise typer.Exit(pin_cli.main(words, prog="mori-mp pin"))
