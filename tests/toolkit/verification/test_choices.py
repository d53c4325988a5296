"""Choices among candidates by their definition: groups of tokens, and the full program's leftovers, limits, tiny numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from toolkit import verification
from toolkit.errors import InputError
from toolkit.testing import dirichlet_pairs, draft_distributions
from toolkit.verification.enumeration import emission
from toolkit.verification.pair_weights import free_wins
from toolkit.verification.rules.importance_lp import best_choice, candidate_sets


def test_pairs_without_mass_and_single_precision_have_weights_too():
    target, load = torch.tensor([[0.5, 0.25, 0.25]]), torch.zeros(1, 3)
    shared = torch.tensor([[[0.0, 0.0, 0.5], [0.0, 0.0, 0.0], [0.5, 0.0, 0.0]]])
    wins = free_wins(target, load, shared)
    assert wins.dtype == torch.float32 and bool(((wins >= 0) & (wins <= 1)).all())
    assert torch.allclose(wins + wins.mT, torch.ones(1, 3, 3))
    assert float(wins[0, 0, 2]) >= 0.5  # token 2 can use half of the pair's mass, token 0 all of it


def test_sets_whose_probability_is_too_small_for_a_number_still_choose():
    drafts = np.array([[1e-200, 1e-200, 1.0]] * 2)
    masks, probs = candidate_sets(drafts)
    assert probs[masks.tolist().index(0b011)] == 0
    masks, choice, chosen = best_choice(np.array([0.3, 0.3, 0.4]), drafts)
    assert choice[masks.tolist().index(0b011)].tolist() == [0.5, 0.5, 0]
    assert choice.sum(1).tolist() == pytest.approx([1.0] * len(masks)) and chosen.sum() == pytest.approx(1)


def test_the_full_program_is_for_up_to_62_tokens_and_20000_sets():
    rule = verification.get("importance_lp")
    p = torch.full((62,), 1 / 62, dtype=torch.float64)
    accept, _ = rule.distribution(p, p.expand(2, -1), torch.tensor([0, 61]))  # 1,953 sets
    assert float(accept.sum()) == pytest.approx(1, abs=1e-6)
    with pytest.raises(InputError, match="use importance"):
        rule.distribution(p, p.expand(3, -1), torch.tensor([0, 1, 2]))  # 39,773


def test_enumerations_check_what_they_are_given_unless_told_not_to():
    p, q = dirichlet_pairs(3)
    rule, short = verification.get("specinfer"), draft_distributions(q * 0.9, 2, "iid")
    with pytest.raises(InputError, match="^draft_probs: expected distributions that sum to 1"):
        emission(rule, "iid", p, short)
    assert torch.isfinite(emission(rule, "iid", p, short, checked=False).distribution).all()
