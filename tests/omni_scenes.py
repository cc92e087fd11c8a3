"""What the stages of omni_stages.py do in each test of tests/vllm_omni: one function a kind of stage.

Each takes the plan that its test wrote and a pipe back to it. "ready" and "done", each answered, keep
the stages of one test in step; "ended" tells which child processes a stage has left behind.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from omni_stages import LAYER, ChunkStage, Plan, Runner, busy, model_config, new_request
from vllm_omni.data_entry_keys import CodesStruct, HiddenStatesStruct, MetaStruct, OmniPayloadStruct
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.kv_transfer_manager import OmniKVCacheConfig, OmniKVTransferManager
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec
from vllm_omni.distributed.omni_connectors.utils.initialization import resolve_connector_spec
from vllm_omni.engine import arg_utils  # noqa: F401  what the plugin of the host's own would import in each stage
from vllm_omni.model_executor.stage_input_processors import qwen3_omni
from vllm_omni.worker.omni_connector_model_runner_mixin import OmniConnectorModelRunnerMixin

from mori_mp import connector  # noqa: F401  likewise
from mori_mp.vllm_omni.plugin import OWN_NAME, register

PROCESSORS = qwen3_omni.__name__
PAUSE = 0.0005


def enter(scene: str, plan: Plan, pipe: Connection) -> None:
    """Entry point of a stage process."""
    os.environ.update(plan.get("env", {}))
    torch.set_num_threads(1)
    if "stand_in" in plan:
        _use_stand_in(**plan["stand_in"])
    from vllm_omni.plugins import load_omni_general_plugins

    load_omni_general_plugins()
    try:
        SCENES[scene](plan, pipe)
    except BaseException as exc:
        pipe.send(("failed", f"{type(exc).__name__}: {exc}"))
        raise
    # A listener that was still starting when its connector was closed ends a little later.
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=5)
    pipe.send(("ended", [str(child) for child in left]))


def _use_stand_in(path: str, pin: str) -> None:
    """Let the in-tree class run without Mori and a GPU: a package `mori`, its function for pinned memory."""
    sys.path.insert(0, path)
    sys.modules.pop("vllm_omni.distributed.omni_connectors.connectors.mori_transfer_engine_connector", None)
    module, _, function = pin.partition(":")
    torch.Tensor.pin_memory = getattr(importlib.import_module(module), function)


# ------------------------------------------------------------------------------------ streamed chunks
def hidden(request: int, chunk: int) -> torch.Tensor:
    """Eight tokens' hidden states; no two chunks are alike."""
    generator = torch.Generator().manual_seed(request * 100_003 + chunk)
    return torch.randn(8, 2048, generator=generator).to(torch.bfloat16)


def codec(request: int, chunk: int) -> torch.Tensor:
    """Twenty-five codec frames of sixteen codebooks."""
    generator = torch.Generator().manual_seed(request * 7_919 + chunk * 31 + 5)
    return torch.randint(0, 2048, (16, 25), generator=generator)


def pass_on(
    transfer_manager: Any, multimodal_output: Plan, request: Any, is_finished: bool = False
) -> OmniPayloadStruct:
    """A stage input processor that packs what it is given."""
    if "hidden" in multimodal_output:
        return OmniPayloadStruct(
            hidden_states=HiddenStatesStruct(output=multimodal_output["hidden"]), meta=MetaStruct()
        )
    return OmniPayloadStruct(codes=CodesStruct(audio=multimodal_output["codes"]), meta=MetaStruct())


