"""The exact rule for greedy drafts that reaches their optimal acceptance: the draw first, then the fixed ones.

Paper: Hu et al., Towards Optimal Multi-draft Speculative Decoding (arXiv:2502.18779), greedy draft sampling. It takes
the K - 1 most probable tokens T of q, and one draw x from the rest. The distribution of x is r = q/(1 - q(T)) outside T and
0 on it.
Deviation: the rule is derived here from the transport problem's cuts, not taken from the paper's pseudo-code.

Optimum. Given x, the output may be x or in T. Send P(x) = r(x) to x itself, at most p(x): that gives
sum_{x not in T} min(p, r) = b. What is left of the draws, 1 - b, may all go to T, which takes p(T) at most. As
b <= 1 - p(T), the whole of T fits: alpha* = p(T) + sum_{x not in T} min(p(x), r(x)).
Rule. Ordinary rejection of x against p with the distribution r: accept with min(1, p(x)/r(x)), else draw y from norm((p - r)+).
It is exact, because x has the distribution r. As r = 0 on T, the draw of y gives T its whole p(T). So P(y is a candidate) =
b + p(T) = alpha*. The rule is exact for any T that x was drawn without, so for draws without replacement as well. It is not
optimal there, and does not declare them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.verification.base import (
    SelectionRule,
    acceptance,
    check_distinct,
    check_support,
    normalized,
    residual,
)
from toolkit.verification.schemes import top_tokens


class GreedyMulti(SelectionRule):
    """Accept the drawn candidate (the last) with min(1, p/r), else y ~ norm((p - r)+), accepted if among the top."""

    name = "greedy_multi"
    lossless = True
    schemes = ("greedy",)

    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        last = (num_candidates - 1).clamp(min=0).unsqueeze(-1)
        positions = torch.arange(candidates.shape[-1], device=candidates.device)
        is_top, is_drawn = positions < last, positions == last
        drawn = candidates.gather(-1, last).squeeze(-1)
        rest = _without(draft_probs[..., 0, :], candidates, is_top)
        rest = torch.where(is_top.any(-1, keepdim=True), normalized(rest, rest), rest)
        passed = acceptance(target_probs, rest, drawn).unsqueeze(-1)
        left = residual(target_probs, rest)
        accept = torch.where(is_top, (1 - passed) * left.gather(-1, candidates), 0.0)
        accept = torch.where(is_drawn & (num_candidates > 0).unsqueeze(-1), passed, accept)
        return accept, normalized(_without(left, candidates, is_top), target_probs)

    def _check_candidates(self, draft_probs: Tensor, candidates: Tensor, real: Tensor) -> None:
        check_support(draft_probs, candidates, real)
        check_distinct(candidates, real)
        count = min(candidates.shape[-1], draft_probs.shape[-1])  # after the vocabulary there is only padding
        draft_probs, candidates, real = draft_probs[..., 0, :], candidates[..., :count], real[..., :count]
        not_last = torch.cat([real[..., 1:], torch.zeros_like(real[..., :1])], -1)
        most_probable = draft_probs.gather(-1, top_tokens(draft_probs, count))
        chosen = draft_probs.gather(-1, candidates.masked_fill(~real, 0))
        if bool((chosen < most_probable)[not_last].any()):
            raise InputError(
                f"candidates: expected q's most probable tokens before the last, got {candidates.tolist()}"
            )


def _without(probs: Tensor, tokens: Tensor, chosen: Tensor) -> Tensor:
    """probs [..., V] with the chosen (mask) of tokens [..., K] set to 0."""
    mask = torch.ones_like(probs).scatter_reduce(-1, tokens, (~chosen).to(probs.dtype), "amin")
    return probs * mask
