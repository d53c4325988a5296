"""Rules for chains, exact by enumeration: every draft, every verdict, random tables in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from toolkit import verification
from toolkit.errors import InputError
from toolkit.types import Proposal
from toolkit.verification import PathRule

RULES = [name for name in verification.names() if isinstance(verification.get(name), PathRule)]
LOSSLESS = [name for name in RULES if verification.get(name).lossless]


class Tables:
    """Next-token laws p and q by the whole prefix, with zeros and ties."""

    def __init__(self, vocab_size: int, depth: int, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.vocab_size, self.depth = vocab_size, depth
        prefixes = [prefix for n in range(depth + 1) for prefix in product(range(vocab_size), repeat=n)]
        self.p = {prefix: self.law() for prefix in prefixes}
        self.q = {prefix: self.p[prefix] if self.coin(0.15) else self.law() for prefix in prefixes}

    def coin(self, chance: float) -> bool:
        return float(torch.rand((), generator=self.generator)) < chance

    def law(self) -> Tensor:
        weights = torch.rand(self.vocab_size, generator=self.generator, dtype=torch.float64) ** 3 + 1e-3
        if self.coin(0.3):
            weights[0] = 0.0
        if self.coin(0.2):
            weights[1:] = 0.5
        return weights / weights.sum()

    def chance(self, table: dict, tokens: tuple[int, ...]) -> float:
        chance = 1.0
        for i, token in enumerate(tokens):
            chance *= float(table[tokens[:i]][token])
        return chance


def output_law(rule: PathRule, tables: Tables) -> tuple[dict, float]:
    """Law of the first depth + 1 emitted tokens (completed by p), and the expected accepted length."""
    depth, law, expected = tables.depth, {}, 0.0
    for drafted in product(range(tables.vocab_size), repeat=depth):
        drawn = tables.chance(tables.q, drafted)
        if drawn == 0:
            continue
        p = torch.stack([tables.p[drafted[:i]] for i in range(depth + 1)])
        q = torch.stack([tables.q[drafted[:i]] for i in range(depth)])
        lengths, residuals = rule.law(p, q, torch.tensor(drafted))
        expected += drawn * float((lengths * torch.arange(depth + 1)).sum())
        for n, token in product(range(depth + 1), range(tables.vocab_size)):
            start = (*drafted[:n], token)
            mass = drawn * float(lengths[n] * residuals[n, token])
            for rest in product(range(tables.vocab_size), repeat=depth - n):
                done = (*start, *rest)
                tail = 1.0
                for i in range(n + 1, depth + 1):
                    tail *= float(tables.p[done[:i]][done[i]])
                law[done] = law.get(done, 0.0) + mass * tail
    return law, expected


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize(("vocab_size", "depth"), [(2, 1), (2, 3), (3, 2), (4, 2), (5, 1)])
def test_emitted_tokens_follow_the_target_exactly(name, vocab_size, depth):
    for seed in range(6):
        tables = Tables(vocab_size, depth, seed)
        law, _ = output_law(verification.get(name), tables)
        outputs = product(range(vocab_size), repeat=depth + 1)
        distance = sum(abs(law.get(out, 0.0) - tables.chance(tables.p, out)) for out in outputs) / 2
        assert distance < 1e-12


def survival(tables: Tables, prefix: tuple[int, ...]) -> tuple[float, float]:
    """prod min(1, p/q) and block verification's P_i along a prefix."""
    tokens, block = 1.0, 1.0
    for i, token in enumerate(prefix):
        ratio = float(tables.p[prefix[:i]][token] / tables.q[prefix[:i]][token])
        tokens, block = tokens * min(1.0, ratio), min(block * ratio, 1.0)
    return tokens, block


def test_expected_lengths_equal_their_formulas_and_block_is_never_below():
    for seed in range(12):
        tables = Tables(3, 2, seed)
        prefixes = [pre for n in (1, 2) for pre in product(range(3), repeat=n) if tables.chance(tables.q, pre) > 0]
        drawn = {prefix: tables.chance(tables.q, prefix) for prefix in prefixes}
        by_token = sum(drawn[prefix] * survival(tables, prefix)[0] for prefix in prefixes)
        by_block = sum(drawn[prefix] * survival(tables, prefix)[1] for prefix in prefixes)
        assert output_law(verification.get("rejection"), tables)[1] == pytest.approx(by_token, abs=1e-12)
        assert output_law(verification.get("block"), tables)[1] == pytest.approx(by_block, abs=1e-12)
        assert by_block >= by_token - 1e-12


