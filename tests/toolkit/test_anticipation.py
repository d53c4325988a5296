"""What `check_anticipation` sees: policies whose draws decide whether they are sent, each only where it is easy to miss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from toolkit.decoding import BlockProposer, ChainProposer
from toolkit.stopping import StoppingPolicy
from toolkit.testing import check_anticipation

DEEPEST = 8


@dataclass(frozen=True)
class CutsAfterDrawing(StoppingPolicy):
    """A control: a drafted round ends before the first position that is unwanted, by anything that the round has shown.

    unwanted  of (num_drafted [B, 1], state): positions [B, D] bool. The state has by position the `drawn` token, its
              probability `prob` and the `largest` one, and [B, 1] each the earlier `rounds` and how many rows are `live`
    """

    unwanted: Callable[[Tensor, dict[str, Tensor]], Tensor]
    couples_rows: bool = False
    reads_context: bool = False

    def init(self, num_rows, device):
        by_depth = {name: torch.zeros(num_rows, DEEPEST, device=device) for name in ("drawn", "prob", "largest")}
        return {**by_depth, **{name: torch.zeros(num_rows, 1, device=device) for name in ("rounds", "live", "context")}}

    def begin(self, live, state):
        state = {**state, "live": live.sum().expand(len(live), 1)}
        return state, live

    def step(self, step, state):
        depth = torch.arange(1, DEEPEST + 1) == step.depth
        new = {"drawn": step.tokens, "prob": step.token_prob, "largest": step.top_probs[:, 0]}
        written = {name: torch.where(depth, value.unsqueeze(1).float(), state[name]) for name, value in new.items()}
        return {**state, **written}, torch.ones_like(step.tokens, dtype=torch.bool)

    def sent(self, num_drafted, state):
        drafted = torch.arange(DEEPEST) < num_drafted.unsqueeze(1)
        unwanted = self.unwanted(num_drafted.unsqueeze(1), state) & drafted
        return torch.where(unwanted.any(1), unwanted.int().argmax(1), num_drafted)

    def observe(self, proposal, verdict, state):
        return {**state, "rounds": state["rounds"] + 1}


def unlikely(state):
    return state["prob"] < 0.5


CONTROLS = {
    "a rare token": CutsAfterDrawing(lambda count, state: state["prob"] < 0.2),
    "where the largest q exceeds .8": CutsAfterDrawing(lambda count, state: unlikely(state) & (state["largest"] > 0.8)),
    "a budget on the round's confidences": CutsAfterDrawing(
        lambda count, state: (state["largest"].sum(1, keepdim=True) < 0.77 * count) & (torch.arange(DEEPEST) > 0)),
    "in rounds of four": CutsAfterDrawing(lambda count, state: unlikely(state) & (count == 4)),
    "from the fourth round on": CutsAfterDrawing(lambda count, state: unlikely(state) & (state["rounds"] >= 3)),
    "with three live rows": CutsAfterDrawing(lambda count, state: unlikely(state) & (state["live"] == 3), couples_rows=True),
    "in texts of more than three tokens": CutsAfterDrawing(
        lambda count, state: unlikely(state) & (state["context"].reshape(-1, 1) > 3), reads_context=True),
    "by the neighbour's draw": CutsAfterDrawing(lambda count, state: state["drawn"].roll(1, 0) == 1, couples_rows=True),
}  # fmt: skip
