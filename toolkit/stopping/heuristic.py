"""Draft more after a round that was accepted whole, less after one that was not.

The rule is transformers' `num_assistant_tokens_schedule="heuristic"`: K + 2 after full acceptance, else max(1, K - 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from toolkit.config.notes import AtLeast
from toolkit.config.values import check_ranges
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import Drafted, Step, Verified


@dataclass(frozen=True)
class Heuristic(StoppingPolicy):
    """K tokens a round, more or fewer than in the last one.

    num_drafted  K of every prompt's first round
    increase     how much K grows after a round that was accepted whole
    decrease     how much it shrinks after any other, down to 1
    """

    name = "heuristic"
    num_drafted: Annotated[int, AtLeast(1)] = 5
    increase: Annotated[int, AtLeast(0)] = 2
    decrease: Annotated[int, AtLeast(0)] = 1
    needs_draft_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    def init(self, num_rows: int, device: torch.device) -> State:
        return {"length": torch.full((num_rows,), self.num_drafted, device=device)}

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        return state, step.depth < state["length"]

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        whole = verdict.length == proposal.num_drafted
        length = torch.where(whole, state["length"] + self.increase, (state["length"] - self.decrease).clamp(min=1))
        return {"length": torch.where(proposal.num_drafted > 0, length, state["length"])}
