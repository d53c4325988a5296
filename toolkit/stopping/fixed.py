"""Always draft the same number of tokens: the baseline every policy is measured against, tuned per workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from toolkit.config.notes import AtLeast
from toolkit.config.values import check_ranges
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import Step


@dataclass(frozen=True)
class Fixed(StoppingPolicy):
    """Draft the same number of tokens in every round.

    num_drafted  K; 0 is plain target decoding
    """

    name = "fixed"
    num_drafted: Annotated[int, AtLeast(0)] = 4
    uses_history: ClassVar[bool] = False
    needs_draft_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    @property
    def limit(self) -> int:  # type: ignore[override]
        return self.num_drafted

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        assert step.tokens is not None
        return state, torch.full_like(step.tokens, step.depth < self.num_drafted, dtype=torch.bool)
