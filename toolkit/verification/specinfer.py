"""Recursive rejection with replacement: candidates are tried one after another, each against what p has left.

Papers: Miao et al., SpecInfer (arXiv:2305.09781), multi-step speculative sampling, for different drafts as well; Yang
et al. (arXiv:2401.06706), Algorithm 1, with replacement.
theirs -> ours: P(x | u, LLM) -> target_probs, P(x | u, SSM_s) -> draft_probs[..., s, :].
Deviation: candidates are tried in the order given instead of a random one; exact in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.verification.base import SelectionRule, acceptance, first_ones, residual


class SpecInfer(SelectionRule):
    """Accept x_k with min(1, p_k(x_k)/q_k(x_k)), else p_{k+1} = norm((p_k - q_k)+); the extra token from the last p.

    A repeated candidate of one q is never accepted the second time: its chance is all at the first.
    """

    lossless = True
    drawing = ("iid", "independent")

    def _law(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        return reject_in_turn(target_probs, draft_probs, candidates, num_candidates)


def reject_in_turn(
    target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
) -> tuple[Tensor, Tensor]:
    """The recursion, with draft_probs[..., k, :] the law x_k was drawn from given the earlier ones.

    Shapes as in `SelectionRule.law`.
    """
    left, reached, accept = target_probs, torch.ones_like(target_probs[..., 0]), []
    for k, real in enumerate(first_ones(candidates, num_candidates).unbind(-1)):
        law = draft_probs[..., k, :]
        passed = acceptance(left, law, candidates[..., k]) * real
        accept.append(reached * passed)
        reached = reached * (1 - passed)
        left = residual(left, law * real.unsqueeze(-1))
    return torch.stack(accept, -1), left
