"""Layer rules: the output beams are i.i.d. draws from p, by enumeration; the fast walk does what the distribution says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from toolkit import verification
from toolkit.errors import InputError
from toolkit.sampling import draw
from toolkit.verification import LayerRule, Outcome, PathRule, SelectionRule, TreeRule
from toolkit.verification.enumeration import beam_distribution
from toolkit.verification.width import layer_width

RULES = [name for name in verification.names() if isinstance(verification.get(name), LayerRule)]
LOSSLESS = [name for name in RULES if verification.get(name).lossless]
SIZES = [(2, 1, 1), (3, 2, 1), (4, 2, 2), (4, 3, 1), (4, 3, 2), (6, 3, 2), (3, 3, 3)]  # M, W_S, width

SPECIAL = [
    ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]),  # q = p: everything is kept
    ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]),  # disjoint: nothing is, and p' stays p
    ([1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
    ([0.4, 0.3, 0.2, 0.1], [0.0, 0.0, 1.0, 0.0]),
    ([0.7, 0.3, 0.0, 0.0], [0.3, 0.1, 0.2, 0.4]),  # the last two pairs' parent was rejected, q kept
]


def distributions(num_pairs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random p and q [M] in float64; some zeros, every other p without mass on its last pairs (dead parents)."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.rand(2, num_pairs, generator=generator, dtype=torch.float64) ** 2 + 1e-3).unbind(0)
    if seed % 2:
        p[-(num_pairs // 2) :] = 0.0
    if seed % 3 == 1:
        q[0] = 0.0
    return p / p.sum(), q / q.sum()


def pairs(num_pairs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random pairs of distributions, and the special ones if the size is theirs."""
    yield from (distributions(num_pairs, seed) for seed in range(8))
    if num_pairs == 4:
        yield from (tuple(torch.tensor(distribution, dtype=torch.float64) for distribution in pair) for pair in SPECIAL)


def product(p: Tensor, width: int) -> Tensor:
    """The joint distribution of `width` i.i.d. draws from p."""
    joint = p.new_ones(())
    for _ in range(width):
        joint = joint.unsqueeze(-1) * p
    return joint


def distance(distribution: Tensor, p: Tensor) -> float:
    """Total variation of a joint distribution of beams from i.i.d. draws from p."""
    return float((distribution - product(p, distribution.dim())).abs().sum() / 2)


class Slow(LayerRule):
    """The walk in plain Python, one candidate after another, and with the faults of the published text and code."""

    def __init__(self, inverted: bool = False, subtractions: int = 1):
        self.inverted, self.subtractions = inverted, subtractions

    def prob(self, left: list[float], q: list[float], token: int) -> float:
        over, under = (q, left) if self.inverted else (left, q)
        return min(1.0, over[token] / under[token]) if under[token] > 0 else 1.0

    def reduced(self, left: list[float], q: list[float]) -> list[float]:
        for _ in range(self.subtractions):
            rest = [max(a - b, 0.0) for a, b in zip(left, q, strict=True)]
            left = [a / sum(rest) for a in rest] if sum(rest) > 0 else left
        return left

    def outcomes(self, p: list, q: list, tokens: list[int], width: int) -> list[tuple[list[bool], float, list[float]]]:
        results = []

        def go(k: int, kept: list[bool], prob: float, left: list[float]) -> None:
            if k == len(tokens) or sum(kept) == width:
                results.append((kept + [False] * (len(tokens) - k), prob, left))
                return
            accept = self.prob(left, q, tokens[k])
            if accept > 0:
                go(k + 1, [*kept, True], prob * accept, p)
            if accept < 1:
                go(k + 1, [*kept, False], prob * (1 - accept), self.reduced(left, q))

        go(0, [], 1.0, p)
        return results

    def distribution(self, target_probs, draft_probs, candidates, width, real=None):
        """Row by row; each outcome of each row is one entry with weight in that row only."""
        result = []
        for row, tokens in enumerate(candidates.tolist()):
            p, q = target_probs[row].tolist(), draft_probs[row].tolist()
            for kept, prob, left in self.outcomes(p, q, tokens, width):
                probs = target_probs.new_zeros(len(candidates))
                probs[row] = prob
                residuals = target_probs.new_tensor(left).expand_as(target_probs)
                result.append(Outcome(torch.tensor(kept, dtype=torch.bool), probs, residuals))
        return result

    def _distribution(self, *args):
        raise NotImplementedError

    def walk(self, target_probs, draft_probs, candidates, real, width, uniforms):
        kept, residuals = torch.zeros_like(real), target_probs.clone()
        for row in range(len(candidates)):
            p, q = target_probs[row].tolist(), draft_probs[row].tolist()
            left, count = p, 0
            for k, token in enumerate(candidates[row].tolist()):
                if not real[row, k] or count == width[row]:
                    continue
                if float(uniforms[row, k]) < self.prob(left, q, token):
                    left, count, kept[row, k] = p, count + 1, True
                else:
                    left = self.reduced(left, q)
            residuals[row] = torch.tensor(left, dtype=residuals.dtype)
        return kept, residuals


