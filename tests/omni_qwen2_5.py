"""Checks of the Qwen2.5-Omni processors, in a process that has vllm-omni: its chunk adapters, our connector.

Whole payloads come from the host's own processors, chunks from ours; what a stage has received in chunks
must be, put together, what it would have received whole.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from connector_support import short_directory
from omni_qwen2_5_talker import inputs_of_steps, make_talker
from omni_stages import HOST, ChunkStage, Plan, compile_function, new_request
from vllm.v1.request import RequestStatus
from vllm_omni.config.stage_config import PipelineConfig, load_deploy_config, merge_pipeline_deploy
from vllm_omni.distributed.omni_connectors import adapter as host_adapter
from vllm_omni.model_executor.models.qwen2_5_omni.pipeline import QWEN2_5_OMNI_PIPELINE
from vllm_omni.model_executor.stage_input_processors import qwen2_5_omni as host_processors

from mori_mp.pipeline.free_ports import PortBlock
from mori_mp.vllm_omni import plugin, qwen2_5_omni, qwen2_5_pipeline

DEPLOY = Path(__file__).parents[1] / "deploy" / "qwen2_5_omni_mori_intranode.yaml"
WIDTH = 48
STOP = 151645
PROMPT = [151644, 8948, 11, 12, 13, 151645, 198, 151644, 872, 21, 22, 151645, 198, 151644, 77091, 198]
ENDS = {"stop": RequestStatus.FINISHED_STOPPED, "length": RequestStatus.FINISHED_LENGTH_CAPPED}
host_rule = host_adapter.compute_talker_prompt_ids_length


def stream_plan(stage: int, base_port: int) -> Plan:
    """A stage of our deploy file, cut to a test's size and this machine."""
    extra = {
        "host": "127.0.0.1", "zmq_port": base_port, "backend_type": "shm", "memory_pool_device": "cpu",
        "memory_pool_size": 8 << 20, "num_transfer_workers": 1, "prefault": False, "pin": "off",
        "codec_chunk_frames": 10, "initial_codec_chunk_frames": 4,
    }  # fmt: skip
    return {"stage": stage, "deploy": DEPLOY, "runner": False, "extra": extra}


@contextmanager
def stages() -> Iterator[list[ChunkStage]]:
    """Thinker, talker and code2wav, as our pipeline and deploy file have them."""
    plugin.register()
    with enabled() as processors, short_directory() as runtime, PortBlock() as ports:
        os.environ["MORI_MP_RUNTIME_DIR"] = str(runtime)
        made = [
            ChunkStage(stream_plan(stage, ports.base), processor)
            for stage, processor in enumerate(processors)
        ]
        try:
            yield made
        finally:
            for stage in reversed(made):
                stage.close()
        assert os.listdir(runtime) == [], "runtime files are left"


@contextmanager
def enabled() -> Iterator[list[str | None]]:
    """Streaming registered with the host; gives the processors that a server finds for our deploy file."""
    registry = _registry()
    os.environ[qwen2_5_pipeline.ENABLE_ENV] = "1"
    try:
        qwen2_5_pipeline.register()
        config = load_deploy_config(DEPLOY)
        merged = merge_pipeline_deploy(registry.OMNI_PIPELINES[config.pipeline], config)
        yield [stage.yaml_engine_args.get("custom_process_next_stage_input_func") for stage in merged]
    finally:
        del os.environ[qwen2_5_pipeline.ENABLE_ENV]
        host_adapter.compute_talker_prompt_ids_length = host_rule


def _registry() -> Any:
    """The host's registry of pipelines. Importing it imports every model.

    Where one of them lacks a package, its function is compiled from its source, over an empty registry.
    """
    name = "vllm_omni.config.pipeline_registry"
    try:
        return importlib.import_module(name)
    except ImportError:
        registry = sys.modules[name] = ModuleType(name)
        registry.__dict__.update(OMNI_PIPELINES={}, PipelineConfig=PipelineConfig)
        compile_function(HOST / "config" / "pipeline_registry.py", "register_pipeline", registry.__dict__)
        return registry


def receive(stage: ChunkStage, request: Any, seconds: float = 20.0) -> list[tuple[list[int], Plan]]:
    """Return every chunk of a request: its prompt then, and what came."""
    stage.admit(request)
    chunks: list[tuple[list[int], Plan]] = []
    deadline = time.monotonic() + seconds
    while True:
        for _, information in stage.step():
            chunks.append((list(request.prompt_token_ids), information or {}))
            if stage.received_all(request):
                stage.drop(request)
                return chunks
        assert time.monotonic() < deadline, f"no end after {len(chunks)} chunks"
        time.sleep(0.0005)


