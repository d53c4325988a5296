"""Multi-draft rules: exact by enumeration over every tuple of candidates, and never above the optimum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.acceptance import optimal_acceptance
from toolkit import verification
from toolkit.errors import InputError
from toolkit.testing import dirichlet_pairs, draft_distributions
from toolkit.verification import SelectionRule, schemes
from toolkit.verification.enumeration import candidate_tuples, emission, optimum
from toolkit.verification.optimal import optimal_acceptances

RULES = [name for name in verification.names() if isinstance(verification.get(name), SelectionRule)]
LOSSLESS = [name for name in RULES if verification.get(name).lossless]
DECLARED = [(name, d) for name in LOSSLESS for d in verification.get(name).schemes]
EXACT_ANYWAY = ("greedy_multi", "without_replacement")  # its last candidate is drawn as in its own scheme
UNDECLARED = [  # rules for one q cannot be given a point mass per candidate at all
    (name, d) for name in LOSSLESS for d in schemes.SCHEMES if d not in verification.get(name).schemes and d != "top_k"
]
SCHEMES = ("iid", "without_replacement", "greedy")
TINY = 3e-13

# p and q over four tokens: equal, disjoint, one-hot, with zeros, ties and entries that nearly agree.
SPECIAL = [
    ([0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]),
    ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]),
    ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]),
    ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]),
    ([1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]),
    ([1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]),
    ([0.0, 0.0, 0.0, 1.0], [0.4, 0.3, 0.2, 0.1]),
    ([0.4, 0.3, 0.2, 0.1], [0.0, 0.0, 1.0, 0.0]),
    ([0.4, 0.4, 0.1, 0.1], [0.1, 0.1, 0.4, 0.4]),
    ([0.4, 0.4, 0.2, 0.0], [0.4, 0.2, 0.4, 0.0]),
    ([0.0, 0.5, 0.3, 0.2], [0.6, 0.0, 0.3, 0.1]),
    ([0.6, 0.3, 0.1, 0.0], [0.0, 0.6, 0.4, 0.0]),
    ([0.25 + TINY, 0.25 - TINY, 0.25, 0.25], [0.25, 0.25, 0.25 - TINY, 0.25 + TINY]),
    ([0.3, 0.3 + TINY, 0.4 - TINY, 0.0], [0.3 + TINY, 0.3, 0.4 - TINY, 0.0]),
    ([1 - 3 * TINY, TINY, TINY, TINY], [TINY, TINY, TINY, 1 - 3 * TINY]),
    ([0.7, 0.1, 0.1, 0.1], [1 - 3 * TINY, TINY, TINY, TINY]),
]


def pairs(num_random: int = 16, vocab_size: int = 4) -> tuple[Tensor, Tensor]:
    """The special pairs (four tokens only) and random ones, every other with zeros: p, q [P, V]."""
    p, q = dirichlet_pairs(num_random, vocab_size)
    for n in range(0, num_random, 2):
        p[n, n % vocab_size] = 0.0
        q[n, (n // 2) % vocab_size] = 0.0
    if vocab_size == 4:
        special = torch.tensor(SPECIAL, dtype=torch.float64)
        p, q = torch.cat([special[:, 0], p]), torch.cat([special[:, 1], q])
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def distance(distribution: Tensor, other: Tensor) -> float:
    """The largest total variation between distributions [P, V]."""
    return float((distribution - other).abs().sum(-1).max() / 2)


# -- exactness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "how"), DECLARED)
def test_emitted_token_follows_the_target_and_acceptance_stays_below_the_optimum(name, how, num_drafts):
    for vocab_size in (2, 3, 4):
        p, q = pairs(vocab_size=vocab_size)
        q = draft_distributions(q, num_drafts, how)
        got = emission(verification.get(name), how, p, q)
        assert distance(got.distribution, p) < (1e-9 if name == "importance_lp" else 1e-12)
        assert (got.accepted <= got.drafted + 1e-12).all()
        assert (got.drafted <= optimum(candidate_tuples(how, q), p) + 1e-12).all()


@pytest.mark.parametrize(("name", "how"), UNDECLARED)
def test_another_scheme_than_the_declared_ones_is_not_exact(name, how):
    p, q = dirichlet_pairs(20)
    got = emission(verification.get(name), how, p, draft_distributions(q, 3, how), checked=False)
    assert (
        (distance(got.distribution, p) < 1e-12)
        if (name, how) == EXACT_ANYWAY
        else (distance(got.distribution, p) > 1e-3)
    )


@pytest.mark.parametrize("how", ["iid", "independent"])
@pytest.mark.parametrize(("num_free", "alphabet"), [(1, 1), (2, 1), (2, 2), (3, 3), (1, 4), (3, 4)])
def test_importance_is_exact_for_every_truncation(num_free, alphabet, how):
    p, q = pairs(8)
    rule = verification.get("importance", num_free=num_free, alphabet=alphabet)
    for num_drafts in (2, 3):
        assert distance(emission(rule, how, p, draft_distributions(q, num_drafts, how)).distribution, p) < 1e-12


@pytest.mark.parametrize("num_halvings", [0, 1, 5, 40])
def test_k_seq_is_exact_after_any_number_of_halvings(num_halvings):
    p, q = pairs(8)
    rule = verification.get("spectr", num_halvings=num_halvings)
    assert distance(emission(rule, "iid", p, draft_distributions(q, 3, "iid")).distribution, p) < 1e-12


@pytest.mark.parametrize("num_drafts", [1, 2, 4, 8])
def test_k_seq_finds_its_root(num_drafts):
    """Acceptance 1 - (1 - b)^K at the rho of sixty halvings."""
    p, q = dirichlet_pairs(50, vocab_size=2000, seed=3) if num_drafts == 8 else pairs(200)
    count = torch.full((len(p), 1), float(num_drafts), dtype=torch.float64)

    def accepted(rho: Tensor) -> Tensor:
        return 1 - (1 - torch.minimum(q, p / rho).sum(-1, keepdim=True)) ** count

    low, high = torch.ones_like(count), count
    for _ in range(60):
        rho = (low + high) / 2
        above = accepted(rho) <= rho * torch.minimum(q, p / rho).sum(-1, keepdim=True)
        low, high = torch.where(above, low, rho), torch.where(above, rho, high)
    got = accepted(verification.get("spectr")._rho(p, q, count))
    assert torch.allclose(got, accepted(high), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", LOSSLESS)
def test_leading_dimensions_and_ragged_rows(name):
    """[2, 3] nodes with 0..3 candidates, rubbish behind the last: each as if it were alone."""
    rule = verification.get(name)
    how = rule.schemes[0]
    p, q = (distribution.reshape(2, 3, 4) for distribution in dirichlet_pairs(6, seed=4))
    q = q.unsqueeze(2).expand(2, 3, 3, 4)
    counts = torch.tensor([[0, 1, 2], [3, 3, 1]])
    uniforms = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    candidates = torch.zeros(2, 3, 3, dtype=torch.long)
    for a, b in np.ndindex(2, 3):
        n = int(counts[a, b])
        if n:
            candidates[a, b, :n] = schemes.candidates(how, q[a, b, 0], uniforms[a, b, :n])[0]
        candidates[a, b, n:] = torch.tensor([-1, 99, 7])[: 3 - n]
    accept, residual = rule.distribution(p, q, candidates, counts)
    assert accept.dtype == residual.dtype == torch.float64
    assert accept.shape == (2, 3, 3)
    assert residual.shape == (2, 3, 4)
    assert torch.equal(residual[0, 0], p[0, 0])
    for a, b in np.ndindex(2, 3):
        n = int(counts[a, b])
        assert (accept[a, b, n:] == 0).all()
        if n:
            alone = rule.distribution(p[a, b], q[a, b, :n], candidates[a, b, :n])
            assert torch.allclose(accept[a, b, :n], alone[0], atol=1e-12)
            assert torch.allclose(residual[a, b], alone[1], atol=1e-12)
    single = rule.distribution(p.float(), q.float(), candidates, counts)
    assert single[0].dtype == single[1].dtype == torch.float32
    assert torch.allclose(single[0].double(), accept, atol=1e-4)


# -- optimum --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])
def test_optimum_equals_the_minimum_over_all_subsets(scheme, num_drafts):
    for vocab_size in (3, 4, 5):
        p, q = pairs(num_random=40, vocab_size=vocab_size)
        expected = optimum(candidate_tuples(scheme, draft_distributions(q, num_drafts, scheme)), p)
        got = optimal_acceptances(p, q, num_drafts, scheme)
        assert torch.allclose(got, expected, atol=1e-11, rtol=0)
        assert optimal_acceptance(p[-1], q[-1], num_drafts, scheme) == pytest.approx(float(expected[-1]), abs=1e-11)


def test_theorem_2_the_optimum_is_1_exactly_when_no_subset_is_short():
    """p(S) >= q(S)^2 for every S, on pairs on both sides of the border."""
    p, q = pairs(num_random=400)
    p = torch.cat([p, 0.5 * (p + q)])
    q = torch.cat([q, q])
    subsets = (torch.arange(16).unsqueeze(1) >> torch.arange(4) & 1).double()
    holds = (p @ subsets.T >= (q @ subsets.T) ** 2 - 1e-13).all(-1)
    assert 50 < int(holds.sum()) < len(holds) - 50
    assert torch.equal(holds, optimal_acceptances(p, q, 2) >= 1 - 1e-12)


@pytest.mark.parametrize("num_drafts", [2, 3, 4])
def test_full_program_reaches_the_optimum(num_drafts):
    p, q = pairs()
    for how in ("iid", "independent"):
        distributions = draft_distributions(q, num_drafts, how)
        got = emission(verification.get("importance_lp"), how, p, distributions).accepted
        assert torch.allclose(got, optimum(candidate_tuples(how, distributions), p), atol=1e-9, rtol=0)


def test_truncated_program_with_every_token_free_reaches_the_optimum_of_two():
    p, q = pairs()
    rule = verification.get("importance", num_free=4)
    for how in ("iid", "independent"):
        distributions = draft_distributions(q, 2, how)
        got = emission(rule, how, p, distributions).accepted
        assert torch.allclose(got, optimum(candidate_tuples(how, distributions), p), atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_free", [1, 2, 3, 5])
def test_truncated_program_loses_at_most_its_bound(num_free):
    p, q = dirichlet_pairs(60, vocab_size=9, seed=2)
    lost = (
        optimal_acceptances(p, q, 2)
        - emission(
            verification.get("importance", num_free=num_free, alphabet=9), "iid", p, draft_distributions(q, 2, "iid")
        ).accepted
    )
    bound = (p - q**2).sort(-1, descending=True).values[:, num_free:].clamp(min=0).sum(-1)
    assert (lost <= bound + 1e-12).all()
    assert (lost >= -1e-12).all()


@pytest.mark.parametrize("sharpness", [1.0, 2.0, 4.0])
def test_grouped_weights_come_close_to_the_optimum_of_two_on_flat_and_on_peaked_distributions(sharpness):
    """Forty tokens; the published rules are further away, the truncated program most of all where p is flat."""
    logits, noise = torch.randn(2, 4, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p, q = (sharpness * logits).softmax(-1), (sharpness * logits + noise).softmax(-1)
    best = optimal_acceptances(p, q, 2).mean()
    lost = {
        name: float(best - emission(verification.get(name), "iid", p, draft_distributions(q, 2, "iid")).accepted.mean())
        for name in ("importance_grouped", "importance", "spectr", "specinfer")
    }
    assert lost["importance_grouped"] < 0.02
    assert lost["importance_grouped"] < min(lost["importance"], lost["spectr"], lost["specinfer"])


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])
def test_greedy_multi_reaches_its_optimum(num_drafts):
    p, q = pairs(num_random=60)
    got = emission(verification.get("greedy_multi"), "greedy", p, draft_distributions(q, num_drafts, "greedy")).accepted
    assert torch.allclose(got, optimal_acceptances(p, q, num_drafts, "greedy"), atol=1e-12, rtol=0)


def test_published_means_over_uniform_pairs():
    """Two candidates, four tokens (arXiv:2502.18779): order, and each within .03."""
    p, q = dirichlet_pairs(400, seed=1)

    def mean(name: str, how: str, num_drafts: int = 2) -> float:
        return float(emission(verification.get(name), how, p, draft_distributions(q, num_drafts, how)).accepted.mean())

    got = {
        0.570: mean("specinfer", "iid", 1),
        0.666: mean("specinfer", "iid"),
        0.683: mean("spectr", "iid"),
        0.719: float(optimal_acceptances(p, q, 2).mean()),
        0.740: mean("mcsd", "without_replacement"),
        0.770: mean("greedy_multi", "greedy"),
        0.810: float(optimal_acceptances(p, q, 2, "without_replacement").mean()),
    }
    assert list(got.values()) == sorted(got.values())
    for published, ours in got.items():
        assert ours == pytest.approx(published, abs=0.03)
    assert mean("importance", "iid") == pytest.approx(got[0.719], abs=1e-9)
    assert float(optimal_acceptances(p, q, 2, "greedy").mean()) == pytest.approx(got[0.770], abs=1e-9)


# -- schemes --------------------------------------------------------------------------------------------------------


def test_the_most_probable_tokens_are_candidates_for_certain_ties_by_id():
    logits = torch.tensor(
        [[1.0, 3.0, 3.0, 0.0], [5.0, -torch.inf, 2.0, 2.0], [-torch.inf, 1.0, -torch.inf, -torch.inf]]
    )
    tokens, counts = schemes.most_probable(logits, 3)
    assert tokens.tolist() == [[1, 2, 0], [0, 2, 3], [1, 0, 0]]
    assert counts.tolist() == [3, 3, 1]
    for count in (2, 6):
        by_probs, real = schemes.candidates("top_k", logits.double().softmax(-1), torch.rand(3, count))
        by_logits, expected = schemes.most_probable(logits, count)
        assert by_probs.tolist() == by_logits.tolist() and real.tolist() == expected.tolist()


@pytest.mark.parametrize("how", [how for how in schemes.SCHEMES if how != "top_k"])
def test_candidates_are_drawn_with_the_probabilities_of_their_tuples(how):
    """100,000 draws against the enumeration, within five standard errors; zeros and too small a support included."""
    _, q = pairs(4)
    uniforms = torch.rand(100_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for n in (1, 4, 9, 10, len(q) - 1):
        distributions = draft_distributions(q, 3, how)[n]
        distribution = distributions if how == "independent" else distributions[0]
        drawn, counts = schemes.candidates(how, distribution.expand(len(uniforms), *distribution.shape), uniforms)
        tuples = candidate_tuples(how, distributions.unsqueeze(0))
        assert (counts == tuples.counts).all()
        share = torch.bincount((drawn * torch.tensor([16, 4, 1])).sum(-1), minlength=64) / len(uniforms)
        error = (tuples.probs[0] * (1 - tuples.probs[0]) / len(uniforms)).sqrt()
        assert ((share - tuples.probs[0]).abs() <= 5 * error + 1e-12).all()


# -- input ----------------------------------------------------------------------------------------------------------

P4 = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
Q4 = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"candidates": torch.zeros(0, dtype=torch.long)}, "at least 1 per node"),
        ({"candidates": torch.tensor([0, 3])}, "their draft distribution can produce"),
        ({"candidates": torch.tensor([0, 4])}, "token ids below 4"),
        ({"candidates": torch.tensor([0, 1, 2])}, "expected shape \\[3, 4\\]"),
        ({"draft_probs": Q4.expand(2, 4)[:, :3]}, "draft_probs: expected shape"),
        (
            {"draft_probs": Q4.expand(2, 4) * 1.001},
            "^draft_probs: expected distributions that sum to 1 within 1e-4, got 1.00",
        ),
        ({"target_probs": P4 - 2e-4}, "^target_probs: expected distributions that sum to 1 within 1e-4, got 0.99"),
        ({"target_probs": torch.tensor([1.2, -0.2, 0.0, 0.0]).double()}, "at least 0, got -0.2"),
        ({"target_probs": P4.expand(2, 4)}, "target_probs: expected shape"),
        ({"num_candidates": torch.tensor(3)}, "expected 0 to 2, got 3"),
        ({"num_candidates": torch.tensor(-1)}, "expected 0 to 2, got -1"),
        ({"num_candidates": torch.tensor([1, 1])}, "num_candidates: expected shape"),
    ],
)
@pytest.mark.parametrize("name", RULES)
def test_bad_input_is_named(name, changed, message):
    given = {"target_probs": P4, "draft_probs": Q4.expand(2, 4), "candidates": torch.tensor([0, 1])}
    verification.get(name).distribution(**given)
    with pytest.raises(InputError, match=message):
        verification.get(name).distribution(**(given | changed))


def test_candidates_that_the_scheme_cannot_produce_are_refused():
    distributions = Q4.expand(2, 4)
    with pytest.raises(InputError, match="different tokens"):
        verification.get("mcsd").distribution(P4, distributions, torch.tensor([1, 1]))
    with pytest.raises(InputError, match="different tokens"):
        verification.get("greedy_multi").distribution(P4, distributions, torch.tensor([0, 0]))
    with pytest.raises(InputError, match="most probable tokens"):
        verification.get("greedy_multi").distribution(P4, distributions, torch.tensor([1, 0]))
    verification.get("greedy_multi").distribution(
        P4, distributions, torch.tensor([1, 9]), torch.tensor(1)
    )  # one draw, nothing fixed
