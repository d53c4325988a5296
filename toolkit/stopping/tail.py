"""Stop when the draft's own probability of the whole drafted chain gets small (saturation tail-prune).

theirs -> ours: theta -> threshold. Constants in use: .2 for chains, .05 for trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from toolkit.config.notes import Probability
from toolkit.config.values import check_ranges
from toolkit.stopping.base import State, Thresholded
from toolkit.types import Drafted, Step, Verified


@dataclass(frozen=True)
class Tail(Thresholded):
    """Stop when q(y_1) ... q(y_k) < threshold, q unwarped.

    threshold  theta; larger means shorter rounds
    """

    name = "tail"
    threshold: Annotated[float, Probability] = 0.2

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    def init(self, num_rows: int, device: torch.device) -> State:
        return {"product": torch.ones(num_rows, dtype=torch.float32, device=device)}

    @property
    def level(self) -> float:
        return self.threshold

    def score(self, step: Step, state: State) -> tuple[State, Tensor]:
        product = state["product"] * step.token_prob
        return {"product": product}, product

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        return {"product": torch.ones_like(state["product"])}
