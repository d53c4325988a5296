"""Layers whose output for one token depends on the tokens beside it: dynamic quantisation with one scale for a whole tensor.

A target with such layers has other distributions in a forward pass over K + 1 tokens than over one, and in a batch than alone.
Speculative decoding then does not keep its text. (A draft may have them: what it draws, it draws from the q that it showed.)

Every quantised layer is tried: a small row alone, and beside a row so large that a common scale leaves nothing of the small
one. Scales per row (of tokens or weights) and quantised weights alone pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SMALL, LARGE = 0.01, 2.0**14  # of the two rows' entries; both are numbers of float16
TOLERANCE = 0.02  # of the largest output: kernels for one row and for two round differently, in bfloat16 up to 2^-8


def coupled_layer(model: Any) -> str | None:
    """The first layer of a model that couples rows, and how, in words; None: there is none."""
    for name, layer in model.named_modules() if isinstance(model, nn.Module) else ():
        kind = type(layer).__name__
        if float(getattr(getattr(layer, "state", None), "threshold", 0.0)) > 0:
            return f"its layer {name} ({kind}) computes outlier columns of the whole batch apart: expected llm_int8_threshold=0"
        if _is_quantised(layer) and _couples(layer, model):
            return (
                f"its layer {name} ({kind}) scales activations by the whole tensor, so that a token's logits change with the "
                "tokens beside it: expected quantised weights alone, or scales per token"
            )
    return None


def _is_quantised(layer: nn.Module) -> bool:
    """Whether it is a linear layer with other than plain weights, and holds no other one that it leaves the work to."""
    if not hasattr(layer, "in_features") or any(hasattr(child, "in_features") for child in layer.children()):
        return False
    weight: Any = getattr(layer, "weight", None)
    plain = type(weight) in (nn.Parameter, Tensor) and weight.is_floating_point()
    return not (plain and type(layer) is nn.Linear) and not getattr(weight, "is_meta", False)


@torch.no_grad()
def _couples(layer: Any, model: Any) -> bool:
    """Whether its output for a small row changes with a large one beside it; False for one that cannot be tried."""
    angles = torch.arange(layer.in_features, dtype=torch.float32, device="cpu")
    rows = torch.stack([SMALL * angles.cos(), LARGE * angles.sin()]).to(model.device, model.dtype).unsqueeze(0)
    try:
        alone, beside = (layer(part)[0, 0].float() for part in (rows[:, :1], rows))
    except Exception:  # it takes something else than rows
        return False
    return not bool((alone - beside).abs().max() <= TOLERANCE * alone.abs().max())
