"""Draft more after a round that was accepted whole, less after one that was not.

Known as transformers' `num_assistant_tokens_schedule="heuristic"`: K + 2 after full acceptance, else max(1, K - 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import DraftStep, Proposal, Verdict


@dataclass(frozen=True)
class Heuristic(StoppingPolicy):
    """K tokens a round; K starts at `num_drafted`, and starts there again with every prompt."""

    num_drafted: int = 5
    increase: int = 2
    decrease: int = 1

    def __post_init__(self) -> None:
        if self.num_drafted < 1 or self.increase < 0 or self.decrease < 0:
            raise InputError(
                "expected policy.num_drafted >= 1, policy.increase >= 0 and policy.decrease >= 0, got "
                f"{self.num_drafted}, {self.increase}, {self.decrease}"
            )

    def init(self, num_rows: int, device: torch.device) -> State:
        return {"length": torch.full((num_rows,), self.num_drafted, device=device)}

    def step(self, step: DraftStep, state: State) -> tuple[State, Tensor]:
        return state, step.depth < state["length"]

    def observe(self, proposal: Proposal, verdict: Verdict, state: State) -> State:
        whole = verdict.length == proposal.num_drafted
        length = torch.where(whole, state["length"] + self.increase, (state["length"] - self.decrease).clamp(min=1))
        return {"length": torch.where(proposal.num_drafted > 0, length, state["length"])}
