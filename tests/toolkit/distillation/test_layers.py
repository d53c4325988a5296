"""A draft made of the target's layers."""

from __future__ import annotations

import copy

import pytest
import torch

from toolkit.distillation import drafts
from toolkit.distillation.drafts import absence_costs, blank_of, draft_of, layers_in, most_costly
from toolkit.errors import InputError
from toolkit.models.teacher import produced_logits
from toolkit.testing import tiny_llama, tiny_model

TEXTS = [([4, 9, 11], [7, 8, 3]), ([6], [10, 12, 4, 5])]


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_all_layers_are_the_target_and_some_are_the_target_without_the_others(family):
    target = tiny_model(family)
    count = len(layers_in(target))
    assert torch.equal(produced_logits(draft_of(target, range(count)), TEXTS), produced_logits(target, TEXTS))
    draft = draft_of(target, [count - 1])
    cut = copy.deepcopy(target)
    for layer in list(layers_in(cut))[:-1]:
        layer.register_forward_hook(
            lambda module, args, kwargs, output: (args[0], *output[1:]) if isinstance(output, tuple) else args[0],
            with_kwargs=True,
        )
    torch.testing.assert_close(produced_logits(draft, TEXTS), produced_logits(cut, TEXTS))


def test_the_cost_of_an_absence_is_the_divergence_without_the_layer(tmp_path, monkeypatch):
    target = tiny_llama(16, 3, 0, torch.float64)
    costs = list(absence_costs(target, TEXTS))
    for layer, cost in enumerate(costs):
        others = [i for i in range(3) if i != layer]
        with torch.no_grad():
            p, q = (produced_logits(model, TEXTS).log_softmax(-1) for model in (target, draft_of(target, others)))
        assert cost == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    assert most_costly(target, TEXTS, 1, tmp_path) == [costs.index(max(costs))]
    monkeypatch.setattr(drafts, "absence_costs", None)  # they are kept
    assert most_costly(target, TEXTS, 3, tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("layers", [[], [3], [-1], [1, 1]])
def test_layers_that_do_not_exist_are_one_line(layers):
    with pytest.raises(InputError, match="layers: expected layers from 0 to 2 of the target, each once"):
        draft_of(tiny_llama(16, 3, 0, torch.float32), layers)


def test_a_blank_draft_takes_the_weights_of_the_trained_one():
    draft = draft_of(tiny_llama(16, 3, 0, torch.float64), [0, 2])
    blank = blank_of(draft)()
    assert blank.dtype == torch.float64 and not torch.equal(blank.lm_head.weight, draft.lm_head.weight)
    blank.load_state_dict(draft.state_dict())
    with torch.no_grad():
        assert torch.equal(produced_logits(blank.eval(), TEXTS), produced_logits(draft, TEXTS))
