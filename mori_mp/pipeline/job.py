"""One run from options to outcome: ports, plans, runner. No terminal code."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mori_mp.deploy import Deploy
from mori_mp.pipeline.free_ports import PortBlock
from mori_mp.pipeline.planner import RunOptions, make_plans, wants_local_ports
from mori_mp.pipeline.runner import Observer, Runner, RunOutcome


def run_pipeline(deploy: Deploy, options: RunOptions, *, timeout_s: float, observer: Observer) -> RunOutcome:
    """Run the pipeline once. timeout_s: for all traffic, once every connector is up.

    Raises DeployError for what is wrong with the YAML, StartupError when no ports are free; whatever goes
    wrong in a stage is in the outcome.
    """
    with contextlib.ExitStack() as stack:
        base_port = None
        if wants_local_ports(options):
            host = str(options.overrides.get("host", "127.0.0.1"))
            base_port = stack.enter_context(PortBlock(host)).base
        plans = make_plans(deploy, options, base_port=base_port)
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
