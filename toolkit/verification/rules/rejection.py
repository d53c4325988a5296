"""Token-level rejection: speculative sampling.

Papers: Leviathan et al. (arXiv:2211.17192), Algorithm 1; Chen et al. (arXiv:2302.01318). Also SpecDec++, section 2.
theirs -> ours: gamma -> K, M_q's distribution q -> draft_probs, M_p's distribution p -> target_probs, n -> length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.verification.base import PathRule, acceptance, residual


class Rejection(PathRule):
    """Accept y_i while U_i < p_i(y_i)/q_i(y_i); after the first rejection draw from norm((p - q)+), else from p."""

    name = "rejection"
    lossless = True

    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, num_drafted: Tensor
    ) -> tuple[Tensor, Tensor]:
        last = num_drafted.unsqueeze(-1)
        steps = torch.arange(tokens.shape[-1] + 1, device=tokens.device)
        accept = acceptance(target_probs[..., :-1, :], draft_probs, tokens)
        accept = torch.cat([accept, accept.new_zeros(*accept.shape[:-1], 1)], -1)  # nothing follows the last
        accept = torch.where(steps < last, accept, 0.0)
        reached = torch.cat([torch.ones_like(accept[..., :1]), accept.cumprod(-1)[..., :-1]], -1)
        after_rejection = residual(target_probs[..., :-1, :], draft_probs)
        residuals = torch.cat([after_rejection, target_probs[..., -1:, :]], -2)
        residuals = torch.where((steps < last).unsqueeze(-1), residuals, target_probs)
        return reached * (1 - accept), residuals

    def accept(
        self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, num_drafted: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        num_nodes = tokens.shape[1]
        if num_nodes == 0:
            return num_drafted, target_probs[:, 0]
        steps = torch.arange(num_nodes, device=tokens.device)
        passed = uniforms < acceptance(target_probs[:, :-1], draft_probs, tokens)
        length = (passed & (steps < num_drafted.unsqueeze(1))).cumprod(1).sum(1)
        rows = torch.arange(len(length), device=length.device)
        p, q = target_probs[rows, length], draft_probs[rows, length.clamp(max=num_nodes - 1)]
        return length, torch.where((length == num_drafted).unsqueeze(1), p, residual(p, q))
