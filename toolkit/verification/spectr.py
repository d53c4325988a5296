"""K-SEQ: i.i.d. candidates in order, each accepted with the same, lowered chance.

Paper: Sun et al., SpecTr (arXiv:2310.15141), k-sequential selection (K-SEQ).
theirs -> ours: p -> draft_probs, q -> target_probs, rho -> rho, beta(rho) = b -> overlap, k -> K. With our letters:
    1 - (1 - b)^K = rho b,  b = b(rho) = sum_x min(q(x), p(x)/rho),  rho in [1, K]
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.verification.base import SelectionRule, acceptances, first_ones, normalized


class SpecTr(SelectionRule):
    """Accept x with min(1, p(x)/(rho q(x))); if none, draw from norm(p - min(q, p/rho) (1 - (1 - b)^K)/b).

    num_halvings  of the bracket around rho, whose upper end is used: exact after any number (from the root on no weight
                  of the extra token is negative); 20 leave less than 1e-6 of K-SEQ's acceptance
    Every candidate has its own chance, repeated ones too.
    """

    lossless = True
    drawing = ("iid",)

    def __init__(self, num_halvings: int = 20):
        if num_halvings < 0:
            raise InputError(f"num_halvings must be at least 0, got {num_halvings}")
        self.num_halvings = num_halvings

    def _law(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        draft_probs = draft_probs[..., 0, :]
        counts = num_candidates.clamp(min=1).unsqueeze(-1).to(target_probs.dtype)
        scaled = target_probs / self._rho(target_probs, draft_probs, counts)
        passed = acceptances(scaled, draft_probs, candidates) * first_ones(candidates, num_candidates)
        before = torch.cat([torch.ones_like(passed[..., :1]), (1 - passed).cumprod(-1)[..., :-1]], -1)
        taken = torch.minimum(draft_probs, scaled)
        overlap = taken.sum(-1, keepdim=True)
        tried = torch.where(overlap > 0, (1 - (1 - overlap) ** counts) / overlap, counts)
        return before * passed, normalized((target_probs - taken * tried).clamp_(min=0), target_probs)

    def _rho(self, target_probs: Tensor, draft_probs: Tensor, counts: Tensor) -> Tensor:
        """The upper end of the bracket around the root; counts [..., 1], like what is returned."""
        low, high = torch.ones_like(counts), counts
        for _ in range(self.num_halvings):
            rho = (low + high) / 2
            taken = torch.minimum(rho * draft_probs, target_probs).sum(-1, keepdim=True)  # rho b
            above = 1 - (1 - taken / rho) ** counts <= taken
            low, high = torch.where(above, low, rho), torch.where(above, rho, high)
        return high
