"""AdaEDL: an entropy bound on acceptance against a threshold that moves towards a wanted acceptance rate.

Paper: AdaEDL (arXiv:2410.18351), section 3. theirs -> ours: gamma -> factor, lambda -> threshold, alpha -> target_rate,
beta_1 -> rate_decay, beta_2 -> threshold_decay, epsilon -> step_size.
After each round the acceptance rate is averaged (rate_decay). The threshold moves up by `step_size` if the average is
below the wanted rate, and down if the average is above it. The threshold itself is averaged, too (threshold_decay).
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
class AdaEdl(StoppingPolicy):
    """Stop when 1 - sqrt(factor * H(q_k)) < lambda, H in nats of the unwarped distribution.

    threshold        lambda's first value
    factor           gamma, of the entropy
    target_rate      alpha, the acceptance rate that is wanted
    rate_decay       beta_1, what the average rate keeps of its last value
    threshold_decay  beta_2, what lambda keeps of its last value
    step_size        epsilon, how far lambda is moved after a round
    """

    name = "adaedl"
    threshold: Annotated[float, Probability] = 0.4
    factor: Annotated[float, AtLeast(0)] = 0.2
    target_rate: Annotated[float, Probability] = 0.9
    rate_decay: Annotated[float, Between(0, 1)] = 0.5
    threshold_decay: Annotated[float, Between(0, 1)] = 0.9
    step_size: Annotated[float, AtLeast(0)] = 0.01

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    def init(self, num_rows: int, device: torch.device) -> State:
        return {
            "threshold": torch.full((num_rows,), self.threshold, dtype=torch.float32, device=device),
            "rate": torch.full((num_rows,), self.target_rate, dtype=torch.float32, device=device),
        }

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        bound = 1 - (self.factor * step.entropy).sqrt()
        return state, bound >= state["threshold"]

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        drafted = proposal.num_drafted > 0
        rate = verdict.length.float() / proposal.num_drafted.clamp(min=1)
        rate = self.rate_decay * state["rate"] + (1 - self.rate_decay) * rate
        moved = state["threshold"] + self.step_size * torch.sign(self.target_rate - rate)
        threshold = self.threshold_decay * state["threshold"] + (1 - self.threshold_decay) * moved
        return {
            "threshold": torch.where(drafted, threshold.clamp(0, 1), state["threshold"]),
            "rate": torch.where(drafted, rate, state["rate"]),
        }
