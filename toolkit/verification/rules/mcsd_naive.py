"""Naive multi-candidate sampling: draw y from p; if it was drafted, the walk goes on there.

Paper: Yang et al., Multi-Candidate Speculative Decoding (arXiv:2401.06706), the naive baseline (MCNS) of its ablation.
Candidates may come from anywhere: exact for every scheme, and without candidates' distributions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.verification.base import SelectionRule, first_ones, normalized


class NaiveMCSD(SelectionRule):
    """P(x_k emitted) = p(x_k); the extra token from p without the candidates. Repeated candidates: all at the first."""

    name = "mcsd_naive"
    lossless = True
    schemes = ("iid", "independent", "without_replacement", "greedy", "top_k")

    def accepted(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        """sum p(y) P(y is among the candidates) [...]."""
        return (target_probs * (1 - (1 - draft_probs).prod(-2))).sum(-1)

    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        left, accept = target_probs, []
        for token, real in zip(candidates.unbind(-1), first_ones(candidates, num_candidates).unbind(-1), strict=True):
            index = token.unsqueeze(-1)
            accept.append(left.gather(-1, index).squeeze(-1) * real)
            left = torch.where(real.unsqueeze(-1), left.scatter(-1, index, 0.0), left)
        return torch.stack(accept, -1), normalized(left, target_probs)
