"""The instruments themselves: random tables have what they should, and what is summed up is told apart from its target."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from toolkit import verification
from toolkit.testing import dirichlet_pairs
from toolkit.verification import PathRule
from toolkit.verification.chain_enumeration import (
    PrefixTables,
    chain_error,
    chain_outputs,
    expected_lengths,
    prefix_survival,
)
from toolkit.verification.enumeration import beam_distribution, candidate_tuples, optimum


class KeepsAll(PathRule):
    """Keeps every drafted token, then draws from p."""

    lossless = False

    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, num_drafted: Tensor
    ) -> tuple[Tensor, Tensor]:
        lengths = torch.zeros(tokens.shape[-1] + 1, dtype=target_probs.dtype)
        lengths[-1] = 1.0
        return lengths, target_probs

    def accept(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def test_tables_hold_every_prefix_and_all_kinds_of_distributions():
    torch.manual_seed(0)
    tables = [PrefixTables(3, 2, seed) for seed in range(60)]
    prefixes = {(), *product(range(3)), *product(range(3), repeat=2)}
    assert all(set(one.p) == set(one.q) == prefixes for one in tables)
    p, q = (torch.stack([getattr(one, side)[prefix] for one in tables for prefix in sorted(prefixes)]) for side in "pq")
    assert torch.allclose(p.sum(1), torch.ones(len(p), dtype=torch.float64))
    alike, zero = (p == q).all(1).double().mean(), (p[:, 0] == 0).double().mean()
    tied = (p[:, 1] == p[:, 2]).double().mean()
    assert 0.1 < alike < 0.2 and 0.25 < zero < 0.35 and 0.14 < tied < 0.26  # of 780: .15, .3 and .2
    assert (p[:, 1:] > 0).all() and (p.min(1).values < 0.02).double().mean() > 0.4
    torch.manual_seed(1)  # tables depend on their seed alone
    assert all(torch.equal(PrefixTables(3, 2, 7).p[key], tables[7].p[key]) for key in prefixes)
    assert not torch.equal(tables[7].p[()], tables[8].p[()])


@pytest.mark.parametrize("depth", [1, 2])
def test_the_error_of_a_rule_that_keeps_all_is_the_distance_of_its_drafts(depth):
    seen = set()
    for seed in range(12):
        one = PrefixTables(3, depth, seed)
        texts = list(product(range(3), repeat=depth))
        distance = sum(abs(one.probability(one.p, text) - one.probability(one.q, text)) for text in texts) / 2
        assert chain_error(KeepsAll(), one) == pytest.approx(distance, abs=1e-12)
        outputs, length = chain_outputs(KeepsAll(), one)
        assert length == pytest.approx(depth) and sum(outputs.values()) == pytest.approx(1)
        seen |= {(distance > 0.1, bool((one.q[()] == 0).any()))}
    assert (True, True) in seen  # also where some texts are never drafted


def test_survival_and_mean_lengths_by_hand():
    one = PrefixTables(2, 2, 0)
    one.p = {(): torch.tensor([0.5, 0.5]), (0,): torch.tensor([0.9, 0.1]), (1,): torch.tensor([0.5, 0.5])}
    one.q = {(): torch.tensor([0.8, 0.2]), (0,): torch.tensor([0.3, 0.7]), (1,): torch.tensor([1.0, 0.0])}
    assert prefix_survival(one, ()) == (1.0, 1.0)
    assert prefix_survival(one, (0, 0)) == pytest.approx((0.625, 1.0))  # .625 * 3 is more than 1
    assert prefix_survival(one, (0, 1)) == pytest.approx((0.625 / 7, 0.625 / 7))
    assert prefix_survival(one, (1, 0)) == pytest.approx((0.5, 0.5))  # 2.5 counts as 1 before .5
    first = 0.8 * 0.625 + 0.2
    second = (0.8 * 0.3 * 0.625 + 0.8 * 0.7 * 0.625 / 7 + 0.2 * 0.5, 0.8 * 0.3 + 0.8 * 0.7 * 0.625 / 7 + 0.2 * 0.5)
    assert expected_lengths(one) == pytest.approx((first + second[0], first + second[1]))


def test_the_optimum_of_one_candidate_is_the_overlap():
    p, q = dirichlet_pairs(9, vocab_size=5)
    optima = optimum(candidate_tuples("iid", q.unsqueeze(1)), p)
    assert torch.allclose(optima, torch.minimum(p, q).sum(1))
    assert torch.allclose(optimum(candidate_tuples("iid", p.unsqueeze(1)), p), torch.ones(9, dtype=torch.float64))


def test_candidates_that_are_not_there_are_no_beams():
    """q has two tokens: a third draw without replacement is none."""
    rule = verification.get("beam_layer_published")
    p, q = torch.tensor([0.2, 0.5, 0.3]).double(), torch.tensor([0.6, 0.4, 0.0]).double()
    for width in (1, 2):
        three, two = (beam_distribution(rule, p, q, count, width, "without_replacement") for count in (3, 2))
        assert torch.allclose(three, two, atol=1e-15) and float(two.sum()) == pytest.approx(1)
    assert beam_distribution(rule, p.float(), q.float(), 2, 1, "without_replacement").dtype == torch.float32
