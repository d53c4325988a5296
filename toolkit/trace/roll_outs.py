"""Roll-outs: what the draft goes on to draft after the rejected positions of texts, as branches of one tree in its cache.

With `upper_bound` the target reads the branches, too. Where the last token of a text was accepted, there is a roll-out after
it, too. A recording for some policies lets roll-outs end one by one, where none of them would go on.

Shapes: B texts of a batch, N tokens of a text, V vocabulary, M max_drafted, R roll-outs under way, n of a part of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from toolkit.engine import Reading, Session
from toolkit.grammar import TextGrammar
from toolkit.models.pair import ModelPair
from toolkit.sampling import Sampling, draw, warp
from toolkit.stopping import StoppingPolicy
from toolkit.trace.replay import past_cuts
from toolkit.trace.trace import Trace
from toolkit.types import DraftStep

OF_POSITIONS = ("accepted", "text_accept_prob", "target_entropy", "text_prob")  # columns that roll-outs have not
OF_STEPS = ("tokens", "draft_prob", "token_prob", "entropy", "top_probs", "accept_prob", "target_prob", "alpha")
Grammars = Sequence[TextGrammar | None]
NODES = 256  # of a text that are read again in one forward pass


class Recording(Protocol):
    """What roll-outs ask of the `Recorder` that they are of."""

    @property
    def pair(self) -> ModelPair: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def plain(self) -> Sampling: ...
    @property
    def max_drafted(self) -> int: ...
    @property
    def heads(self) -> Mapping[str, Any]: ...
    @property
    def late(self) -> list[str]: ...
    @property
    def room(self) -> int: ...
    def width(self, num_rows: int) -> int: ...
    def warp_draft(self, logits: Tensor, seen: Tensor | None) -> Tensor: ...
    def within(self, logits: Tensor, grammars: Grammars | None) -> Tensor: ...
    def facts_of(
        self, step: DraftStep, target_probs: Tensor | None, grammars: Grammars | None = None
    ) -> dict[str, Tensor]: ...
    def scored(self, trace: Trace) -> Trace: ...


class RecordedText:
    """A text to be recorded: its row, ids, and uniforms [N, 1 + M] of its draws.

    seen [N, V]  tokens before each of the produced ones, for the repetition penalty
    grammars [N]  before each of the produced ones; None: no text of the batch has one
    """

    def __init__(self, row: int, prompt: Sequence[int], produced: Sequence[int], uniforms: Tensor):
        self.row, self.prompt, self.produced, self.uniforms = row, list(prompt), list(produced), uniforms
        self.seen: Tensor | None = None
        self.grammars: Grammars | None = None


@dataclass
class _Roll:
    """A roll-out under way, of `length` steps.

    token   its newest one, which the draft has not read;  parent  the node before it
    goal    steps that are wanted;  seen [V]  tokens before the newest one, for the repetition penalty
    grammar  before the newest one; None: the text has none, or it has ended
    """

    position: int
    token: int
    parent: int
    length: int = 0
    goal: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)
    seen: Tensor | None = None
    grammar: TextGrammar | None = None

    def read(self) -> None:
        """Take the newest token into what stands before the next one."""
        if self.seen is not None:
            self.seen[self.token] = True
        self.grammar = None if self.grammar is None else self.grammar.after(self.token)


class RollOuts:
    """The roll-outs of a batch's texts.

    columns        of every text's positions, as `Recorder` makes them
    draft, target  sessions that have read the texts; target: it reads the roll-outs, too. None: it does not
    facts          per text: columns of steps, in parts; `_Roll.steps` says which rows of which part belong to a roll-out
    """

    def __init__(
        self,
        recorder: Recording,
        batch: Sequence[RecordedText],
        columns: Sequence[dict[str, Tensor]],
        draft: Session,
        target: Session | None = None,
    ):
        self.recorder, self.batch, self.columns, self.draft, self.target = recorder, batch, columns, draft, target
        self.ends = set(recorder.pair.ends(recorder.sampling))
        self.facts: list[list[dict[str, Tensor]]] = [[] for _ in batch]
        self.rolls: list[list[_Roll]] = []
        for text, column in zip(batch, columns, strict=True):
            drafted, after_rejection = column["tokens"].tolist(), ~column["accepted"]
            after_rejection[-1] = True  # a stop string has ended the text, or there is no room
            rolls = [
                _Roll(position, drafted[position], position - 1, 0, 0, [], row_of(text.seen, position), grammar)
                for position in after_rejection.nonzero().squeeze(-1).tolist()
                for grammar in [None if text.grammars is None else text.grammars[position]]
            ]
            self.rolls.append([roll for roll in rolls if self._goes_on(roll)])

    def whole(self) -> Trace:
        """The trace with every roll-out to its end."""
        for roll in self._after().values():
            roll.goal = self.recorder.max_drafted
        self._extend()
        return self.trace()

    def as_far_as(self, policies: Sequence[StoppingPolicy]) -> Trace:
        """The trace with roll-outs as far as one of these policies goes on; they grow by a step, later by halves."""
        trace, after, going = self.trace(), self._after(), list(policies)
        while going:
            wanted = [past_cuts(trace, policy) for policy in going]
            going = [policy for policy, positions in zip(going, wanted, strict=True) if len(positions)]
            for position in torch.cat(wanted).unique().tolist():
                after[position].goal += max(1, after[position].length // 2)
            self._extend()
            trace = self.trace()
        return trace

    def resumed(self, trace: Trace, positions: Tensor) -> Trace:
        """A cut trace of these texts with the roll-outs after `positions` [n] to their ends.

        The draft reads the steps that are there again, and draws on from the same uniforms.
        """
        wanted = set(positions.tolist())
        nodes: list[list[_Roll]] = [[] for _ in self.batch]
        begin, last_step = 0, trace.num_positions
        for row, (rolls, column) in enumerate(zip(self.rolls, self.columns, strict=True)):
            first_step, first_node = last_step, self.draft.index.num_nodes(row)
            for roll in rolls:
                roll.length = int(trace.roll_length[begin + roll.position])
                roll.steps = [(0, last_step - first_step + number) for number in range(roll.length)]
                last_step += roll.length
                goes_on = begin + roll.position in wanted
                roll.goal = self.recorder.max_drafted if goes_on else 0
                for token in trace.tokens[last_step - roll.length : last_step].tolist():
                    if goes_on:
                        nodes[row].append(_Roll(roll.position, roll.token, roll.parent))
                        roll.parent = first_node + len(nodes[row]) - 1
                    roll.read()
                    roll.token = token
            self.facts[row].append(columns_of(trace, slice(first_step, last_step)))
            begin += len(column["tokens"])
        for first in range(0, max(map(len, nodes)), NODES):
            self._branch(self.draft, [rolls[first : first + NODES] for rolls in nodes], last=1)
        self._extend()
        return self.trace()

    def _after(self) -> dict[int, _Roll]:
        """The roll-outs by the positions that they follow, in the trace."""
        begins = accumulate((len(text.produced) for text in self.batch), initial=0)
        each = zip(begins, self.rolls, strict=False)
        return {begin + roll.position: roll for begin, rolls in each for roll in rolls}

    def _goes_on(self, roll: _Roll) -> bool:
        """Whether the roll-out has a further step: it has not come to an end of text, to the limit or to M."""
        recorder, ahead = self.recorder, roll.length + 1
        return roll.token not in self.ends and roll.position + ahead < recorder.room and ahead < recorder.max_drafted

    def _extend(self) -> None:
        """Draft on in every roll-out up to its goal: a forward pass per step, or several for many roll-outs."""
        size = self.recorder.width(len(self.batch))
        while True:
            live = [[roll for roll in rolls if roll.length < roll.goal and self._goes_on(roll)] for rolls in self.rolls]
            width = max(map(len, live))
            if not width:
                break
            for begin in range(0, width, size):
                self._step([rolls[begin : begin + size] for rolls in live])

    def _step(self, live: list[list[_Roll]]) -> None:
        """One token more for some roll-outs of every text; what is known of these steps is appended to the text's facts."""
        recorder = self.recorder
        first = [self.draft.index.num_nodes(row) for row in range(len(self.batch))]
        reading = self._branch(self.draft, live)
        logits, hidden = recorder.pair.fit(reading.logits), reading.hidden
        target_logits = None if self.target is None else self._branch(self.target, live).logits
        for row, (text, rolls) in enumerate(zip(self.batch, live, strict=True)):
            if not rolls:
                continue
            for roll in rolls:
                roll.read()
            noted = [roll.seen for roll in rolls if roll.seen is not None]  # of all, or of none
            seen = torch.stack(noted) if noted else None  # tokens before the ones that are drawn now [R, V]
            grammars = None if text.grammars is None else [roll.grammar for roll in rolls]
            allowed = recorder.within(logits[row, : len(rolls)], grammars)
            distribution, target_probs = recorder.warp_draft(allowed, seen), None
            if target_logits is not None:
                target_probs = warp(recorder.within(target_logits[row, : len(rolls)], grammars), recorder.plain, seen)
            positions, lengths = torch.tensor([(roll.position, roll.length) for roll in rolls]).T
            drawn = draw(distribution, text.uniforms[positions, 2 + lengths].to(distribution.device))
            states = hidden[row, : len(rolls)].to(distribution.device)
            step = DraftStep(1, allowed, distribution, states, drawn)
            for number, (roll, token) in enumerate(zip(rolls, drawn.tolist(), strict=True)):
                roll.length += 1
                roll.steps.append((len(self.facts[row]), number))
                roll.token, roll.parent = token, first[row] + number
            self.facts[row].append(recorder.facts_of(step, target_probs, grammars))

    def _branch(self, session: Session, live: list[list[_Roll]], last: int | None = None) -> Reading:
        """One forward: the newest token of every roll-out under way becomes a node. Logits [B, R, V], states [B, R, D].

        last  of the last so many alone; None: of all
        """
        width = max(map(len, live))
        padded = [  # padding is read in any case
            rolls + [_Roll(0, text.prompt[0], -1)] * (width - len(rolls))
            for rolls, text in zip(live, self.batch, strict=True)
        ]
        device = session.index.device
        tokens = torch.tensor([[roll.token for roll in rolls] for rolls in padded], device=device)
        parents = torch.tensor([[roll.parent for roll in rolls] for rolls in padded], device=device)
        session.reserve(max(session.lengths) + width)
        return session.extend(tokens, counts=[0] * len(live), parents=parents, last=last or width)

    def trace(self) -> Trace:
        """The trace as far as the roll-outs have come, with the logits of all heads."""
        batch, recorder = self.batch, self.recorder
        lengths = torch.tensor([len(text.produced) for text in batch])
        total = int(lengths.sum())
        roll_first, roll_length = torch.zeros(total, dtype=torch.long), torch.zeros(total, dtype=torch.int32)
        roll_cut = torch.zeros(total, dtype=torch.bool)
        names = [name for name in self.columns[0] if name not in OF_POSITIONS]
        pieces: list[dict[str, Tensor]] = list(self.columns)
        begin, next_step = 0, total
        for text, rolls, facts in zip(batch, self.rolls, self.facts, strict=True):
            offsets = list(accumulate((len(part["tokens"]) for part in facts), initial=0))
            order = [offsets[entry] + number for roll in rolls for entry, number in roll.steps]
            if order:
                pieces.append({name: torch.cat([part[name] for part in facts])[order] for name in names})
            for roll in rolls:
                roll_first[begin + roll.position], roll_length[begin + roll.position] = next_step, roll.length
                roll_cut[begin + roll.position] = self._goes_on(roll)
                next_step += roll.length
            begin += len(text.produced)
        of_positions: dict[str, Any] = {
            name: torch.cat([column[name] for column in self.columns]) for name in OF_POSITIONS
        }
        columns = {name: torch.cat([piece[name] for piece in pieces]) for name in names}
        estimates = {name: columns.pop(f"estimates/{name}") for name in recorder.heads if name not in recorder.late}
        return recorder.scored(Trace(
            text_first=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            room=torch.tensor([recorder.room] * len(batch)),
            rows=torch.tensor([text.row for text in batch]),
            prompt_lengths=torch.tensor([len(text.prompt) for text in batch]),
            roll_first=roll_first,
            roll_length=roll_length,
            roll_cut=roll_cut if bool(roll_cut.any()) else None,
            text_tokens=torch.tensor([token for text in batch for token in text.produced], dtype=torch.int32),
            max_drafted=recorder.max_drafted,
            estimates=estimates,
            **of_positions,
            **columns,  # type: ignore[arg-type]
        ))  # fmt: skip


def columns_of(trace: Trace, steps: slice) -> dict[str, Tensor]:
    """The columns of some steps of a trace, as `Recorder.facts_of` makes them."""
    held = OF_STEPS if trace.certain is None else (*OF_STEPS, "certain", "certain_after")
    columns = {name: getattr(trace, name)[steps] for name in held}
    columns |= {f"estimates/{name}": logits[steps] for name, logits in trace.estimates.items()}
    if isinstance(trace.hidden, Tensor):
        columns["hidden"] = trace.hidden[steps]
    return columns


def row_of(seen: Tensor | None, position: int) -> Tensor | None:
    """A copy of the tokens before a position [V], of those before each [N, V]."""
    return None if seen is None else seen[position].clone()
