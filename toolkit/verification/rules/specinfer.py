"""Recursive rejection with replacement: candidates are tried one after another, each against what p has left.

Papers: Miao et al., SpecInfer (arXiv:2305.09781), multi-step speculative sampling, for different drafts as well; Yang
et al. (arXiv:2401.06706), Algorithm 1, with replacement.
theirs -> ours: P(x | u, LLM) -> target_probs, P(x | u, SSM_s) -> draft_probs[..., s, :].
Deviation: candidates are tried in the order given instead of a random one; exact in any order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from toolkit.verification.base import SelectionRule, first_ones, normalized


class SpecInfer(SelectionRule):
    """Accept x_k with min(1, p_k(x_k)/q_k(x_k)), else p_{k+1} = norm((p_k - q_k)+); the extra token from the last p.

    A repeated candidate of one q is never accepted the second time: its probability is all at the first.
    """

    name = "specinfer"
    lossless = True
    schemes = ("iid", "independent", "top_k")

    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = torch.ones_like(target_probs[..., :1])
        distributions = ((distribution, total) for distribution in draft_probs.unbind(-2))
        return reject_in_turn(target_probs, distributions, candidates, num_candidates)

    def accepted(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        """1 - prod_k sum (p_k - q_k)+ [...]."""
        left, mass = target_probs, torch.ones_like(target_probs[..., :1])
        for distribution in draft_probs.unbind(-2):
            left = (left - mass * distribution).clamp(min=0)
            mass = left.sum(-1, keepdim=True)
        return 1 - mass.squeeze(-1)


def reject_in_turn(
    target_probs: Tensor, distributions: Iterable[tuple[Tensor, Tensor]], candidates: Tensor, num_candidates: Tensor
) -> tuple[Tensor, Tensor]:
    """The recursion. `distributions`: per candidate the weights [..., V] it was drawn by, and their sum [..., 1].

    Otherwise as `SelectionRule.distribution`. What is left of p is scaled to sum 1 only at the end; until then its sum
    is `mass`.
    """
    tiny = torch.finfo(target_probs.dtype).tiny
    real = first_ones(candidates, num_candidates).to(target_probs.dtype)
    left, mass, ratios = target_probs, torch.ones_like(target_probs[..., :1]), []
    for (distribution, total), token, counts in zip(
        distributions, candidates.unsqueeze(-1).unbind(-2), real.unsqueeze(-1).unbind(-2), strict=True
    ):
        scale = mass / total.clamp(min=tiny)
        ratios.append(left.gather(-1, token) / (scale * distribution.gather(-1, token)).clamp(min=tiny))
        left = torch.addcmul(left, distribution, scale * counts, value=-1).clamp_(min=0)
        mass = left.sum(-1, keepdim=True)
    passed = torch.cat(ratios, -1).clamp(max=1.0) * real
    reached = torch.cat([torch.ones_like(mass), (1 - passed).cumprod(-1)[..., :-1]], -1)
    return reached * passed, normalized(left, target_probs)
