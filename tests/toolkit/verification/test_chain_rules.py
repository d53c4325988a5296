"""Rules for chains, exact by enumeration: every draft, every verdict, random tables in float64."""

from __future__ import annotations

import pytest
import torch

from toolkit import verification
from toolkit.errors import InputError
from toolkit.types import Proposal
from toolkit.verification import PathRule
from toolkit.verification.chain_enumeration import PrefixTables, chain_error, chain_outputs, expected_lengths

RULES = [name for name in verification.names() if isinstance(verification.get(name), PathRule)]
LOSSLESS = [name for name in RULES if verification.get(name).lossless]


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize(("vocab_size", "depth"), [(2, 1), (2, 3), (3, 2), (4, 2), (5, 1)])
def test_emitted_tokens_follow_the_target_exactly(name, vocab_size, depth):
    for seed in range(6):
        assert chain_error(verification.get(name), PrefixTables(vocab_size, depth, seed)) < 1e-12


def test_expected_lengths_equal_their_formulas_and_block_is_never_below():
    for seed in range(12):
        tables = PrefixTables(3, 2, seed)
        by_token, by_block = expected_lengths(tables)
        assert chain_outputs(verification.get("rejection"), tables)[1] == pytest.approx(by_token, abs=1e-12)
        assert chain_outputs(verification.get("block"), tables)[1] == pytest.approx(by_block, abs=1e-12)
        assert by_block >= by_token - 1e-12


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_verdicts_are_drawn_from_the_distribution(name, most):
    """Ragged rows; lengths and extra tokens of many verdicts against the distribution, at five standard errors."""
    rule, runs = verification.get(name), 40_000
    tables = PrefixTables(3, most, seed=5)
    drafted = torch.tensor([2, 1, 2])[:most]
    p = torch.stack([tables.p[tuple(drafted[:i].tolist())] for i in range(most + 1)])
    q = torch.stack([tables.q[tuple(drafted[:i].tolist())] for i in range(most)])
    for num_drafted in {0, most - 1, most}:
        lengths, residuals = rule.distribution(p, q, drafted, torch.tensor(num_drafted))
        count = torch.full((runs,), num_drafted)
        proposal = Proposal(drafted.expand(runs, -1), q.expand(runs, -1, -1), count, count)
        uniforms = torch.rand(runs, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        verdict = rule.verify(proposal, p.expand(runs, -1, -1), uniforms)
        joint = torch.zeros(most + 1, 3, dtype=torch.float64)
        joint.index_put_((verdict.length, verdict.extra), torch.ones(runs, dtype=torch.float64), accumulate=True)
        expected = lengths.unsqueeze(1) * residuals
        error = (expected * (1 - expected) / runs).sqrt().clamp(min=1e-9)
        assert bool(((joint / runs - expected).abs() <= 5 * error + 1e-12).all())
        assert bool((verdict.bonus == (verdict.length == num_drafted)).all())
        assert bool(verdict.valid.all())


@pytest.mark.parametrize("name", RULES)
def test_limits(name):
    """q = p accepts everything, disjoint supports nothing; one-hot distributions work."""
    rule = verification.get(name)
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.8, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    lengths, _ = rule.distribution(p, p[:2], torch.tensor([1, 0]))
    assert lengths.tolist() == pytest.approx([0, 0, 1])
    q = torch.tensor([[0.0, 0.0, 1.0]] * 2, dtype=torch.float64)
    lengths, residuals = rule.distribution(p, q, torch.tensor([2, 2]))
    assert lengths.tolist() == pytest.approx([1, 0, 0])
    assert residuals[0].tolist() == pytest.approx(p[0].tolist())


def test_bad_distributions_are_refused():
    rule = verification.get("rejection")
    p, q = torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    with pytest.raises(InputError, match="tokens that their draft distribution can produce"):
        rule.distribution(p, q, torch.tensor([1]))
    with pytest.raises(InputError, match="sum to 1 within 1e-4"):
        rule.distribution(p * 1.1, q, torch.tensor([0]))
    with pytest.raises(InputError, match=r"^target_probs: expected shape \[2, 'V'\], got \[1, 2\]"):
        rule.distribution(p[:1], q, torch.tensor([0]))
    with pytest.raises(InputError, match=r"^draft_probs: expected shape \[1, 2\], got \[1, 3\]"):
        rule.distribution(p, torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([0]))
    with pytest.raises(InputError, match="unknown rule 'rejecton': did you mean rejection"):
        verification.get("rejecton")
