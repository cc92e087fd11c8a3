"""Stages of a pipeline made of vLLM-Omni's own parts; runs in processes of their own (see omni_support.py).

Everything between model and connector is the host's: plugin loader, deploy file, edges, roles and ports,
chunk adapter, runner transport, KV manager, request and payload classes, Qwen3-Omni's stage processors. What
stands in is the model (made-up tensors, omni_scenes.py) and the scheduler's loop (`ChunkStage.step`).
"""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm_omni
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import RequestStatus
from vllm_omni.distributed.omni_connectors import load_omni_transfer_config
from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import (
    OmniChunkTransferAdapter,
)
from vllm_omni.distributed.omni_connectors.utils import config as host_config
from vllm_omni.request import OmniRequest
from vllm_omni.worker.omni_connector_model_runner_mixin import OmniConnectorModelRunnerMixin

HOST = Path(vllm_omni.__file__).parent
SHIPPED = HOST / "deploy" / "qwen3_omni_moe_mori_intranode.yaml"
LAYER = 24  # the hidden layer that Qwen3-Omni's talker takes
Plan = dict[str, Any]


# -------------------- configuration, as the host does it
def compile_function(module: Path, name: str, names: Plan, within: str = "") -> Any:
    """Make one function of a module that cannot be imported, or of a class in it, with these globals."""
    body = ast.parse(module.read_text()).body
    if within:
        [body] = [node.body for node in body if isinstance(node, ast.ClassDef) and node.name == within]
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    # Annotations stay text, as under the module's own `from __future__ import annotations`.
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *found], []), module.name, "exec"), names)
    return names[name]


def stage_spec(plan: Plan) -> Plan:
    """Name and unresolved configuration of a stage's connector, by the host's own function."""
    transfer = load_omni_transfer_config(plan.get("deploy", SHIPPED))
    for spec in transfer.connectors.values():
        spec.name = plan.get("name", spec.name)
        spec.extra.update(plan["extra"])
    names = {"TRANSFER_ENGINE_CONNECTOR_NAMES": host_config.TRANSFER_ENGINE_CONNECTOR_NAMES}
    of_stage = compile_function(HOST / "engine" / "stage_init_utils.py", "get_stage_connector_spec", names)
    spec = of_stage(transfer, plan["stage"], True)
    assert isinstance(spec, dict)
    return spec


def model_config(plan: Plan, processor: str | None, async_chunk: bool = True) -> SimpleNamespace:
    """What the host's parts read of a stage's model configuration."""
    return SimpleNamespace(
        stage_connector_config=stage_spec(plan),
        stage_id=plan["stage"],
        model_stage=("thinker", "talker", "code2wav")[plan["stage"]],
        max_num_seqs=64,
        max_model_len=65536,
        worker_type="generation" if plan["stage"] == 2 else "ar",
        async_chunk=async_chunk,
        requires_full_payload_input=plan["stage"] > 0 and not async_chunk,
        custom_process_next_stage_input_func=processor,
        hf_config=SimpleNamespace(talker_config=SimpleNamespace(accept_hidden_layer=LAYER)),
    )


class Runner(OmniConnectorModelRunnerMixin):
    """The transport half of the host's model runner."""

    def __init__(self, config: SimpleNamespace) -> None:
        self.model_config = config
        self.init_omni_connectors(config)


def new_request(name: str, prompt: list[int], plan: Plan) -> OmniRequest:
    """A running request as the scheduler has it."""
    request = OmniRequest(
        request_id=f"{name}-internal",
        external_req_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=100_000),
        pooling_params=None,
    )
    request.status = RequestStatus.RUNNING
    sender = plan.get("sender_info", {}).get(name, plan.get("sender_info", {}).get("*"))
    if sender is not None:
        request.payload_sender_info = sender
    return request


# -------------------- a stage of streamed chunks
class ChunkStage:
    """A scheduler's use of the chunk adapter, with the requests that it has running."""

    def __init__(self, plan: Plan, processor: str | None) -> None:
        config = model_config(plan, processor)
        # The host's worker comes first, and with it the runner's connector, which streamed chunks never use.
        self.runner = Runner(config) if plan.get("runner", True) else None
        self.adapter = OmniChunkTransferAdapter(
            SimpleNamespace(model_config=config, scheduler_config=SimpleNamespace(max_num_seqs=64))
        )
        self.requests: dict[str, OmniRequest] = {}
        self.running: list[OmniRequest] = []
        self._waiting = FCFSRequestQueue()

    def connector_class(self) -> Plan:
        """Which class the host made."""
        made = type(self.adapter.connector)
        return {"class": made.__name__, "module": made.__module__}

    def admit(self, request: OmniRequest) -> None:
        self.requests[request.request_id] = request
        self.running.append(request)

    def step(self) -> list[tuple[OmniRequest, Plan]]:
        """One turn of the scheduler's loop: the requests that have a chunk, with what came for them."""
        adapter = self.adapter
        adapter.process_pending_chunks(self._waiting, self.running, scheduler_requests=self.requests)
        ready = [r.request_id for r in self.running if r.request_id in adapter.requests_with_ready_chunks]
        output = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=ready, additional_information={}),
        )
        adapter.postprocess_scheduler_output(output, self.requests)
        adapter.restore_queues(self._waiting, self.running, self.requests)
        information = output.scheduled_cached_reqs.additional_information
        return [(self.requests[name], information[name]) for name in ready]

    def received_all(self, request: OmniRequest) -> bool:
        return bool(self.adapter.is_done_receiving_chunks(request.request_id))

    def send(self, request: OmniRequest, output: Plan, last: bool) -> None:
        """Hand the model's output of one step to the adapter."""
        request.append_output_token_ids(7)
        request.num_computed_tokens = request.num_tokens - 1
        if last:
            request.status = RequestStatus.FINISHED_STOPPED
        self.adapter.save_async(output, request, new_token_ids=[7])
        if last:
            self.drop(request)

    def drop(self, request: OmniRequest) -> None:
        self.running.remove(request)
        del self.requests[request.request_id]

    def close(self) -> Plan:
        """Shut down as the host does; what the connector said before, and how long it took."""
        health = self.adapter.connector.health()
        began = time.monotonic()
        self.adapter.shutdown()
        if self.runner is not None:
            self.runner.shutdown_omni_connectors()
        return {
            "health": health,
            "close_s": time.monotonic() - began,
            "send_failures": dict(self.adapter.collect_failed_send_request_ids()),
            "receive_failures": dict(self.adapter.collect_failed_receive_request_ids()),
        }


@contextmanager
def busy(plan: Plan) -> Iterator[None]:
    """A thread that never gives up the GIL of its own will, where the plan has one."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(100))

    if plan.get("busy"):
        threading.Thread(target=spin, daemon=True).start()
    try:
        yield
    finally:
        stop.set()
