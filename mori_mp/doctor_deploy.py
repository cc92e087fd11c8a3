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
    holder,
)
from mori_mp.config import ConnectorConfig, misspelt_keys
from mori_mp.deploy import Deploy, load_deploy
from mori_mp.doctor_host import Finding, Level
from mori_mp.ports import DEFAULT_BASE_PORT, OWN_NAMES, TRANSFER_ENGINE_NAMES
from mori_mp.shared.errors import ConfigError, DeployError, EngineUnavailable, MoriMPError
from mori_mp.shared.memory import available_bytes
from mori_mp.shared.runtime import base_directory

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
        if on_gpu:
            yield from _gpu_findings(what, config, engine, puts)
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
        found.append(Finding(_AREA, what, "broken", str(exc), _CORRECT))
        if isinstance(exc, DeployError):  # it is about the port; what else is wrong?
            found += _other_problems(deploy, stage_id)
        return found, None, ""
    found.append(Finding(_AREA, what, "ok", f"{resolved.name}, {config.role}, engine {engine} ({reason})"))
    return found, config, engine


def _other_problems(deploy: Deploy, stage_id: int) -> Iterator[Finding]:
    """What is wrong with a stage's configuration but for its port."""
    try:
        ConnectorConfig.from_dict(
            deploy.connector_for_stage(stage_id, overrides={"zmq_port": DEFAULT_BASE_PORT}).config
        )
    except ConfigError as exc:
        yield Finding(_AREA, f"stage {stage_id}", "broken", str(exc), _CORRECT)
    except DeployError:
        return  # the same again: it was not about zmq_port


def _gpu_findings(what: str, config: ConnectorConfig, engine: str, puts: bool) -> Iterator[Finding]:
    """What a GPU pool takes, and what goes past it."""
    detail = f"{config.memory_pool_size / 2**30:.2f} GiB of GPU memory for its pool"
    if puts:
        where = " on every GPU that it sees" if engine == "xgmi" else ""
        detail += f", some 0.5 GiB{where} for each of {config.num_transfer_workers} workers that has to write"
    yield Finding(_AREA, what, "ok", f"{detail}; gpu_memory_utilization must leave that")
    if config.tensor_device != "pool":
        yield Finding(
            _AREA,
            what,
            "note",
            "tensor_device: cpu: GPU tensors inside objects, which vLLM-Omni's stages put, go through host "
            "memory",
            "set tensor_device: pool at both ends, or keep a host pool (backend_type: shm)",
        )


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
            card = holder(claim, base_directory(config.runtime_dir)) if taken else None
            if card is not None and card.stage_id == config.stage_id:
                detail = f"{where} is this stage's already: process {card.pid} runs it now"
                yield Finding(_AREA, what, "note", detail, "nothing, unless another one is to be started")
                continue
            if card is not None:
                stage = f", stage {card.stage_id}," if card.stage_id >= 0 else ""
                fix = f"end process {card.pid}{stage} which has it"
            elif taken:
                fix = f"see who has it: ss -ltnp 'sport = :{claim.port}'"
            else:
                fix = "correct `host` in the file"
            level = _level(claim, puts)
            if level != "broken" and not config.observed():
                fix += "; or set prestart: false, since a last stage has no need of it"
            yield Finding(_AREA, what, level, str(exc), fix)
            if not taken:
                return  # the host is at fault, and would be again
        else:
            metrics = claim.purpose == "metrics"
            yield Finding(_AREA, what, "ok", f"{where} is free" + (", for metrics" if metrics else ""))


def _level(claim: Claim, puts: bool) -> Level:
    """How bad it is that an address is not to be had."""
    return "broken" if puts and claim.purpose == "listener" else "warning"
