"""The probability that a rule emits one of the candidates, and the best of any rule, at given p and q.

Where a rule sums its acceptance over all i.i.d. or independent candidates (`SelectionRule.accepted`: sum min(p, P_I)), that is
taken. Elsewhere, and for what the extra token adds to `drafted`, candidates are drawn a few times per position, and the rule
states the probability for these (`SelectionRule.distribution`). Without replacement a control variate reduces the noise: a(x_1)
= min(1, p(x_1)/q(x_1)) has the mean alpha = sum_x min(p, q), and (1 - alpha)^(K - 1) of its deviation is subtracted. This does
not change the mean, and with one candidate no noise is left. The draws of a position are also spread evenly
(`spread_uniforms`). The noise that remains is part of the intervals. Top-k candidates are not drawn: they are always the same,
so one evaluation is exact.

Shapes: N positions, R draws, K candidates, V vocabulary. The draft's side is q [N, V]. With independent candidates it is
[N, K, V], one distribution per candidate. With the top-k scheme it is the draft's logits [N, V]; the largest ones are the
candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.verification import SelectionRule
from toolkit.verification.base import acceptance
from toolkit.verification.optimal import independent_bounds, optimal_acceptances
from toolkit.verification.schemes import candidates, likeliest

TOLERANCE = 1e-4  # by which the optimum without replacement may be off: see `optima`


@dataclass(frozen=True)
class Chances:
    """accepted [N]: P(a candidate is emitted by acceptance); drafted [N]: P(the emitted token is a candidate).

    A decoder walks on in both cases, so `drafted` is what lengthens rounds and what the optimum bounds.
    """

    accepted: Tensor
    drafted: Tensor


def expected_acceptance(
    rule: SelectionRule, scheme: str, target_probs: Tensor, draft_probs: Tensor, uniforms: Tensor
) -> Chances:
    """Means over R draws of the candidates: target_probs [N, V], the draft's side as above, uniforms [R, N, K]. float64 out."""
    accepted, added = torch.zeros(2, len(target_probs), dtype=torch.float64, device=target_probs.device)
    num_drafts = uniforms.shape[-1]
    uniforms = uniforms[:1] if scheme == "top_k" else uniforms
    for row in uniforms:
        # Candidates [N, K] of each position, how many are real [N], and what each was drawn from [N, K, V].
        if scheme == "top_k":
            drawn, counts = likeliest(draft_probs, num_drafts)
            distributions = torch.nn.functional.one_hot(drawn, draft_probs.shape[-1])
        else:
            drawn, counts = candidates(scheme, draft_probs, row)
            alike = scheme != "independent"
            distributions = draft_probs.unsqueeze(-2).expand(-1, num_drafts, -1) if alike else draft_probs
        distributions = distributions.to(target_probs.dtype)
        accept, residual = rule.distribution(target_probs, distributions, drawn, counts)
        by_acceptance = accept.sum(-1).double()
        real = torch.arange(num_drafts, device=drawn.device) < counts.unsqueeze(-1)
        redrawn = residual - residual.scatter(-1, torch.where(real, drawn, drawn[..., :1]), 0.0)
        accepted += by_acceptance - _deviation(scheme, target_probs, draft_probs, drawn)
        added += (1 - by_acceptance) * redrawn.sum(-1)
    summed = rule.accepted(target_probs, distributions) if scheme in ("iid", "independent") else None
    accepted = accepted / len(uniforms) if summed is None else summed.double()
    return Chances(accepted, accepted + added / len(uniforms))


def spread_uniforms(shape: tuple[int, int, int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Uniforms [R, N, K] for R draws: per position and candidate one in each of R equal parts (a Latin hypercube)."""
    parts = torch.rand(shape, generator=generator, dtype=dtype).argsort(dim=0)
    within = torch.rand(shape, generator=generator, dtype=dtype)
    return ((parts + within) / shape[0]).clamp(max=1 - torch.finfo(dtype).eps)


def optima(target_probs: Tensor, draft_probs: Tensor, num_drafts: int, scheme: str) -> Tensor:
    """`optimal_acceptances` [N]; with three and more candidates without replacement within 1e-4; with independent ones of
    different distributions an upper bound.

    That case costs an integral over all tokens, so q's unlikeliest tokens are left out. Together they have at most
    TOLERANCE/K of what q leaves after its K likeliest. A candidate is one of them with a probability below TOLERANCE.
    """
    if scheme == "top_k":
        tokens, counts = likeliest(draft_probs, num_drafts)
        real = torch.arange(num_drafts, device=tokens.device) < counts.unsqueeze(-1)
        return (target_probs.gather(-1, tokens) * real).sum(-1, dtype=torch.float64)
    if scheme == "independent":
        return independent_bounds(target_probs, draft_probs)
    if scheme == "without_replacement" and num_drafts > 2:
        # Both distributions on the tokens of q that count, and one more token that q cannot draw, with the rest of p.
        q, order = draft_probs.double().sort(dim=-1, descending=True)
        behind = q.flip(-1).cumsum(-1).flip(-1)  # the mass of each token and all less likely ones
        left = behind[..., min(num_drafts, q.shape[-1] - 1)].unsqueeze(-1)
        size = max(int((behind > TOLERANCE / num_drafts * left).sum(-1).max()), min(num_drafts, q.shape[-1]))
        whole = target_probs.double()
        q, p = q[..., :size], whole.gather(-1, order[..., :size])
        rest = (whole.sum(-1, keepdim=True) - p.sum(-1, keepdim=True)).clamp(min=0)
        p, q = torch.cat([p, rest], -1), torch.cat([q, torch.zeros_like(rest)], -1)
        target_probs, draft_probs = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    return optimal_acceptances(target_probs, draft_probs, num_drafts, scheme)


def _deviation(scheme: str, target_probs: Tensor, draft_probs: Tensor, drawn: Tensor) -> Tensor:
    """How far candidates [N, K] are from their mean in what is known of it [N]: see above."""
    num_drafts = drawn.shape[-1]
    if scheme != "without_replacement" and (scheme != "greedy" or num_drafts > 1):
        return torch.zeros(len(drawn), dtype=torch.float64, device=drawn.device)
    refused = 1 - torch.minimum(target_probs, draft_probs).sum(-1, dtype=torch.float64)
    refusal = 1 - acceptance(target_probs, draft_probs, drawn[..., 0]).double()
    return (refused - refusal) * refused ** (num_drafts - 1)
