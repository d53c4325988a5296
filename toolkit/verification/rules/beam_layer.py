"""Speculative beams: the candidates of a layer are tried in turn, each against what p has left since the last one kept.

Paper: Dynamic-Width Speculative Beam Decoding (arXiv:2409.16560), Algorithm 1, lines 13-31, and Theorem 3.1.
theirs -> ours: p_beam -> target_probs, q_beam -> draft_probs, S -> candidates, W_L -> width, p' -> left, at the end
residual.
Deviation: a candidate is accepted with min(1, p'/q); the text and line 17 print the ratio upside down, Eq. 4 does not.
Deviation: candidates are i.i.d. draws from q, as the theorem assumes; the published code drafts without replacement.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.verification.base import acceptance, residual
from toolkit.verification.layer import LayerRule, Outcome


class BeamLayer(LayerRule):
    """p' = p; accept x with min(1, p'(x)/q(x)); p' = p after an acceptance, norm((p' - q)+) after a rejection.

    The walk stops at the width; what it has not reached is rejected without a test. At every candidate the next output
    beam is drawn from p whatever came before: the candidate is fresh, and p' is made for it. So the outputs, in order,
    are i.i.d. from p, for any width that does not look at the candidates.
    """

    name = "beam_layer"
    lossless = True

    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, width: Tensor, real: Tensor
    ) -> list[Outcome]:
        nothing = torch.zeros(0, dtype=torch.bool, device=candidates.device)
        outcomes = [Outcome(nothing, torch.ones_like(target_probs[..., 0]), target_probs)]
        for token, counts in zip(candidates.unbind(-1), real.unbind(-1), strict=True):
            outcomes = [
                following
                for outcome in outcomes
                for following in _branches(outcome, target_probs, draft_probs, token, counts, width)
                if bool((following.probability > 0).any())
            ]
        return outcomes

    def walk(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        candidates: Tensor,
        real: Tensor,
        width: Tensor,
        uniforms: Tensor,
    ) -> tuple[Tensor, Tensor]:
        left, num_accepted, columns = target_probs, torch.zeros_like(width), []
        candidates = candidates.masked_fill(~real, 0)
        for k in range(candidates.shape[1]):
            tested = real[:, k] & (num_accepted < width)
            accepted = tested & (uniforms[:, k] < acceptance(left, draft_probs, candidates[:, k]))
            reduced = torch.where((tested & ~accepted).unsqueeze(1), residual(left, draft_probs), left)
            left = torch.where(accepted.unsqueeze(1), target_probs, reduced)
            num_accepted = num_accepted + accepted
            columns.append(accepted)
        return torch.stack(columns, 1) if columns else real, left


def _branches(
    outcome: Outcome, target_probs: Tensor, draft_probs: Tensor, token: Tensor, counts: Tensor, width: Tensor
) -> tuple[Outcome, Outcome]:
    """What one candidate makes of an outcome so far: it is kept, or it is not (rejected, not real, or not reached)."""
    accepted_so_far, prob, left = outcome
    tested = counts & (accepted_so_far.sum() < width)
    accepted = torch.where(tested, acceptance(left, draft_probs, token), 0.0)
    reduced = torch.where(tested.unsqueeze(-1), residual(left, draft_probs), left)
    return (
        Outcome(torch.cat([accepted_so_far, accepted_so_far.new_ones(1)]), prob * accepted, target_probs),
        Outcome(torch.cat([accepted_so_far, accepted_so_far.new_zeros(1)]), prob * (1 - accepted), reduced),
    )
