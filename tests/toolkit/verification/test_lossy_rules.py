"""MTAD's and BiLD's rules against slow references, their limits, and what they are in the loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from toolkit import config
from toolkit.decoding import Sampling, decode
from toolkit.testing import output_pvalue
from toolkit.types import Proposal
from toolkit.verification import get

TAUS = (0.0, 0.05, 0.1, 0.5, 0.9, 1.0)
SURPRISES = (0.0, 0.5, 1.0, 2.0, 50.0)


def tables(num_rows: int, depth: int = 5, vocab_size: int = 4, zeros: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """p [R, K + 1, V], q [R, K, V] and tokens [R, K] drawn from q; some p are 0, as after top-k."""
    generator = torch.Generator().manual_seed(depth)
    p = torch.rand(num_rows, depth + 1, vocab_size, generator=generator, dtype=torch.float64) ** 2 + 1e-3
    q = torch.rand(num_rows, depth, vocab_size, generator=generator, dtype=torch.float64) ** 2 + 1e-3
    if zeros:
        p[::3, 1, 0] = 0.0
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(num_rows, depth)
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True), tokens


def slow_mtad(p: Tensor, q: Tensor, tokens: list[int], num_drafted: int, tau: float) -> int:
    """eta by products, prefix after prefix, without early exit."""
    eta, joint_p, joint_q = 0, 1.0, 1.0
    for i, token in enumerate(tokens[:num_drafted]):
        joint_p, joint_q = joint_p * float(p[i, token]), joint_q * float(q[i, token])
        if joint_p > 0 and min(1.0, joint_p / joint_q if joint_q > 0 else 1.0) > tau:
            eta = i + 1
    return eta


def slow_bild(p: Tensor, tokens: list[int], num_drafted: int, tau_2: float) -> int:
    """How many tokens come before the first one too surprising."""
    for i, token in enumerate(tokens[:num_drafted]):
        if p[i, token] == 0 or -math.log(float(p[i, token])) > tau_2:
            return i
    return num_drafted


def lengths(rule, p: Tensor, q: Tensor, tokens: Tensor, num_drafted: Tensor) -> list[int]:
    """The certain length of every row, the same from `distribution` and from a verdict; extra tokens come from p."""
    probs, residuals = rule.distribution(p, q, tokens, num_drafted)
    assert torch.equal(residuals, p)
    assert probs.sum(-1).tolist() == [1.0] * len(p)
    uniforms = torch.rand(len(p), 3 * tokens.shape[1] + 1, generator=torch.Generator().manual_seed(0))
    verdict = rule.verify(Proposal(tokens, q, num_drafted, num_drafted), p, uniforms)
    assert verdict.length.tolist() == probs.argmax(-1).tolist()
    assert bool(verdict.valid.all())
    return verdict.length.tolist()


@pytest.mark.parametrize("tau", TAUS)
def test_mtad_is_its_definition(tau):
    p, q, tokens = tables(300)
    drafted = torch.arange(300) % 6
    got = lengths(get("mtad", tau=tau), p, q, tokens, drafted)
    assert got == [slow_mtad(p[n], q[n], tokens[n].tolist(), n % 6, tau) for n in range(300)]
    assert len(set(got)) > 3 or tau == 1.0


@pytest.mark.parametrize("tau_2", SURPRISES)
def test_bild_is_its_definition(tau_2):
    p, q, tokens = tables(300)
    drafted = torch.arange(300) % 6
    got = lengths(get("bild", tau_2=tau_2), p, q, tokens, drafted)
    assert got == [slow_bild(p[n], tokens[n].tolist(), n % 6, tau_2) for n in range(300)]
    assert len(set(got)) > 2 or tau_2 == 0.0


def test_bild_without_any_tolerance_keeps_what_the_target_is_certain_of():
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]]], dtype=torch.float64)
    q = torch.full((1, 2, 2), 0.5, dtype=torch.float64)
    rule = get("bild", tau_2=0.0)
    assert lengths(rule, p, q, torch.tensor([[1, 0]]), torch.tensor([2])) == [1]
    assert lengths(rule, p, q, torch.tensor([[0, 0]]), torch.tensor([2])) == [0]


def test_limits_of_tau():
    """0 keeps all that p can emit, 1 nothing; just below 1, prefixes with p >= q still pass; a longer one may alone."""
    p, q, tokens = tables(300)
    whole = torch.full((300,), 5)
    chain = p[:, :-1].gather(2, tokens.unsqueeze(2)).squeeze(2)
    possible = (chain > 0).long().cumprod(1).sum(1).tolist()
    assert lengths(get("mtad", tau=0.0), p, q, tokens, whole) == possible
    assert min(possible) < 5
    assert lengths(get("mtad", tau=1.0), p, q, tokens, whole) == [0] * 300
    assert lengths(get("mtad", tau=1.0), p, p[:, :5], tokens.new_tensor([[1] * 5] * 300), whole) == [0] * 300
    assert lengths(get("mtad", tau=1 - 1e-9), p, p[:, :5], tokens.new_tensor([[1] * 5] * 300), whole) == [5] * 300
    p = torch.tensor([[0.1, 0.9], [0.9, 0.1], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5], [0.1, 0.9]], dtype=torch.float64)
    distribution, _ = get("mtad", tau=0.5).distribution(p, q, torch.tensor([0, 0]))  # .1/.5 = .2 fails, .09/.05 passes
    assert distribution.tolist() == [0, 0, 1]


def test_a_token_that_its_own_warped_distribution_has_cut_counts_as_infinitely_likelier_under_p():
    """Beams drawn from the joint distribution may hold such tokens: q = 0. Without p they still fail."""
    p = torch.tensor([[[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.5, 0.5]]])
    q, tokens, one = torch.tensor([[[1.0, 0.0]]] * 2), torch.ones(2, 1, dtype=torch.long), torch.ones(2).long()
    length, _ = get("mtad", tau=0.5).accept(p, q, tokens, one, torch.rand(2, 1))
    assert length.tolist() == [1, 0]


def test_tokens_per_round_obey_theorem_3_6():
    """length + 1 >= min(K + 1, |log tau| / U), U over whole distributions; the length alone breaks it, and the
    bound is tight.
    """
    p, q, tokens = tables(2000, vocab_size=3, zeros=False)
    largest = (p[:, :-1].log() - q.log()).abs().amax((1, 2)).tolist()
    whole, alone, tight = torch.full((2000,), 5), 0, 0
    for tau in (0.01, 0.1, 0.5, 0.9):
        got = lengths(get("mtad", tau=tau), p, q, tokens, whole)
        for length, most in zip(got, largest, strict=True):
            assert length + 1 >= min(6, abs(math.log(tau)) / most)
            alone += length < min(5, abs(math.log(tau)) / most)
            tight += length < abs(math.log(tau)) / most <= length + 1
    assert alone > 0 and tight > 0


@pytest.mark.parametrize(("name", "override"), [("mtad", "rule.tau=1"), ("bild", "rule.tau_2=0")])
def test_the_strictest_setting_is_sampling_from_the_target(name, override, table_pair):
    """Whole outputs by chi-square, through the loop; the ordinary setting is seen to be lossy."""
    strict = config.method(name, [override])
    assert output_pvalue(table_pair, strict, 3000) > 0.001
    (generation,) = decode(table_pair, [[0, 1]], strict, Sampling(max_new_tokens=20, seed=3))
    assert all(r.num_accepted == 0 for r in generation.rounds) and generation.counts.num_drafted > 0
    assert output_pvalue(table_pair, config.method(name), 3000) < 1e-6
    assert not config.method(name).rule.lossless


@pytest.mark.parametrize(("name", "override"), [("mtad", "rule.tau=0"), ("bild", "rule.tau_2=99")])
def test_the_laxest_setting_keeps_everything_the_target_can_emit(name, override, table_pair):
    for generation in decode(table_pair, [[0, 1]] * 20, config.method(name, [override]), Sampling(max_new_tokens=20)):
        assert all(r.num_accepted == r.num_drafted for r in generation.rounds)


@pytest.mark.parametrize("name", ["mtad", "bild"])
def test_greedy_text_is_the_targets_own_all_the_same(name, exact_pair, prompts):
    """One-hot distributions: a prefix is possible under p or it is not."""
    sampling = Sampling(temperature=0, max_new_tokens=12)
    plain = decode(exact_pair, prompts, config.method("autoregressive"), sampling)
    assert [g.token_ids for g in decode(exact_pair, prompts, config.method(name), sampling)] == [
        g.token_ids for g in plain
    ]
