"""Attention of grouped heads in sessions: the stock numbers, fewer copies, and other calls untouched."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toolkit.engine import open_session
from toolkit.engine.attention import grouped_attention


@pytest.mark.parametrize("masked", [True, False])
def test_grouped_heads_give_the_stock_numbers(masked):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, count, 8, generator=generator, dtype=torch.float64)
        for heads, count in ((6, 3), (2, 5), (2, 5))
    )
    seen = torch.rand(2, 1, 3, 5, generator=generator) < 0.7
    mask = torch.zeros(2, 1, 3, 5, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 3, True
    arguments = (module, query, key, value, mask if masked else None)
    stock, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](*arguments, scaling=0.3)
    with grouped_attention():
        grouped, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](*arguments, scaling=0.3)
    assert grouped.shape == stock.shape == (2, 3, 6, 8)
    assert torch.allclose(grouped, stock, rtol=0, atol=1e-14)


def test_a_session_copies_no_keys(monkeypatch):
    from transformers.integrations import sdpa_attention

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model, copied = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval(), []
    stock = sdpa_attention.repeat_kv
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda states, count: copied.append(count) or stock(states, count))
    tokens, later = torch.tensor([[5, 9, 33, 21]]), torch.ones(4, 4, dtype=torch.bool).triu(1)
    mask = torch.zeros(1, 1, 4, 4, dtype=torch.float64).masked_fill(later, torch.finfo(torch.float64).min)
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask)
    assert copied, "outside of sessions nothing is changed"
    copied.clear()
    got = open_session(model, 1, 8).extend(tokens, last=4)
    assert not copied and torch.allclose(got.logits, expected.logits, rtol=0, atol=1e-12)
