"""One run from options to outcome: ports, plans, runner. No terminal code."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mori_mp.deploy import Deploy
from mori_mp.endpoint import check_bindable, resolve_host
from mori_mp.pipeline.free_ports import PortBlock
from mori_mp.pipeline.planner import RunOptions, make_plans, wants_local_ports
from mori_mp.pipeline.runner import Observer, Runner, RunOutcome
from mori_mp.shared.files import write_whole
from mori_mp.shared.tracing import join


def run_pipeline(deploy: Deploy, options: RunOptions, *, timeout_s: float, observer: Observer) -> RunOutcome:
    """Run the pipeline once. timeout_s: for all traffic, once every connector is up.

    Raises DeployError for what is wrong with the YAML, StartupError when no ports are free or the host
    is none of this machine, and what check_plans() does; whatever goes wrong in a stage is in the outcome.
    """
    from mori_mp.pipeline.preflight import check_plans  # imports torch: the command line does without

    with contextlib.ExitStack() as stack:
        base_port = None
        if wants_local_ports(options):
            host = resolve_host(str(options.overrides.get("host", "127.0.0.1")))
            check_bindable(host, 0)
            base_port = stack.enter_context(PortBlock(host)).base
        plans = make_plans(deploy, options, base_port=base_port)
        check_plans(plans)
        return Runner(plans, timeout_s=timeout_s, observer=observer).run()


def with_overrides(options: RunOptions, extra: Mapping[str, Any]) -> RunOptions:
    """The same run with more keys in every connector's `extra`."""
    return replace(options, overrides={**options.overrides, **extra})


def default_timeout_s(options: RunOptions) -> float:
    """A time by which a healthy run has long ended: its own pace, doubled, and a minute."""
    if options.trace:
        paced = [
            sum(options.gap_s if chunk.gap_s is None else chunk.gap_s for chunk in chunks)
            for requests in options.trace.values()
            for chunks in requests
        ]
        expected = max(paced)
    elif options.duration_s is not None:
        expected = options.duration_s
    else:
        expected = (options.chunks or 0) * options.gap_s
    return 60.0 + 2 * expected


def run_traced(
    deploy: Deploy, options: RunOptions, target: Path, *, timeout_s: float, observer: Observer
) -> tuple[RunOutcome, int]:
    """As run_pipeline(), and write the spans of all stages to one trace; returns how many it has.

    0 when no connector wrote any, as one of another class would. Raises OSError if target cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="mori-mp-trace-") as folder:
        traced = with_overrides(options, {"trace_path": f"{folder}/{{stage}}-{{pid}}.json"})
        outcome = run_pipeline(deploy, traced, timeout_s=timeout_s, observer=observer)
        trace = join(json.loads(path.read_bytes()) for path in sorted(Path(folder).glob("*.json")))
    write_whole(target, json.dumps(trace, separators=(",", ":")).encode())
    return outcome, sum(event["ph"] in "Xb" for event in trace["traceEvents"])
