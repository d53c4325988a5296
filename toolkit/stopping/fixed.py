"""Always draft the same number of tokens: the baseline every policy is measured against, tuned per workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import DraftStep


@dataclass(frozen=True)
class Fixed(StoppingPolicy):
    """Draft `num_drafted` tokens; 0 is plain target decoding."""

    num_drafted: int = 4
    remembers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.num_drafted < 0:
            raise InputError(f"policy.num_drafted: expected 0 or more, got {self.num_drafted}")

    @property
    def limit(self) -> int:  # type: ignore[override]
        return self.num_drafted

    def step(self, step: DraftStep, state: State) -> tuple[State, Tensor]:
        assert step.tokens is not None
        return state, torch.full_like(step.tokens, step.depth < self.num_drafted, dtype=torch.bool)
