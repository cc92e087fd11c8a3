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
from typing import Any

import omni_models
import omni_runner_scenes
import torch
from omni_child import children_left
from omni_models import PROMPT, codec, frames_from, hidden, thinker_output
from omni_stages import ChunkStage, Plan, busy, new_request
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec
from vllm_omni.distributed.omni_connectors.utils.initialization import resolve_connector_spec
from vllm_omni.engine import arg_utils  # noqa: F401  what the plugin of the host's own would import in each stage
from vllm_omni.model_executor.stage_input_processors import qwen3_omni

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
    pipe.send(("ended", children_left()))


def _use_stand_in(path: str, pin: str) -> None:
    """Let the in-tree class run without Mori and a GPU: a package `mori`, its function for pinned memory."""
    sys.path.insert(0, path)
    sys.modules.pop("vllm_omni.distributed.omni_connectors.connectors.mori_transfer_engine_connector", None)
    module, _, function = pin.partition(":")
    torch.Tensor.pin_memory = getattr(importlib.import_module(module), function)


# ------------------------------------------------------------------------------------ streamed chunks
def chunks(plan: Plan, pipe: Connection) -> None:
    """Stage 0 sends `chunks` chunks of each request, 1 checks and answers each, 2 (or the last) checks."""
    stage_id, count, last_stage = plan["stage"], plan["chunks"], plan.get("last_stage", 2)
    # As the host has them: stages say only what they have to.
    stage = ChunkStage(plan, f"{omni_models.__name__}.pass_on" if stage_id < last_stage else None)
    names = {name: int(number) for name, number in plan["requests"].items()}
    pipe.send(("ready", stage.connector_class()))
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
    pipe.send(("ready", stage.connector_class()))
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
    "names": names,
    **omni_runner_scenes.SCENES,
}
