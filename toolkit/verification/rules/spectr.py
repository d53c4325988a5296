"""K-SEQ: i.i.d. candidates in order, each accepted with the same, lowered probability.

Paper: Sun et al., SpecTr (arXiv:2310.15141), k-sequential selection (K-SEQ).
theirs -> ours: p -> draft_probs, q -> target_probs, rho -> rho, beta(rho) = b -> overlap, k -> K. With our letters:
    1 - (1 - b)^K = rho b,  b = b(rho) = sum_x min(q(x), p(x)/rho),  rho in [1, K].

Deviation: the bracket around rho is not halved but cut into up to 1024 sections at once. At all their edges b comes
from two histograms over p/q, at the price of about three halvings.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from toolkit.config.notes import Between
from toolkit.config.values import check_ranges
from toolkit.verification.base import SelectionRule, acceptances, first_ones, normalized


class SpecTr(SelectionRule):
    """Accept x with min(1, p(x)/(rho q(x))); if none, draw from norm(p - min(q, p/rho) (1 - (1 - b)^K)/b).

    num_halvings  how often (at least) the bracket around rho is halved; its upper end is used. The rule is exact after
                  any number, as no weight of the extra token is negative from the root on. 20 cost less than 1e-6 of
                  the acceptance

    Every candidate has its own probability, repeated ones too.
    """

    name = "spectr"
    lossless = True
    schemes = ("iid",)

    def __init__(self, num_halvings: Annotated[int, Between(0, 200)] = 20):
        self.num_halvings = num_halvings
        check_ranges(self, "rule.")

    def _distribution(
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

    def accepted(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        """1 - (1 - b)^K [...]."""
        counts = torch.full_like(target_probs[..., :1], draft_probs.shape[-2])
        scaled = target_probs / self._rho(target_probs, draft_probs[..., 0, :], counts)
        overlap = torch.minimum(draft_probs[..., 0, :], scaled).sum(-1)
        return 1 - (1 - overlap) ** counts.squeeze(-1)

    def _rho(self, target_probs: Tensor, draft_probs: Tensor, counts: Tensor) -> Tensor:
        """The upper end of the last section with the root [..., 1]; counts [..., 1] is K."""
        ratio = target_probs / draft_probs  # 0/0 ends in the first section, where it counts for nothing
        q_total = draft_probs.sum(-1, keepdim=True)
        halvings_at_once = min(ratio.shape[-1].bit_length(), 10)
        num_sections = 2**halvings_at_once
        sections = torch.arange(num_sections + 1, dtype=ratio.dtype, device=ratio.device)
        low, high = torch.ones_like(counts), counts
        for _ in range(0, self.num_halvings, halvings_at_once):
            edges = low + (high - low) * (sections / num_sections)
            per_unit = num_sections / (high - low).clamp(min=torch.finfo(ratio.dtype).eps)
            index = torch.addcmul(1 - low * per_unit, ratio, per_unit).clamp_(0, num_sections + 1).long().clamp_(min=0)
            empty = ratio.new_zeros(*ratio.shape[:-1], num_sections + 2)
            p_below, q_below = (
                empty.scatter_add(-1, index, distribution).cumsum(-1)[..., :-1]
                for distribution in (target_probs, draft_probs)
            )
            overlap = p_below / edges + (q_total - q_below)
            above = 1 - (1 - overlap) ** counts <= edges * overlap  # from one edge on
            first = (~above[..., :-1]).sum(-1, keepdim=True)
            low, high = edges.gather(-1, (first - 1).clamp(min=0)), edges.gather(-1, first)
        return high
