"""Stages that send payloads whole, by the model runner's transport, and KV caches, by the KV manager."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from omni_models import PROMPT, thinker_output
from omni_stages import Plan, Runner, model_config, new_request
from vllm_omni.distributed.omni_connectors.kv_transfer_manager import OmniKVCacheConfig, OmniKVTransferManager
from vllm_omni.model_executor.stage_input_processors import qwen3_omni
from vllm_omni.worker.omni_connector_model_runner_mixin import OmniConnectorModelRunnerMixin

PAUSE = 0.0005


# --------------------------------------------------------------------------------- full payloads
def full_payload(plan: Plan, pipe: Connection) -> None:
    """A stage without streaming: stage 0's runner sends each request's payload whole, stage 1 takes it."""
    stage_id = plan["stage"]
    config = model_config(
        plan, f"{qwen3_omni.__name__}.thinker2talker_full_payload" if stage_id == 0 else None, False
    )
    runner = Runner(config)
    names = {name: int(number) for name, number in plan["requests"].items()}
    requests = {name: new_request(name, PROMPT, plan) for name in names}
    pipe.send(("ready", {}))
    pipe.recv()
    received: dict[str, Any] = {}
    if stage_id == 0:
        for name, request in requests.items():
            request.append_output_token_ids([21, 22, 23])
            output = thinker_output(names[name], 0)
            assert runner.send_full_payload_outputs(None, {request.request_id: (output, request)})
    else:
        for request in requests.values():
            runner.register_chunk_recv(request)
        external = {request.request_id: name for name, request in requests.items()}
        deadline = time.monotonic() + plan["seconds"]
        while len(received) < len(names) and time.monotonic() < deadline:
            for request_id, payload in (runner.recv_full_payload_inputs(None) or {}).items():
                received[external[request_id]] = payload
            time.sleep(PAUSE)
    pipe.send(("done", {"received": received}))
    pipe.recv()
    runner.shutdown_omni_connectors()


class SynchronousRunner(OmniConnectorModelRunnerMixin):
    """A runner that waits for its payloads through the KV manager's connector, as the diffusion stages do."""

    def __init__(self, config: SimpleNamespace, manager: OmniKVTransferManager) -> None:
        self.init_omni_connectors(config, manager, synchronous=True)


def synchronous(plan: Plan, pipe: Connection) -> None:
    """The receiver of full_payload's stage 0, waiting for one request after the other."""
    config = model_config(plan, None, async_chunk=False)
    manager = OmniKVTransferManager(
        OmniKVCacheConfig(
            connector_config={
                "type": config.stage_connector_config["name"],
                **plan["extra"],
                "role": "receiver",
            },
            from_stage="0",
            to_stage="1",
            stage_id=1,
            engine_input_source=[0],
        )
    )
    runner = SynchronousRunner(config, manager)
    pipe.send(("ready", {}))
    pipe.recv()
    received, times = {}, {}
    for name in plan["requests"]:
        began = time.monotonic()
        received[name] = runner.recv_stage_payload(
            name, "0", "1", sender_info=plan["sender"], retry_seconds=plan["seconds"]
        )
        times[name] = time.monotonic() - began
    pipe.send(("done", {"received": received, "seconds": times}))
    pipe.recv()
    manager.close()


# --------------------------------------------------------------------------------------- KV caches
LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_WIDTH = 2, 6, 4, 4, 8
BLOCK_IDS, SEQUENCE = [4, 1, 3], 10


def kv_caches(heads: slice) -> list[torch.Tensor]:
    """The paged KV cache of each layer, as one tensor-parallel rank has it: its share of the heads."""
    generator = torch.Generator().manual_seed(17)
    shape = (2, BLOCKS, BLOCK_SIZE, HEADS, HEAD_WIDTH)
    caches = [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(LAYERS)]
    return [cache[..., heads, :].contiguous() for cache in caches]


def kv_expected(heads: slice) -> dict[str, list[torch.Tensor]]:
    """What a receiver of those heads must hold of the sequence."""
    flat = [cache[:, BLOCK_IDS].flatten(1, 2)[:, :SEQUENCE] for cache in kv_caches(heads)]
    return {"key_cache": [cache[0] for cache in flat], "value_cache": [cache[1] for cache in flat]}


