"""AdaEDL: an entropy bound on acceptance against a threshold that moves towards a wanted acceptance rate.

Paper: AdaEDL (arXiv:2410.18351), section 3. theirs -> ours: gamma -> factor, lambda -> threshold, alpha -> target_rate,
beta_1 -> rate_decay, beta_2 -> threshold_decay, epsilon -> rate_step.
After each round the acceptance rate is averaged (rate_decay), and the threshold moves by `step_size` up if the average
is below the wanted rate and down if it is above, averaged itself (threshold_decay).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import DraftStep, Proposal, Verdict


@dataclass(frozen=True)
class AdaEdl(StoppingPolicy):
    """Stop when 1 - sqrt(factor * H(q_k)) < lambda, H in nats of the unwarped law; lambda starts at `threshold`."""

    threshold: float = 0.4
    factor: float = 0.2
    target_rate: float = 0.9
    rate_decay: float = 0.5
    threshold_decay: float = 0.9
    step_size: float = 0.01

    def __post_init__(self) -> None:
        for name in ("threshold", "target_rate", "rate_decay", "threshold_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"policy.{name}: expected a number in [0, 1], got {getattr(self, name)}")
        if self.factor < 0 or self.step_size < 0:
            raise InputError(f"expected policy.factor and policy.step_size >= 0, got {self.factor}, {self.step_size}")

    def init(self, num_rows: int, device: torch.device) -> State:
        return {
            "threshold": torch.full((num_rows,), self.threshold, device=device),
            "rate": torch.full((num_rows,), self.target_rate, device=device),
        }

    def step(self, step: DraftStep, state: State) -> tuple[State, Tensor]:
        bound = 1 - (self.factor * step.entropy).sqrt()
        return state, bound >= state["threshold"]

    def observe(self, proposal: Proposal, verdict: Verdict, state: State) -> State:
        drafted = proposal.num_drafted > 0
        rate = verdict.length / proposal.num_drafted.clamp(min=1)
        rate = self.rate_decay * state["rate"] + (1 - self.rate_decay) * rate
        moved = state["threshold"] + self.step_size * torch.sign(self.target_rate - rate)
        threshold = self.threshold_decay * state["threshold"] + (1 - self.threshold_decay) * moved
        return {
            "threshold": torch.where(drafted, threshold.clamp(0, 1), state["threshold"]),
            "rate": torch.where(drafted, rate, state["rate"]),
        }
