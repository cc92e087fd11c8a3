"""Streaming for Qwen2.5-Omni: the stage input processors that vLLM-Omni 0.30.0 has for whole payloads only.

The chunk adapter calls a processor after every model step of the sending stage, and sends what it returns.
What the models of vLLM-Omni can take decides what a chunk holds:

    thinker -> talker    the talker waits for a chunk before each of its steps, and one row of the thinker's
                         hidden states goes into each step
        first chunk      embed.prefill [P, H] for the P tokens of the prompt, hidden_states.output [1, H] for
                         the first token of the answer (the talker's prompt ends with it), ids.prompt
        further chunks   embed.thinker_reply [1, H]: the queue that the talker takes a row from at each step,
                         and that is empty again when the answer has ended
    talker -> code2wav   codes.audio: codec ids, `codec_chunk_frames` at a time, each sent once. Code2wav
                         makes sound of each chunk on its own, so there is no left context to send again

Rows are float32, as in the whole payload; concatenated, the chunks hold what that holds. ids.output has the
tokens of the answer, in pieces.

The pipeline that names these processors is made by `qwen2_5_pipeline`. docs/qwen2_5_omni.md has the reasons
and what stays impossible.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mori_mp.vllm_omni.qwen2_5_pipeline import ENABLE_ENV, reserved_prompt_length, talker_prompt_length

logger = logging.getLogger(__name__)

CODEC_IDS = 8292
"""Codec ids lie below; from here on the talker's vocabulary has control tokens."""

DEFAULT_CHUNK_FRAMES = 100  # two seconds


class UnusableChunk(Exception):
    """A request cannot be streamed; the message is for its client."""


@dataclasses.dataclass
class _Answer:
    """One request: rows of hidden states taken so far, those held back, tokens of the answer sent."""

    rows: int = 0
    held: list[torch.Tensor] = dataclasses.field(default_factory=list)
    tokens: int = 0
    started: bool = False
    failed: bool = False


# -------------------------------------------------------------------------- thinker -> talker
def thinker2talker_async_chunk(
    transfer_manager: Any,
    multimodal_output: Any,
    request: Any,
    is_finished: bool = False,
    new_token_ids: Sequence[int] = (),
) -> Any:
    """Return the chunk for one thinker step, an OmniPayloadStruct, or None when there is nothing to send yet.

    multimodal_output["hidden"] [n, H] holds the rows of the step's tokens. A request that cannot be streamed
    is failed through the adapter, with the reason.
    """
    answers = transfer_manager.request_payload  # the adapter forgets it with the request
    answer = answers.setdefault(request.external_req_id, _Answer())
    if answer.failed:
        return None
    try:
        return _thinker_chunk(answer, multimodal_output, request, is_finished, bool(new_token_ids))
    except UnusableChunk as exc:
        answer.failed = True
        reason = f"request {request.external_req_id!r} cannot be streamed to the talker: {exc}"
        logger.error("%s", reason)
        transfer_manager.record_send_failure(request.request_id, reason)
        return None


def _thinker_chunk(answer: _Answer, output: Any, request: Any, finished: bool, sampled: bool) -> Any:
    from vllm_omni.data_entry_keys import (
        EmbeddingsStruct,
        HiddenStatesStruct,
        IdsStruct,
        MetaStruct,
        OmniPayloadStruct,
    )

    if getattr(request, "resumable", False):
        raise UnusableChunk("sessions with streaming input are not supported for Qwen2.5-Omni")
    prompt, tokens = list(request.prompt_token_ids), list(request.output_token_ids)
    fresh = _fresh_rows(answer, output, len(prompt), len(tokens), sampled)
    meta = MetaStruct(finished=torch.tensor(finished, dtype=torch.bool))
    if answer.started:
        if not len(fresh) and not finished:
            return None
        embed = EmbeddingsStruct(thinker_reply=fresh) if len(fresh) else None
        piece = _fresh_tokens(answer, request, tokens, finished)
        return OmniPayloadStruct(embed=embed, ids=IdsStruct(output=piece), meta=meta)
    if len(fresh):
        answer.held.append(fresh)
    if answer.rows <= len(prompt) and not finished:
        return None
    if answer.rows < len(prompt):
        raise UnusableChunk(f"the thinker gave {answer.rows} rows for a prompt of {len(prompt)} tokens")
    _check_reserved(prompt)
    rows = torch.cat(answer.held)
    answer.held, answer.started = [], True
    prefill, reply = rows[: len(prompt)], rows[len(prompt) :]
    # The talker reads the first of these ids even when the answer is empty.
    piece = _fresh_tokens(answer, request, tokens, finished) or tokens[:1]
    return OmniPayloadStruct(
        embed=EmbeddingsStruct(prefill=prefill, prefill_shape=list(prefill.shape)),
        hidden_states=HiddenStatesStruct(output=reply, output_shape=list(reply.shape)),
        ids=IdsStruct(prompt=prompt, output=piece),
        meta=meta,
    )


