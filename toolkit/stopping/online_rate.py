"""The rate rule with an estimator that learns from the verdicts of the text: no head, no recording, no threshold.

The rule is `rate`'s. The estimator's weights are in the state, and so every row has its own (`LearningEstimator`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from toolkit.stopping.base import LearningEstimator, State, StoppingPolicy, entry_probs
from toolkit.stopping.rate import Rate
from toolkit.types import Drafted, Step, Verified


@dataclass(frozen=True)
class OnlineRate(Rate):
    """`Rate` with weights that begin again with every prompt.

    estimator   gives weights that lie in the state and learn from the verdicts

    The rest is `Rate`'s.
    """

    name = "online_rate"
    reads_states: ClassVar[bool] = False
    estimator: LearningEstimator  # type: ignore[assignment]

    @property
    def uses_history(self) -> bool:  # type: ignore[override]
        return True

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state of `Rate`, and the estimator's weights."""
        return {**super().init(num_rows, device), **self.estimator.init(num_rows, self.deepest, device)}

    def score(self, step: Step, state: State) -> tuple[State, Tensor]:
        survival, following = entry_probs(self.estimator.at(state), step, state["survival"])
        return {**state, **self.estimator.read(step, state), "survival": survival}, following

    def foresee(self, step: Step) -> Tensor | None:  # type: ignore[override]
        return StoppingPolicy.foresee(self, step)

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        learned = self.estimator.learn(proposal.num_drafted, verdict.length, state)
        return {**super().observe(proposal, verdict, state), **learned}
