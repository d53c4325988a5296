"""Stop at a token the draft itself is not sure of.

The rule is known as transformers' `assistant_confidence_threshold` (their default t = .4) and llama.cpp's `draft-p-min`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from toolkit.config.notes import Probability
from toolkit.config.values import check_ranges
from toolkit.stopping.base import State, Thresholded
from toolkit.types import Step


@dataclass(frozen=True)
class Confidence(Thresholded):
    """Stop when q(y_k) < threshold, q unwarped. The token is sent all the same.

    threshold  t; larger means shorter rounds
    """

    name = "confidence"
    threshold: Annotated[float, Probability] = 0.4

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    @property
    def level(self) -> float:
        return self.threshold

    def score(self, step: Step, state: State) -> tuple[State, Tensor]:
        return state, step.token_prob
