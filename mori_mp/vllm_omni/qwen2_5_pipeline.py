"""Makes vLLM-Omni able to stream Qwen2.5-Omni: a pipeline that names our processors, and a prompt length.

`register()` sees to both when MORI_MP_QWEN2_5_OMNI=1. The pipeline `qwen2_5_omni_mori` is the host's, with
the processors of `qwen2_5_omni` for its thinker and talker. The length is that of the prompt which the host
reserves for the talker before it is known, by a rule of Qwen3-Omni's. docs/qwen2_5_omni.md has the reasons.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from importlib import import_module

logger = logging.getLogger(__name__)

PIPELINE = "qwen2_5_omni_mori"
ENABLE_ENV = "MORI_MP_QWEN2_5_OMNI"

_PROCESSORS = "mori_mp.vllm_omni.qwen2_5_omni"  # by name: it imports torch
_BY_STAGE = {0: "thinker2talker_async_chunk", 1: "talker2code2wav_async_chunk"}

_RULES = "vllm_omni.distributed.omni_connectors.adapter"
_RULE = "compute_talker_prompt_ids_length"
_REGISTRY = "vllm_omni.config.pipeline_registry"
_PIPELINES = "vllm_omni.model_executor.models.qwen2_5_omni.pipeline"


def register() -> None:
    """Make the pipeline known to vLLM-Omni and have it reserve the talker's prompt in full.

    Does nothing unless MORI_MP_QWEN2_5_OMNI=1, because the second changes a function that Qwen3-Omni shares:
    set it for servers of Qwen2.5-Omni only. Idempotent; what goes wrong is logged, not raised.
    """
    if os.environ.get(ENABLE_ENV, "").strip() != "1":
        return
    try:
        _install()
    except Exception:
        logger.exception("%s is set, but this version of vllm-omni cannot stream Qwen2.5-Omni", ENABLE_ENV)


def talker_prompt_length(prompt_ids: Sequence[int]) -> int:
    """Return how long a prompt the talker needs: the thinker's, the speaker, the answer's first token."""
    return len(prompt_ids) + 2


def reserved_prompt_length(prompt_ids: Sequence[int]) -> int:
    """Return how long a prompt the host reserves for the talker, given the thinker's."""
    try:
        length = int(getattr(import_module(_RULES), _RULE)(list(prompt_ids)))
    except Exception:  # what the host's orchestrator does when its rule does not fit a prompt
        length = len(prompt_ids)
    return max(1, length)


def _install() -> None:
    registry = import_module(_REGISTRY)
    setattr(import_module(_RULES), _RULE, talker_prompt_length)
    if PIPELINE in registry.OMNI_PIPELINES:
        return
    pipeline = import_module(_PIPELINES).QWEN2_5_OMNI_PIPELINE
    stages = tuple(
        dataclasses.replace(
            stage, async_chunk_process_next_stage_input_func=f"{_PROCESSORS}.{_BY_STAGE[stage.stage_id]}"
        )
        if stage.stage_id in _BY_STAGE
        else stage
        for stage in pipeline.stages
    )
    registry.register_pipeline(dataclasses.replace(pipeline, stages=stages), PIPELINE)
