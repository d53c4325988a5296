"""Why an architecture is not decoded: what its class and config say, in a few words.

Only for messages: whether a model is decoded right is found by decoding (`toolkit.session.selfcheck`). Models that keep
no keys and values at all are the exception and need no trial.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

RECURRENT = ("mamba", "linear_attention", "recurrent", "conv", "hybrid", "ssm", "rwkv", "lstm", "gated_delta")


def hopeless(model: Any) -> str | None:
    """What rules a tree-structured cache of keys and values out from the start; None: nothing."""
    config = model.config.get_text_config(decoder=True)
    kinds = [str(kind) for kind in getattr(config, "layer_types", None) or []]
    recurrent = [kind for kind in kinds if any(word in kind for word in RECURRENT)]
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if getattr(model, "_is_stateful", False) or recurrent:
        return "it keeps a state (recurrent, or compressed) that no tree of tokens can share"
    if getattr(getattr(model, "get_output_embeddings", lambda: None)(), "weight", None) is None:
        return "it has no output embedding"
    attention = str(getattr(model.config, "_attn_implementation", None) or "")
    if "flash" in attention or "flex" in attention:
        return f"its attention ({attention}) takes no masks of trees: load it with attn_implementation=sdpa"
    if getattr(model.config, "_experts_implementation", None) == "grouped_mm" and model.dtype == torch.float64:
        return "its experts (grouped_mm) know no float64: load it in float32, or with experts_implementation=eager"
    return None


def likely(model: Any, seen: str) -> str:
    """Why its cached forward may differ from its uncached one, by what is known of such models.

    seen  what went wrong: said, shortened, where nothing is known
    """
    config = model.config.get_text_config(decoder=True)
    inner = getattr(config, "attn_config", None)
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or []}
    sparse = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
    if getattr(config, "alibi", False) or getattr(inner, "alibi", False) or "Bloom" in type(model).__name__:
        return "its attention is biased by slots (alibi), and nodes of a tree are not in order"
    if sparse:
        return f"it has layers of type {sparse[0]}, which keep more than keys and values"
    if config.model_type == "gpt_neo":
        return "its attention counts slots, not positions, and nodes of a tree are not in order"
    if "position_ids" not in inspect.signature(inspect.unwrap(model.forward)).parameters:
        return "its forward takes no positions (position_ids)"
    if _looks_ahead(model):
        return "its attention is bidirectional: a token's logits change with what follows it"
    return f"its cached forward differs from its uncached one ({' '.join(seen.split())[:120]})"


@torch.no_grad()
def _looks_ahead(model: Any) -> bool:
    """Whether the first token's logits change with the second."""
    try:
        tokens = torch.tensor([[5, 6, 7], [5, 9, 8]], device=model.device)
        first = model(input_ids=tokens, use_cache=False).logits[:, 0]
        return not torch.allclose(first[0], first[1], rtol=1e-4, atol=1e-5)
    except Exception:  # a model that cannot be run tells nothing
        return False
