"""Everything is made where its input is: under another default device the same numbers come out.

A tensor that is made without a device would lie on "meta" here, which holds no numbers and cannot be mixed with real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from toolkit import verification
from toolkit.testing import dirichlet_pairs, draft_distributions
from toolkit.verification import schemes
from toolkit.verification.enumeration import beam_distribution, candidate_tuples, emission, optimum
from toolkit.verification.optimal import independent_bounds, optimal_acceptances
from toolkit.verification.width import layer_width


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors within."""
    if isinstance(value, Tensor):
        return [value]
    parts = value if isinstance(value, (list, tuple)) else vars(value).values()
    return [tensor for part in parts for tensor in tensors_of(part)]


def stays_where_it_is(compute: Callable[[], Any]) -> None:
    expected = tensors_of(compute())
    with torch.device("meta"):
        tensors = tensors_of(compute())
    assert tensors
    for one, other in zip(expected, tensors, strict=True):
        assert other.device == one.device and torch.equal(one, other)


def uniforms(rows: int, slots: int) -> Tensor:
    return torch.rand(rows, slots, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


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
    stays_where_it_is(lambda: schemes.most_probable(p.log(), 2))
