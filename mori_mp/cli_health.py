"""`mori-mp health`: the health documents of this host's connectors, for people and for probes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from mori_mp import observe
from mori_mp.cli_top import STYLES, RuntimeDir
from mori_mp.observe import Sample
from mori_mp.shared.runtime import base_directory

_OK, _UNHEALTHY, _NONE_FOUND = 0, 1, 2
_RECENT = 5
_OLD_SECONDS = 1.0
_TROUBLES = ("unreached", "timeouts", "refused", "pool_exhausted", "corrupt")


def health(
    stage: Annotated[int | None, typer.Option(metavar="N", help="Connectors of this stage only.")] = None,
    json_out: Annotated[
        bool, typer.Option("--json", help="The whole documents, as docs/health-schema.md describes them.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Count degraded as unhealthy.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0.05, max=60.0, help="Seconds to wait for a control process.")
    ] = observe.ANSWER_SECONDS,
    runtime_dir: RuntimeDir = None,
) -> None:
    """Report on every connector of this host that listens.

    The control process answers, so a stuck stage does not hold this up; one
    that does not answer in time is unhealthy.

    Exit status 0: all healthy, degraded or starting. 1: some are unhealthy.
    2: none found; under vLLM-Omni there are none before their first use.

    Examples:

      mori-mp health
      mori-mp health --stage 1 --json
      mori-mp health --strict --timeout 3 > /dev/null        # an alert
      mori-mp health --timeout 3 > /dev/null || [ $? -eq 2 ]   # a liveness probe
    """
    base = runtime_dir or base_directory()
    samples = [
        sample for sample in observe.observe(base, timeout) if stage in (None, sample.found.card.stage_id)
    ]
    if json_out:
        typer.echo(json.dumps([document(sample) for sample in samples], indent=1))
    else:
        console = Console(soft_wrap=True)
        for sample in samples:
            console.print(*summary(sample), sep="\n")
    if not samples:
        which = "connector" if stage is None else f"connector of stage {stage}"
        typer.echo(f"no {which} listens below {base}", err=True)
        raise typer.Exit(_NONE_FOUND)
    bad = {"unhealthy", "degraded"} if strict else {"unhealthy"}
    raise typer.Exit(_UNHEALTHY if any(sample.status in bad for sample in samples) else _OK)


def document(sample: Sample) -> dict[str, Any]:
    """The document, or what can be said without one."""
    if sample.document is not None:
        return sample.document
    card = sample.found.card
    return {
        "status": sample.status,
        "error": sample.reason,
        "stage_id": card.stage_id,
        "role": card.role,
        "engine": card.engine,
        "pid": card.pid,
        "endpoint": card.endpoint,
    }


def summary(sample: Sample) -> list[Text]:
    """A few lines: state, what has moved, what has gone wrong."""
    card, (row,) = sample.found.card, observe.rows([sample], {})
    lines = [
        Text.assemble(
            f"stage {card.stage_id} ",
            (row.status, STYLES.get(row.status, "")),
            f" {card.role} {card.engine} {card.endpoint} pid {card.pid}",
        )
    ]
    if row.error:
        lines.append(Text(f"  {row.error}", style=STYLES.get(row.status, "")))
    if sample.document is None:
        return lines
    told = sample.document
    counters = told.get("receiver", {}).get("counters", {})
    lines.append(
        Text(
            f"  put {told.get('puts', '-')}, got {told.get('gets', '-')}, "
            f"{_megabytes(told.get('bytes_transferred'))} MB, errors {told.get('errors', '-')}, "
            f"timeouts {told.get('timeouts', '-')}, misses {counters.get('misses', '-')}; "
            f"published {_dash(row.published)}, leased {_dash(row.leased)}, "
            f"in flight {_dash(row.in_flight)}, pool {_dash(row.pool_percent)} %"
        )
    )
    if row.restarts:
        lines.append(Text(f"  restarts of control and workers: {row.restarts}", style="yellow"))
    lines += [*_sending(told), *_receiving(told), *_faults(told.get("faults") or {})]
    return lines


def _sending(told: dict[str, Any]) -> Iterator[Text]:
    """What waits longest, and whether anybody is there to fetch it."""
    sender = told.get("sender") or {}
    oldest = (sender.get("ledger") or {}).get("oldest") or {}
    age = oldest.get("age_s")
    if isinstance(age, (int, float)) and age >= _OLD_SECONDS:
        yield Text(
            f"  oldest payload: {oldest.get('key')}, {oldest.get('state')}, {age:.0f} s old; "
            f"receivers that have said hello: {_dash(sender.get('sessions'))}",
            style="yellow",
        )


def _receiving(told: dict[str, Any]) -> Iterator[Text]:
    """Where payloads come from, and which get() calls brought none; misses are above."""
    receiver = told.get("receiver") or {}
    for peer in receiver.get("senders") or []:
        known = peer.get("protocol") not in (None, "unknown")
        state = f"announced and not fetched {_dash(peer.get('ready'))}" if known else "no answer yet"
        yield Text(f"  fetches from {peer.get('address')}: {state}", style="" if known else "yellow")
    counters = receiver.get("counters") or {}
    troubles = [f"{name} {counters[name]}" for name in _TROUBLES if counters.get(name)]
    if troubles:
        yield Text(f"  get() calls without a payload: {', '.join(troubles)}", style="yellow")


def _faults(faults: dict[str, Any]) -> Iterator[Text]:
    """The counts, and the last few faults; those that say the same are told once."""
    counts = faults.get("counts") or {}
    if counts:
        said = ", ".join(f"{cause} {count}" for cause, count in sorted(counts.items()))
        yield Text(f"  faults: {said}", style="yellow")
    alike: dict[str, tuple[float, int]] = {}
    for fault in faults.get("recent") or []:
        where = "".join(f" {name}={fault[name]}" for name in ("key", "edge", "peer") if fault.get(name))
        text = f"{fault.get('cause')}: {fault.get('text')}" + (f" [{where.strip()}]" if where else "")
        _, count = alike.pop(text, (0.0, 0))
        alike[text] = (fault.get("time", 0), count + 1)
    for text, (at, count) in list(alike.items())[-_RECENT:]:
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        yield Text(f"    {clock} {text}" + (f" ({count} times)" if count > 1 else ""))


def _dash(value: object) -> str:
    return "-" if value is None else str(value)


def _megabytes(value: Any) -> str:
    return f"{value / 1e6:.1f}" if isinstance(value, (int, float)) else "-"
