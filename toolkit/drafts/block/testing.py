"""Random block drafts for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from toolkit.drafts.block.model import BlockDraft, BlockSettings


def tiny_block(
    target: Any, kind: str = "dflash", kept: Tensor | None = None, seed: int = 0, **settings: Any
) -> BlockDraft:
    """A random block draft of two layers for a tiny target, on its device; forty tokens have an output row.

    settings  of `BlockSettings`, and `window`: of the last layer
    """
    generator, base = torch.Generator().manual_seed(seed), target.config
    tokens = torch.randperm(base.vocab_size, generator=generator)[:40].sort().values if kept is None else kept
    window = settings.pop("window", None)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=base.vocab_size, hidden_size=base.hidden_size, intermediate_size=24, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, num_hidden_layers=2, max_position_embeddings=512, tie_word_embeddings=False,
        use_sliding_window=window is not None, sliding_window=window,
        layer_types=["full_attention", "full_attention" if window is None else "sliding_attention"],
    )  # fmt: skip
    spark = kind == "dspark"
    more = {"sample_from_anchor": spark, "markov_rank": 3 if spark else 0, "enable_confidence_head": spark,
            "confidence_head_with_markov": spark}  # fmt: skip
    usual = {"block_size": 4, "mask_token_id": 1, "target_layers": (0, 1, 2)}
    draft: Any = BlockDraft(config, BlockSettings(kind, **{**usual, **more, **settings}), tokens).to(target.dtype)
    for parameter in draft.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    frozen: BlockDraft = draft.to(target.device).requires_grad_(False).eval()
    return frozen