def _fresh_rows(answer: _Answer, output: Any, prompt: int, tokens: int, sampled: bool) -> torch.Tensor:
    """Return the rows [n, H] that this step adds.

    A step that sampled a token has computed all tokens before it, so the rows due are known: a step that
    computes some of them again, after a preemption, adds its last ones only.
    """
    hidden = output.get("hidden") if isinstance(output, Mapping) else None
    if not isinstance(hidden, torch.Tensor) or hidden.dim() != 2:
        return torch.empty(0, 0)
    due = len(hidden)  # a part of the prompt
    if sampled:
        due = prompt + tokens - 1 - answer.rows
    elif tokens:
        due = 0  # a part of what is computed again
    if due <= 0:
        return torch.empty(0, 0)
    if due > len(hidden):
        raise UnusableChunk(f"{due} rows of hidden states are due and a step gave {len(hidden)}")
    twice = answer.rows < prompt and due < len(hidden) < prompt  # the prompt's last part, with rows not due
    if not sampled:
        twice = answer.rows + due >= prompt  # as many rows as the prompt has, and no token: parts came twice
    if twice:
        raise UnusableChunk("the thinker was preempted amid a prompt that it computes in parts")
    answer.rows += due
    return hidden[len(hidden) - due :].detach().cpu().to(torch.float32)


def _fresh_tokens(answer: _Answer, request: Any, tokens: list[int], finished: bool) -> list[int]:
    """Return the answer's tokens that no chunk has had, without the one that stopped it."""
    status = getattr(request, "status", None)
    if finished and getattr(status, "name", "") == "FINISHED_STOPPED":
        tokens = tokens[:-1]
    elif not finished:
        tokens = tokens[:-1]  # the last one may turn out to be the one that stops it
    piece = tokens[answer.tokens :]
    answer.tokens += len(piece)
    return piece


def _check_reserved(prompt: list[int]) -> None:
    """Raise UnusableChunk if the host reserves a prompt of another length for the talker.

    It would cut the conditioning off, or leave rows of nothing at its end, without a word.
    """
    reserved, needed = reserved_prompt_length(prompt), talker_prompt_length(prompt)
    if reserved != needed:
        raise UnusableChunk(
            f"vllm-omni reserves {reserved} prompt tokens for the talker, which needs {needed}. "
            f"Set {ENABLE_ENV}=1 for all processes of the server."
        )


# ------------------------------------------------------------------------- talker -> code2wav
def talker2code2wav_async_chunk(
    transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False
) -> Any:
    """Return the chunk for one talker step, an OmniPayloadStruct, or None until enough codec ids are there.

    The connector's configuration has `codec_chunk_frames` and `initial_codec_chunk_frames` (the first chunk;
    0: like the others). `codec_left_context_frames` has no meaning here.
    """
    from vllm_omni.data_entry_keys import CodesStruct, MetaStruct, OmniPayloadStruct

    sent = transfer_manager.request_payload
    request_id = request.external_req_id
    start = sent.get(request_id, 0)
    codes = codec_ids(list(request.output_token_ids), is_finished)[start:]
    if not is_finished:
        size = _chunk_frames(transfer_manager, first=start == 0)
        codes = codes[: len(codes) // size * size]
    if not codes:
        return None
    sent[request_id] = start + len(codes)
    return OmniPayloadStruct(
        codes=CodesStruct(audio=torch.tensor(codes, dtype=torch.long)),
        meta=MetaStruct(left_context_size=0, finished=torch.tensor(is_finished, dtype=torch.bool)),
    )


def codec_ids(tokens: list[int], complete: bool) -> list[int]:
    """Return the codec ids among the talker's tokens.

    Placeholders (-1) at the end of a complete answer, tokens whose value was not known in time, count as
    repetitions of the last id, as in vllm-omni's processor for whole payloads.
    """
    codes = [token for token in tokens if 0 <= token < CODEC_IDS]
    if complete and codes:
        for token in reversed(tokens):
            if token != -1:
                break
            codes.append(codes[-1])
    return codes


def _chunk_frames(transfer_manager: Any, first: bool) -> int:
    config = getattr(getattr(transfer_manager, "connector", None), "config", None)
    config = config if isinstance(config, Mapping) else {}
    initial = int(config.get("initial_codec_chunk_frames") or 0)
    if first and initial > 0:
        return initial
    return max(1, int(config.get("codec_chunk_frames") or DEFAULT_CHUNK_FRAMES))
