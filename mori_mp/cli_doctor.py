"""`mori-mp doctor`: what of this host works for connectors, what does not, and the fix."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from mori_mp import doctor as checks
from mori_mp.cli_console import table_console

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "broken": "bold red"}


def doctor(
    deploy_config: Annotated[
        Path | None,
        typer.Option(help="A vLLM-Omni deploy YAML: check its connectors, engines, memory and ports too."),
    ] = None,
    self_test: Annotated[
        bool, typer.Option(help="Start two connectors and move a payload (about two seconds).")
    ] = True,
    strict: Annotated[bool, typer.Option("--strict", help="Count warnings as broken.")] = False,
    json_out: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check this host: packages, engines, devices, memory, limits, CPUs, ports.

    Nothing is changed. Run it where the stages run: in their container, as their user.

    Exit status 0: all that is needed works. 1: something needed is broken, or, with --strict, warned of.

    Examples:

      mori-mp doctor
      mori-mp doctor --deploy-config deploy/qwen3_omni_moe_mori_intranode.yaml
      mori-mp doctor --json --no-self-test
      mori-mp doctor --strict --deploy-config deploy.yaml   # for a pipeline that checks changes
    """
    logging.getLogger("mori_mp").setLevel(logging.CRITICAL)  # what goes wrong is a finding
    findings = checks.examine(deploy_config, self_test)
    good = checks.healthy(findings, strict)
    if json_out:
        document = {"ok": good, "findings": [msgspec.structs.asdict(finding) for finding in findings]}
        typer.echo(json.dumps(document, indent=1))
    else:
        table_console().print(_table(findings))
    raise typer.Exit(0 if good else 1)


def _table(findings: list[checks.Finding]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("area", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    alike: dict[checks.Finding, list[str]] = {}  # several stages of one file, as a rule
    for finding in findings:
        alike.setdefault(msgspec.structs.replace(finding, what=""), []).append(finding.what)
    for finding, what in alike.items():
        told = Text(finding.detail)
        if finding.fix:
            told.append(f"\n→ {finding.fix}", style="italic")
        level = Text(finding.level, style=_STYLES[finding.level])
        table.add_row(level, finding.area, "\n".join(what), told)
    return table
