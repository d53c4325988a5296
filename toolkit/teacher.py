"""Teacher-forced passes: one forward over whole given texts, no cache.

Texts are padded on the right. A causal model's states do not depend on what follows, so the padding needs no mask; what
comes out behind a text's end means nothing.

Shapes: B texts, T longest text, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from toolkit.pair import vocab_size
from toolkit.session import open_session

PADDING = 0


def pad_right(texts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
    """Texts of different lengths as one tensor [B, T]."""
    longest = max(len(text) for text in texts)
    return torch.tensor([[*text, *[PADDING] * (longest - len(text))] for text in texts], device=device)


@torch.no_grad()
def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Next-token logits [B, T, V] after every token of [B, T], unwarped."""
    tokens = _readable(model, tokens)
    if _is_tabular(model):
        return open_session(model, *tokens.shape).extend(tokens, last=tokens.shape[1]).logits
    return model(input_ids=tokens, use_cache=False).logits


@torch.no_grad()
def states_of(model: Any, tokens: Tensor) -> Tensor:
    """Final hidden states [B, T, D] of tokens [B, T]: what the output embedding reads; state t has read token t."""
    tokens = _readable(model, tokens)
    if _is_tabular(model):
        return open_session(model, *tokens.shape).extend(tokens, last=tokens.shape[1]).hidden
    caught: list[Tensor] = []

    def catch(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        caught.append(args[0])
        return (args[0][:, -1:],)  # nobody wants the logits: compute one column of them

    hook = model.get_output_embeddings().register_forward_pre_hook(catch)
    try:
        model(input_ids=tokens, use_cache=False)
    finally:
        hook.remove()
    return caught[0]


def hidden_size(model: Any) -> int:
    """D: the width of what `states_of` returns."""
    return model.probs.shape[0] if _is_tabular(model) else int(model.get_output_embeddings().weight.shape[1])


def _readable(model: Any, tokens: Tensor) -> Tensor:
    """On the model's device; a token beyond its vocabulary (padding of the other model's) becomes its last one."""
    return tokens.to(model.device).clamp(max=vocab_size(model) - 1)


def _is_tabular(model: Any) -> bool:
    return hasattr(model, "open_session")