def chunks(plan: Plan, pipe: Connection) -> None:
    """Stage 0 sends `chunks` chunks of each request, 1 checks and answers each, 2 (or the last) checks."""
    stage_id, count, last_stage = plan["stage"], plan["chunks"], plan.get("last_stage", 2)
    # As the host has them: stages say only what they have to.
    stage = ChunkStage(plan, f"{__name__}.pass_on" if stage_id < last_stage else None)
    names = {name: int(number) for name, number in plan["requests"].items()}
    pipe.send(("ready", {"class": type(stage.adapter.connector).__name__}))
    pipe.recv()
    got = dict.fromkeys(names, 0)
    wrong: list[str] = []
    deadline = time.monotonic() + plan["seconds"]
    with busy(plan):
        requests = {name: new_request(name, [1, 2, 3], plan) for name in names}
        for request in requests.values():
            stage.admit(request)
        if stage_id == 0:
            for chunk in range(count):
                for name, request in requests.items():
                    stage.send(request, {"hidden": hidden(names[name], chunk)}, chunk == count - 1)
                    got[name] += 1
        while stage_id and time.monotonic() < deadline and any(n < count for n in got.values()):
            arrived = stage.step()
            for request, information in arrived:
                name = request.external_req_id
                chunk, number = got[name], names[name]
                got[name] += 1
                if stage_id == 1:
                    content, want = information["hidden_states"]["output"], hidden(number, chunk)
                else:
                    content, want = information["codes"]["audio"], codec(number, chunk)
                if content.dtype != want.dtype or not torch.equal(content, want):
                    wrong.append(f"{name} chunk {chunk}")
                last = chunk == count - 1
                if last != stage.received_all(request):
                    wrong.append(f"{name} chunk {chunk}: the end of the stream is elsewhere")
                if stage_id < last_stage:
                    stage.send(request, {"codes": codec(number, chunk)}, last)
                elif last:
                    stage.drop(request)
            if not arrived:
                time.sleep(PAUSE)
        pipe.send(("done", {"got": got, "wrong": wrong[:10]}))
        pipe.recv()  # others may still be reading from us
    pipe.send(("closed", stage.close()))


# -------------------- Qwen3-Omni's own processors
WIDTH = 64
PROMPT = [151644, 872, 11, 12, 13, 14, 151644, 77091, 15]


def thinker_output(number: int, step: int) -> Plan:
    """What the thinker's forward gives: the prompt's rows at first, then one row a step."""
    rows = len(PROMPT) if step == 0 else 1
    generator = torch.Generator().manual_seed(number * 1_009 + step)

    def rows_of(count: int) -> torch.Tensor:
        return torch.randn(count, WIDTH, generator=generator).to(torch.bfloat16)

    return {
        "hidden_states.layer_0": rows_of(rows),
        f"hidden_states.layer_{LAYER}": rows_of(rows),
        "embed.tts_bos": rows_of(1),
        "embed.tts_eos": rows_of(1),
        "embed.tts_pad": rows_of(1),
    }


def frames_from(information: Plan, count: int) -> list[torch.Tensor]:
    """Codec frames that depend on every bit of what the talker was given."""
    seed = 1
    for group in ("embed", "hidden_states"):
        for key, value in sorted(information.get(group, {}).items()):
            if isinstance(value, torch.Tensor):
                words = value.contiguous().view(torch.int16).to(torch.int64).flatten()
                places = torch.arange(1, words.numel() + 1)
                seed = (seed * 31 + int((words * places).sum()) + len(key)) % (1 << 31)
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 2048, (1, 16), generator=generator) for _ in range(count)]


def qwen3(plan: Plan, pipe: Connection) -> None:
    """Thinker, talker and code2wav of Qwen3-Omni without the models; "done" has all that a stage received."""
    stage_id = plan["stage"]
    stage = ChunkStage(
        plan,
        (f"{PROCESSORS}.thinker2talker_async_chunk", f"{PROCESSORS}.talker2code2wav_async_chunk", None)[
            stage_id
        ],
    )
    names = {name: int(number) for name, number in plan["requests"].items()}
    pipe.send(("ready", {"class": type(stage.adapter.connector).__name__}))
    pipe.recv()
    requests = {name: new_request(name, PROMPT, plan) for name in names}
    received: dict[str, list[Any]] = {name: [] for name in names}
    for request in requests.values():
        stage.admit(request)
    if stage_id == 0:
        for step in range(plan["steps"]):
            for name, request in requests.items():
                stage.send(request, thinker_output(names[name], step), step == plan["steps"] - 1)
    deadline = time.monotonic() + plan["seconds"]
    while stage_id and stage.running and time.monotonic() < deadline:
        arrived = stage.step()
        for request, information in arrived:
            received[request.external_req_id].append((list(request.prompt_token_ids), information))
            last = stage.received_all(request)
            if stage_id == 1:
                frames = frames_from(information, plan["frames"])
                for position, frame in enumerate(frames):
                    end = last and position == len(frames) - 1
                    stage.send(request, {"codes.audio": frame}, end)
            elif last:
                stage.drop(request)
        if not arrived:
            time.sleep(PAUSE)
    left = [request.external_req_id for request in stage.running] if stage_id else []
    pipe.send(("done", {"received": received, "unfinished": left}))
    pipe.recv()
    pipe.send(("closed", stage.close()))


