"""Attention of grouped heads without copies of their keys and values, in the forward passes of sessions.

Where heads share keys and values, transformers copies these for every head if there is a mask and more than one query token.
At a context of 800 tokens and three heads per key this takes longer than attention itself, in every forward pass that
verifies drafted tokens. Here the heads of a group are laid beside one another as queries: [b, H, T, d] becomes
[b, H / G, G T, d], and the mask is repeated. Sums are those of the stock kernel, up to rounding. Models that are called
outside of sessions are not touched.

Shapes: b rows, H heads, G heads of a group, T query tokens, S keys, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_STOCK = ALL_ATTENTION_FUNCTIONS["sdpa"]
_IN_SESSION: ContextVar[bool] = ContextVar("in_session", default=False)
SPECIAL = ("softcap", "s_aux", "position_bias", "cache")  # arguments that the stock function alone knows


@contextmanager
def grouped_attention() -> Iterator[None]:
    """Within this, models with `sdpa` attention compute grouped heads without copies."""
    token = _IN_SESSION.set(True)
    try:
        yield
    finally:
        _IN_SESSION.reset(token)


def _sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    rows, heads, width, size = query.shape
    groups = heads // key.shape[1]
    stock = not _IN_SESSION.get() or groups == 1 or width == 1 or dropout
    if (
        stock
        or attention_mask is None
        or attention_mask.shape[1] != 1
        or any(kwargs.get(name) is not None for name in SPECIAL)
    ):
        result: tuple[Tensor, None] = _STOCK(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return result
    beside = query.reshape(rows, heads // groups, groups * width, size)
    mask = attention_mask.repeat(1, 1, groups, 1)
    attended = scaled_dot_product_attention(beside, key, value, attn_mask=mask, scale=scaling)
    return attended.reshape(rows, heads, width, value.shape[-1]).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS["sdpa"] = _sdpa
