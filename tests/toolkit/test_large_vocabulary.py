"""Warping, drawing and verifying at V = 262,144: right, and in few passes over the vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.sampling import Sampling, draw, warp
from toolkit.types import Proposal
from toolkit.verification import get

VOCAB, DRAFTED, ROWS = 262_144, 3, 2
aten = torch.ops.aten


class Counted(TorchDispatchMode):
    """Counts what operations write, views apart, in elements; and the longest row that is sorted."""

    def __init__(self):
        super().__init__()
        self.written = self.largest = self.sorted = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if not func.is_view:
            sizes = [result.numel() for result in tree_leaves(results) if isinstance(result, torch.Tensor)]
            self.written += sum(sizes)
            self.largest = max([self.largest, *sizes])
        if func in (aten.sort.default, aten.sort.stable):
            self.sorted = max(self.sorted, args[0].shape[-1])
        return results


def a_round(rule, sampling, target_logits, draft_logits, uniforms):
    """A chain drafted and judged: warped distributions p, q, the proposal and the verdict."""
    tokens, probs = [], []
    for step in range(DRAFTED):
        probs.append(warp(draft_logits[:, step], sampling))
        tokens.append(draw(probs[-1], uniforms[:, step]))
    full = torch.full((ROWS,), DRAFTED)
    proposal = Proposal(torch.stack(tokens, 1), torch.stack(probs, 1), full, full)
    target_probs = warp(target_logits, sampling)
    return proposal, target_probs, get(rule).verify(proposal, target_probs, uniforms)


# Passes: outputs of all operations, in rows of V that are warped (drafted and target's). A softmax is one.
@pytest.mark.parametrize(
    ("rule", "settings", "most_passes"),
    [
        ("rejection", {"temperature": 0.0}, 6),
        ("block", {}, 5),
        ("rejection", {"top_k": 50}, 7),
        ("block", {"top_p": 0.9}, 12),
        ("rejection", {"top_k": 50, "top_p": 0.9}, 13),
    ],
)
def test_a_round_at_a_large_vocabulary_takes_few_passes(rule, settings, most_passes):
    generator = torch.Generator().manual_seed(0)
    ranks = torch.rand(VOCAB, generator=generator).argsort() + 1
    target = (
        torch.randn(ROWS, DRAFTED + 1, VOCAB, generator=generator) - 1.5 * ranks.log()
    )  # as language is distributed
    draft = target[:, :-1] + 0.3 * torch.randn(ROWS, DRAFTED, VOCAB, generator=generator)
    uniforms = torch.rand(ROWS, 3 * DRAFTED + 1, generator=generator, dtype=torch.float64)
    with Counted() as counted:
        proposal, p, verdict = a_round(rule, Sampling(**settings), target, draft, uniforms)
    warped = ROWS * (2 * DRAFTED + 1) * VOCAB
    assert counted.written <= most_passes * warped
    assert counted.largest <= ROWS * (DRAFTED + 1) * VOCAB, "nothing is larger than the target's distributions"
    assert counted.sorted <= VOCAB // 8, "no row is sorted as a whole"
    assert verdict.valid.all()
    _check(rule, proposal, p, verdict, uniforms)


def _check(rule, proposal, p, verdict, uniforms):
    """The extra token is the one that the rule's own distribution gives for this uniform in float64, up to rounding."""
    q, p = proposal.draft_probs.double(), p.double()
    ones = torch.ones(ROWS, DRAFTED + 1, dtype=torch.float64)
    assert torch.allclose(p.sum(-1), ones, atol=1e-3), "float32 sums V terms, off by 1e-4 where registers are short"
    lengths, extras = get(rule)._distribution(p, q, proposal.tokens, proposal.num_drafted)
    for row, length in enumerate(verdict.length.tolist()):
        assert lengths[row, length] > 0
        token, residual = int(verdict.extra[row]), extras[row, length] / extras[row, length].sum()
        point, before = uniforms[row, 2 * DRAFTED + length], residual[:token].sum()
        assert residual[token] > 0
        assert before - 1e-4 <= point <= before + residual[token] + 1e-4
