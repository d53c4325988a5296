"""Random EAGLE-3 drafts for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from toolkit.drafts.eagle3.model import Eagle3


def tiny_eagle3(
    target: Any,
    layers: Sequence[int] = (0, 1, 2),
    kept: Tensor | None = None,
    flags: Sequence[str] = (),
    family: str = "llama",
    seed: int = 0,
) -> Eagle3:
    """A random EAGLE-3 draft for a tiny target, on its device; forty tokens have an output row, in any order."""
    generator, base = torch.Generator().manual_seed(seed), target.config
    tokens = torch.randperm(base.vocab_size, generator=generator)[:40] if kept is None else kept
    config = AutoConfig.for_model(
        family, vocab_size=base.vocab_size, hidden_size=16, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, num_hidden_layers=1, max_position_embeddings=512,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    draft: Any = Eagle3(config, layers, len(layers) * base.hidden_size, tokens, flags).to(target.dtype)
    for parameter in draft.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    frozen: Eagle3 = draft.to(target.device).requires_grad_(False).eval()
    return frozen
