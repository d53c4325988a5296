"""Recursive rejection without replacement: as SpecInfer's, with every earlier candidate removed from q.

Paper: Yang et al., Multi-Candidate Speculative Decoding (arXiv:2401.06706), Algorithm 2.
theirs -> ours: q -> draft_probs, p -> target_probs, k -> K, x~^i -> candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.verification.base import SelectionRule, check_distinct, check_support, normalized
from toolkit.verification.specinfer import reject_in_turn


class MCSD(SelectionRule):
    """Accept x_k with min(1, p_k(x_k)/q_k(x_k)); on rejection p <- norm((p - q_k)+), q_k(x_k) <- 0, q <- norm(q)."""

    lossless = True
    drawing = ("without_replacement",)

    def _law(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        drawn_from = laws_without_earlier(draft_probs[..., 0, :], candidates)
        return reject_in_turn(target_probs, drawn_from, candidates, num_candidates)

    def _check_candidates(self, draft_probs: Tensor, candidates: Tensor, real: Tensor) -> None:
        check_support(draft_probs, candidates, real)
        check_distinct(candidates, real)


def laws_without_earlier(draft_probs: Tensor, candidates: Tensor) -> Tensor:
    """The law each of candidates [..., K] was drawn from, given draft_probs [..., V] before removals: [..., K, V].

    All zero once every token of q is drawn.
    """
    laws = [draft_probs]
    for token in candidates[..., :-1].unbind(-1):
        left = laws[-1].scatter(-1, token.unsqueeze(-1), 0.0)
        laws.append(normalized(left, left))
    return torch.stack(laws, -2)
