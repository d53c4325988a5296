"""A Trace: a record of responses from which any stopping policy can be replayed, exactly in distribution.

For a lossless chain rule the text does not depend on the policy. Let X_1..X_N be a text of the target. Position i holds an
accepted draft with probability min(1, q(X_i)/p(X_i)). Else the draft's token there is drawn from norm((q - p)+), and X_i
is the correction. This is the joint distribution of (drafted token, accepted, emitted token) given the emitted token. The
acceptance draws are made once, when the trace is recorded. After every rejected position the draft goes on drafting. A
policy sees this roll-out, because it does not know of the rejection yet, nor of the stop string that has ended the text.
A recording for some policies is **cut**: a roll-out ends where none of them goes on. What goes on there raises `CutError`.

A **step** is one drafted token with what the draft's forward pass gave. Steps 0..P-1 are the positions of all texts, one text
after another ("on path"); the roll-outs' steps follow. A round that starts after s tokens of a text visits the text's
positions s+1, s+2, ... up to the first rejected one or the last, and then that position's roll-out.

A draft that reads the target's states says something else about a position in every round. Its recordings are
**by start**: a round visits the position that it starts at, and then that position's roll-out, whatever is accepted. `run`
tells how many of its tokens are. Acceptance draws are made per start and depth (`toolkit.trace.record_by_start`).

Shapes: T texts, P positions of all texts, S >= P steps, D hidden size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.files.tensors import load_tensors, save_tensors
from toolkit.files.text import first_line
from toolkit.grammar.walk import FORCED
from toolkit.types import SMALLEST

PER_TEXT = ("room", "rows", "prompt_lengths")
PER_POSITION = (
    "accepted", "roll_cut", "roll_first", "roll_length", "run", "target_entropy", "text_accept_prob", "text_prob",
    "text_tokens",
)  # fmt: skip
STORED = {"text_accept_prob": "chance"}  # names in files, where they differ: recordings of earlier revisions load

OLDER = "this recording does not hold the texts' own tokens, which heads with earlier positions read: record it again"


class CutError(InputError):
    """Something goes on where a recording's roll-outs were cut, after `positions` [n] of the trace."""

    def __init__(self, positions: Tensor):
        super().__init__(
            f"{len(positions)} roll-outs of this recording were cut where something goes on: expected a whole recording "
            "(`Store.trace` without policies), or one for this policy"
        )
        self.positions = positions


class Rows:
    """Rows of several tensors [n_i, D] as those of one. Of memory-mapped files only the selected rows are read."""

    def __init__(self, parts: Sequence[Tensor]):
        self.parts = list(parts)
        self.ends = torch.tensor([len(part) for part in self.parts]).cumsum(0)
        self.shape = (int(self.ends[-1]), *self.parts[0].shape[1:])
        self.dtype = self.parts[0].dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Tensor) -> Tensor:
        """The rows index [...] as [..., D], copied."""
        flat = index.flatten()
        rows = torch.empty(len(flat), *self.shape[1:], dtype=self.dtype)
        part = torch.searchsorted(self.ends, flat, right=True)
        for number in part.unique().tolist():
            chosen = part == number
            first = int(self.ends[number]) - len(self.parts[number])
            rows[chosen] = self.parts[number][flat[chosen] - first]
        return rows.view(*index.shape, *self.shape[1:])

    def whole(self) -> Tensor:
        """All rows, in memory."""
        return torch.cat(self.parts)