def test_every_rule_is_in_one_battery():
    kinds = (PathRule, SelectionRule, TreeRule, LayerRule)
    assert all(sum(isinstance(verification.get(name), kind) for kind in kinds) == 1 for name in verification.names())
    assert "beam_layer" in LOSSLESS


def test_the_published_rule_is_not_exact_for_its_own_draws():
    """The rule for i.i.d. draws on draws without replacement: the first output beam does not follow p."""
    rule, worst = verification.get("beam_layer_published"), 0.0
    assert not rule.lossless and rule.schemes == ("without_replacement",)
    for p, q in pairs(4):
        if int((q > 0).sum()) < 2:
            continue
        first = torch.zeros_like(p)
        for a in range(4):
            for b in range(4):
                if a == b or q[a] == 0 or q[b] == 0:
                    continue
                prob = q[a] * q[b] / (1 - q[a])
                for outcome in rule.distribution(p, q, torch.tensor([a, b]), 1):
                    beam = outcome.residual.clone()
                    if bool(outcome.kept.any()):
                        beam = torch.zeros_like(p)
                        beam[(a, b)[int(outcome.kept.long().argmax())]] = 1.0
                    first += prob * outcome.probability * beam
        assert float(first.sum()) == pytest.approx(1)
        worst = max(worst, float((first - p).abs().sum() / 2))
    assert 0.01 < worst < 1


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize(("num_pairs", "num_candidates", "width"), SIZES)
def test_output_beams_are_iid_draws_from_the_target(name, num_pairs, num_candidates, width):
    """As an ordered list: each next beam is drawn from p whatever the ones before it are. The multiset's
    distribution follows.
    """
    for p, q in pairs(num_pairs):
        distribution = beam_distribution(verification.get(name), p, q, num_candidates, width)
        assert distance(distribution, p) < 1e-12


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
def test_also_with_the_dynamic_width(name, threshold):
    widths = set()
    for p, q in pairs(4):
        width = int(layer_width(p.unsqueeze(0), q.unsqueeze(0), 3, threshold))
        widths.add(width)
        assert distance(beam_distribution(verification.get(name), p, q, 3, width), p) < 1e-12
    assert len(widths) > 1 or threshold == 0.0


@pytest.mark.parametrize("name", LOSSLESS)
def test_also_with_q_restricted_to_living_parents(name):
    """Dead candidates are not real, q is renormalised without them: the number of real ones is random, p is still met."""
    rule, num_candidates, width = verification.get(name), 3, 2
    for seed in (1, 3, 5, 7):
        p, q = distributions(6, seed)
        alive = torch.arange(6) < 3
        restricted = torch.where(alive, q, 0.0) / q[alive].sum()
        tokens = torch.cartesian_prod(*[torch.arange(6)] * num_candidates)
        tokens = tokens[q[tokens].prod(1) > 0]
        joint = torch.zeros(6, 6, dtype=torch.float64)
        for candidates, prob in zip(tokens, q[tokens].prod(1), strict=True):
            for kept, probability, residual in rule.distribution(p, restricted, candidates, width, alive[candidates]):
                beams = [torch.eye(6, dtype=p.dtype)[token] for token in candidates[kept]] + [residual, p, p]
                joint += prob * probability * torch.outer(beams[0], beams[1])
        assert distance(joint, p) < 1e-12


