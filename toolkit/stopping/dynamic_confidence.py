"""Dynamic confidence: the confidence rule with a threshold fitted again after every round.

The rule is known as transformers' dynamic speculation (default since 4.45). Its threshold minimises FPR + 3 FNR over the
tokens verified so far. Their class counts a token as positive if it was accepted. A false positive is an unaccepted
token above the threshold, a false negative an accepted one below it.
Deviation: the history is per prompt (theirs runs on over prompts), so that a row does not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from toolkit.config.notes import AtLeast, Between, Probability
from toolkit.config.values import check_ranges
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import Drafted, Step, Verified


@dataclass(frozen=True)
class DynamicConfidence(StoppingPolicy):
    """Stop when q(y_k) < t, q unwarped.

    threshold  t's first value, for every prompt
    miss_cost  what an accepted token below t costs against an unaccepted one above it
    history    the newest verified tokens that t is fitted to, per prompt; at most this many of one round are looked at
    """

    name = "dynamic_confidence"
    threshold: Annotated[float, Probability] = 0.4
    miss_cost: Annotated[float, AtLeast(0)] = 3.0
    history: Annotated[int, Between(1, 65536)] = 256

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    def init(self, num_rows: int, device: torch.device) -> State:
        """scores, labels: ring buffers [B, history], label -1 where empty; fresh: this round's scores."""
        empty = torch.zeros(num_rows, self.history, dtype=torch.float32, device=device)
        return {
            "threshold": torch.full((num_rows,), self.threshold, dtype=torch.float32, device=device),
            "scores": empty,
            "labels": torch.full_like(empty, -1),
            "filled": torch.zeros(num_rows, dtype=torch.long, device=device),
            "fresh": empty.clone(),
        }

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        score = step.token_prob.to(state["fresh"].dtype)
        fresh = state["fresh"].clone()
        fresh[:, step.depth - 1 : step.depth] = score.unsqueeze(1)  # of a round longer than the history: its first ones
        return {**state, "fresh": fresh}, score >= state["threshold"]

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        """Tokens up to the first rejection were verified; later ones were never verified."""
        verified = torch.minimum(verdict.length + 1, proposal.num_drafted).clamp(max=self.history)
        scores, labels = state["scores"].clone(), state["labels"].clone()
        rows = torch.arange(len(verified), device=verified.device)
        for k in range(min(proposal.num_nodes, self.history)):
            is_verified = k < verified
            slot = (state["filled"] + k) % self.history
            scores[rows, slot] = torch.where(is_verified, state["fresh"][:, k], scores[rows, slot])
            labels[rows, slot] = torch.where(is_verified, (k < verdict.length).float(), labels[rows, slot])
        return {
            **state,
            "scores": scores,
            "labels": labels,
            "filled": state["filled"] + verified,
            "threshold": self._fit(scores, labels, state["threshold"]),
        }

    def _fit(self, scores: Tensor, labels: Tensor, old: Tensor) -> Tensor:
        """The observed score that minimises FPR + miss_cost * FNR, per row; `old` until both classes were observed."""
        scores, order = scores.masked_fill(labels < 0, torch.inf).sort(dim=1)  # empty positions come last
        labels = labels.gather(1, order)
        accepted, rejected = (labels == 1).float(), (labels == 0).float()
        below = lambda kind: kind.cumsum(1) - kind  # of that kind before each position
        false_negative = below(accepted) / accepted.sum(1, keepdim=True).clamp(min=1)
        false_positive = 1 - below(rejected) / rejected.sum(1, keepdim=True).clamp(min=1)
        cost = (false_positive + self.miss_cost * false_negative).masked_fill(labels < 0, torch.inf)
        cost[:, 1:].masked_fill_(scores[:, 1:] == scores[:, :-1], torch.inf)  # of equal scores the first one counts
        best = scores.gather(1, cost.argmin(1, keepdim=True)).squeeze(1)
        both = (accepted.sum(1) > 0) & (rejected.sum(1) > 0)
        return torch.where(both, best, old)
