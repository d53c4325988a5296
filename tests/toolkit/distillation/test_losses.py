"""Every loss against its formula, written out in Python, in float64; every gradient against finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from toolkit.config import choices, compose, instantiate
from toolkit.distillation import (
    AcceptanceLikelihood,
    CrossEntropy,
    DistillBatch,
    ForwardKL,
    JensenShannon,
    Mixture,
    ReverseKL,
    Term,
    TotalVariation,
)
from toolkit.distillation.losses import LOWEST
from toolkit.distillation.teachers import Expected, distill_batch
from toolkit.errors import InputError

N, V = 5, 7


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def jsd(p, q, beta):
    mixed = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)


def tvd(p, q):
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


SLOW = {  # p, q, the text's token -> the loss of one position
    "forward_kl": (ForwardKL(), lambda p, q, token: kl(p, q)),
    "reverse_kl": (ReverseKL(), lambda p, q, token: kl(q, p)),
    "jsd": (JensenShannon(0.5), lambda p, q, token: jsd(p, q, 0.5)),
    "jsd_.1": (JensenShannon(0.1), lambda p, q, token: jsd(p, q, 0.1)),
    "tvd": (TotalVariation(), lambda p, q, token: tvd(p, q)),
    "lk": (AcceptanceLikelihood(), lambda p, q, token: -math.log(sum(map(min, p, q)))),
    "cross_entropy": (CrossEntropy(), lambda p, q, token: -math.log(q[token])),
    "mixture": (
        Mixture({"a": Term(ForwardKL(), 2.0, 0.0), "b": Term(TotalVariation(), 0.5)}),
        lambda p, q, token: 2.0 * 0.75 * kl(p, q) + 0.5 * tvd(p, q),  # a quarter of the training is done
    ),
}


LOWER = ("forward_kl", "reverse_kl", "jsd", "jsd_.1")  # bounds of the losses where only some tokens of p are known
UPPER = ("tvd", "lk")


def kept(log_probs, k):
    """The k most probable tokens, and the mass of all others."""
    top = log_probs.topk(k)
    return Expected(*top, log_probs.scatter(-1, top.indices, -torch.inf).logsumexp(-1))


def bound(name, p, q, token, known):
    """A loss of one position where p is known of the tokens `known`: one category for the rest, or none in common."""
    p_known, q_known = [p[x] for x in known], [q[x] for x in known]
    p_rest, q_rest = (sum(mass for x, mass in enumerate(side) if x not in known) for side in (p, q))
    if name in UPPER:
        return SLOW[name][1]([*p_known, p_rest, 0.0], [*q_known, 0.0, q_rest], token)
    if name == "mixture":
        return 2.0 * 0.75 * bound("forward_kl", p, q, token, known) + 0.5 * bound("tvd", p, q, token, known)
    return SLOW[name][1]([*p_known, p_rest], [*q_known, q_rest], token) if name in LOWER else SLOW[name][1](p, q, token)


@pytest.fixture
def positions():
    generator = torch.Generator().manual_seed(3)
    target, draft = (2 * torch.randn(N, V, generator=generator, dtype=torch.float64) for _ in range(2))
    return target.log_softmax(-1), draft, torch.randint(V, (N,), generator=generator)


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_losses_are_their_formulas(name, temperature, positions):
    target, logits, tokens = positions
    loss, slow = SLOW[name]
    losses = loss(distill_batch(Expected(target), logits, tokens, temperature), 0.25)
    p, q = target.exp().tolist(), (logits / temperature).softmax(-1).tolist()
    expected = [slow(*row) for row in zip(p, q, tokens.tolist(), strict=True)]
    assert torch.allclose(losses, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("k", [None, 3])
def test_gradients_are_finite_differences(name, k, positions):
    target, logits, tokens = positions
    expected = Expected(target) if k is None else kept(target, k)

    def total(values):
        return SLOW[name][0](distill_batch(expected, values, tokens, 0.8), 0.25).sum()

    (gradient,) = torch.autograd.grad(total(logits.requires_grad_()), logits)
    step = 1e-6
    for row in range(N):
        for column in range(V):
            moved = torch.zeros_like(logits)
            moved[row, column] = step
            with torch.no_grad():
                slope = (total(logits + moved) - total(logits - moved)) / (2 * step)
            assert float(slope) == pytest.approx(float(gradient[row, column]), abs=1e-7)


@pytest.mark.parametrize("name", SLOW)
def test_categories_of_probability_zero_are_no_trouble(name, positions):
    """A target that is certain: finite losses and gradients, and the formula's value where it is finite."""
    _, logits, tokens = positions
    target = torch.zeros(N, V, dtype=torch.float64).scatter(1, tokens.unsqueeze(1), 1.0).log()
    logits.requires_grad_()
    losses = SLOW[name][0](distill_batch(Expected(target), logits, tokens, 1.0), 0.25)
    losses.sum().backward()
    assert losses.isfinite().all() and logits.grad.isfinite().all()
    if name != "reverse_kl":  # which is infinite there, and here at most -LOWEST
        p, q = target.exp().tolist(), logits.softmax(-1).tolist()
        slow = [SLOW[name][1](*row) for row in zip(p, q, tokens.tolist(), strict=True)]
        assert torch.allclose(losses, torch.tensor(slow, dtype=torch.float64), rtol=1e-9)
    assert losses.max() <= -LOWEST


