"""The steps of a recording that a round visits, by where it starts, and a step as policies and heads read it: no model runs.

They follow from the acceptance draws alone. Logits of a head lie per step [S], or [S, 2]. A head may read the depth in the
round, and rounds from different starts visit a step at different depths. Its logits lie per start and depth, [P, M + 1, 1] or
[P, M + 1, 2].

Shapes: P positions, S steps of the trace, M max_drafted; B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.grammar.walk import FORCED
from toolkit.stopping.base import State, StoppingPolicy, in_context
from toolkit.trace.trace import OLDER, CutError, Rows, Trace
from toolkit.types import STEP_NAMES, UNDRAWN, History


@dataclass(frozen=True)
class Geometry:
    """Properties of a round that starts before position i (all [P]). They follow from the acceptance draws alone.

    run    accepted positions from i on, before the first rejected one or the text's end
    left   positions from i to the text's end
    room   how many tokens a round may draft there
    edge   positions that a round follows before it gets to a roll-out: up to the first rejected one or the text's last; in
           recordings by start none but its first
    context tokens of prompt and text before it; None: the recording does not tell
    cut    whether the roll-out that the round gets to was cut; None: none was
    steps  index and existence [M + 1, P] each, as `recorded_at` gives them for every start and depth; None: not worked out
    """

    run: Tensor
    left: Tensor
    room: Tensor
    edge: Tensor
    context: Tensor | None = None
    cut: Tensor | None = None
    steps: tuple[Tensor, Tensor] | None = None

    def in_context(self, policy: StoppingPolicy, state: State, starts: Tensor) -> State:
        """The state before rounds from `starts` [B], as live decoding gives it to a policy that reads the context's length."""
        return in_context(policy, state, None if self.context is None else self.context[starts])

    def with_steps(self, trace: Trace) -> Geometry:
        """The same with `steps` worked out, which is faster where `recorded_at` is called often for few starts at a time."""
        starts = torch.arange(trace.num_positions)
        steps = [recorded_at(trace, self, starts, depth) for depth in range(1, trace.max_drafted + 2)]
        index, exists = (torch.stack(values) for values in zip(*steps, strict=True))
        return replace(self, steps=(index, exists))

    @classmethod
    def of(cls, trace: Trace) -> Geometry:
        position = torch.arange(trace.num_positions)
        text = torch.repeat_interleave(torch.arange(trace.num_texts), trace.lengths())
        end = trace.text_first[1:][text]
        left = end - position
        room = (trace.room[text] - (position - trace.text_first[:-1][text])).clamp(min=0)
        context = None
        if trace.prompt_lengths is not None:
            context = trace.prompt_lengths[text] + position - trace.text_first[:-1][text]
        if trace.run is not None:
            return cls(torch.minimum(trace.run.long(), left), left, room, torch.zeros_like(left), context)
        rejected = torch.where(trace.accepted, trace.num_positions, position)
        run = torch.minimum(rejected.flip(0).cummin(0).values.flip(0), end) - position
        edge = torch.minimum(run, left - 1)
        return cls(run, left, room, edge, context, None if trace.roll_cut is None else trace.roll_cut[position + edge])


@dataclass(frozen=True)
class Certain:
    """The tokens of rounds [...] that a grammar left alone: they say nothing of acceptance.

    drafted  among the drafted tokens;  after  those that ride along after them;  kept  the accepted ones of both
    """

    drafted: Tensor
    after: Tensor
    kept: Tensor

    def where(self, chosen: Tensor, other: Certain | None) -> Certain:
        """These in the chosen rounds [B] bool, else the others. Raises InputError if there are none."""
        if other is None:
            raise InputError("a recording under a grammar, and copies without it: expected both of the same texts")
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Certain(*(torch.where(chosen, own, others) for own, others in pairs))

    @classmethod
    def of(cls, trace: Trace, geometry: Geometry, starts: Tensor, num_drafted: Tensor) -> Certain | None:
        """Of rounds from `starts` [B] that draft `num_drafted` [..., B]; None: the recording knows no grammar."""
        if trace.certain is None or trace.certain_after is None:
            return None
        run, first = geometry.run[starts], trace.certain[starts]
        drafted, kept = torch.zeros_like(num_drafted), torch.zeros_like(num_drafted)
        after = torch.where(first, 1 + trace.certain_after[starts], 0).expand_as(num_drafted)
        for depth in range(1, int(num_drafted.max()) + 1):
            index, _ = recorded_at(trace, geometry, starts, depth)
            certain = trace.certain[index] & (num_drafted >= depth)
            drafted, kept = drafted + certain, kept + (certain & (run >= depth))
            after = torch.where(num_drafted == depth, trace.certain_after[index], after)
        after = after.clamp(max=FORCED).minimum((geometry.room[starts] - num_drafted).clamp(min=0))
        return cls(drafted, after, kept + torch.where(run >= num_drafted, after, 0))


