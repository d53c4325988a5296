"""Dynamic width: P(m, k) against simulation of the walk itself, its limits, and the count of Theorem 3.2."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from toolkit.sampling import draw
from toolkit.verification import get
from toolkit.verification.width import (
    acceptance_probs,
    accepted_distribution,
    fill_probs,
    layer_width,
)


def random_distributions(num_distributions: int, num_pairs: int, seed: int) -> tuple[Tensor, Tensor]:
    """p, q [L, M]: zeros in every fifth p."""
    weights = (
        torch.rand(2, num_distributions, num_pairs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        ** 2
    )
    weights[0, ::5, 0] = 0.0
    p, q = weights / weights.sum(-1, keepdim=True)
    return p, q


def test_number_accepted_by_hand():
    """alpha = (.5, .8): none .1, and after the first acceptance a fresh walk."""
    distribution = accepted_distribution(torch.tensor([0.5, 0.8], dtype=torch.float64))
    assert distribution.tolist() == pytest.approx([0.5 * 0.2, 0.5 * 0.8 + 0.5 * 0.5, 0.5 * 0.5])
    equal = accepted_distribution(torch.full((3, 6), 0.3, dtype=torch.float64))  # equal probabilities: binomial
    binomial = torch.distributions.Binomial(6, torch.tensor(0.3, dtype=torch.float64))
    assert torch.allclose(equal, binomial.log_prob(torch.arange(7, dtype=torch.float64)).exp().expand(3, -1))
    assert float(acceptance_probs(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5]), 2)[0]) == 1.0


def test_a_layer_fills_as_often_as_the_rule_fills_it():
    """fill_probs is about the walk that does stop: the rule's own distribution, summed over all candidates."""
    from itertools import product

    rule = get("beam_layer")
    for (p, q), w in product(zip(*random_distributions(6, 3, seed=4), strict=True), (1, 2, 3)):
        full = 0.0
        for tokens in product(range(3), repeat=3):
            outcomes = rule.distribution(p, q, torch.tensor(tokens), w) if float(q[list(tokens)].min()) > 0 else []
            full += float(q[list(tokens)].prod()) * sum(float(o.probability) for o in outcomes if o.kept.sum() == w)
        assert float(fill_probs(p, q, 3)[w]) == pytest.approx(full, abs=1e-12)


def test_width_is_the_largest_that_is_likely_enough():
    p, q = random_distributions(40, 5, seed=2)
    fills, widths = fill_probs(p, q, 4), {t: layer_width(p, q, 4, t).tolist() for t in (0.0, 0.5, 0.9, 1.0)}
    assert fills[:, 0].tolist() == pytest.approx([1.0] * 40)
    assert bool((fills.diff(dim=-1) <= 1e-15).all())
    for threshold, chosen in widths.items():
        for row, w in enumerate(chosen):
            likely = [k for k in range(1, 5) if float(fills[row, k]) >= threshold]
            assert w == max([1, *likely])
    assert widths[0.0] == [4] * 40
    assert len(set(widths[0.5])) > 1 and sum(widths[0.9]) < sum(widths[0.5])
    assert layer_width(p, q, 4, 0.9, min_width=3).tolist() == [max(3, w) for w in widths[0.9]]
    assert layer_width(p, p, 4, 1.0).tolist() == [4] * 40
    assert layer_width(p.float(), p.float(), 4, 1.0).tolist() == [4] * 40
    disjoint = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert layer_width(*disjoint, 4, 0.1).tolist() == [1]


def rounds(p: Tensor, q: Tensor, num_candidates: int, widths: Tensor, num_layers: int, runs: int) -> Tensor:
    """Layers of simulated rounds [runs], every layer with the same distributions: filled ones in a row, and the last one."""
    rule, generator = get("beam_layer"), torch.Generator().manual_seed(5)
    real, full = torch.ones(runs, num_candidates, dtype=torch.bool), torch.ones(runs, dtype=torch.bool)
    layers = torch.ones(runs)
    for _ in range(num_layers):
        drawn, tests = torch.rand(2, runs, num_candidates, generator=generator, dtype=torch.float64)
        both = p.expand(runs, -1), q.expand(runs, -1)
        candidates = draw(both[1].unsqueeze(1).expand(-1, num_candidates, -1), drawn)
        kept, _ = rule.walk(*both, candidates, real, widths.expand(runs), tests)
        full = full & (kept.sum(1) == widths)
        layers += full
    return layers


def expected_layers(threshold: float, fill_prob: float, num_layers: int) -> float:
    """(1 - a^(gamma + 1)) / (1 - a), a = min(t, beta): layers per round, the target's own last one included.

    Theorem 3.2: exact where every layer fills with probability a (beta <= t in every layer, all alike). Otherwise a layer fills
    with a probability of at least min(t, its own beta). `fill_prob` is beta, P(at least W_min accepted).
    """
    prob = min(threshold, fill_prob)
    return float(sum(prob**n for n in range(num_layers + 1)))


def test_layers_per_round_are_theorem_3_2s():
    """beta < t: every layer has the least width and fills with probability beta, exactly the theorem's count. Else at least."""
    p, q = random_distributions(6, 5, seed=3)
    runs, num_layers, below = 40_000, 3, 0
    for row in range(6):
        beta = float(fill_probs(p[row], q[row], 4)[2])
        for threshold in (0.6, 0.97):
            widths = layer_width(p[row : row + 1], q[row : row + 1], 4, threshold, min_width=2)
            layers = rounds(p[row], q[row], 4, widths, num_layers, runs)
            error = float(layers.std()) / runs**0.5
            expected = expected_layers(threshold, beta, num_layers)
            assert float(layers.mean()) >= expected - 4 * error
            if beta <= threshold:
                below += 1
                assert abs(float(layers.mean()) - expected) < 4 * error
    assert 3 <= below < 12
    assert expected_layers(1.0, 1.0, 3) == 4
    assert expected_layers(0.5, 0.9, 2) == pytest.approx((1 - 0.5**3) / (1 - 0.5))


def test_rows_may_have_candidates_of_their_own_number():
    """A ragged layer's widths are those of each row alone with that many candidates."""
    p, q = random_distributions(12, 5, 8)
    counts = torch.tensor([1, 2, 3, 4] * 3)
    for threshold in (0.0, 0.3, 0.8):
        widths = layer_width(p, q, 4, threshold, 1, counts)
        alone = [layer_width(p[i : i + 1], q[i : i + 1], int(n), threshold)[0] for i, n in enumerate(counts)]
        assert widths.tolist() == [int(width) for width in alone]
    distribution = fill_probs(p, q, 4, counts)
    for i, n in enumerate(counts.tolist()):
        assert torch.allclose(distribution[i, : n + 1], fill_probs(p[i], q[i], n))
        assert not bool(distribution[i, n + 1 :].any())
