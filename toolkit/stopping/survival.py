"""Stop when some drafted token has probably been rejected: the rule of SpecDec++.

Paper: SpecDec++ (arXiv:2405.19715), section 3 and Algorithm 1. theirs -> ours: h -> threshold, f(e_i) -> estimator.

With lag = 1, as published, the state at step k has read y_{k-1}. So y_k is drawn before its own score is known, and a
round that stops carries one unscored token. With lag = 0 the draft reads y_k, at the cost of one more forward pass. It draws
y_{k+1} from this forward pass only if the survival that includes y_k is high enough.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from toolkit.config.notes import Probability
from toolkit.config.values import check_ranges
from toolkit.errors import InputError
from toolkit.stopping.base import ReadEstimator, State, Thresholded
from toolkit.types import Drafted, Step, Verified


@dataclass(frozen=True)
class Survival(Thresholded):
    """Stop when 1 - product of estimates > threshold.

    estimator  scores the token a state has read: a HeadEstimator
    threshold  h; larger means longer rounds
    lag        1: faithful, one token late; 0: reads one token further, and pays for it
    """

    name = "survival"
    reads_states: ClassVar[bool] = True
    estimator: ReadEstimator
    threshold: Annotated[float, Probability] = 0.7
    lag: Literal[0, 1] = 1

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")
        if self.lag not in (0, 1):
            raise InputError(f"policy.lag: expected 0 or 1, got {self.lag}")

    @property
    def reads(self) -> bool:  # type: ignore[override]
        return self.lag == 0

    def bind(self, pair: object) -> Survival:
        return replace(self, estimator=self.estimator.bind(pair))

    def init(self, num_rows: int, device: torch.device) -> State:
        return {"survival": torch.ones(num_rows, dtype=torch.float32, device=device)}

    @property
    def level(self) -> float:
        return 1 - self.threshold

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        if self.lag == 0:  # scored when it was read
            return state, torch.ones_like(state["survival"], dtype=torch.bool)
        return super().step(step, state)

    def read(self, step: Step, state: State) -> tuple[State, Tensor]:
        state, score = self.score(step, state)
        return state, score >= self.level

    def score(self, step: Step, state: State) -> tuple[State, Tensor]:
        survival = state["survival"]
        if step.depth > 1:  # at depth 1 the state has read the context, but no drafted token
            survival = survival * self.estimator.read_prob(step)
        return {"survival": survival}, survival

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        return {"survival": torch.ones_like(state["survival"])}