def step_at(trace: Trace, geometry: Geometry, starts: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The step that a round visits at `depth` (from 1): its index [B], and whether there is one [B].

    Raises CutError where roll-outs were cut before.
    """
    index, exists = recorded_at(trace, geometry, starts, depth)
    if geometry.cut is not None:
        check_recorded([cut_before(geometry, starts, geometry.cut[starts] & ~exists)])
    return index, exists


def cut_before(geometry: Geometry, starts: Tensor, rows: Tensor) -> Tensor:
    """The positions [n] that the roll-outs follow which rounds from `starts` [B] get to, of some rows [B] bool."""
    return (starts + geometry.edge[starts])[rows]


def check_recorded(positions: Sequence[Tensor]) -> None:
    """Raises CutError if any roll-out after these positions [n] was to go on."""
    wanted = torch.cat([torch.zeros(0, dtype=torch.long), *positions]).unique()
    if len(wanted):
        raise CutError(wanted)


def recorded_at(trace: Trace, geometry: Geometry, starts: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """As `step_at`; where roll-outs were cut before, there is no step."""
    if geometry.steps is not None and depth <= len(geometry.steps[0]):
        return geometry.steps[0][depth - 1, starts], geometry.steps[1][depth - 1, starts]
    ahead = depth - 1
    edge = geometry.edge[starts]
    position = starts + edge.clamp(max=ahead)
    into_roll = ahead - edge - 1  # steps into the roll-out
    index = torch.where(into_roll < 0, position, trace.roll_first[position] + into_roll)
    exists = (into_roll < 0) | (into_roll < trace.roll_length[position])
    return torch.where(exists, index, 0), exists


def step_after(trace: Trace, steps: Tensor) -> tuple[Tensor, Tensor]:
    """The step that reads the token of each of these [n]: its index [n], and whether it was recorded [n].

    steps  any steps of a recording by start; of others, positions
    """
    if trace.run is None:
        return step_at(trace, Geometry.of(trace), steps, 2)
    last = trace.num_positions - 1
    after = torch.where(steps > last, steps + 1, trace.roll_first[steps.clamp(max=last)]).clamp(max=trace.num_steps - 1)
    return after, trace.steps_before[after] == steps


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


@dataclass
class RecordedStep:
    """A DraftStep read from a trace, with the same names for the statistics that a policy may ask for."""

    trace: Trace
    depth: int
    index: Tensor  # [B] steps of the trace
    drawn: bool = True
    live: Tensor | None = None  # [B] rows that are drafting, of a simulated batch
    device: torch.device | None = None  # where what is read goes; None: it stays on the CPU

    def _read(self, values: Tensor | Rows) -> Tensor:
        return values[self.index] if self.device is None else values[self.index].to(self.device)

    def _read_drawn(self, values: Tensor) -> Tensor:
        """Facts of y_k. Raises InputError while it has not been drawn."""
        if not self.drawn:
            raise InputError(UNDRAWN)
        return self._read(values)

    @property
    def tokens(self) -> Tensor | None:
        """y_k [B]."""
        return self._read(self.trace.tokens).long() if self.drawn else None

    @property
    def draft_prob(self) -> Tensor:
        """q_k(y_k), warped [B]."""
        return self._read_drawn(self.trace.draft_prob)

    @property
    def token_prob(self) -> Tensor:
        """Unwarped probability of y_k [B]."""
        return self._read_drawn(self.trace.token_prob)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the unwarped distribution [B], nats."""
        return self._read(self.trace.entropy)

    @property
    def top_probs(self) -> Tensor:
        """The two largest unwarped probabilities [B, 2]."""
        return self._read(self.trace.top_probs)

    @property
    def margin(self) -> Tensor:
        """Difference of the two largest unwarped probabilities [B]."""
        return self.top_probs[:, 0] - self.top_probs[:, 1]

    @property
    def hidden(self) -> Tensor:
        """States [B, D] that produced q_k, in the draft's number format (float16 in recordings of older versions)."""
        states = self._hidden(self.index)
        return states if self.device is None else states.to(self.device)

    @property
    def match(self) -> None:
        """None: recordings are of draft models."""

    def history(self, count: int) -> History:
        """The `count` positions before the step, as live decoding keeps them.

        Raises InputError if the trace is too old to hold the texts' own tokens, or recorded by start.
        """
        trace = self.trace
        if trace.run is not None:
            raise InputError(
                "a recording of a draft that reads the target's states: expected a head with head.earlier=0"
            )
        if trace.text_tokens is None or trace.text_prob is None:
            raise InputError(OLDER)
        steps = [self.index]
        for _ in range(count):
            steps.append(torch.where(steps[-1] < 0, -1, trace.steps_before[steps[-1].clamp(min=0)]))
        following = torch.stack(steps[:-1][::-1], 1)  # which step came after each of them
        before = torch.stack(steps[1:][::-1], 1)
        present, at = before >= 0, before.clamp(min=0)
        on_path = (following < trace.num_positions) & present  # these positions hold the text's own token
        position = torch.where(on_path, at, 0)
        tokens = torch.where(on_path, trace.text_tokens[position], trace.tokens[at]).long()
        token_prob = torch.where(on_path, trace.text_prob[position], trace.token_prob[at])
        likelihood, number = (values[self.index] for values in trace.likelihood)
        columns = (self._hidden(at), tokens, token_prob, trace.entropy[at], trace.top_probs[at])
        masked = (values * present.view(*present.shape, *[1] * (values.dim() - 2)) for values in columns)
        fields = (*masked, present, likelihood, number)
        return History(*(values if self.device is None else values.to(self.device) for values in fields))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Names of a live step that a recording does not hold: distributions over the whole vocabulary."""
            if name in STEP_NAMES:  # its property has raised an AttributeError of its own: again, as it is
                object.__getattribute__(self, name)
            raise AttributeError(f"a recorded step has no {name}: policies may read {', '.join(STEP_NAMES)}")

    def _hidden(self, index: Tensor) -> Tensor:
        if self.trace.hidden is None:
            raise InputError("this trace holds no hidden states: record it with hidden=true, or with the policy's head")
        return self.trace.hidden[index]

    def head_logits(self, head: Any) -> Tensor:
        """The recorded raw logits of a head [B], or [B, 2] of a pre-read one; the head is read by its `key` alone."""
        logits = logits_at(self.trace, self.trace.head_logits(head.key), self.index, self.depth)
        return logits if self.device is None else logits.to(self.device)