def rows(count: int) -> torch.Tensor:
    """Hidden states [count, WIDTH] as the thinker gives them."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count)).to(torch.bfloat16)


def think(adapter: Any, request: Any, hidden: torch.Tensor, answer: list[int], end: str, parts: int) -> None:
    """Play the thinker: the prompt in parts, then a token a step."""
    length = len(request.prompt_token_ids)
    for part in range(parts - 1):
        start, stop = length * part // parts, length * (part + 1) // parts
        request.num_computed_tokens = stop
        adapter.save_async({"hidden": hidden[start:stop]}, request, new_token_ids=[])
    start = length * (parts - 1) // parts
    for step, token in enumerate(answer):
        stop = length + step
        request.num_computed_tokens = stop
        request.append_output_token_ids(token)
        if step == len(answer) - 1:
            request.status = ENDS[end]
        adapter.save_async({"hidden": hidden[start:stop]}, request, new_token_ids=[token])
        start = stop


def talk(adapter: Any, request: Any, tokens: list[int]) -> None:
    """Play the talker, whose hidden states nobody needs."""
    for step, token in enumerate(tokens):
        request.num_computed_tokens = len(request.prompt_token_ids) + step
        request.append_output_token_ids(token)
        if step == len(tokens) - 1:
            request.status = RequestStatus.FINISHED_STOPPED
        adapter.save_async({"hidden": torch.zeros(1, 4)}, request, new_token_ids=[token])


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)


def thinker_chunks() -> None:
    """Concatenated chunks are the whole payload, and the talker computes on the same at each step."""
    with stages() as (thinker, talker, _):
        model, number = make_talker(WIDTH), 0
        for end in ENDS:
            for answer_length in (1, 2, 3, 40):
                for parts in (1, 3):
                    number += 1
                    answer = [1000 + i for i in range(answer_length - 1)] + [STOP if end == "stop" else 1999]
                    hidden = rows(len(PROMPT) + len(answer) - 1)
                    request = new_request(f"r{number}", PROMPT, {})
                    think(thinker.adapter, request, hidden, answer, end, parts)
                    got = [info for _, info in receive(talker, new_request(f"r{number}", [0] * 18, {}))]
                    whole = host_processors.thinker2talker_full_payload(None, {"hidden": hidden}, request)
                    where = f"{end}, answer of {answer_length}, prompt in {parts}"
                    reply = [got[0]["hidden_states"]["output"]]
                    reply += [c["embed"]["thinker_reply"] for c in got[1:] if "embed" in c]
                    assert same(got[0]["embed"]["prefill"], whole["embed"]["prefill"]), where
                    assert same(torch.cat(reply), whole["hidden_states"]["output"]), where
                    assert got[0]["ids"]["prompt"] == whole["ids"]["prompt"], where
                    tokens = [token for chunk in got for token in chunk.get("ids", {}).get("output", [])]
                    assert tokens == (whole["ids"]["output"] or answer[:1]), where
                    assert all(len(r) == 1 for r in reply[:-1]), "a chunk a step, a row a chunk"
                    check_talker(model, got, whole, where)


def check_talker(model: Any, chunks: list[Plan], whole: Plan, where: str) -> None:
    """Let the host's talker take the chunks, and the whole payload; 60 steps are more than any answer has."""
    reserved = host_adapter.compute_talker_prompt_ids_length(PROMPT)
    taken = inputs_of_steps(model, chunks, reserved, 60)
    if not whole["ids"]["output"]:  # an answer of one token, which stopped it
        try:
            inputs_of_steps(model, [whole], reserved, 1)
        except IndexError:
            return
        raise AssertionError("the talker takes a payload without the answer's first token")
    wanted = inputs_of_steps(model, [whole], reserved, 60)
    assert all(map(same, taken, wanted)), where
    if len(whole["hidden_states"]["output"]):
        assert len(taken[0]) == reserved, f"{where}: the talker's prompt is not what the host reserves"


def codec_chunks() -> None:
    """Concatenated chunks are the whole payload, in the sizes asked for, each id sent once."""
    with stages() as (_, talker, code2wav):
        ids = [(i * 37) % 8292 for i in range(47)]
        for number, tokens in enumerate(
            [
                [*ids, 8294],
                [8293, *ids[:5], 8292, *ids[5:20], 8296, *ids[20:], 8294],
                [*ids[:7], -1, -1],
                [*ids[:4], 8294],
                ids[:14],
            ]
        ):
            request = new_request(f"c{number}", [8293, 8292, 8294], {})
            talk(talker.adapter, request, tokens)
            got = receive(code2wav, new_request(f"c{number}", [0], {}))
            whole = host_processors.talker2code2wav_full_payload(None, {}, request)
            pieces = [prompt for prompt, _ in got if prompt != [0]]
            assert [code for piece in pieces for code in piece] == whole["codes"]["audio"], tokens
            sizes = [len(piece) for piece in pieces]
            assert sizes[0] == min(4, len(whole["codes"]["audio"])), sizes
            assert all(size == 10 for size in sizes[1:-1]), sizes
            assert {info.get("meta", {}).get("left_context_size", 0) for _, info in got} == {0}


