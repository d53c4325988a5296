"""Drafts of other widths: nothing changes where nothing is cut off."""

import torch

from benchmarks.resized import _fill, _folded, _principal, resized
from toolkit.testing import tiny_llama


def test_folding_and_rotating_change_nothing_and_slicing_little_more_than_it_cuts():
    model = tiny_llama(16, 2, 0, torch.float64)
    for norm in (model.model.norm, *(one.input_layernorm for one in model.model.layers)):
        norm.weight.copy_(1 + torch.rand(16, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    texts = [list(range(6, 60)), list(range(60, 20, -1))]
    tokens = torch.tensor([texts[0]])
    expected = model(input_ids=tokens).logits
    folded = _folded(model)
    assert torch.allclose(folded(input_ids=tokens).logits, expected, atol=1e-4)  # the norms compute in float32
    turned = type(model)(folded.config).to(torch.float64)
    with torch.no_grad():
        _fill(turned, folded, _principal(folded, texts), 1.0)
    assert torch.allclose(turned(input_ids=tokens).logits, expected, atol=1e-4)  # the norms compute in float32
    more_heads = tiny_llama(16, 2, 0, torch.float64)
    more_heads.config.num_attention_heads = more_heads.config.num_key_value_heads = 4
    assert resized(more_heads, 10, texts).config.num_attention_heads == 5
    sliced = resized(model, 8, texts)
    assert sliced.lm_head.weight.shape == (97, 8) and sliced(input_ids=tokens).logits.shape == expected.shape
    assert resized(model, 16, texts) is model
    padded = resized(model, 32, texts)
    assert padded.lm_head.weight.shape == (97, 32)
    assert torch.allclose(padded(input_ids=tokens).logits, expected, atol=1e-4)
