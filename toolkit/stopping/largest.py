"""Send a position while the draft's distribution there is sure of some token: a baseline for block drafts.

vLLM's `draft_confidence_threshold` compares the same number, and so does llama.cpp's `--spec-draft-p-min` for chains
(method=p_min; its probability is of the ten best tokens alone, and so a little larger). `confidence` reads the drawn token's
probability and decides about the next position. This one decides about the position itself, before its token is drawn: in a
chain the forward pass that ends a round is paid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from toolkit.config.notes import Probability
from toolkit.config.values import check_ranges
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import Step


@dataclass(frozen=True)
class Largest(StoppingPolicy):
    """Send position k while the largest probability of q_k is at least `threshold`, q_k unwarped.

    threshold  larger means shorter rounds
    """

    name = "largest"
    reads: ClassVar[bool] = True
    uses_history: ClassVar[bool] = False
    threshold: Annotated[float, Probability] = 0.4

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    def read(self, step: Step, state: State) -> tuple[State, Tensor]:
        return state, step.top_probs[:, 0] >= self.threshold
