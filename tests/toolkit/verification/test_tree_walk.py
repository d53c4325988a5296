"""Rules over trees: the emitted text follows the target, and a tree of width 1 is a chain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from toolkit import verification
from toolkit.sampling import draw
from toolkit.types import Proposal, Verdict
from toolkit.verification import SelectionRule, TreeRule, schemes
from toolkit.verification.base import num_uniforms, split_uniforms

RULES = [name for name in verification.names() if isinstance(verification.get(name), (SelectionRule, TreeRule))]
DECLARED = [(name, how) for name in RULES for how in verification.get(name).schemes]


def is_rejection(name: str) -> bool:
    """Whether the rule is plain rejection on one candidate: all are but those that do not use q to the full."""
    p, q = torch.tensor([0.2, 0.3, 0.5]).double(), torch.tensor([0.6, 0.3, 0.1]).double()
    accept, _ = verification.get(name).distribution(p, q.unsqueeze(0), torch.tensor([0]))
    return bool((accept - 1 / 3).abs().max() < 1e-6)


REJECTION = [name for name in RULES if isinstance(verification.get(name), SelectionRule) and is_rejection(name)]


def test_the_papers_rules_are_rejection_on_one_candidate():
    assert set(REJECTION) >= set(RULES) & {"specinfer", "spectr", "mcsd", "importance", "importance_lp", "greedy_multi"}


def uniform(rows: int, slots: int, seed: int) -> Tensor:
    return torch.rand(rows, slots, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tables(num: int, vocab_size: int, seed: int) -> Tensor:
    """Distributions [num, V], row v after token v."""
    weights = uniform(num, vocab_size, seed) ** 2 + 0.02
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("name", REJECTION)
def test_a_tree_of_width_1_is_a_chain_token_for_token(name):
    """The same uniforms, ragged rows: the verdicts of `rejection`."""
    rows, most, vocab_size = (40 if name == "importance_lp" else 400), 4, 5
    uniforms = uniform(rows, num_uniforms(most), seed=1)
    p, q = (tables(rows * (most + 1), vocab_size, seed).reshape(rows, most + 1, vocab_size) for seed in (2, 3))
    tokens = draw(q[:, :most], uniforms[:, :most])
    num_drafted = torch.arange(rows) % (most + 1)
    chain = Proposal(tokens, q[:, :most], num_drafted, num_drafted)
    parents, drawn_from = (torch.arange(most).expand(rows, -1) + shift for shift in (-1, 0))
    expected = verification.get("rejection").verify(chain, p, uniforms)
    for proposal in (chain, Proposal(tokens, q[:, :most], num_drafted, num_drafted, parents, drawn_from)):
        got = verification.get(name).verify(proposal, p, uniforms)
        for field in ("path", "length", "extra", "bonus", "valid"):
            assert torch.equal(getattr(got, field), getattr(expected, field)), field
    assert 0 < int(expected.bonus.sum()) < rows


def two_levels(how: str, drafts: Tensor, uniforms: Tensor) -> Proposal:
    """Two children of the context (last token 0) and two of each: drafts [2, V, V], after token v by child."""
    draws, _, _ = split_uniforms(uniforms)
    tokens, distributions = [], []

    def grow(last: Tensor, slots: Tensor) -> Tensor:
        distribution = drafts[:, last].transpose(0, 1)  # [B, 2, V]
        shared = distribution if how == "independent" else distribution[:, :1].expand_as(distribution)
        drawn, _ = schemes.candidates(how, distribution if how == "independent" else distribution[:, 0], slots)
        distributions.append(torch.nn.functional.one_hot(drawn, 3).double() if how == "top_k" else shared)
        tokens.append(drawn)
        return drawn

    first = grow(torch.zeros(len(uniforms), dtype=torch.long), draws[:, 0:2])
    grow(first[:, 0], draws[:, 2:4])
    grow(first[:, 1], draws[:, 4:6])
    count = torch.full((len(uniforms),), 6)
    parents = torch.tensor([-1, -1, 0, 0, 1, 1]).expand(len(uniforms), -1)
    return Proposal(torch.cat(tokens, 1), torch.cat(distributions, 1), count, torch.full_like(count, 3), parents)


def emitted(proposal: Proposal, verdict: Verdict, target: Tensor, uniforms: Tensor) -> Tensor:
    """The first three tokens of every row, completed by the target's own draws: [B, 3]."""
    kept = proposal.tokens.gather(1, verdict.path[:, :2].clamp(min=0))
    tokens = torch.cat([kept, torch.zeros_like(kept[:, :1])], 1)
    tokens.scatter_(1, verdict.length.unsqueeze(1), verdict.extra.unsqueeze(1))
    for i in (1, 2):
        fresh = draw(target[tokens[:, i - 1]], uniforms[:, i])
        tokens[:, i] = torch.where(verdict.length < i, fresh, tokens[:, i])
    return tokens


