"""Successive choices between two candidates, until one is left: what the importance-sampling rules share.

Paper: Khisti et al. (arXiv:2410.18234), Theorem 1 and Remark 4. A rule says how one of two candidates is chosen (a
`CandidateMatch`) and gets the chosen one's distribution P_I. One speculative step with P_I makes the emitted token follow p,
however it was chosen.

Shapes: R matches are played at once, between winners of m and n candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from toolkit.verification.base import acceptances, first_ones, residual


class CandidateMatch(Protocol):
    """How one of two candidates is chosen, a first and a second one with distributions [..., R, V]."""

    @property
    def chosen(self) -> Tensor:
        """The distribution of the chosen one [..., R, V]."""

    def wins_of(self, first: Tensor, second: Tensor) -> Tensor:
        """P(the first is chosen) for every pair of tokens first [..., R, m] and second [..., R, n]: [..., R, m, n]."""


def choose_and_accept(
    target_probs: Tensor,
    draft_probs: Tensor,
    candidates: Tensor,
    num_candidates: Tensor,
    match: Callable[[Tensor, Tensor], CandidateMatch],
) -> tuple[Tensor, Tensor]:
    """Accept the last one chosen with min(1, p/P_I), else draw from norm((p - P_I)+): a rule's `_distribution`.

    `match` gets the distributions of the first and of the second candidates [..., R, V].
    """
    real = first_ones(candidates, num_candidates)
    brackets = _played(draft_probs, candidates, real, match)
    probs, chosen = brackets.probs[..., 0, : candidates.shape[-1]], brackets.distribution[..., 0, :]
    return probs * acceptances(target_probs, chosen, candidates) * real, residual(target_probs, chosen)


def accepted_of_chosen(
    target_probs: Tensor, draft_probs: Tensor, match: Callable[[Tensor, Tensor], CandidateMatch]
) -> Tensor:
    """P(the last one chosen is accepted) [...]: sum min(p, P_I)."""
    any_candidates = torch.zeros(draft_probs.shape[:-1], dtype=torch.long, device=draft_probs.device)
    brackets = _played(draft_probs, any_candidates, torch.ones_like(any_candidates, dtype=torch.bool), match)
    return torch.minimum(target_probs, brackets.distribution[..., 0, :]).sum(-1)


def _played(
    draft_probs: Tensor, candidates: Tensor, real: Tensor, match: Callable[[Tensor, Tensor], CandidateMatch]
) -> _Brackets:
    """The one bracket that is left."""
    brackets = _Brackets.of_one(draft_probs, candidates, real)
    while brackets.distribution.shape[-2] > 1:
        brackets = _play(brackets.every_second(0), brackets.every_second(1), match)
    return brackets


def _play(first: _Brackets, second: _Brackets, match: Callable[[Tensor, Tensor], CandidateMatch]) -> _Brackets:
    """Choose between the winners of two brackets each."""
    choice = match(first.distribution, second.distribution)
    wins = choice.wins_of(first.tokens, second.tokens)
    played = second.present.unsqueeze(-1)
    first_wins = first.probs * (wins * second.probs.unsqueeze(-2)).sum(-1)
    second_wins = second.probs * ((1 - wins) * first.probs.unsqueeze(-1)).sum(-2)
    distribution = choice.chosen if bool(played.all()) else torch.where(played, choice.chosen, first.distribution)
    return _Brackets(
        distribution,
        torch.cat([first.tokens, second.tokens], -1),
        torch.cat([torch.where(played, first_wins, first.probs), torch.where(played, second_wins, 0.0)], -1),
        first.present,
    )


@dataclass(frozen=True)
class _Brackets:
    """R groups of m candidates, one of which is chosen.

    distribution     [..., R, V]  of the chosen one
    tokens  [..., R, m]  the candidates
    probs   [..., R, m]  P(this one is chosen | candidates)
    present [..., R]     False where the node has none of these candidates
    """

    distribution: Tensor
    tokens: Tensor
    probs: Tensor
    present: Tensor

    @classmethod
    def of_one(cls, draft_probs: Tensor, candidates: Tensor, real: Tensor) -> _Brackets:
        """One candidate each; R is the next power of two, filled up with candidates that are not there."""
        missing = (1 << (candidates.shape[-1] - 1).bit_length()) - candidates.shape[-1]
        if missing:
            draft_probs = torch.cat([draft_probs, draft_probs[..., :missing, :]], -2)
            candidates, real = (torch.nn.functional.pad(t, (0, missing)) for t in (candidates, real))
        tokens = candidates.unsqueeze(-1)
        return cls(draft_probs, tokens, torch.ones_like(tokens, dtype=draft_probs.dtype), real)

    def every_second(self, start: int) -> _Brackets:
        """The brackets start, start + 2, ..."""
        rows = slice(start, None, 2)
        return _Brackets(
            self.distribution[..., rows, :],
            self.tokens[..., rows, :],
            self.probs[..., rows, :],
            self.present[..., rows],
        )
