"""The steps of a recording that a round visits, by where it starts. They follow from the acceptance draws alone.

Logits of a head lie per step [S], or [S, 2]. A head may read the depth in the round, and rounds from different starts
visit a step at different depths. Its logits lie per start and depth, [P, M + 1, 1] or [P, M + 1, 2].

Shapes: P positions, S steps of the trace, M max_drafted; B rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.trace.trace import Trace


@dataclass(frozen=True)
class Geometry:
    """Properties of a round that starts before position i (all [P]). They follow from the acceptance draws alone.

    run    accepted positions from i on, before the first rejected one or the text's end
    left   positions from i to the text's end
    room   how many tokens a round may draft there
    edge   positions that a round follows before it gets to a roll-out: up to the first rejected one or the text's last; in
           recordings by start none but its first
    steps  index and existence [M + 1, P] each, as `step_at` gives them for every start and depth; None: not worked out
    """

    run: Tensor
    left: Tensor
    room: Tensor
    edge: Tensor
    steps: tuple[Tensor, Tensor] | None = None

    def with_steps(self, trace: Trace) -> Geometry:
        """The same with `steps` worked out, which is faster where `step_at` is called often for few starts at a time."""
        starts = torch.arange(trace.num_positions)
        steps = [step_at(trace, self, starts, depth) for depth in range(1, trace.max_drafted + 2)]
        index, exists = (torch.stack(values) for values in zip(*steps, strict=True))
        return replace(self, steps=(index, exists))

    @classmethod
    def of(cls, trace: Trace) -> Geometry:
        position = torch.arange(trace.num_positions)
        text = torch.repeat_interleave(torch.arange(trace.num_texts), trace.lengths())
        end = trace.text_first[1:][text]
        left = end - position
        room = (trace.room[text] - (position - trace.text_first[:-1][text])).clamp(min=0)
        if trace.run is not None:
            return cls(torch.minimum(trace.run.long(), left), left, room, torch.zeros_like(left))
        rejected = torch.where(trace.accepted, trace.num_positions, position)
        run = torch.minimum(rejected.flip(0).cummin(0).values.flip(0), end) - position
        return cls(run, left, room, torch.minimum(run, left - 1))


def step_at(trace: Trace, geometry: Geometry, starts: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The step that a round visits at `depth` (from 1): its index [B], and whether the recording reaches there [B]."""
    if geometry.steps is not None and depth <= len(geometry.steps[0]):
        return geometry.steps[0][depth - 1, starts], geometry.steps[1][depth - 1, starts]
    ahead = depth - 1
    edge = geometry.edge[starts]
    position = starts + edge.clamp(max=ahead)
    into_roll = ahead - edge - 1  # steps into the roll-out
    index = torch.where(into_roll < 0, position, trace.roll_first[position] + into_roll)
    exists = (into_roll < 0) | (into_roll < trace.roll_length[position])
    return torch.where(exists, index, 0), exists


def logits_at(trace: Trace, logits: Tensor, index: Tensor, depth: int) -> Tensor:
    """A head's logits [B], or [B, 2], at steps [B] that rounds visit at a depth.

    Raises InputError for a depth that is not recorded.
    """
    if logits.dim() < 3:
        return logits[index]
    if depth > logits.shape[1]:
        raise InputError(f"this head's logits are recorded up to depth {logits.shape[1]}, got {depth}: lower max_depth")
    values = logits[(trace.step_positions[index] - (depth - 1)).clamp(min=0), depth - 1]
    return values.squeeze(-1) if values.shape[-1] == 1 else values
