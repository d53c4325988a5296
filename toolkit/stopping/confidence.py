"""Stop at a token the draft itself is not sure of.

Known as transformers' `assistant_confidence_threshold` (their default t = .4) and llama.cpp's `draft-p-min`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from toolkit.errors import InputError
from toolkit.stopping.base import State, Thresholded
from toolkit.types import DraftStep


@dataclass(frozen=True)
class Confidence(Thresholded):
    """Stop when q(y_k) < threshold, q unwarped. The token is sent all the same."""

    threshold: float = 0.4

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise InputError(f"policy.threshold: expected a probability in [0, 1], got {self.threshold}")

    @property
    def level(self) -> float:
        return self.threshold

    def score(self, step: DraftStep, state: State) -> tuple[State, Tensor]:
        return state, step.token_prob
