"""SVIP: stop where the draft's entropy says that acceptance may be low.

Paper: SVIP (arXiv:2411.18462), section 3: alpha >= 1 - sqrt(KL(q, p) / 2) (Pinsker), with the cross entropy taken as
proportional to H(q). theirs -> ours: h -> threshold; the factor .15 is the published code's.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from toolkit.errors import InputError
from toolkit.stopping.base import State, Thresholded
from toolkit.types import DraftStep


@dataclass(frozen=True)
class Svip(Thresholded):
    """Stop when sqrt(factor * H(q_k)) > threshold, H in nats of the unwarped law that y_k is drawn from."""

    threshold: float = 0.3
    factor: float = 0.15

    def __post_init__(self) -> None:
        if self.threshold < 0 or self.factor < 0:
            raise InputError(f"expected policy.threshold and policy.factor >= 0, got {self.threshold}, {self.factor}")

    @property
    def level(self) -> float:
        return -self.threshold

    def score(self, step: DraftStep, state: State) -> tuple[State, Tensor]:
        return state, -(self.factor * step.entropy).sqrt()
