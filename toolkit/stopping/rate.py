"""Rate: draft one more token while it pays, at the rate of tokens per target-forward time that is reached. No threshold.

Ours, from renewal-reward theory (Dinkelbach's fixed point). To maximise E[tokens of a round] / E[cost of a round], with
lambda the best such rate, another draft forward of cost c is worth it, looking one step ahead, iff

    P(all drafted so far accepted) * P(the next one accepted)  >  lambda * c

lambda is the rate achieved itself: tracked while decoding, prompt by prompt, or solved on traces (`analysis.price`, which
keeps the best one met on the way to the fixed point) and given as `rate`. With an acceptance head instead of a pre-read
one this is SpecDec++'s rule at the threshold that theory gives, h = 1 - lambda c.
Looking one step ahead is not the optimum: what the next token's score will show is worth something, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.stopping.base import State, Thresholded
from toolkit.types import DraftStep, Proposal, Verdict


@dataclass(frozen=True)
class Rate(Thresholded):
    """Stop when survival * P(next accepted) < rate * cost_ratio.

    estimator   gives `drawn_probs(step)`, P(y_k accepted) and P(y_{k+1} accepted), before y_k is read
    cost_ratio  c, draft forward / target forward
    rate        lambda, tokens per target-forward time; None: what this prompt has reached so far, from `start` on
    start       the rate a prompt begins with if it is tracked
    memory      how many target forwards' worth of evidence `start` counts for
    """

    estimator: Any
    cost_ratio: float = 0.2
    rate: float | None = None
    start: float = 2.0
    memory: float = 20.0

    def __post_init__(self) -> None:
        positive = self.start > 0 and self.memory > 0 and (self.rate is None or self.rate > 0)
        if self.cost_ratio < 0 or not positive:
            raise InputError(
                "expected policy.cost_ratio >= 0 and policy.rate (or null), policy.start, policy.memory above 0, got "
                f"{self.cost_ratio} and {self.rate}, {self.start}, {self.memory}"
            )

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return self.rate is None

    @property
    def level(self) -> float:
        return (self.start if self.rate is None else self.rate) * self.cost_ratio

    def bind(self, pair: object) -> Rate:
        return replace(self, estimator=self.estimator.bind(pair))

    def init(self, num_rows: int, device: torch.device) -> State:
        """survival of the round; and, if the rate is tracked, tokens and cost of the prompt's rounds so far."""
        one = torch.ones(num_rows, device=device)
        tracked = {"tokens": self.start * self.memory * one, "cost": self.memory * one}
        return {"survival": one, **(tracked if self.rate is None else {})}

    def step(self, step: DraftStep, state: State) -> tuple[State, Tensor]:
        state, score = self.score(step, state)
        if self.rate is not None:
            return state, score >= self.level
        return state, score >= state["tokens"] / state["cost"] * self.cost_ratio

    def score(self, step: DraftStep, state: State) -> tuple[State, Tensor]:
        accepted, following = self.estimator.drawn_probs(step)
        survival = state["survival"] * accepted
        return {**state, "survival": survival}, survival * following

    def foresee(self, step: DraftStep) -> Tensor:
        return self.estimator.drawn_probs(step)[1]

    def observe(self, proposal: Proposal, verdict: Verdict, state: State) -> State:
        fresh = {"survival": torch.ones_like(state["survival"])}
        if self.rate is not None:
            return fresh
        cost = proposal.num_calls * self.cost_ratio + 1
        return {**fresh, "tokens": state["tokens"] + verdict.length + 1, "cost": state["cost"] + cost}