@pytest.mark.parametrize("name", RULES)
def test_verdicts_are_drawn_from_the_law(name):
    """Ragged rows; lengths and extra tokens of many verdicts against the law, at five standard errors."""
    rule, runs = verification.get(name), 40_000
    tables = Tables(3, 3, seed=5)
    drafted = torch.tensor([2, 1, 2])
    p = torch.stack([tables.p[tuple(drafted[:i].tolist())] for i in range(4)])
    q = torch.stack([tables.q[tuple(drafted[:i].tolist())] for i in range(3)])
    for num_drafted in (0, 2, 3):
        lengths, residuals = rule.law(p, q, drafted, torch.tensor(num_drafted))
        count = torch.full((runs,), num_drafted)
        proposal = Proposal(drafted.expand(runs, 3), q.expand(runs, 3, 3), count, count)
        uniforms = torch.rand(runs, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        verdict = rule.verify(proposal, p.expand(runs, 4, 3), uniforms)
        joint = torch.zeros(4, 3, dtype=torch.float64)
        joint.index_put_((verdict.length, verdict.extra), torch.ones(runs, dtype=torch.float64), accumulate=True)
        expected = lengths.unsqueeze(1) * residuals
        error = (expected * (1 - expected) / runs).sqrt().clamp(min=1e-9)
        assert bool(((joint / runs - expected).abs() <= 5 * error + 1e-12).all())
        assert bool((verdict.bonus == (verdict.length == num_drafted)).all())
        assert bool(verdict.valid.all())


@pytest.mark.parametrize("name", RULES)
def test_limits(name):
    """q = p accepts everything, disjoint supports nothing; one-hot laws work."""
    rule = verification.get(name)
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.8, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    lengths, _ = rule.law(p, p[:2], torch.tensor([1, 0]))
    assert lengths.tolist() == pytest.approx([0, 0, 1])
    q = torch.tensor([[0.0, 0.0, 1.0]] * 2, dtype=torch.float64)
    lengths, residuals = rule.law(p, q, torch.tensor([2, 2]))
    assert lengths.tolist() == pytest.approx([1, 0, 0])
    assert residuals[0].tolist() == pytest.approx(p[0].tolist())


@pytest.mark.parametrize("name", RULES)
def test_leading_dimensions_and_float32(name):
    rule = verification.get(name)
    p = torch.softmax(torch.randn(2, 5, 4, 6, generator=torch.Generator().manual_seed(0)), -1)
    q = torch.softmax(torch.randn(2, 5, 3, 6, generator=torch.Generator().manual_seed(1)), -1)
    tokens = torch.randint(6, (2, 5, 3), generator=torch.Generator().manual_seed(2))
    lengths, residuals = rule.law(p, q, tokens, torch.tensor([[0, 1, 2, 3, 3]] * 2))
    assert lengths.dtype == residuals.dtype == torch.float32
    one, _ = rule.law(p[1, 2], q[1, 2], tokens[1, 2], torch.tensor(2))
    assert torch.allclose(lengths[1, 2], one)
    assert torch.allclose(lengths.sum(-1), torch.ones(2, 5), atol=1e-5)


def test_bad_laws_are_refused():
    rule = verification.get("rejection")
    p, q = torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    with pytest.raises(InputError, match="tokens that their draft law can produce"):
        rule.law(p, q, torch.tensor([1]))
    with pytest.raises(InputError, match="sum to 1 within 1e-4"):
        rule.law(p * 1.1, q, torch.tensor([0]))
    with pytest.raises(InputError, match=r"draft_probs: expected shape \[1, 2\], got \[1, 3\]"):
        rule.law(p, torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([0]))
    with pytest.raises(InputError, match="unknown rule 'rejecton': did you mean rejection"):
        verification.get("rejecton")
