"""Rate: draft one more token while it pays, at the rate of tokens per target-forward time that is reached. No threshold.

The rule is ours, from renewal-reward theory (Dinkelbach's fixed point). The aim is to maximise E[tokens of a round] /
E[cost of a round]; lambda is the best such rate. Looking one step ahead, another draft forward pass of cost c is worth it iff

    P(all drafted so far accepted) * P(the next one accepted)  >  lambda * c

lambda is the rate that the rule itself achieves. It is tracked while decoding, prompt by prompt, or solved on traces
and given as `rate`. For the latter, `analysis.timing` keeps the best rate on the way to the fixed point. With an acceptance
head instead of a pre-read one, this is SpecDec++'s rule at the threshold that theory gives, h = 1 - lambda c.
Looking one step ahead is not optimal, because the next token's score is information with a value of its own.
Under block verification (method=block_rate) more than the product is kept; the rule is then a cautious one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from toolkit.config.notes import Above, AtLeast, Between
from toolkit.config.values import check_ranges
from toolkit.stopping.base import DrawnEstimator, State, Thresholded, entry_probs
from toolkit.types import Drafted, Judged, Step


@dataclass(frozen=True)
class Rate(Thresholded):
    """Stop when survival * P(next accepted) < rate * cost_ratio.

    estimator   gives `drawn_probs(step)`, P(y_k accepted) and P(y_{k+1} accepted), before y_k is read
    cost_ratio  c, draft forward pass / target forward pass
    rate        lambda, tokens per target-forward time; None: what this prompt has reached so far, from `initial_rate` on
    initial_rate  the rate a prompt begins with if it is tracked
    memory      how many target forward passes' worth of evidence `initial_rate` counts for
    """

    reads_states: ClassVar[bool] = True
    estimator: DrawnEstimator
    cost_ratio: Annotated[float, AtLeast(0)] = 0.2
    rate: Annotated[float, Above(0)] | None = None
    initial_rate: Annotated[float, Between(0, 1e6, "(]")] = 2.0
    memory: Annotated[float, Between(0, 1e6, "(]")] = 20.0

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    @property
    def uses_history(self) -> bool:  # type: ignore[override]
        return self.rate is None

    @property
    def level(self) -> float:
        return (self.initial_rate if self.rate is None else self.rate) * self.cost_ratio

    def bind(self, pair: object) -> Rate:
        return replace(self, estimator=self.estimator.bind(pair))

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state: survival of the round and, if the rate is tracked, tokens and cost of the prompt's rounds so far."""
        ones = torch.ones(num_rows, dtype=torch.float32, device=device)
        if self.rate is not None:
            return {"survival": ones}
        tokens, cost = (torch.full_like(ones, value) for value in (self.initial_rate * self.memory, self.memory))
        return {"survival": ones, "tokens": tokens, "cost": cost}

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        state, score = self.score(step, state)
        if self.rate is not None:
            return state, score >= self.level
        return state, score >= state["tokens"] / state["cost"] * self.cost_ratio

    def score(self, step: Step, state: State) -> tuple[State, Tensor]:
        survival, following = entry_probs(self.estimator, step, state["survival"])
        return {**state, "survival": survival}, following

    def foresee(self, step: Step) -> Tensor:
        return self.estimator.drawn_probs(step)[1]

    def observe(self, proposal: Drafted, verdict: Judged, state: State) -> State:
        fresh = {"survival": torch.ones_like(state["survival"])}
        if self.rate is not None:
            return fresh
        cost = proposal.num_calls * self.cost_ratio + 1
        return {**fresh, "tokens": state["tokens"] + verdict.length + 1, "cost": state["cost"] + cost}