@pytest.mark.parametrize(
    ("fault", "scheme"),
    [({"inverted": True}, "iid"), ({"subtractions": 2}, "iid"), ({}, "without_replacement")],
    ids=["ratio upside down", "q subtracted twice", "drawn without replacement"],
)
def test_published_faults_are_seen(fault, scheme):
    """Negative controls: each is far off on ordinary distributions; the same code without the fault is exact."""
    far = [distance(beam_distribution(Slow(**fault), p, q, 3, 2, scheme), p) for p, q in pairs(4)]
    assert max(far) > 0.05
    assert sum(d > 1e-3 for d in far) >= 5  # of 13
    assert max(distance(beam_distribution(Slow(), p, q, 3, 2), p) for p, q in pairs(4)) < 1e-12


@pytest.mark.parametrize(("num_pairs", "num_candidates", "width"), SIZES)
def test_the_distribution_is_the_slow_walks(num_pairs, num_candidates, width):
    rule, generator = verification.get("beam_layer"), torch.Generator().manual_seed(2)
    for p, q in pairs(num_pairs):
        for _ in range(5):
            tokens = draw(q.expand(num_candidates, -1), torch.rand(num_candidates, generator=generator))
            got = {tuple(kept.tolist()): rest for kept, *rest in rule.distribution(p, q, tokens, width)}
            expected = Slow().outcomes(p.tolist(), q.tolist(), tokens.tolist(), width)
            assert sum(float(probability) for probability, _ in got.values()) == pytest.approx(1, abs=1e-12)
            assert set(got) == {tuple(kept) for kept, _, _ in expected}
            for kept, probability, left in expected:
                assert float(got[tuple(kept)][0]) == pytest.approx(probability, abs=1e-14)
                assert got[tuple(kept)][1].tolist() == pytest.approx(left, abs=1e-12)


