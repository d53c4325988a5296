"""Everything is made where its input is: under another default device the same numbers come out.

A tensor that is made without a device would lie on "meta" here, which holds no numbers and cannot be mixed with real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.toolkit.verification.test_beam_layers import ragged
from tests.toolkit.verification.test_tree_walk import two_levels
from toolkit import verification
from toolkit.testing import dirichlet_pairs, draft_distributions
from toolkit.types import Proposal
from toolkit.verification import LayerRule, PathRule, schemes
from toolkit.verification.base import num_uniforms
from toolkit.verification.enumeration import beam_distribution, candidate_tuples, emission, optimum
from toolkit.verification.optimal import independent_bounds, optimal_acceptances
from toolkit.verification.width import layer_width


def tensors_of(found: Any) -> list[Tensor]:
    """All tensors within."""
    if isinstance(found, Tensor):
        return [found]
    parts = found if isinstance(found, (list, tuple)) else vars(found).values()
    return [tensor for part in parts for tensor in tensors_of(part)]


def stays_where_it_is(compute: Callable[[], Any]) -> None:
    expected = tensors_of(compute())
    with torch.device("meta"):
        found = tensors_of(compute())
    assert found
    for one, other in zip(expected, found, strict=True):
        assert other.device == one.device and torch.equal(one, other)


def uniforms(rows: int, slots: int) -> Tensor:
    return torch.rand(rows, slots, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def chains() -> tuple[Proposal, Tensor]:
    """Chains of 0 to 3 tokens, and p after each of their nodes."""
    p, q = dirichlet_pairs(32)
    tokens = torch.arange(24).reshape(8, 3) % 4
    count = torch.arange(8) % 4
    return Proposal(tokens, q[:24].reshape(8, 3, 4), count, count), p.reshape(8, 4, 4)


def trees(how: str) -> tuple[Proposal, Tensor]:
    """Two candidates, and two behind each of them; fewer in some rows."""
    p, q = dirichlet_pairs(3, vocab_size=3)[0], dirichlet_pairs(6, vocab_size=3)[1].reshape(2, 3, 3)
    whole = two_levels(how, q, uniforms(8, num_uniforms(6)))
    count = torch.tensor([6, 0, 1, 2, 3, 4, 5, 6])
    proposal = Proposal(whole.tokens, whole.draft_probs, count, whole.num_calls, whole.parents)
    return proposal, p[torch.cat([torch.zeros(8, 1, dtype=torch.long), whole.tokens], 1)]


@pytest.mark.parametrize("name", verification.names())
def test_rules(name):
    rule = verification.get(name)
    if isinstance(rule, LayerRule):
        batch = ragged(20)
        stays_where_it_is(lambda: rule.walk(**batch))
        given = [batch[key] for key in ("target_probs", "draft_probs", "candidates")]
        stays_where_it_is(lambda: rule.distribution(*given, 2))
        return
    proposal, p = chains() if isinstance(rule, PathRule) else trees(rule.schemes[0])
    drawn, tests = uniforms(8, num_uniforms(6)), uniforms(8, 1)
    stays_where_it_is(lambda: rule.verify(proposal, p, drawn))
    nothing = Proposal(proposal.tokens[:, :0], proposal.draft_probs[:, :0], torch.zeros_like(proposal.num_drafted), p)
    stays_where_it_is(lambda: rule.verify(nothing, p[:, :1], tests))
    if isinstance(rule, PathRule):
        for count in (None, proposal.num_drafted):
            stays_where_it_is(lambda count=count: rule.distribution(p, proposal.draft_probs, proposal.tokens, count))
        return
    p, q = dirichlet_pairs(6)
    q = draft_distributions(q, 3, rule.schemes[0])
    tokens = schemes.candidates(rule.schemes[0], q if rule.schemes[0] == "independent" else q[:, 0], uniforms(6, 3))[0]
    for count in (None, torch.tensor([3, 1, 2, 3, 0, 3])):
        stays_where_it_is(lambda count=count: rule.distribution(p, q, tokens, count))


@pytest.mark.parametrize("how", list(schemes.SCHEMES))
def test_schemes_and_enumerations(how):
    p, q = dirichlet_pairs(5)
    q[0] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    distributions = draft_distributions(q, 3, how)
    drawn_from = distributions if how == "independent" else q
    drawn = uniforms(5, 3)
    stays_where_it_is(lambda: schemes.candidates(how, drawn_from, drawn))
    stays_where_it_is(lambda: candidate_tuples(how, distributions))
    stays_where_it_is(lambda: optimum(candidate_tuples(how, distributions), p))
    stays_where_it_is(lambda: emission(verification.get("mcsd_naive"), how, p, distributions))


def test_optima_and_widths():
    p, q = dirichlet_pairs(5)
    for how in ("iid", "without_replacement", "greedy"):
        for num_drafts in (1, 2, 3):
            stays_where_it_is(lambda how=how, count=num_drafts: optimal_acceptances(p, q, count, how))
    each = draft_distributions(q, 3, "independent")
    stays_where_it_is(lambda: independent_bounds(p, each))
    counts = torch.tensor([1, 2, 3, 3, 2])
    stays_where_it_is(lambda: layer_width(p, q, 3, 0.5, 1, counts))
    stays_where_it_is(lambda: beam_distribution(verification.get("beam_layer"), p[0], q[0], 3, 2))
    stays_where_it_is(lambda: schemes.likeliest(p.log(), 2))
