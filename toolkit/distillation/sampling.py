"""On-policy texts: what the draft itself says, for the target to correct (GKD, arXiv:2306.13649; DistillSpec)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from toolkit import config
from toolkit.decoding import decode
from toolkit.engine import EngineOptions
from toolkit.errors import InputError
from toolkit.pair import ModelPair
from toolkit.sampling import Sampling
from toolkit.teacher import Text

PLAIN = EngineOptions(cuda_graphs="off", cpu_packing="off")  # weights change between calls


def is_on_policy(lmbda: float, seed: int, step: int) -> bool:
    """Whether a step's texts are the draft's own: with probability lmbda, a function of (seed, step)."""
    generator = torch.Generator().manual_seed((seed << 32) + step)
    return bool(torch.rand((), generator=generator, dtype=torch.float64) < lmbda)


def own_texts(
    draft: Any, texts: Sequence[Text], sampling: Sampling, ends: Sequence[int], seed: int, step: int
) -> list[Text]:
    """The draft's responses to the prompts of texts, drawn as the target's were; random numbers of (seed, step).

    ends  tokens that end a text
    """
    pair = ModelPair(target=draft, end_ids=tuple(ends), options=PLAIN)
    method = config.method("autoregressive")
    prompts = [list(prompt) for prompt, _ in texts]
    drawn = replace(sampling, seed=(seed << 32) + step, stop=())
    found = decode(pair, prompts, method, drawn, batch_size=len(prompts))
    failed = next((generation.error for generation in found if generation.error is not None), None)
    if failed is not None:
        raise InputError(f"the draft could not answer a prompt ({failed}); set lmbda=0, or leave that prompt out")
    return [(prompt, generation.token_ids) for prompt, generation in zip(prompts, found, strict=True)]