def test_equal_distributions_cost_nothing(positions):
    target, _, tokens = positions
    seen = distill_batch(Expected(target), target, tokens, 1.0)
    for loss in (ForwardKL(), ReverseKL(), JensenShannon(0.3), TotalVariation(), AcceptanceLikelihood()):
        assert loss(seen).abs().max() < 1e-12
    assert torch.allclose(seen.alpha, torch.ones(N, dtype=torch.float64))


def test_alpha_is_that_of_the_whole_vocabulary(positions):
    target, logits, tokens = positions
    q = logits.softmax(-1).tolist()
    slow = [sum(map(min, *row)) for row in zip(target.exp().tolist(), q, strict=True)]
    assert distill_batch(Expected(target), logits, tokens, 1.0).alpha.tolist() == pytest.approx(slow)
    with pytest.raises(AssertionError):
        distill_batch(kept(target, 3), logits, tokens, 1.0).alpha  # noqa: B018


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("k", range(1, V + 1))
def test_losses_of_some_tokens_are_the_stated_bounds(name, k, positions):
    target, logits, tokens = positions
    loss = SLOW[name][0]
    whole, part = (loss(distill_batch(one, logits, tokens, 1.0), 0.25) for one in (Expected(target), kept(target, k)))
    p, q, top_tokens = target.exp().tolist(), logits.softmax(-1).tolist(), target.topk(k).indices.tolist()
    rows = zip(p, q, tokens.tolist(), top_tokens, strict=True)
    slow = torch.tensor([bound(name, *row) for row in rows], dtype=torch.float64)
    assert torch.allclose(part, slow, rtol=1e-12, atol=1e-12)
    if name in LOWER:
        assert (part <= whole + 1e-12).all()
    if name in UPPER:
        assert (part >= whole - 1e-12).all()
    if k == V or name == "cross_entropy":
        assert torch.allclose(part, whole)


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("k", [1, 8, 64])
def test_peaked_targets_in_float32(name, k):
    """Targets whose other tokens have less mass than float32 resolves beside 1, and a draft that likes those others."""
    generator = torch.Generator().manual_seed(5)
    scales = torch.logspace(0, 1.8, 200, dtype=torch.float64).unsqueeze(1)
    target = (scales * torch.randn(200, 128, generator=generator, dtype=torch.float64)).log_softmax(-1)
    logits = (target / 8 + torch.randn(200, 128, generator=generator, dtype=torch.float64)).float()
    tokens = torch.randint(128, (200,), generator=generator)
    assert (1 - target.topk(k).values.exp().sum(-1) < 1e-7).sum() > 10  # 0 in float32, its log is not
    part = SLOW[name][0](distill_batch(kept(target.float(), k), logits, tokens, 1.0), 0.25)
    whole = SLOW[name][0](distill_batch(Expected(target.float()), logits, tokens, 1.0), 0.25)
    q = logits.double().softmax(-1).tolist()
    p, top_tokens = target.exp().tolist(), target.topk(k).indices.tolist()
    rows = zip(p, q, tokens.tolist(), top_tokens, strict=True)
    slow = torch.tensor([bound(name, *row) for row in rows])
    assert torch.allclose(part, slow, rtol=1e-4, atol=1e-5)
    if name in LOWER:
        assert (part <= whole + 1e-5).all()
    if name in UPPER:
        assert (part >= whole - 1e-5).all()


