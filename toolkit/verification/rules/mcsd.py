"""Recursive rejection without replacement: as SpecInfer's, with every earlier candidate removed from q.

Paper: Yang et al., Multi-Candidate Speculative Decoding (arXiv:2401.06706), Algorithm 2.
theirs -> ours: q -> draft_probs, p -> target_probs, k -> K, x~^i -> candidates.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from toolkit.verification.base import SelectionRule, check_distinct, check_support
from toolkit.verification.rules.specinfer import reject_in_turn


class MCSD(SelectionRule):
    """Accept x_k with min(1, p_k(x_k)/q_k(x_k)); on rejection p <- norm((p - q_k)+), q_k(x_k) <- 0, q <- norm(q)."""

    name = "mcsd"
    lossless = True
    schemes = ("without_replacement",)

    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        distributions = _without_earlier(draft_probs[..., 0, :], candidates)
        return reject_in_turn(target_probs, distributions, candidates, num_candidates)

    def _check_candidates(self, draft_probs: Tensor, candidates: Tensor, real: Tensor) -> None:
        check_support(draft_probs, candidates, real)
        check_distinct(candidates, real)


def _without_earlier(draft_probs: Tensor, candidates: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Per candidate: draft_probs [..., V] without the earlier ones, and the sum of that [..., 1], 0 once all are drawn."""
    yield draft_probs, torch.ones_like(draft_probs[..., :1])
    left = draft_probs.clone()
    for token in candidates[..., :-1].unsqueeze(-1).unbind(-2):
        left.scatter_(-1, token, 0.0)
        yield left, left.sum(-1, keepdim=True)
