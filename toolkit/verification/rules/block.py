"""Block verification: the drafted chain is verified as a whole; exact, and never shorter than token-level rejection.

Paper: Sun et al., Block Verification Accelerates Speculative Decoding (arXiv:2403.10444), Algorithm 2.
theirs -> ours: M_s -> q, M_b -> p, gamma -> K, tau -> length, p_i -> weight (P_i elsewhere in this package).
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.verification.base import PathRule


def survival(before: Tensor, target_prob: Tensor, draft_prob: Tensor) -> Tensor:
    """P_i [...] from P_{i-1}, p(x_i) and q(x_i): the probability that at least i tokens are kept, given x_1..x_i (Lemma 3).

    It does not depend on how many are drafted after them. So another token is worth E[P_{i+1}], which is the sum of
    min(P_i p, q) over tokens.
    """
    return (before * (target_prob / draft_prob.clamp(min=torch.finfo(draft_prob.dtype).tiny))).clamp(max=1.0)


class Block(PathRule):
    """P_i = min(P_{i-1} r_i, 1); keep the longest prefix i with U_i < h_i, then draw from norm((P_i p - q)+)."""

    name = "block"
    lossless = True

    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, num_drafted: Tensor
    ) -> tuple[Tensor, Tensor]:
        weight, keep = self._weights(target_probs, draft_probs, tokens, num_drafted)
        fails_later = (1 - keep).flip(-1).cumprod(-1).flip(-1)  # [..., K + 1]: all of i, i + 1, ... fail
        fails_later = torch.cat([fails_later[..., 1:], torch.ones_like(keep[..., :1])], -1)
        return keep * fails_later, self._residuals(target_probs, draft_probs, weight, num_drafted)

    def accept(
        self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, num_drafted: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        if tokens.shape[1] == 0:
            return num_drafted, target_probs[:, 0]
        weight, keep = self._weights(target_probs, draft_probs, tokens, num_drafted)
        passed = uniforms < keep[:, 1:]
        steps = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        length = (passed * steps).amax(1)
        rows = torch.arange(len(length), device=length.device)
        residuals = self._residuals(
            target_probs[rows, length].unsqueeze(1),
            draft_probs[rows, length.clamp(max=tokens.shape[1] - 1)].unsqueeze(1),
            weight[rows, length].unsqueeze(1),
            num_drafted - length,
        )
        return length, residuals.squeeze(1)

    def _weights(
        self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, num_drafted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """P_i and h_i for i = 0..K, both [..., K + 1]; h_0 = 1, and 0 after num_drafted."""
        index = tokens.unsqueeze(-1)
        p = target_probs[..., :-1, :].gather(-1, index).squeeze(-1)
        q = draft_probs.gather(-1, index).squeeze(-1)
        weights = [torch.ones_like(target_probs[..., 0, 0])]
        for i in range(tokens.shape[-1]):
            weights.append(survival(weights[-1], p[..., i], q[..., i]))
        weight = torch.stack(weights, -1)
        left = (weight[..., :-1, None] * target_probs[..., :-1, :] - draft_probs).clamp(min=0).sum(-1)  # Z_i, i < K
        below = left + 1 - weight[..., :-1]
        inner = torch.where(below > 0, left / below.clamp(min=torch.finfo(left.dtype).tiny), 0.0)
        keep = torch.cat([inner, weight[..., -1:]], -1)
        steps = torch.arange(keep.shape[-1], device=keep.device)
        last = num_drafted.unsqueeze(-1)
        keep = torch.where(steps == last, weight, keep)
        keep = torch.where(steps > last, 0.0, keep)
        return weight, torch.where(steps == 0, 1.0, keep.clamp(max=1.0))

    def _residuals(self, target_probs: Tensor, draft_probs: Tensor, weight: Tensor, num_drafted: Tensor) -> Tensor:
        """norm((P_i p_{i+1} - q_{i+1})+), and p_{i+1} from position num_drafted on: [..., positions, V]."""
        missing = target_probs.shape[-2] - draft_probs.shape[-2]
        shape = (*draft_probs.shape[:-2], missing, draft_probs.shape[-1])
        padded = torch.cat([draft_probs, draft_probs.new_zeros(shape)], -2)
        left = (weight.unsqueeze(-1) * target_probs - padded).clamp(min=0)
        total = left.sum(-1, keepdim=True)
        normed = torch.where(total > 0, left / total.clamp(min=torch.finfo(left.dtype).tiny), target_probs)
        steps = torch.arange(target_probs.shape[-2], device=weight.device)
        inside = (steps < num_drafted.unsqueeze(-1)).unsqueeze(-1)
        return torch.where(inside, normed, target_probs)