def of_rows(name, p, q, token):
    """A loss of one position where q is 0 at some categories: forward KL renormalises p over the others."""
    if name == "forward_kl":
        inside = sum(a for a, b in zip(p, q, strict=True) if b > 0)
        pairs = [(a / inside, b) for a, b in zip(p, q, strict=True) if b > 0]
        return kl(*zip(*pairs, strict=True))
    if name == "mixture":
        return 2.0 * 0.75 * of_rows("forward_kl", p, q, token) + 0.5 * tvd(p, q)
    return 0.0 if name == "cross_entropy" and q[token] == 0 else SLOW[name][1](p, q, token)


def smallest(p, q):
    """Forward KL over the rows where only the sum of the last p, and of p without a row, is known: by ternary search."""
    low, high = 0.0, p[-1]
    for _ in range(200):
        third = (high - low) / 3
        left, right = (of_rows("forward_kl", [*p[:-1], mass], q, 0) for mass in (low + third, high - third))
        low, high = (low + third, high) if left > right else (low, high - third)
    return of_rows("forward_kl", [*p[:-1], high], q, 0)


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("k", [None, *range(1, V + 1)])
def test_losses_of_a_reduced_vocabulary(name, k, positions):
    """Rows for four of seven tokens, with all of p and with its k most probable tokens; gradients are finite differences."""
    target, logits, tokens = positions
    rows = torch.tensor([0, 2, 3, 6])
    logits = logits[:, rows].clone().requires_grad_()
    expected = Expected(target) if k is None else kept(target, k)

    def losses(values):
        return SLOW[name][0](distill_batch(expected, values, tokens, 0.8, rows), 0.25)

    q = torch.zeros(N, V, dtype=torch.float64).index_copy(1, rows, (logits.detach() / 0.8).softmax(-1))
    slow = []
    for row in range(N):
        p_row, q_row, token = target[row].exp().tolist(), q[row].tolist(), int(tokens[row])
        if k is not None and name != "cross_entropy":
            known = target[row].topk(k).indices.tolist()
            p_rest, q_rest = (sum(m for x, m in enumerate(side) if x not in known) for side in (p_row, q_row))
            p_known, q_known = [p_row[x] for x in known], [q_row[x] for x in known]
            shared = smallest([*p_known, p_rest], [*q_known, q_rest]) if name in ("mixture", "forward_kl") else None
            if name == "forward_kl":
                slow.append(shared)
                continue
            if name == "mixture":
                slow.append(1.5 * shared + 0.5 * tvd([*p_known, p_rest, 0.0], [*q_known, 0.0, q_rest]))
                continue
            p_row, q_row = [*p_known, p_rest], [*q_known, q_rest]
            if name in UPPER:
                p_row, q_row = [*p_known, p_rest, 0.0], [*q_known, 0.0, q_rest]
                if name == "lk" and not sum(map(min, p_row, q_row)):
                    slow.append(-LOWEST)
                    continue
        slow.append(of_rows(name, p_row, q_row, token))
    values = losses(logits)
    assert values.tolist() == pytest.approx(slow, rel=1e-3 if -LOWEST in slow else 1e-9, abs=1e-9)
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    assert gradient.isfinite().all()
    step = torch.zeros_like(logits)
    step[1, 2] = 1e-6
    with torch.no_grad():
        slope = (losses(logits + step) - losses(logits - step)).sum() / 2e-6
    assert float(slope) == pytest.approx(float(gradient[1, 2]), abs=1e-6)