class Redraws(SelectionRule):
    """Accepts nothing and draws from p: exact, and every step down the tree is an extra token that was drafted."""

    lossless, schemes = True, ("iid",)

    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(candidates, dtype=target_probs.dtype), target_probs


@pytest.mark.parametrize(("rule", "how"), [*((verification.get(n), how) for n, how in DECLARED), (Redraws(), "iid")])
def test_emitted_texts_follow_the_target(rule, how):
    """27 texts of three tokens against their probabilities, each within five standard errors."""
    rows = 30_000
    target, drafts = tables(3, 3, seed=4), tables(6, 3, seed=5).reshape(2, 3, 3)
    uniforms = uniform(rows, num_uniforms(6), seed=6)
    proposal = two_levels(how, drafts, uniforms)
    last = torch.cat([torch.zeros(rows, 1, dtype=torch.long), proposal.tokens], 1)
    verdict = rule.verify(proposal, target[last], uniforms)
    assert verdict.valid.all()
    assert (verdict.bonus == (verdict.length == 2)).all()
    assert (verdict.path >= 0).sum(1).equal(verdict.length)
    assert len(verdict.length.unique()) == 3
    tokens = emitted(proposal, verdict, target, uniform(rows, 3, seed=7))
    share = torch.bincount(tokens @ torch.tensor([9, 3, 1]), minlength=27) / rows
    probs = torch.einsum("a,ab,bc->abc", target[0], target, target).flatten()
    assert ((share - probs).abs() <= 5 * (probs * (1 - probs) / rows).sqrt()).all()


@pytest.mark.parametrize("name", RULES)
def test_rows_do_not_depend_on_their_neighbours_and_name_what_is_not_a_number(name):
    rule = verification.get(name)
    target, drafts = tables(3, 3, seed=4), tables(6, 3, seed=5).reshape(2, 3, 3)
    uniforms = uniform(8, num_uniforms(6), seed=9)
    proposal = two_levels(rule.schemes[0], drafts, uniforms)
    probs = target[torch.cat([torch.zeros(8, 1, dtype=torch.long), proposal.tokens], 1)]
    clean = rule.verify(proposal, probs, uniforms)
    spoilt, distributions = probs.clone(), proposal.draft_probs.clone()
    spoilt[3, 0, 1] = torch.nan
    distributions[5, 0, 1] = torch.nan
    broken = Proposal(proposal.tokens, distributions, proposal.num_drafted, proposal.num_calls, proposal.parents)
    verdict = rule.verify(broken, spoilt, uniforms)
    assert verdict.valid.tolist() == [True, True, True, False, True, False, True, True]
    for field in ("path", "length", "extra", "bonus"):
        assert torch.equal(getattr(verdict, field)[verdict.valid], getattr(clean, field)[verdict.valid])


@pytest.mark.parametrize("name", RULES)
def test_nothing_drafted_is_plain_sampling(name):
    p = tables(5, 4, seed=1)
    uniforms = uniform(5, num_uniforms(3), seed=2)
    none = torch.zeros(5, dtype=torch.long)
    expected = draw(p, uniforms[:, 6])
    for width in (0, 3):
        drafts = tables(5 * width, 4, seed=3).reshape(5, width, 4)
        proposal = Proposal(none.unsqueeze(1).expand(5, width), drafts, none, none)
        verdict = verification.get(name).verify(proposal, p.unsqueeze(1).expand(5, width + 1, 4), uniforms)
        assert torch.equal(verdict.extra, expected)
        assert verdict.bonus.all()
        assert (verdict.length == 0).all()
