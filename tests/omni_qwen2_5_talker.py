"""Qwen2.5-Omni's talker, as far as it takes what the thinker sends: the host's methods, made-up weights.

Importing the model needs packages that no connector uses, so its methods are compiled from their source.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from omni_stages import HOST, Plan, compile_function

SOURCE = HOST / "model_executor" / "models" / "qwen2_5_omni" / "qwen2_5_omni.py"
MODEL = "Qwen2_5OmniForConditionalGeneration"
METHODS = (
    *("talker_preprocess", "thinker_to_talker_process", "_thinker_to_talker_prefill"),
    *("thinker_to_talker_decode_one_step", "_thinker_to_talker_decode_one_step"),
)
IDS = 8300


def make_talker(width: int) -> Any:
    """The model with these methods, for hidden states of that width."""
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(IDS, width, generator=generator)
    names: Plan = {"torch": torch}
    methods = {name: compile_function(SOURCE, name, names, within=MODEL) for name in METHODS}
    model = type(MODEL, (), methods)()
    model.talker_config = SimpleNamespace(
        tts_codec_pad_token_id=8292, tts_codec_start_token_id=8293, tts_codec_mask_token_id=8296
    )
    model.talker = SimpleNamespace(embed_input_ids=lambda ids: table[ids])
    model.model = None
    model.voice_type = "a voice"
    model.embed_codec_pad_token, model.embed_codec_bos_token = table[8292:8293], table[8293:8294]
    model._get_embed_text_spk_token = lambda voice: table[:1]
    model._module_device = lambda module: torch.device("cpu")
    return model


def inputs_of_steps(model: Any, chunks: list[Plan], prompt_length: int, steps: int) -> list[torch.Tensor]:
    """The embeddings that each of the talker's steps computes on: of its prompt, then of a token a step.

    As the host's runner does it: a chunk before each step while there are any, whose fields replace those of
    the chunks before, as do the fields that the model gives back.
    """
    fields: dict[str, dict[str, Any]] = {}
    inputs = []
    for step in range(steps):
        _replace(fields, chunks[step] if step < len(chunks) else {})
        ids = torch.zeros(prompt_length, dtype=torch.int64) if step == 0 else torch.tensor([step])
        _, embeddings, given_back = model.talker_preprocess(ids, None, **fields)
        _replace(fields, given_back)
        inputs.append(embeddings)
    return inputs


def _replace(fields: dict[str, dict[str, Any]], new: Plan) -> None:
    for group in ("embed", "hidden_states", "ids"):
        if new.get(group):
            fields.setdefault(group, {}).update(new[group])
