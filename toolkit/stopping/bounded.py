"""Bounds around any policy: never stop before `min_drafted`, never go beyond `max_drafted` (both inclusive)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import DraftStep, Proposal, Verdict


@dataclass(frozen=True)
class Bounded(StoppingPolicy):
    """`policy` between bounds. A policy that asks for no draft at all (`begin`) is not overruled."""

    policy: StoppingPolicy
    min_drafted: int = 1
    max_drafted: int = 20

    def __post_init__(self) -> None:
        if not 0 <= self.min_drafted <= max(self.max_drafted, self.min_drafted) or self.max_drafted < 0:
            raise InputError(
                f"expected 0 <= min_drafted and 0 <= max_drafted, got {self.min_drafted}, {self.max_drafted}"
            )

    @property
    def limit(self) -> int:  # type: ignore[override]
        own = self.policy.limit
        return self.max_drafted if own is None else min(own, self.max_drafted)

    @property
    def reads(self) -> bool:  # type: ignore[override]
        return self.policy.reads

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return self.policy.remembers

    def bind(self, pair: object) -> Bounded:
        return Bounded(self.policy.bind(pair), self.min_drafted, self.max_drafted)

    def init(self, num_rows: int, device: torch.device) -> State:
        return self.policy.init(num_rows, device)

    def begin(self, num_rows: int, state: State, device: torch.device) -> Tensor:
        if self.limit == 0:
            return torch.zeros(num_rows, dtype=torch.bool, device=device)
        return self.policy.begin(num_rows, state, device)

    def step(self, step: DraftStep, state: State) -> tuple[State, Tensor]:
        state, go_on = self.policy.step(step, state)
        if step.depth < self.min_drafted:
            go_on = torch.ones_like(go_on)
        return state, go_on if step.depth < self.limit else torch.zeros_like(go_on)

    def read(self, step: DraftStep, state: State) -> tuple[State, Tensor]:
        state, go_on = self.policy.read(step, state)
        return state, torch.ones_like(go_on) if step.depth <= self.min_drafted else go_on

    def foresee(self, step: DraftStep) -> Tensor | None:
        return self.policy.foresee(step)

    def observe(self, proposal: Proposal, verdict: Verdict, state: State) -> State:
        return self.policy.observe(proposal, verdict, state)
