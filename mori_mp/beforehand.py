"""What can be told of a connector before it is made: its workers' interpreter, its ports, its sender's name.

`mori-mp doctor` and `mori-mp pipeline` ask this; a connector finds the same when it starts, some of it in a
log only. Every stage is taken to run on this host.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from mori_mp import interpreter_probe
from mori_mp.config import ConnectorConfig
from mori_mp.endpoint import check_bindable, resolve_host
from mori_mp.shared import registry
from mori_mp.shared.errors import ConfigError, StartupError
from mori_mp.workers.spawn import module_path

_PROBE_SECONDS = 20.0


def check_interpreter(python: str, engine: str) -> str:
    """Return the Python version of another interpreter for workers that run an engine.

    Raises StartupError where it cannot be run, is not supported, or lacks what a worker imports.
    """
    root = module_path()[0]
    told = f"worker_python={python!r}"
    try:
        done = subprocess.run(
            [python, str(Path(interpreter_probe.__file__).resolve()), root, engine],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            cwd="/",  # as a worker's
        )
    except OSError as exc:
        raise StartupError(
            f"{told} cannot be run: {exc.strerror}; name a Python interpreter of this machine"
        ) from None
    except subprocess.TimeoutExpired:
        raise StartupError(f"{told} did not import in {_PROBE_SECONDS:g} s what a worker needs") from None
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines and lines[-1].startswith(interpreter_probe.SOUND):
        return lines[-1].removeprefix(interpreter_probe.SOUND)
    said = done.stderr.strip().splitlines()
    why = said[-1] if said else f"it is no Python interpreter (exit status {done.returncode})"
    raise StartupError(f"{told} cannot run workers: {why}")


def check_sender_host(config: ConnectorConfig) -> None:
    """Raise ConfigError if the name of the stage to receive from does not resolve."""
    if config.role == "sender" or config.sender_host is None:
        return
    try:
        socket.getaddrinfo(resolve_host(config.sender_host), config.sender_zmq_port, type=socket.SOCK_STREAM)
    except socket.gaierror as exc:
        raise ConfigError(
            f"sender_host={config.sender_host!r} does not resolve ({exc.strerror}); set it (or `host`, where"
            " it comes from that) to a name or address of the stage to receive from"
        ) from None


# ---- ports


class Claim(NamedTuple):
    """An address that a stage is going to listen at, what for, and the key that sets the port."""

    stage_id: int
    purpose: Literal["listener", "metrics"]
    host: str
    port: int
    key: str

    def __str__(self) -> str:
        return f"{self.purpose} ({self.key}{' + stage_id' if self.purpose == 'metrics' else ''})"


def claims(config: ConnectorConfig, puts: bool) -> list[Claim]:
    """List what a connector will listen at, free ports left out. puts: whether it will be asked to put."""
    endpoint = config.listener_endpoint()
    if endpoint is None or not (puts or config.listens_ahead()):
        return []
    host = resolve_host(endpoint[0])
    wanted = [
        Claim(config.stage_id, "listener", host, endpoint[1], config.listener_key()),
        Claim(config.stage_id, "metrics", host, config.metrics_port(), "prometheus_port"),
    ]
    return [claim for claim in wanted if claim.port]


def check_claim(claim: Claim) -> None:
    """Raise StartupError if the address cannot be listened at now."""
    check_bindable(claim.host, claim.port, claim.key)


def holder(claim: Claim, base: Path) -> registry.Card | None:
    """Return the connector of this host that listens at an address; None if none of those below base does."""
    endpoint = (
        f"tcp://[{claim.host}]:{claim.port}" if ":" in claim.host else f"tcp://{claim.host}:{claim.port}"
    )
    return next((found.card for found in registry.live(base) if found.card.endpoint == endpoint), None)


def collisions(claimed: Iterable[Claim]) -> Iterator[tuple[int, str]]:
    """Yield a stage and a text for each address that another of these claims has already."""
    owners: dict[tuple[str, int], Claim] = {}
    for claim in claimed:
        owner = owners.setdefault((claim.host, claim.port), claim)
        if owner is not claim:
            key = next((one.key for one in (claim, owner) if one.key != "zmq_port"), "zmq_port")
            cure = f"change {key}"
            if key == "outgoing.zmq_port":  # what stages share says, each of them reads
                cure += ", or name the one stage that it is for in outgoing.from_stage"
            yield (
                claim.stage_id,
                f"{claim.host}:{claim.port} would be its {claim} and the {owner} of stage {owner.stage_id}; "
                f"{cure}",
            )
