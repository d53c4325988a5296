"""Traces for training pre-read heads with output=block: drafted chains from every start, with block verification's P_i.

A round may start at every position of a text. The tokens that the draft draws from there are recorded: on path up to the first
rejected token, then its roll-out. P_i follows from p and q of every drafted token
(`toolkit.verification.rules.block.survival`). An example is a start and a depth k. Its labels are P_k, and P_{k+1} of the
token that was drawn next. The second label is one sample of the mean that the second output predicts.

Depth k in 1..M of a start's chain has weight P_{k-1}, the probability that the block was kept so far. A policy seldom gets
further. One depth is drawn per start, once for all epochs. All starts weigh alike, as in `toolkit.training.depths`.

Shapes: P positions, M most tokens of a recorded round, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.acceptance.inputs import Inputs
from toolkit.errors import InputError
from toolkit.trace import Trace
from toolkit.trace.rounds import Geometry, step_at
from toolkit.trace.step import RecordedStep
from toolkit.training.states import Positions, States
from toolkit.verification.rules.block import survival

MEND = (
    "record them with upper_bound=true and max_drafted of 2 or more; those that an older version recorded so, again, with "
    "overwrite=true"
)


class BlockStates(States):
    """One example per position of some texts, as a start: features [P, F], labels [P, 2], not a number where there is none.

    inputs  what the head to be trained reads; seed: of the depths
    Raises InputError if the recording lacks p of the drafted tokens, or roll-outs.
    """

    def __init__(self, trace: Trace, texts: Sequence[int], table: Tensor, inputs: Inputs | None = None, seed: int = 0):
        self.trace, self.table, self.inputs = trace, table, inputs or Inputs()
        self.first, self.last = trace.text_first[:-1][list(texts)], trace.text_first[1:][list(texts)]
        self.num_examples, self.num_positions = len(texts), int((self.last - self.first).sum())
        self.steps, self.depths, self.labels = chosen_steps(trace, torch.Generator().manual_seed(seed))

    def batch(self, examples: Sequence[int]) -> Positions:
        starts = torch.cat([torch.arange(int(self.first[text]), int(self.last[text])) for text in examples])
        step = RecordedStep(self.trace, 1, self.steps[starts])
        features = self.inputs.features(step, self.table, self.depths[starts])
        return Positions(features, self.labels[starts], step.token_prob)


def block_probs(trace: Trace) -> tuple[Tensor, Tensor]:
    """For every depth 1..M and start: the step there [M, P], and P_depth [M, P], not a number beyond the chain's end.

    Raises InputError if the recording does not hold p of all drafted tokens.
    """
    if trace.target_prob is None or bool(trace.target_prob.isnan().any()):
        raise InputError(
            f"head.output=block learns from p and q of all drafted tokens, which these traces lack: {MEND}"
        )
    geometry, starts = Geometry.of(trace), torch.arange(trace.num_positions)
    weight = torch.ones(trace.num_positions, dtype=torch.float64)
    steps, probs = [], []
    for depth in range(1, trace.max_drafted + 1):
        index, exists = step_at(trace, geometry, starts, depth)
        p, q = (values[index].double() for values in (trace.target_prob, trace.draft_prob))
        weight = torch.where(exists, survival(weight, p, q), torch.nan)
        steps.append(index)
        probs.append(weight)
    return torch.stack(steps), torch.stack(probs)


def chosen_steps(trace: Trace, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """One example per start: its step [P], depth [P] from 1, and labels [P, 2]. Raises InputError without roll-outs."""
    if trace.max_drafted < 2:
        raise InputError(f"head.output=block needs chains of drafted tokens, these traces hold single ones: {MEND}")
    steps, probs = block_probs(trace)
    before = torch.cat([torch.ones_like(probs[:1]), probs[:-1]])
    weights = torch.where(probs.isnan(), 0.0, before.nan_to_num(0.0)).cumsum(0)
    level = torch.rand(weights.shape[1], generator=generator, dtype=torch.float64) * weights[-1]
    chosen = (level >= weights).sum(0).clamp(max=len(steps) - 1)
    following = torch.cat([probs[1:], torch.full_like(probs[:1], torch.nan)])
    starts = torch.arange(len(chosen))
    labels = torch.stack([probs[chosen, starts], following[chosen, starts]], 1).float()
    return steps[chosen, starts], chosen + 1, labels