@dataclass(frozen=True)
class Trace:
    """Responses, acceptance draws and draft steps. All tensors lie on the CPU.

    text_first [T+1]    first position of each text; the last entry is P
    room [T]            most positions of the text that can hold a draft: its length limit less one for the extra token
    rows [T]            row of the responses
    prompt_lengths [T]  tokens of each text's prompt; None in recordings of older versions
    accepted [P]        whether the position's drafted token is the text's
    text_accept_prob [P]  probability of that, min(1, q/p) of the text's token
    roll_first [P]      first step of the roll-out after a rejected position, and after a text's last one where a stop
                        string ended it; 0 elsewhere
    roll_length [P]     its steps
    target_entropy [P]  nats, of the target's warped distribution that the text's token was drawn from
    tokens [S]          drafted token
    draft_prob [S]      q(token), warped
    token_prob [S]      of the unwarped distribution, as all that follow
    entropy [S]         nats
    top_probs [S, 2]    the two largest
    accept_prob [S]     min(1, p/q)(token), given that all before it are accepted; not a number where not recorded
    alpha [S]           sum_x min(p, q)(x) there; likewise
    estimates           head's name -> its raw logits. An acceptance head has [S], from the state that produced q, about the
                        token *before*. A pre-read head has [S, 2], about the drawn token and the one after it. Heads that
                        read the depth in the round have them per start and depth (`toolkit.trace.steps.logits_at`)
    hidden [S, D]       that state in the draft's number format, if it was recorded; `Rows` where it lies in several files
    text_tokens [P]     the text's own token: the drafted one where it was accepted; None in recordings of older versions
    text_prob [P]       its probability in the draft's unwarped distribution; likewise
    target_prob [S]     p(token), warped, where accept_prob is recorded, else not a number; None in older recordings
    roll_cut [P]        whether the roll-out after the position was cut; None: no roll-out was
    run [P]             accepted tokens of the round that starts there, at most max_drafted and the certain ones after these;
                        None: not recorded by start
    certain [S]         whether a grammar left the token alone; None: no text has a grammar
    certain_after [S]   how many certain tokens follow it, at most `toolkit.grammar.walk.FORCED`; likewise
    max_drafted         most steps of a round the roll-outs suffice for
    blocks              True: a round's steps came from one draft forward pass (block drafts)
    about               what the trace was made from
    names               a head's key -> its name in `estimates`, where that is another one
    """

    text_first: Tensor
    room: Tensor
    rows: Tensor
    accepted: Tensor
    text_accept_prob: Tensor
    roll_first: Tensor
    roll_length: Tensor
    target_entropy: Tensor
    tokens: Tensor
    draft_prob: Tensor
    token_prob: Tensor
    entropy: Tensor
    top_probs: Tensor
    accept_prob: Tensor
    alpha: Tensor
    max_drafted: int
    estimates: Mapping[str, Tensor] = field(default_factory=dict)
    hidden: Tensor | Rows | None = None
    text_tokens: Tensor | None = None
    text_prob: Tensor | None = None
    target_prob: Tensor | None = None
    roll_cut: Tensor | None = None
    run: Tensor | None = None
    blocks: bool = False
    prompt_lengths: Tensor | None = None
    certain: Tensor | None = None
    certain_after: Tensor | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_texts(self) -> int:
        """T."""
        return len(self.rows)

    @property
    def num_positions(self) -> int:
        """P, the tokens of all texts."""
        return len(self.accepted)

    @property
    def num_steps(self) -> int:
        """S."""
        return len(self.tokens)

    @property
    def most_sent(self) -> int:
        """The most tokens of a round: those that ride along after the drafted ones are more than max_drafted."""
        return self.max_drafted + (0 if self.certain is None else FORCED)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        held = [*_tensors(self, but=("hidden",)).values(), *self.estimates.values()]
        states = 0 if self.hidden is None else math.prod(self.hidden.shape) * self.hidden.dtype.itemsize
        return sum(value.numel() * value.element_size() for value in held) + states

    @cached_property
    def steps_before(self) -> Tensor:
        """The step before each step [S]; -1 for a text's first one.

        Before a roll-out's first step comes the position that the roll-out follows.
        """
        before = torch.arange(self.num_steps) - 1
        before[self.text_first[:-1]] = -1
        origins = (self.roll_length > 0).nonzero().squeeze(1)
        before[self.roll_first[origins]] = origins
        return before

    @cached_property
    def step_positions(self) -> Tensor:
        """The position of each step [S].

        A roll-out's steps count on from the rejected position. A round that visits a step at depth k starts k - 1
        positions before it.
        """
        positions = torch.arange(self.num_steps)
        origins = (self.roll_length > 0).nonzero().squeeze(1)
        lengths = self.roll_length[origins].long()
        into = within(lengths)
        positions[self.roll_first[origins].repeat_interleave(lengths) + into] = (
            origins.repeat_interleave(lengths) + 1 + into
        )
        return positions

    @cached_property
    def likelihood(self) -> tuple[Tensor, Tensor]:
        """The sum of log token_prob [S] over the text's tokens before each step, and the number of these tokens [S].

        Tokens of roll-outs count, too. Raises InputError if the recording does not know the texts' own tokens.
        """
        text_prob = self.text_prob
        if text_prob is None:
            raise InputError(OLDER)
        position = torch.arange(self.num_positions)
        first = self.text_first[:-1].repeat_interleave(self.lengths())
        text_sums = _sums_before(text_prob, first, position)
        origins = (self.roll_length > 0).nonzero().squeeze(1)
        start = self.roll_first[origins].repeat_interleave(self.roll_length[origins])
        origin = origins.repeat_interleave(self.roll_length[origins])
        step = start + within(self.roll_length[origins])
        total, count = torch.zeros(self.num_steps), torch.zeros(self.num_steps)
        total[position], count[position] = text_sums.float(), (position - first).float()
        rolled = _sums_before(self.token_prob, start, step) + _logs(self.token_prob[origin])
        total[step] = (text_sums[origin] + rolled).float()
        count[step] = (origin - first[origin] + 1 + step - start).float()
        return total, count

    def calls(self, num_drafted: Tensor) -> Tensor:
        """Draft forward passes of rounds that draft so many tokens [...]: one for each, or one for a block."""
        return (num_drafted > 0).to(num_drafted.dtype) if self.blocks else num_drafted

    def head_logits(self, key: str) -> Tensor:
        """The raw logits of all steps, as in `estimates`, of the head with this key. Raises InputError if there are none."""
        name = self.names.get(key, key)
        if name not in self.estimates:
            held = ", ".join(self.estimates) or "none"
            raise InputError(
                f"this trace holds no estimates of the head {name} (held: {held}): record it with this head"
            )
        return self.estimates[name]

    def lengths(self) -> Tensor:
        """Tokens of each text [T]."""
        return self.text_first.diff()

    @cached_property
    def step_sequences(self) -> Tensor:
        """The text of each step [S]."""
        of_positions = torch.arange(self.num_texts).repeat_interleave(self.lengths())
        sequences = torch.empty(self.num_steps, dtype=torch.long)
        sequences[: self.num_positions] = of_positions
        lengths = self.roll_length.long()
        rolled = self.roll_first.repeat_interleave(lengths) + within(lengths)
        sequences[rolled] = of_positions.repeat_interleave(lengths)
        return sequences

    def only(self, sequences: Tensor) -> Trace:
        """The trace of some of its texts [T] bool."""
        steps, lengths = sequences[self.step_sequences], self.lengths()[sequences]
        positions, number = steps[: self.num_positions], steps.cumsum(0) - 1
        values: dict[str, Any] = {}
        for name, value in _tensors(self, but=("text_first", "roll_first")).items():
            values[name] = value[sequences if name in PER_TEXT else positions if name in PER_POSITION else steps]
        values["text_first"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        values["roll_first"] = torch.where(self.roll_length > 0, number[self.roll_first.clamp(max=len(number) - 1)], 0)[
            positions
        ]
        estimates = {name: value[positions if value.dim() > 2 else steps] for name, value in self.estimates.items()}
        return replace(self, **values, estimates=estimates)

    def save(self, path: Path | str) -> Path:
        """One safetensors file, whole or not at all."""
        tensors = {STORED.get(name, name): value for name, value in _tensors(self).items()}
        tensors |= {f"estimates/{name}": value for name, value in self.estimates.items()}
        metadata = {"about": json.dumps(dict(self.about)), "max_drafted": str(self.max_drafted)}
        metadata |= {"blocks": "true"} if self.blocks else {}
        return save_tensors(path, tensors, metadata)

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        """Read a file, memory-mapped. Raises InputError if it is missing, cut short or not what was written."""
        tensors, metadata = load_tensors(path, "trace", "delete it and record it again")
        try:
            estimates = {k.split("/", 1)[1]: tensors.pop(k) for k in list(tensors) if k.startswith("estimates/")}
            tensors |= {name: tensors.pop(stored) for name, stored in STORED.items()}
            return cls(
                **tensors,
                estimates=estimates,
                max_drafted=int(metadata["max_drafted"]),
                blocks="blocks" in metadata,
                about=json.loads(metadata["about"]),
                names={},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{path} is not a whole trace: {first_line(error)}; delete it and record it again"
            ) from None


def _logs(probs: Tensor) -> Tensor:
    return probs.double().clamp(min=SMALLEST).log()


def _sums_before(probs: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Sums of logarithms over entries first..last - 1 of probs, for every pair of them."""
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), _logs(probs).cumsum(0)])
    return sums[last] - sums[first]


def within(lengths: Tensor) -> Tensor:
    """0, 1, ... within each of several runs of these lengths."""
    ends = lengths.long().cumsum(0)
    return torch.arange(int(lengths.sum())) - (ends - lengths).repeat_interleave(lengths)


def join(traces: Sequence[Trace], mapped: bool = False) -> Trace:
    """Several traces as one; all must hold the same estimates. `about` is the first one's.

    mapped  leave states in their files (`Rows`), because they are most of a trace and may exceed the memory
    """
    if not traces:
        raise InputError("expected at least one trace, got none")
    if len(traces) == 1:
        return traces[0]
    for name in ("target_prob", "prompt_lengths"):  # files that an older version has begun lack them
        if any(getattr(trace, name) is None for trace in traces):
            without: Any = {name: None}
            traces = [replace(trace, **without) for trace in traces]
    blank: dict[str, Callable[[Trace], Tensor]] = {  # of what some of them lack
        "roll_cut": lambda trace: torch.zeros_like(trace.accepted),
        "certain": lambda trace: torch.zeros_like(trace.tokens, dtype=torch.bool),
        "certain_after": lambda trace: torch.zeros_like(trace.tokens),
    }
    for name, zeros in blank.items():
        if any(getattr(trace, name) is not None for trace in traces):
            filled: list[dict[str, Any]] = [{name: zeros(trace)} for trace in traces]
            traces = [
                replace(trace, **values) if getattr(trace, name) is None else trace
                for trace, values in zip(traces, filled, strict=True)
            ]
    first = traces[0]
    optional = ("hidden", "text_tokens", "run")
    held = [
        (set(trace.estimates), trace.max_drafted, trace.blocks, *(getattr(trace, name) is None for name in optional))
        for trace in traces
    ]
    if any(entry != held[0] for entry in held):
        raise InputError("traces to be joined must hold the same estimates, states, tokens, runs and max_drafted")
    total = sum(trace.num_positions for trace in traces)
    parts: dict[str, list[Tensor]] = {}
    rolls_before = positions_before = 0
    for trace in traces:
        shift = {
            "text_first": torch.tensor(positions_before),
            "roll_first": torch.where(trace.roll_length == 0, 0, total + rolls_before - trace.num_positions),
        }
        for name, value in _tensors(trace, but=("hidden",) if mapped else ()).items():
            parts.setdefault(name, []).append(value + shift[name] if name in shift else value)
        positions_before += trace.num_positions
        rolls_before += trace.num_steps - trace.num_positions
    joined: dict[str, Any] = {name: _joined(name, values, traces) for name, values in parts.items()}
    estimates = {}
    for name in first.estimates:
        values = [trace.estimates[name] for trace in traces]
        estimates[name] = torch.cat(
            values if values[0].dim() > 2 else _in_order(values, traces)
        )  # by start, or by step
    if mapped and first.hidden is not None:
        joined["hidden"] = Rows(_in_order([trace.hidden for trace in traces], traces))
    facts: dict[str, Any] = {name: getattr(first, name) for name in ("max_drafted", "blocks", "about")}
    return Trace(**joined, **facts, estimates=estimates)


def _joined(name: str, values: list[Tensor], traces: Sequence[Trace]) -> Tensor:
    if name == "text_first":
        return torch.cat([*(value[:-1] for value in values[:-1]), values[-1]])
    if name in (*PER_TEXT, *PER_POSITION):
        return torch.cat(values)
    return torch.cat(_in_order(values, traces))


def _in_order(values: Sequence[Any], traces: Sequence[Trace]) -> list[Tensor]:
    """All positions' steps, then all roll-outs'."""
    sizes = [trace.num_positions for trace in traces]
    path = [value[:size] for value, size in zip(values, sizes, strict=True)]
    return [*path, *(value[size:] for value, size in zip(values, sizes, strict=True))]


def _tensors(trace: Trace, but: Sequence[str] = ()) -> dict[str, Tensor]:
    values = {item.name: getattr(trace, item.name) for item in fields(trace) if item.name not in but}
    values = {name: value.whole() if isinstance(value, Rows) else value for name, value in values.items()}
    return {name: value.contiguous() for name, value in values.items() if isinstance(value, Tensor)}
