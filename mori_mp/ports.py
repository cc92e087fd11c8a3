"""Which TCP port a stage's connector binds, and which one its peers dial.

Every stage computes its peers' ports from the deploy YAML alone; nobody announces them. The arithmetic is
therefore part of the contract with vllm-omni and must agree with it to the number::

    port = base                     the YAML's zmq_port
         + purpose                  request_forwarding 0, kv_transfer 100, orchestrator 200
         + 1024 * replica_id        one block per replica of the stage
         +   16 * local_rank        one slot per tensor-parallel rank
         + from_stage               the edge's sending stage, 0..15

The blocks are the host's and are not collision-free for every combination: request forwarding of rank 6,
stage 4 and KV transfer of rank 0, stage 0 are both base + 100. That cannot be changed from one end.
"""

from __future__ import annotations

import os
import re
from typing import Any, Literal, get_args

from mori_mp.shared.errors import DeployError

Purpose = Literal["request_forwarding", "kv_transfer", "orchestrator"]

TRANSFER_ENGINE_NAMES: frozenset[str] = frozenset(
    {
        "MoriTransferEngineConnector",
        "MoriMPConnector",
        "MooncakeTransferEngineConnector",
        "NixlConnector",
        "YuanrongTransferEngineConnector",
    }
)
"""Connector names whose configuration gets a computed port. All but MoriMPConnector are the host's own."""

OWN_NAMES: frozenset[str] = frozenset({"MoriTransferEngineConnector", "MoriMPConnector"})
"""Those of them that mori-mp answers to."""

DEFAULT_BASE_PORT = 50051
RANK_STRIDE = 16
REPLICA_STRIDE = 1024
PURPOSE_OFFSETS: dict[Purpose, int] = {"request_forwarding": 0, "kv_transfer": 100, "orchestrator": 200}

_UNSET_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def expand_port(value: Any, field: str) -> int:
    """Return `value` as an integer, after expanding `$VAR` and `${VAR}` from the environment.

    value: an int, or a string as the YAML holds it.
    field: the key's name, for the message.
    Raises DeployError when a variable is unset or the result is no integer.
    """
    expanded = os.path.expandvars(value) if isinstance(value, str) else value
    if isinstance(expanded, str):
        unset = ["".join(groups) for groups in _UNSET_VARIABLE.findall(expanded)]
        if unset:
            raise DeployError(
                f"{field} is {value!r}, but the environment has no {', '.join(unset)}. "
                f"Set it in the environment of every stage, or write the number."
            )
    try:
        if isinstance(expanded, bool) or (isinstance(expanded, float) and not expanded.is_integer()):
            raise TypeError
        return int(expanded)
    except (TypeError, ValueError, OverflowError):
        became = f" (expanded to {expanded!r})" if expanded != value else ""
        raise DeployError(f"{field} must be a port number, got {value!r}{became}.") from None


def compute_port(
    base: int,
    *,
    purpose: Purpose,
    from_stage: int,
    local_rank: int = 0,
    replica_id: int = 0,
) -> int:
    """Return the TCP port on which the sender of an edge listens.

    base: the YAML's zmq_port.
    purpose: what the sockets carry; one of PURPOSE_OFFSETS.
    from_stage: the edge's sending stage, 0..15.
    local_rank: tensor-parallel rank of the worker on its host, from 0.
    replica_id: replica of the stage, from 0.
    Raises DeployError for an unknown purpose, an argument out of range, or a port outside 1..65535.
    """
    if purpose not in PURPOSE_OFFSETS:
        raise DeployError(f"unknown purpose {purpose!r}. Use one of: {', '.join(get_args(Purpose))}.")
    if not 0 <= from_stage < RANK_STRIDE:
        raise DeployError(
            f"from_stage must be in 0..{RANK_STRIDE - 1}, got {from_stage}: a rank has {RANK_STRIDE} ports, "
            f"one for each stage that sends through a transfer engine."
        )
    for label, index in (("local_rank", local_rank), ("replica_id", replica_id)):
        if index < 0:
            raise DeployError(f"{label} must not be negative, got {index}.")

    offset = PURPOSE_OFFSETS[purpose]
    port = base + offset + REPLICA_STRIDE * replica_id + RANK_STRIDE * local_rank + from_stage
    if not 1 <= port <= 65535:
        raise DeployError(
            f"port {port} is outside 1..65535 (zmq_port {base} + {purpose} {offset} + {REPLICA_STRIDE} * "
            f"replica {replica_id} + {RANK_STRIDE} * rank {local_rank} + stage {from_stage}). "
            f"Choose another zmq_port."
        )
    return port