# --------------------------------------------------------------------------------- full payloads
def full_payload(plan: Plan, pipe: Connection) -> None:
    """A stage without streaming: stage 0's runner sends each request's payload whole, stage 1 takes it."""
    stage_id = plan["stage"]
    config = model_config(plan, f"{PROCESSORS}.thinker2talker_full_payload" if stage_id == 0 else None, False)
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
    config = model_config(plan, None, False)
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
    """One rank of a stage that sends (0) or receives (1) KV caches."""
    sends, rank = plan["stage"] == 0, int(plan["env"]["LOCAL_RANK"])
    from_tp, to_tp = plan["tp"]
    manager = OmniKVTransferManager(
        OmniKVCacheConfig(
            connector_config={"type": plan["name"], **plan["extra"]},
            from_stage="0",
            to_stage="1",
            stage_id=plan["stage"],
            engine_input_source=[] if sends else [0],
            need_send_cache=sends,
            need_recv_cache=not sends,
            recv_timeout=plan["seconds"],
            from_tp=from_tp,
            to_tp=to_tp,
        )
    )
    share = HEADS // (from_tp if sends else to_tp)
    heads = slice(rank * share, (rank + 1) * share)
    pipe.send(("ready", {"class": type(manager.connector).__name__}))
    pipe.recv()
    problems: dict[str, str] = {}
    for name in ("req-call", "req-update"):
        if sends:
            work = {name: {"seq_len": SEQUENCE, "block_ids": BLOCK_IDS}}
            manager.handle_finished_requests_kv_transfer(work, kv_caches(heads), BLOCK_SIZE, "bfloat16")
            continue
        # The endpoint of the sender's first rank comes with the call, or has been told before.
        if name == "req-call":
            data, _ = manager.receive_kv_cache_for_request(name, sender_info=plan["sender"])
        else:
            manager.update_sender_info(plan["sender"])
            data, _ = manager.receive_kv_cache_for_request(name)
        problems[name] = _kv_problem(data, heads)
    pipe.send(("done", {"problems": problems}))
    pipe.recv()
    manager.close()


def _kv_problem(data: Plan | None, heads: slice) -> str:
    if data is None:
        return "nothing came"
    for kind, wanted in kv_expected(heads).items():
        found = data["layer_blocks"][kind]
        if len(found) != len(wanted) or not all(map(torch.equal, found, wanted)):
            return f"{kind} differs: shapes {[tuple(t.shape) for t in found]}"
    return ""


# ------------------------------------------------------------------------------------ the plugin
def names(plan: Plan, pipe: Connection) -> None:
    """What the loaded plugin has changed in the host."""
    constructors = OmniConnectorFactory._registry
    registry = {name: constructor.__module__ for name, constructor in constructors.items()}
    copies = {
        name: sorted(module.TRANSFER_ENGINE_CONNECTOR_NAMES)
        for name, module in sys.modules.items()
        if name.startswith("vllm_omni.") and hasattr(module, "TRANSFER_ENGINE_CONNECTOR_NAMES")
    }
    resolved = [
        [
            resolve_connector_spec(
                ConnectorSpec(name, {**plan["extra"], "from_stage": 0, "to_stage": 1}),
                stage_id=stage,
                role=role,
                local_rank=1,
                replica_id=1,
            ).extra
            for name in ("MoriMPConnector", "MoriTransferEngineConnector")
        ]
        for stage, role in enumerate(("sender", "receiver"))
    ]
    before = dict(constructors)
    if OWN_NAME in before:
        register()
    pipe.send(("ready", {}))
    pipe.recv()
    again = before != constructors
    pipe.send(("done", {"registry": registry, "copies": copies, "resolved": resolved, "again": again}))
    pipe.recv()


SCENES: dict[str, Callable[[Plan, Connection], None]] = {
    "chunks": chunks,
    "qwen3": qwen3,
    "full_payload": full_payload,
    "synchronous": synchronous,
    "kv": kv,
    "names": names,
}
