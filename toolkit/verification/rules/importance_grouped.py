"""Importance-weighted choice with weights for groups of tokens of similar p/q, then one speculative step.

Paper: Khisti et al., Multi-Draft Speculative Sampling: Canonical Architectures and Theoretical Limits
(arXiv:2410.18234), Theorem 1 and Remark 4; the groups are this project's.
theirs -> ours: p -> draft_probs (q in formulas), q -> target_probs (p), w -> wins, p_I -> chosen.

Of two candidates from groups g and h the first is chosen with probability w_gh, of one group always. Tokens of a group then
keep the proportions of q. If p/q varies little within a group, sum_i min(p(i), P_I(i)) is nearly sum_g min(p(g),
P_I(g)). Then the program over the few groups (`pair_weights`) comes close to the one over all tokens.
Deviation: `importance` has a few tokens with free weights and a fixed order of all others. Here every token belongs to
a group whose weights are free. The order lets the first tokens win too often unless p is concentrated on few tokens.
Here there is neither an order nor a truncated alphabet, and the cost is linear in V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from toolkit.config.notes import Between
from toolkit.config.values import check_ranges
from toolkit.verification.base import SelectionRule
from toolkit.verification.pair_weights import free_wins
from toolkit.verification.successive import accepted_of_chosen, choose_and_accept


class GroupedImportance(SelectionRule):
    """Pairs choose until one candidate is left; accept it with min(1, p/P_I), else draw from norm((p - P_I)+).

    num_groups  groups of tokens, even in p/q from 0 to 2; the last one is from 2 on. P_I/q is at most 2; q is the mean
                of the two candidates' distributions. There are 2^num_groups cuts

    Candidate k's probability is P(k chosen) min(1, p/P_I); of equal candidates the first is chosen.
    """

    name = "importance_grouped"
    lossless = True
    schemes = ("iid", "independent")

    def __init__(self, num_groups: Annotated[int, Between(2, 12)] = 6):
        self.num_groups = num_groups
        check_ranges(self, "rule.")

    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        return choose_and_accept(target_probs, draft_probs, candidates, num_candidates, self._match(target_probs))

    def accepted(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        """sum min(p, P_I) [...]."""
        return accepted_of_chosen(target_probs, draft_probs, self._match(target_probs))

    def _match(self, target_probs: Tensor) -> Callable[[Tensor, Tensor], _Match]:
        return lambda first, second: _Match.of(target_probs.unsqueeze(-2), first, second, self.num_groups)


@dataclass(frozen=True)
class _Match:
    """The choice between two candidates.

    group  [..., V]     of every token
    wins   [..., G, G]  P(the first is chosen | it is of the row's group, the second of the column's)
    chosen [..., V]     P_I
    """

    group: Tensor
    wins: Tensor
    chosen: Tensor

    @classmethod
    def of(
        cls, target_probs: Tensor, first_distribution: Tensor, second_distribution: Tensor, num_groups: int
    ) -> _Match:
        ratio = (
            2
            * target_probs
            / (first_distribution + second_distribution).clamp_(min=torch.finfo(first_distribution.dtype).tiny)
        )
        group = ratio.mul_((num_groups - 1) / 2).clamp_(max=num_groups - 1).long().clamp_(min=0)  # if not a number: 0
        empty = first_distribution.new_zeros(*first_distribution.shape[:-1], num_groups)
        target, first, second = (
            empty.scatter_add(-1, group, distribution)
            for distribution in (target_probs.expand_as(first_distribution), first_distribution, second_distribution)
        )
        pairs = first.unsqueeze(-1) * second.unsqueeze(-2)
        weights = free_wins(target, first * second, pairs + pairs.mT)
        same = torch.eye(num_groups, dtype=torch.bool, device=weights.device)
        wins, loses = weights.masked_fill(same, 1.0), weights.masked_fill(same, 0.0)
        first_chosen, second_chosen = (
            (wins @ second.unsqueeze(-1)).squeeze(-1),
            (loses @ first.unsqueeze(-1)).squeeze(-1),
        )
        chosen = first_distribution * first_chosen.gather(-1, group) + second_distribution * second_chosen.gather(
            -1, group
        )
        return cls(group, wins, chosen)

    def wins_of(self, first: Tensor, second: Tensor) -> Tensor:
        """See `toolkit.verification.successive.CandidateMatch`."""
        rows, columns = self.group.gather(-1, first), self.group.gather(-1, second)
        at_rows = self.wins.gather(-2, rows.unsqueeze(-1).expand(*rows.shape, self.wins.shape[-1]))  # [..., m, G]
        return at_rows.gather(-1, columns.unsqueeze(-2).expand(*rows.shape, columns.shape[-1]))
