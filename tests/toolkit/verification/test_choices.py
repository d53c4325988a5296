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
from toolkit.verification.rules.importance_grouped import _Match
from toolkit.verification.rules.importance_lp import best_choice, candidate_sets


@pytest.mark.parametrize("num_groups", [2, 3, 6, 9])
def test_groups_are_even_in_the_ratio_and_choose_by_their_weights(num_groups):
    p, first = dirichlet_pairs(16, vocab_size=7)
    second = dirichlet_pairs(16, vocab_size=7, seed=3)[1]
    p[0, :2], first[1, 1:3], second[1, 1:3], p[1, 2] = 0.0, 0.0, 0.0, 0.0  # 0 by something, something by 0, 0 by 0
    match = _Match.of(p.unsqueeze(1), first.unsqueeze(1), second.unsqueeze(1), num_groups)
    every = torch.arange(7).expand(16, 1, 7)
    wins, seen = match.wins_of(every, every)[:, 0], set()
    for row in range(16):
        groups = []
        for token in range(7):
            mean = float(first[row, token] + second[row, token]) / 2
            ratio = float(p[row, token]) / mean if mean else 99.0 * float(p[row, token] > 0)
            groups.append(min(int(ratio / 2 * (num_groups - 1)), num_groups - 1))
        assert match.group[row, 0].tolist() == groups
        seen |= set(groups)
        chosen = torch.zeros(7, dtype=torch.float64)
        for i in range(7):
            for j in range(7):
                weight, both = float(wins[row, i, j]), float(first[row, i] * second[row, j])
                chosen[i] += both * weight
                chosen[j] += both * (1 - weight)
                if groups[i] == groups[j]:
                    assert weight == 1
                else:
                    assert weight + float(wins[row, j, i]) == pytest.approx(1)
        assert torch.allclose(match.chosen[row, 0], chosen, atol=1e-12)
    assert seen == set(range(num_groups))


def test_pairs_without_mass_and_single_precision_have_weights_too():
    target, load = torch.tensor([[0.5, 0.25, 0.25]]), torch.zeros(1, 3)
    shared = torch.tensor([[[0.0, 0.0, 0.5], [0.0, 0.0, 0.0], [0.5, 0.0, 0.0]]])
    wins = free_wins(target, load, shared)
    assert wins.dtype == torch.float32 and bool(((wins >= 0) & (wins <= 1)).all())
    assert torch.allclose(wins + wins.mT, torch.ones(1, 3, 3))
    assert float(wins[0, 0, 2]) >= 0.5  # token 2 can use half of the pair's mass, token 0 all of it


def test_what_a_set_has_left_is_shared_by_its_tokens():
    """One candidate is 0, the other 1 or 2, and 0 has no probability under p: what flows where is the only possibility."""
    p, drafts = np.array([0.0, 0.2, 0.3, 0.5]), np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0]])
    masks, choice, chosen = best_choice(p, drafts)
    assert masks.tolist() == [0b011, 0b101]
    assert choice.tolist() == [pytest.approx([0.3, 0.7, 0, 0]), pytest.approx([0.2, 0, 0.8, 0])]
    assert chosen.tolist() == pytest.approx([0.25, 0.35, 0.4, 0])


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