def kv(plan: Plan, pipe: Connection) -> None:
    """One rank of a stage in a chain that hands KV caches on: made at stage 0, compared at each later one."""
    stage, rank = plan["stage"], int(plan["env"]["LOCAL_RANK"])
    receiver, sender = _kv_managers(plan)
    share = HEADS // plan["tp"][stage]
    heads = slice(rank * share, (rank + 1) * share)
    pipe.send(("ready", {"class": type((sender or receiver).connector).__name__}))
    pipe.recv()
    caches = kv_caches(heads)
    problems: dict[str, str] = {}
    for name in ("req-call", "req-update"):
        if receiver is not None:
            # The endpoint of the sender's first rank comes with the call, or has been told before.
            if name == "req-call":
                data, _ = receiver.receive_kv_cache_for_request(name, sender_info=plan["sender"])
            else:
                receiver.update_sender_info(plan["sender"])
                data, _ = receiver.receive_kv_cache_for_request(name)
            problems[name] = _kv_problem(data, heads)
            caches = _paged(data) if not problems[name] else []
        if sender is not None and caches:
            work = {name: {"seq_len": SEQUENCE, "block_ids": BLOCK_IDS}}
            sender.handle_finished_requests_kv_transfer(work, caches, BLOCK_SIZE, "bfloat16")
    pipe.send(("done", {"problems": problems}))
    pipe.recv()
    for manager in {id(manager): manager for manager in (receiver, sender) if manager is not None}.values():
        manager.close()


def _kv_managers(plan: Plan) -> tuple[OmniKVTransferManager | None, OmniKVTransferManager | None]:
    """Who receives and who sends: one manager where both edges have the same ranks: it knows one edge's."""
    stage, tp = plan["stage"], plan["tp"]
    incoming = tuple(tp[stage - 1 : stage + 1]) if stage > 0 else None
    outgoing = tuple(tp[stage : stage + 2]) if stage + 1 < len(tp) else None
    if incoming == outgoing:
        both = _kv_manager(plan, incoming, receives=True, sends=True)
        return both, both
    return (
        _kv_manager(plan, incoming, receives=True) if incoming else None,
        _kv_manager(plan, outgoing, sends=True) if outgoing else None,
    )


def _kv_manager(plan: Plan, tp: Any, *, receives: bool = False, sends: bool = False) -> OmniKVTransferManager:
    stage = plan["stage"]
    return OmniKVTransferManager(
        OmniKVCacheConfig(
            connector_config={"type": plan["name"], **plan["extra"]},
            from_stage=str(stage if sends else stage - 1),
            to_stage=str(stage + 1 if sends else stage),
            stage_id=stage,
            engine_input_source=[stage - 1] if receives else [],
            need_send_cache=sends,
            need_recv_cache=receives,
            recv_timeout=plan["seconds"],
            from_tp=tp[0],
            to_tp=tp[1],
        )
    )


def _kv_problem(data: Plan | None, heads: slice) -> str:
    if data is None:
        return "nothing came"
    for kind, wanted in kv_expected(heads).items():
        found = data["layer_blocks"][kind]
        if len(found) != len(wanted) or not all(map(torch.equal, found, wanted)):
            return f"{kind} differs: shapes {[tuple(t.shape) for t in found]}"
    return ""


def _paged(data: Plan) -> list[torch.Tensor]:
    """The caches of a stage that has taken what it received into the same blocks of its own."""
    caches = []
    for keys, values in zip(
        data["layer_blocks"]["key_cache"], data["layer_blocks"]["value_cache"], strict=True
    ):
        cache = torch.zeros(2, BLOCKS, BLOCK_SIZE, *keys.shape[1:], dtype=keys.dtype)
        taken = torch.zeros(2, len(BLOCK_IDS) * BLOCK_SIZE, *keys.shape[1:], dtype=keys.dtype)
        taken[:, :SEQUENCE] = torch.stack([keys, values])
        cache[:, BLOCK_IDS] = taken.view(2, len(BLOCK_IDS), BLOCK_SIZE, *keys.shape[1:])
        caches.append(cache)
    return caches


SCENES: dict[str, Callable[[Plan, Connection], None]] = {
    "full_payload": full_payload,
    "synchronous": synchronous,
    "kv": kv,
}