def ragged(num_rows: int = 400, num_pairs: int = 5, num_candidates: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """A batch for `walk`: distributions, candidates, how many are real and widths differ by row."""
    generator = torch.Generator().manual_seed(seed)
    both = [distributions(num_pairs, seed) for seed in range(num_rows)]
    draft_probs = torch.stack([q for _, q in both])
    uniforms = torch.rand(2, num_rows, num_candidates, generator=generator, dtype=torch.float64)
    return {
        "target_probs": torch.stack([p for p, _ in both]),
        "draft_probs": draft_probs,
        "candidates": draw(draft_probs.unsqueeze(1).expand(-1, num_candidates, -1), uniforms[0]),
        "real": torch.rand(num_rows, num_candidates, generator=generator) < 0.8,
        "width": torch.randint(0, num_candidates + 1, (num_rows,), generator=generator),
        "uniforms": uniforms[1],
    }


@pytest.mark.parametrize("name", RULES)
def test_the_fast_walk_is_the_slow_one_on_the_same_uniforms(name):
    batch = ragged()
    kept, residuals = verification.get(name).walk(**batch)
    slow_kept, slow_residuals = Slow().walk(**batch)
    assert torch.equal(kept, slow_kept)
    assert torch.allclose(residuals, slow_residuals, atol=1e-12, rtol=0)
    assert not bool((kept & ~batch["real"]).any())
    assert bool((kept.sum(1) <= batch["width"]).all())
    assert len(set(kept.sum(1).tolist())) == 5  # every count from 0 to 4 occurs
    assert torch.equal(residuals[batch["width"] == 0], batch["target_probs"][batch["width"] == 0])


@pytest.mark.parametrize("name", RULES)
def test_rows_of_a_walk_do_not_depend_on_their_neighbours(name):
    rule, batch = verification.get(name), ragged(40)
    kept, residuals = rule.walk(**batch)
    for row in range(40):
        one_kept, one_residual = rule.walk(**{key: value[row : row + 1] for key, value in batch.items()})
        assert torch.equal(one_kept[0], kept[row])
        assert torch.equal(one_residual[0], residuals[row])
    none = {key: value[:, :0] if key in ("candidates", "real", "uniforms") else value for key, value in batch.items()}
    assert torch.equal(rule.walk(**none)[1], batch["target_probs"])


@pytest.mark.parametrize("name", RULES)
def test_the_walk_is_drawn_from_the_distribution(name):
    """Frequencies of all outcomes of one layer, at five standard errors; residuals exactly."""
    rule, runs = verification.get(name), 100_000
    p = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1], dtype=torch.float64)
    q = torch.tensor([0.1, 0.4, 0.1, 0.3, 0.1], dtype=torch.float64)
    tokens, uniforms = torch.tensor([1, 3, 0]), torch.rand(runs, 3, generator=torch.Generator().manual_seed(1))
    whole = torch.ones(runs, 3, dtype=torch.bool)
    kept, residuals = rule.walk(
        p.expand(runs, -1), q.expand(runs, -1), tokens.expand(runs, -1), whole, torch.full((runs,), 2), uniforms
    )
    outcomes = rule.distribution(p, q, tokens, 2)
    assert len(outcomes) == 3
    seen = 0
    for mask, probability, residual in outcomes:
        rows, prob = (kept == mask).all(1), float(probability)
        seen += int(rows.sum())
        assert abs(int(rows.sum()) / runs - prob) <= 5 * (prob * (1 - prob) / runs) ** 0.5
        assert torch.allclose(residuals[rows], residual, atol=1e-12, rtol=0)
    assert seen == runs


@pytest.mark.parametrize("name", RULES)
def test_leading_dimensions_and_float32(name):
    rule, batch = verification.get(name), ragged(6, num_candidates=3)
    width = batch["width"].clamp(min=1)
    arguments = [batch["target_probs"], batch["draft_probs"], batch["candidates"], width, batch["real"]]
    outcomes = rule.distribution(*(value.unsqueeze(0) for value in arguments))
    assert torch.allclose(sum(o.probability for o in outcomes), torch.ones(1, 6, dtype=torch.float64))
    for row in range(6):
        alone = rule.distribution(*(value[row] for value in arguments))
        expected = {tuple(o.kept.tolist()): float(o.probability) for o in alone}
        got = {tuple(o.kept.tolist()): float(o.probability[0, row]) for o in outcomes if o.probability[0, row] > 0}
        assert got == pytest.approx(expected)
    single = rule.distribution(arguments[0].float(), arguments[1].float(), *arguments[2:])
    assert {o.probability.dtype for o in single} == {o.residual.dtype for o in single} == {torch.float32}


@pytest.mark.parametrize("name", RULES)
def test_bad_input(name):
    rule = verification.get(name)
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.5, 0.5])
    for width in (0, 3):
        with pytest.raises(InputError, match=f"width: expected 1 to 2, the number of draft beams, got {width}"):
            rule.distribution(p, q, torch.tensor([1, 2]), width)
    with pytest.raises(InputError, match="tokens that their draft distribution can produce"):
        rule.distribution(p, q, torch.tensor([1, 0]), 1)
    rule.distribution(p, q, torch.tensor([1, 0]), 1, torch.tensor([True, False]))
    with pytest.raises(InputError, match="^target_probs: expected distributions that sum to 1 within 1e-4"):
        rule.distribution(p * 1.1, q, torch.tensor([1]), 1)
    with pytest.raises(InputError, match=r"^draft_probs: expected shape \[3\], got \[2\]"):
        rule.distribution(p, q[1:], torch.tensor([1]), 1)
