"""SVIP: stop where the draft's entropy says that acceptance may be low.

Paper: SVIP (arXiv:2411.18462), section 3: alpha >= 1 - sqrt(KL(q, p) / 2) (Pinsker), with the cross entropy taken as
proportional to H(q). theirs -> ours: h -> threshold; the factor .15 is the published code's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from toolkit.config.notes import AtLeast
from toolkit.config.values import check_ranges
from toolkit.stopping.base import State, Thresholded
from toolkit.types import Step


@dataclass(frozen=True)
class Svip(Thresholded):
    """Stop when sqrt(factor * H(q_k)) > threshold, H in nats of the unwarped distribution that y_k is drawn from.

    threshold  h; larger means longer rounds
    factor     of the entropy
    """

    name = "svip"
    threshold: Annotated[float, AtLeast(0)] = 0.3
    factor: Annotated[float, AtLeast(0)] = 0.15

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    @property
    def level(self) -> float:
        return -self.threshold

    def score(self, step: Step, state: State) -> tuple[State, Tensor]:
        return state, -(self.factor * step.entropy).sqrt()