@pytest.mark.parametrize("name", [*LOWER, *UPPER])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_hold_for_any_rows_and_tokens(name, dtype):
    """Random p, q, rows and k; where q is p over the rows, forward KL and its gradient are 0, whatever is known of p."""
    generator, loss, margin = torch.Generator().manual_seed(7), SLOW[name][0], 1e-12 if dtype == torch.float64 else 1e-5
    for trial in range(60):
        size = int(torch.randint(3, 9, (), generator=generator))
        rows = torch.randperm(size, generator=generator)[: 1 + trial % size].sort().values
        scale = 0.3 + trial % 11
        target = (scale * torch.randn(20, size, generator=generator, dtype=torch.float64)).log_softmax(-1).to(dtype)
        logits = target[:, rows] + trial % 3 * torch.randn(20, len(rows), generator=generator).to(dtype)
        tokens, least = torch.zeros(20, dtype=torch.long), logits.detach().clone().requires_grad_()
        whole = loss(distill_batch(Expected(target), logits, tokens, 1.0, rows))
        for k in range(1, size + 1):
            part = loss(distill_batch(kept(target, k), least, tokens, 1.0, rows))
            excess = part - whole if name in LOWER else whole - part
            assert (excess <= margin * whole.clamp(min=1)).all()
            if name == "forward_kl" and trial % 3 == 0:
                (gradient,) = torch.autograd.grad(part.sum(), least)
                assert part.abs().max() < margin and gradient.abs().max() < margin


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("rows", [[6, 0, 3, 2], [6, 5, 4, 3, 2, 1, 0]])
def test_rows_may_be_in_any_order(name, k, rows, positions):
    target, logits, tokens = positions
    expected = Expected(target) if k is None else kept(target, k)
    ascending, shuffled = (
        SLOW[name][0](distill_batch(expected, logits[:, order], tokens, 0.8, torch.tensor(order)), 0.25)
        for order in (sorted(rows), rows)
    )
    assert torch.allclose(ascending, shuffled, rtol=1e-12)


def test_alpha_of_a_reduced_vocabulary_counts_all_of_p(positions):
    target, logits, tokens = positions
    rows = torch.tensor([1, 4])
    seen = distill_batch(Expected(target), logits[:, rows], tokens, 1.0, rows)
    q = torch.zeros(N, V, dtype=torch.float64).index_copy(1, rows, logits[:, rows].softmax(-1))
    assert torch.allclose(seen.alpha, torch.minimum(target.exp(), q).sum(-1))
    assert seen.has_row.tolist() == [int(token) in (1, 4) for token in tokens]


def test_weights_go_in_a_straight_line():
    term = Term(ForwardKL(), 1.0, 0.0)
    assert [term.at(progress) for progress in (0.0, 0.25, 1.0)] == [1.0, 0.75, 0.0]
    assert Term(ForwardKL(), 0.3).at(0.9) == 0.3
    with pytest.raises(InputError, match="weight above 0"):
        Mixture({"a": Term(ForwardKL(), 1.0, 0.0)})
    with pytest.raises(InputError, match="beta"):
        JensenShannon(1.0)


@pytest.mark.parametrize("name", choices("loss"))
def test_every_loss_of_the_config_is_built_and_scores(name, positions):
    loss = instantiate(compose("distill", [f"loss={name}", "responses=x"]).loss)
    target, logits, tokens = positions
    seen: DistillBatch = distill_batch(Expected(target), logits, tokens, 1.0)
    for progress in (0.0, 0.5, 1.0):
        assert loss(seen, progress).shape == (N,) and loss(seen, progress).isfinite().all()
