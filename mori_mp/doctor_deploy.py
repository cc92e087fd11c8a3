"""Doctor's checks of a deploy YAML: what its connectors would find on this host when they start."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from mori_mp.backend import choose
from mori_mp.beforehand import (
    Claim,
    check_claim,
    check_interpreter,
    check_sender_host,
    claims,
    collisions,
)
from mori_mp.config import ConnectorConfig, misspelt_keys
from mori_mp.deploy import Deploy, load_deploy
from mori_mp.doctor_host import Finding, Level
from mori_mp.ports import OWN_NAMES, TRANSFER_ENGINE_NAMES
from mori_mp.shared.errors import EngineUnavailable, MoriMPError
from mori_mp.shared.memory import available_bytes

_AREA = "deploy"
_CORRECT = "correct the connector's `extra` in the file"


def check_deploy(path: Path) -> Iterator[Finding]:
    """The connectors that are ours: configuration, engine, interpreter of workers, addresses, memory."""
    try:
        deploy = load_deploy(path)
        nodes = deploy.topology()
    except MoriMPError as exc:
        yield Finding(_AREA, path.name, "broken", str(exc), "correct the file, or its path")
        return
    for text in deploy.warnings:
        yield Finding(_AREA, path.name, "warning", text, "correct the file")
    wanted = 0
    claimed: list[Claim] = []
    version = cache(check_interpreter)  # stages have one in common, as a rule
    for node in nodes:
        what = f"stage {node.stage.stage_id}"
        findings, config, engine = _read(deploy, node.stage.stage_id)
        yield from findings
        if config is None:
            continue
        on_gpu = config.memory_pool_device != "cpu"
        wanted += config.host_pool_size if on_gpu else config.memory_pool_size
        puts = bool(node.outputs) or config.role != "receiver"
        try:
            check_sender_host(config)
        except MoriMPError as exc:
            yield Finding(_AREA, what, "broken", str(exc), _CORRECT)
        if config.worker_python and puts:
            yield _interpreter_finding(what, config.worker_python, engine, version)
        yield from _port_findings(what, config, puts)
        claimed += claims(config, puts)
    for stage_id, text in collisions(claimed):
        yield Finding(_AREA, f"stage {stage_id}", "broken", text, _CORRECT)
    room = available_bytes()
    if wanted:
        level: Level = "ok" if wanted <= room else "broken"
        detail = f"{wanted / 2**30:.2f} GiB of host memory for all pools, {room / 2**30:.1f} GiB left"
        fix = "lower memory_pool_size (host_pool_size beside a GPU pool), or raise the memory limit"
        yield Finding(_AREA, "pools", level, detail, "" if level == "ok" else fix)


def _read(deploy: Deploy, stage_id: int) -> tuple[list[Finding], ConnectorConfig | None, str]:
    """Read a stage's configuration, and settle its engine; None where it is not ours, or has none."""
    what = f"stage {stage_id}"
    found: list[Finding] = []
    try:
        resolved = deploy.connector_for_stage(stage_id)
        if resolved.name not in OWN_NAMES:
            kind = "its own engine" if resolved.name in TRANSFER_ENGINE_NAMES else "not ours"
            return [Finding(_AREA, what, "note", f"{resolved.name}: {kind}, not checked")], None, ""
        for text in misspelt_keys(resolved.config):
            found.append(Finding(_AREA, what, "warning", text, "rename it, unless other code reads it"))
        config = ConnectorConfig.from_dict(resolved.config)
        engine, reason = choose(config)
    except EngineUnavailable as exc:
        fix = "do as it says, or set a backend_type that this host has (engines, above)"
        return [*found, Finding(_AREA, what, "broken", str(exc), fix)], None, ""
    except MoriMPError as exc:
        return [*found, Finding(_AREA, what, "broken", str(exc), _CORRECT)], None, ""
    found.append(Finding(_AREA, what, "ok", f"{resolved.name}, {config.role}, engine {engine} ({reason})"))
    return found, config, engine


def _interpreter_finding(what: str, python: str, engine: str, version: Callable[[str, str], str]) -> Finding:
    try:
        detail = f"worker_python: {python} has what workers import (Python {version(python, engine)})"
    except MoriMPError as exc:
        return Finding(_AREA, what, "broken", str(exc), "do as it says, or leave worker_python out")
    return Finding(_AREA, what, "ok", detail)


def _port_findings(what: str, config: ConnectorConfig, puts: bool) -> Iterator[Finding]:
    """Whether the ports of a connector can be had now.

    A last stage has no need of the one that it listens on, and payloads move without metrics.
    """
    if puts and config.listener_endpoint() is None:
        yield Finding(_AREA, what, "broken", f"it cannot listen: {config.no_listener_reason()}", _CORRECT)
    for claim in claims(config, puts):
        where = f"{claim.host}:{claim.port}"
        try:
            check_claim(claim)
        except MoriMPError as exc:
            taken = isinstance(exc.__cause__, OSError) and exc.__cause__.errno == errno.EADDRINUSE
            fix = (
                f"see who has it: ss -ltnp 'sport = :{claim.port}'" if taken else "correct `host` in the file"
            )
            needed = puts and claim.purpose == "listener"
            if not needed and not config.observed():
                fix += "; or set prestart: false, since a last stage has no need of it"
            yield Finding(_AREA, what, "broken" if needed else "warning", str(exc), fix)
            if not taken:
                return  # the host is at fault, and would be again
        else:
            metrics = claim.purpose == "metrics"
            yield Finding(_AREA, what, "ok", f"{where} is free" + (", for metrics" if metrics else ""))
