"""The instruments themselves: random tables have what they should, and what is summed up is told apart from its target."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from toolkit import verification
from toolkit.testing import dirichlet_pairs, draft_distributions
from toolkit.verification import PathRule, SelectionRule
from toolkit.verification.chain_enumeration import (
    PrefixTables,
    chain_error,
    chain_outputs,
    expected_lengths,
    prefix_survival,
)
from toolkit.verification.enumeration import beam_distribution, candidate_tuples, emission, optimum


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


def test_probabilities_of_prefixes_multiply():
    one = PrefixTables(3, 2, 4)
    assert one.probability(one.p, ()) == 1
    assert one.probability(one.q, (1, 2)) == pytest.approx(float(one.q[()][1] * one.q[(1,)][2]))
    for side in (one.p, one.q):
        assert sum(one.probability(side, tokens) for tokens in product(range(3), repeat=2)) == pytest.approx(1)


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


class Takes(SelectionRule):
    """Accepts its first candidate with a given probability, and draws from q instead of a residual."""

    lossless, schemes = False, ("iid", "without_replacement", "greedy")

    def __init__(self, prob: float):
        self.prob = prob

    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        accept = torch.zeros_like(candidates, dtype=target_probs.dtype)
        accept[..., 0] = self.prob
        return accept, draft_probs[..., 0, :]


@pytest.mark.parametrize("how", Takes.schemes)
def test_what_is_emitted_is_summed_over_all_tuples(how):
    p, q = dirichlet_pairs(6)
    q[0] = torch.tensor([0.3, 0.0, 0.7, 0.0])
    got = emission(Takes(0.25), how, p, draft_distributions(q, 3, how))
    first = torch.nn.functional.one_hot(q.argmax(1), 4).double() if how == "greedy" else q
    assert torch.allclose(got.accepted, torch.full((6,), 0.25, dtype=torch.float64))
    assert torch.allclose(got.distribution, 0.25 * first + 0.75 * q)
    drafted = []
    for pair in range(6):  # P(a draw from q is one of three candidates), and 1 for an accepted one
        again = {
            "iid": sum(x * (1 - (1 - x) ** 3) for x in q[pair].tolist()),
            "without_replacement": float(inclusion(q[pair].tolist()) @ q[pair]),
            "greedy": float(greedy_inclusion(q[pair]) @ q[pair]),
        }[how]
        drafted.append(0.25 + 0.75 * again)
    assert got.drafted.tolist() == pytest.approx(drafted)


def inclusion(q: list[float]) -> Tensor:
    """P(token is among up to three draws without replacement) of four."""
    found = torch.zeros(4, dtype=torch.float64)

    def go(drawn: list[int], prob: float) -> None:
        left = [token for token in range(4) if token not in drawn and q[token] > 0]
        if len(drawn) == 3 or not left:
            found[drawn] += prob
            return
        for token in left:
            go([*drawn, token], prob * q[token] / sum(q[other] for other in left))

    go([], 1.0)
    return found


def greedy_inclusion(q: Tensor) -> Tensor:
    """The two likeliest for certain, and one of the rest."""
    found = torch.zeros(4, dtype=torch.float64)
    order = q.argsort(descending=True)
    found[order[:2]] = 1.0
    rest = q[order[2:]]
    if float(rest.sum()) > 0:
        found[order[2:]] = rest / rest.sum()
    return found


def test_the_optimum_of_one_candidate_is_the_overlap():
    p, q = dirichlet_pairs(9, vocab_size=5)
    found = optimum(candidate_tuples("iid", q.unsqueeze(1)), p)
    assert torch.allclose(found, torch.minimum(p, q).sum(1))
    assert torch.allclose(optimum(candidate_tuples("iid", p.unsqueeze(1)), p), torch.ones(9, dtype=torch.float64))


def test_candidates_that_are_not_there_are_no_beams():
    """q has two tokens: a third draw without replacement is none."""
    rule = verification.get("beam_layer_published")
    p, q = torch.tensor([0.2, 0.5, 0.3]).double(), torch.tensor([0.6, 0.4, 0.0]).double()
    for width in (1, 2):
        three, two = (beam_distribution(rule, p, q, count, width, "without_replacement") for count in (3, 2))
        assert torch.allclose(three, two, atol=1e-15) and float(two.sum()) == pytest.approx(1)
    assert beam_distribution(rule, p.float(), q.float(), 2, 1, "without_replacement").dtype == torch.float32
