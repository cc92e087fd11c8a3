"""Made-up outputs of models, for the stages of omni_scenes.py and omni_runner_scenes.py."""

from __future__ import annotations

from typing import Any

import torch
from omni_stages import LAYER, Plan
from vllm_omni.data_entry_keys import CodesStruct, HiddenStatesStruct, MetaStruct, OmniPayloadStruct


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


# -------------------- what Qwen3-Omni's own processors take
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
