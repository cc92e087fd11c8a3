"""`mori-mp pipeline`: options, their checks, and what is printed."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from mori_mp.cli_console import table_console
from mori_mp.deploy import load_deploy
from mori_mp.pipeline.job import default_timeout_s, run_pipeline, run_traced, with_overrides
from mori_mp.pipeline.planner import RunOptions
from mori_mp.pipeline.report import LiveView, as_document, compare, comparison_table, print_outcome
from mori_mp.pipeline.runner import RunOutcome
from mori_mp.pipeline.trace import load_trace
from mori_mp.shared.errors import MoriMPError

_USAGE_ERROR = 2


class GetChoice(str, Enum):
    """How a stage waits for its chunks."""

    deadline = "deadline"
    wake = "wake"
    poll = "poll"


class MetadataChoice(str, Enum):
    """What get() is told beside the key."""

    none = "none"
    endpoint = "endpoint"


class WorkerMode(str, Enum):
    """Where control and transfer workers run."""

    process = "process"
    thread = "thread"


class Delivery(str, Enum):
    """How payloads reach a receiver on the same host."""

    auto = "auto"
    lease = "lease"
    landing = "landing"


_TRAFFIC, _CONNECTOR, _OUTPUT = "Traffic", "Connector", "Output"


def pipeline(
    deploy_config: Annotated[
        Path, typer.Option(help="vLLM-Omni deploy YAML; its edges are the topology of the run.")
    ],
    backend: Annotated[
        str | None,
        typer.Option(
            help="Transfer engine for every edge instead of the YAML's. [b]shm[/b] needs no GPU: it runs on "
            "host memory, 127.0.0.1 and free ports.",
            rich_help_panel=_CONNECTOR,
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, max=1024, help="Concurrent requests.", rich_help_panel=_TRAFFIC)
    ] = 4,
    chunks: Annotated[
        int, typer.Option(min=1, help="Chunks of each request on each edge.", rich_help_panel=_TRAFFIC)
    ] = 50,
    duration: Annotated[
        float | None,
        typer.Option(min=0.0, help="Seconds to send for, instead of --chunks.", rich_help_panel=_TRAFFIC),
    ] = None,
    gap_ms: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Pause between two chunks of a request. 0 sends as fast as put() allows: put→usable is then "
            "mostly the time that chunks wait for each other, not that of a transfer.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = 20.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay recorded shapes, dtypes and gaps: JSON lines or safetensors, as described in "
            "mori_mp/pipeline/trace.py.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of all shapes and contents.", rich_help_panel=_TRAFFIC)
    ] = 0,
    busy: Annotated[
        bool,
        typer.Option(
            "--busy",
            help="Spin a pure-Python thread in every stage, as a scheduler that holds the GIL.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = False,
    get: Annotated[
        GetChoice,
        typer.Option(
            help="deadline: get_with_deadline(). poll: get() every ms, as vLLM-Omni's chunk adapter. "
            "wake: get() and wait_for_change().",
            rich_help_panel=_TRAFFIC,
        ),
    ] = GetChoice.deadline,
    metadata: Annotated[
        MetadataChoice,
        typer.Option(
            help="What receivers pass to get(): nothing, or the sender's host and port. put()'s own metadata "
            "stays in the sending process, as between vLLM-Omni's stages.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = MetadataChoice.none,
    pool_size: Annotated[
        str | None, typer.Option(help="memory_pool_size, such as 512MiB.", rich_help_panel=_CONNECTOR)
    ] = None,
    num_workers: Annotated[
        int | None, typer.Option(min=1, help="num_transfer_workers.", rich_help_panel=_CONNECTOR)
    ] = None,
    eager_bytes: Annotated[
        str | None, typer.Option(help="eager_bytes, such as 64KiB; 0 = none.", rich_help_panel=_CONNECTOR)
    ] = None,
    delivery: Annotated[
        Delivery | None,
        typer.Option(
            help="delivery: read in place, or written to the receiver.",
            rich_help_panel=_CONNECTOR,
        ),
    ] = None,
    worker_mode: Annotated[
        WorkerMode | None, typer.Option(help="worker_mode.", rich_help_panel=_CONNECTOR)
    ] = None,
    compare_modes: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Run worker_mode process, then thread, with the same traffic, and print the ratios.",
            rich_help_panel=_CONNECTOR,
        ),
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any key into every connector's extra; VALUE is JSON, or else text. Repeatable.",
            rich_help_panel=_CONNECTOR,
        ),
    ] = None,
    connector: Annotated[
        str | None,
        typer.Option(
            metavar="PKG.MODULE:CLASS",
            help="Run another connector class of the same API, to compare it.",
            rich_help_panel=_CONNECTOR,
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Seconds from the moment all connectors are up; what has not arrived by then is lost. "
            "Default: a minute and twice the traffic's own pace.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    json_to: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write the result as JSON; - is stdout (tables then go to stderr).",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    trace_out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the spans of every transfer to one trace, for ui.perfetto.dev or chrome://tracing. "
            "With --compare: one file for each mode, FILE with the mode before its suffix.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option(help="Show a table while it runs (on a terminal).", rich_help_panel=_OUTPUT)
    ] = True,
    show_processes: Annotated[
        bool,
        typer.Option(
            "--show-processes",
            help="List stage, control and worker processes with memory, threads and CPU mask.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Print the stages' logs as they come.", rich_help_panel=_OUTPUT),
    ] = False,
) -> None:
    """Stream and check a model's stage-to-stage traffic through real connectors.

    Starts one process per stage of a vLLM-Omni deploy YAML, each with its own
    connector, and streams concurrent requests through them at Qwen3-Omni's
    shapes: bf16 hidden states with embeddings and ids out of the first stage,
    int64 codec frames after it. Every chunk is checked byte by byte.

    Exit status 0: everything arrived right and nothing is left over. 1: chunks
    lost, corrupt or left over, or a stage failed. 2: nothing was started, since
    options, deploy YAML, engine, interpreter, address or pool size cannot work
    here.

    Examples:

      D=deploy/qwen3_omni_moe_mori_intranode.yaml
      mori-mp pipeline --deploy-config $D --backend shm
      mori-mp pipeline --deploy-config $D --backend shm --busy --compare
      mori-mp pipeline --deploy-config $D --requests 16 --duration 60 --get poll
      mori-mp pipeline --deploy-config $D --trace recorded.jsonl --json out.json
      mori-mp pipeline --deploy-config $D --backend shm --trace-out run.json
    """
    console = table_console(stderr=json_to == "-")
    logging.basicConfig(
        level=logging.INFO,
        format="%(message)s",
        handlers=[RichHandler(console=Console(stderr=True), show_path=False, show_time=False)],
    )
    if compare_modes and worker_mode is not None:
        raise typer.BadParameter("--compare runs both worker modes; leave --worker-mode out")
    if trace is not None and duration is not None:
        raise typer.BadParameter("a trace has its own length; leave --duration out")
    if trace_out is not None and not trace_out.parent.is_dir():
        raise typer.BadParameter(f"--trace-out: there is no folder {trace_out.parent}")
    overrides: dict[str, Any] = {
        "memory_pool_size": pool_size,
        "num_transfer_workers": num_workers,
        "eager_bytes": eager_bytes,
        "delivery": delivery.value if delivery else None,
        "worker_mode": worker_mode.value if worker_mode else None,
    }
    overrides = {key: value for key, value in overrides.items() if value is not None}
    overrides.update(parse_settings(set_ or []))
    try:
        deploy = load_deploy(deploy_config)
        options = RunOptions(
            requests=requests,
            chunks=chunks,
            duration_s=duration,
            seed=seed,
            gap_s=gap_ms / 1e3,
            backend=backend,
            connector_class=connector,
            overrides=overrides,
            get_mode=get.value,
            metadata=metadata.value,
            busy=busy,
            trace=load_trace(trace) if trace is not None else {},
        )
        modes = [mode.value for mode in WorkerMode] if compare_modes else [None]
        outcomes: dict[str, RunOutcome] = {}
        for mode in modes:
            title = f"{deploy_config.name}: {mode or overrides.get('worker_mode') or 'pipeline'}"
            with LiveView(console, title, live=live and console.is_terminal, echo=verbose) as view:
                chosen = with_overrides(options, {"worker_mode": mode} if mode else {})
                limit = timeout or default_timeout_s(options)
                if trace_out is None:
                    outcome, spans = run_pipeline(deploy, chosen, timeout_s=limit, observer=view), 0
                else:
                    target = trace_out.with_suffix(f".{mode}{trace_out.suffix}") if mode else trace_out
                    outcome, spans = run_traced(deploy, chosen, target, timeout_s=limit, observer=view)
            print_outcome(console, outcome, title, show_processes=show_processes)
            if trace_out is not None:
                console.print(Text(f"trace: {spans} spans in {target}"), soft_wrap=True)
            outcomes[mode or "run"] = outcome
            if outcome.interrupted:
                break
    except MoriMPError as error:
        Console(stderr=True).print(Text(f"mori-mp pipeline: {error}", style="bold red"), soft_wrap=True)
        raise typer.Exit(_USAGE_ERROR) from None
    if len(outcomes) == 2:
        console.print(comparison_table(outcomes))
    if json_to is not None:
        told = {"deploy_config": str(deploy_config), **dataclasses.asdict(options), "trace": str(trace or "")}
        _write_json(json_to, told, outcomes)
    raise typer.Exit(0 if all(outcome.ok for outcome in outcomes.values()) else 1)


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """`key=value` pairs; the value is JSON where it parses as JSON, else text. BadParameter without a key."""
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, found, text = setting.partition("=")
        if not found or not key:
            raise typer.BadParameter(f"--set wants KEY=VALUE, got {setting!r}")
        try:
            parsed[key] = json.loads(text)
        except ValueError:
            parsed[key] = text
    return parsed


def _write_json(target: str, told: dict[str, Any], outcomes: dict[str, RunOutcome]) -> None:
    """Write the outcome, or both of a comparison, with the options that led to it."""
    document: dict[str, Any]
    if len(outcomes) == 1:
        (outcome,) = outcomes.values()
        document = as_document(outcome)
    else:
        document = {
            "ok": all(outcome.ok for outcome in outcomes.values()),
            "runs": {mode: as_document(outcome) for mode, outcome in outcomes.items()},
            "comparison": compare(outcomes),
        }
    text = json.dumps({"options": told, **document}, indent=1, ensure_ascii=False)
    if target == "-":
        sys.stdout.write(text + "\n")
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")
