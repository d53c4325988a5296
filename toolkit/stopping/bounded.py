"""Bounds around any policy: never stop before `min_drafted`, never go beyond `max_drafted` (both inclusive)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from toolkit.config.notes import AtLeast
from toolkit.config.values import check_ranges
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import Children, Drafted, Match, Nodes, Step, Verified


@dataclass(frozen=True)
class Bounded(StoppingPolicy):
    """`policy` between bounds. If the policy asks for no draft at all (`begin`), the round has no draft."""

    passes_on: ClassVar[bool] = True
    policy: StoppingPolicy
    min_drafted: Annotated[int, AtLeast(0)] = 1
    max_drafted: Annotated[int, AtLeast(0)] = 20

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def limit(self) -> int:  # type: ignore[override]
        own = self.policy.limit
        return self.max_drafted if own is None else min(own, self.max_drafted)

    @property
    def reads(self) -> bool:  # type: ignore[override]
        return self.policy.reads

    @property
    def uses_history(self) -> bool:  # type: ignore[override]
        return self.policy.uses_history

    @property
    def couples_rows(self) -> bool:  # type: ignore[override]
        return self.policy.couples_rows

    @property
    def needs_draft_model(self) -> bool:  # type: ignore[override]
        return self.policy.needs_draft_model

    @property
    def reads_matches(self) -> bool:  # type: ignore[override]
        return self.policy.reads_matches

    @property
    def reads_context(self) -> bool:  # type: ignore[override]
        return self.policy.reads_context

    @property
    def reads_states(self) -> bool:  # type: ignore[override]
        return self.policy.reads_states

    @property
    def num_history(self) -> int:
        return self.policy.num_history

    def bind(self, pair: object) -> Bounded:
        return replace(self, policy=self.policy.within(self.limit).bind(pair))

    def init(self, num_rows: int, device: torch.device) -> State:
        return self.policy.init(num_rows, device)

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        if self.limit == 0:
            return state, torch.zeros_like(live)
        return self.policy.begin(live, state)

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        state, go_on = self.policy.step(step, state)
        if step.depth < self.min_drafted:
            go_on = torch.ones_like(go_on)
        return state, go_on if step.depth < self.limit else torch.zeros_like(go_on)

    def read(self, step: Step, state: State) -> tuple[State, Tensor]:
        state, go_on = self.policy.read(step, state)
        return state, torch.ones_like(go_on) if step.depth <= self.min_drafted else go_on

    @property
    def plans_copies(self) -> bool:  # type: ignore[override]
        return self.policy.plans_copies

    def plan(self, match: Match, available: Tensor, live: Tensor, state: State) -> tuple[State, Tensor]:
        available = available.clamp(max=self.limit)
        state, length = self.policy.plan(match, available, live, state)
        return state, torch.maximum(length, available.clamp(max=self.min_drafted))

    @property
    def chooses_nodes(self) -> bool:  # type: ignore[override]
        return self.policy.chooses_nodes

    def judge(self, children: Children) -> Tensor:
        return self.policy.judge(children)

    def choose(self, nodes: Nodes, state: State) -> tuple[State, Tensor, Tensor]:
        state, num_sent, read = self.policy.choose(nodes, state)
        return state, num_sent.clamp(min=self.min_drafted), read

    def foresee(self, step: Step) -> Tensor | None:
        return self.policy.foresee(step)

    def sent(self, num_drafted: Tensor, state: State) -> Tensor:
        return torch.maximum(self.policy.sent(num_drafted, state), num_drafted.clamp(max=self.min_drafted))

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        return self.policy.observe(proposal, verdict, state)