class Manager:
    """What the processors use of the adapter."""

    def __init__(self, **config: Any) -> None:
        self.request_payload: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self.connector = SimpleNamespace(config=config)

    def record_send_failure(self, request_id: str, reason: str) -> None:
        self.failed[request_id] = reason


def step(manager: Manager, request: Any, hidden: Any, token: int | None, finished: bool = False) -> Any:
    if token is not None:
        request.append_output_token_ids(token)
    return qwen2_5_omni.thinker2talker_async_chunk(
        manager, {"hidden": hidden}, request, finished, new_token_ids=() if token is None else (token,)
    )


@contextmanager
def reserved_in_full() -> Iterator[None]:
    host_adapter.compute_talker_prompt_ids_length = qwen2_5_pipeline.talker_prompt_length
    try:
        yield
    finally:
        host_adapter.compute_talker_prompt_ids_length = host_rule


def what_is_computed_again() -> None:
    """A thinker preempted amid its answer computes all again, whole or in parts: nothing is sent twice."""
    hidden, length = rows(len(PROMPT) + 3), len(PROMPT)
    for parts in (1, 3):
        with reserved_in_full():
            manager, request = Manager(), new_request("again", PROMPT, {})
            assert step(manager, request, hidden[:length], 1) is None
            first = step(manager, request, hidden[length : length + 1], 2)
            for part in range(parts - 1):
                assert step(manager, request, hidden[: length // (2 - part)], None) is None
            again = hidden[: length + 2] if parts == 1 else hidden[length - 2 : length + 2]
            second = step(manager, request, again, 3)
            third = step(manager, request, hidden[length + 2 :], 4, True)
            taken = [first.hidden_states.output, second.embed.thinker_reply, third.embed.thinker_reply]
            assert same(torch.cat(taken), hidden[length:].float())
            assert manager.failed == {}


def requests_that_cannot_be_streamed() -> None:
    """They fail at once and say why, and nothing is sent for them."""
    hidden, length = rows(len(PROMPT) + 1), len(PROMPT)

    def reason(play: Any, prompt: list[int] = PROMPT, full: bool = True) -> str:
        manager, request = Manager(), new_request("bad", prompt, {})
        host_adapter.compute_talker_prompt_ids_length = (
            qwen2_5_pipeline.talker_prompt_length if full else host_rule
        )
        try:
            assert play(manager, request) is None
            assert step(manager, request, hidden[:1], 9, True) is None, "a failed request sends nothing more"
        finally:
            host_adapter.compute_talker_prompt_ids_length = host_rule
        return manager.failed[request.request_id]

    def two_steps(manager: Manager, request: Any) -> Any:
        step(manager, request, hidden[:length], 1)
        return step(manager, request, hidden[length:], 2)

    def short(manager: Manager, request: Any) -> Any:
        return step(manager, request, hidden[: length - 1], 1)

    def preempted_in_parts(manager: Manager, request: Any) -> Any:
        step(manager, request, hidden[:6], None)
        step(manager, request, hidden[:4], None)
        return step(manager, request, hidden[4:length], 1)

    def session(manager: Manager, request: Any) -> Any:
        request.resumable = True
        return step(manager, request, hidden[:length], 1)

    assert qwen2_5_pipeline.ENABLE_ENV in reason(two_steps, full=False)
    assert "are due" in reason(short)
    assert "preempted" in reason(preempted_in_parts)
    assert "streaming input" in reason(session)


def registration() -> None:
    """Only on request; the pipeline is the host's with two processors more, and our deploy file names it."""
    registry = _registry()
    qwen2_5_pipeline.register()
    assert host_adapter.compute_talker_prompt_ids_length is host_rule
    assert qwen2_5_pipeline.PIPELINE not in registry.OMNI_PIPELINES
    for _ in range(2):
        with enabled() as processors:
            assert host_adapter.compute_talker_prompt_ids_length(PROMPT) == len(PROMPT) + 2
            assert processors == [
                f"{qwen2_5_omni.__name__}.{qwen2_5_omni.thinker2talker_async_chunk.__name__}",
                f"{qwen2_5_omni.__name__}.{qwen2_5_omni.talker2code2wav_async_chunk.__name__}",
                None,
            ]
    ours = registry.OMNI_PIPELINES[qwen2_5_pipeline.PIPELINE]
    for mine, theirs in zip(ours.stages, QWEN2_5_OMNI_PIPELINE.stages, strict=True):
        assert dataclasses.replace(mine, async_chunk_process_next_stage_input_func=None) == theirs


CHECKS = {
    check.__name__: check
    for check in (
        thinker_chunks,
        codec_chunks,
        what_is_computed_again,
        requests_that_cannot_be_streamed,
        registration,
    )
}
