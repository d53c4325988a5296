"""Record traces of a draft that reads the target's states: one chain of tokens from every start.

Such a draft says something else about a position in every round: so q and the acceptance draws are made per start s and depth
k. A chain follows the text X as long as its tokens are accepted, then the draft's own tokens. With q_{s,k} for q:

    accepted_{s,k} ~ Bernoulli(min(1, q_{s,k}(X_{s+k-1}) / p(X_{s+k-1}))); else the drafted token ~ norm((q_{s,k} - p)+)

Rounds of one text do not overlap, so replay stays exact. All starts of a text are drafted side by side. A block draft makes one
forward pass over the blocks of all starts, and no chain is longer than a block.

Shapes: N tokens of a text, T of its prompt and itself, M max_drafted, V vocabulary, n starts that still draft, W width of the
target's states, D of the draft's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from toolkit.drafts.kinds import block_length, gives_blocks, kind_of, reads_states
from toolkit.engine import Session
from toolkit.engine.engine import engine_of
from toolkit.errors import InputError
from toolkit.grammar.text import grammar_key
from toolkit.grammar.walk import along
from toolkit.models.pair import ModelPair
from toolkit.models.teacher import Text, readings_along
from toolkit.sampling import Sampling, draw, row_generator, warp
from toolkit.trace import Trace, join
from toolkit.trace.record import Recorder, decided
from toolkit.trace.roll_outs import Grammars, RecordedText
from toolkit.trace.steps import Geometry
from toolkit.types import DraftStep

PER_START = ("accepted", "text_accept_prob", "text_prob")
PAYS = 0.02  # share of rounds whose k-th token is accepted, below which no policy needs it
DEEPEST = 20  # of any recording whose depth is measured
TEXTS, TOKENS = 4, 128  # that are looked at, and the most tokens of each


class StartRecorder(Recorder):
    """A `Recorder` of drafts that read the target's states; its recordings are by start (`Trace.run`).

    Of a block draft `max_drafted` is at most a block. A kind's recorder names its `chains`.
    """

    chains: ClassVar[type[Chains]]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(
            self, "max_drafted", min(self.max_drafted, block_length(self.pair.draft) or self.max_drafted)
        )

    @torch.inference_mode()
    def recorded(self, sequences: Sequence[Text], rows: Sequence[int], others: Sequence[Recorder]) -> list[Trace]:
        """As `Recorder.recorded`, a text after another. Raises InputError for heads that read earlier positions, too."""
        for name, head in self.heads.items():
            if getattr(head, "num_history", 0):
                raise InputError(
                    f"head {name} reads earlier positions, whose states this draft computes again in every round: expected a "
                    "head with head.earlier=0"
                )
        texts = [RecordedText(row, *text, torch.empty(0)) for row, text in zip(rows, sequences, strict=True)]
        self.prepare(texts, sequences)
        own = join([self._record(text) for text in texts])
        return [own, *(other.recorded(sequences, rows, ())[0] for other in others)]

    def _record(self, text: RecordedText) -> Trace:
        sessions = engine_of(self.pair).open(1, len(text.prompt) + len(text.produced), captured=False)
        target: Any = sessions.target
        parts = [self._target_probs(text, target, first) for first in range(0, len(text.produced), self.width(1))]
        states = target.states[:, : len(text.prompt) + len(text.produced) - 1, 0]
        chains = self.chains(self, text, torch.cat(parts), states, target if self.upper_bound else None)
        return self.scored(chains.trace())

    def _target_probs(self, text: RecordedText, target: Session, first: int) -> Tensor:
        """p of the text's positions from `first` on [n, V]."""
        end = min(first + self.width(1), len(text.produced))
        logits = self.path(target, [text], first, end).logits[0]
        seen = None if text.seen is None else text.seen[first:end]
        logits = self.within(logits, None if text.grammars is None else text.grammars[first:end])
        probs = warp(logits, self.plain, seen)
        self.check_possible(text, first, logits, probs, seen)
        return probs

    def draws(self, row: int, length: int) -> Tensor:
        """[M, N, 2]: acceptance, and the drafted token instead; the same for every max_drafted."""
        generator = row_generator(self.sampling.seed + 1_000_003 * (self.replicate + 1), row)
        return torch.rand(self.max_drafted, length, 2, generator=generator, dtype=torch.float64)


def recorder_of(pair: ModelPair, *options: Any, **named: Any) -> Recorder:
    """The recorder that a pair's draft needs, with the options of `Recorder`."""
    recorder: Recorder = kind_of(pair.draft).part("recorder")(pair, *options, **named)
    return recorder


class Chains(ABC):
    """The chains of drafted tokens from every start of a text, a depth at a time.

    probs   p of the text's positions [N, V]
    states  the target's, of all tokens but the last [1, T - 1, W]
    target  its session, which has read these; it reads the chains, too. None: it does not

    alive    starts that still draft [n]
    newest   token that each start's chain ends in [N]
    run      accepted tokens of each chain before its first rejected one [N]
    parents  the target's node before each chain's newest token [N]; -1: the prompt
    grammars  after each chain's newest token [N]; None: the text has none, nor has a text beside it
    """

    def __init__(
        self, recorder: StartRecorder, text: RecordedText, probs: Tensor, states: Tensor, target: Session | None
    ):
        self.recorder, self.text, self.probs, self.target = recorder, text, probs, target
        self.draft, self.device, size = recorder.pair.draft, probs.device, len(text.produced)
        self.draws = recorder.draws(text.row, size)
        self.ends = torch.tensor(recorder.pair.ends(recorder.sampling), device=self.device)
        self.produced = torch.tensor(text.produced, device=self.device)
        self.starts = torch.arange(size, device=self.device)
        self.alive, self.run = self.starts, torch.zeros_like(self.starts)
        self.newest = torch.tensor([*text.prompt, *text.produced][-size - 1 : -1], device=self.device)
        self.seen = None if text.seen is None else text.seen.clone()
        self.parents = self.starts - 1
        self.grammars = None if text.grammars is None else list(text.grammars)
        self.states = states.to(self.draft.device, self.draft.dtype)

    def trace(self) -> Trace:
        recorder, size = self.recorder, len(self.starts)
        columns: list[tuple[Tensor, dict[str, Tensor]]] = []
        if self.target is not None:
            self.target.reserve(self.target.index.capacity + size * recorder.max_drafted)
        final = self.first()
        for depth in range(1, recorder.max_drafted + 1):
            if depth > 1:
                final = self.deeper(depth)
            parts = [self._draft(part, final[part], depth) for part in self.alive.split(recorder.width(1))]
            columns.append((self.alive, {name: torch.cat([part[name] for part in parts]) for name in parts[0]}))
            tokens = self.newest[self.alive]
            goes_on = ~torch.isin(tokens, self.ends) & (self.alive + depth < recorder.room)
            self.alive = self.alive[goes_on]
            if not len(self.alive):
                break
        return self._assembled(columns)

    @abstractmethod
    def first(self) -> Tensor:
        """Read the text; returns final states [N, D] at every start."""

    @abstractmethod
    def deeper(self, depth: int) -> Tensor:
        """Returns final states [N, D] at a depth from 2 on, after the chains' newest tokens."""

    @abstractmethod
    def outputs(self, starts: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, V] of the final states [n, D] of some starts [n], and what heads read of them."""

    def _draft(self, starts: Tensor, final: Tensor, depth: int) -> dict[str, Tensor]:
        """One token more from some starts [n], from the final states [n, D] that predict it; its columns."""
        pair, recorder = self.recorder.pair, self.recorder
        logits, hidden = self.outputs(starts, final)
        grammars = None if self.grammars is None else [self.grammars[start] for start in starts.tolist()]
        logits = recorder.within(pair.fit(logits), grammars)
        seen = None if self.seen is None else self.seen[starts]
        q = recorder.warp_draft(logits, seen)
        position = starts + depth - 1
        follows = (self.run[starts] == depth - 1) & (position < len(self.produced))
        at = position.clamp(max=len(self.produced) - 1)
        p = self.probs[at]
        emitted = self.produced[at].unsqueeze(-1)
        draws = self.draws[depth - 1].to(self.device)[starts]
        accept_prob, accepted, tokens = decided(p, q, emitted, draws)
        accepted = accepted & follows
        tokens = torch.where(follows, tokens, draw(q, draws[:, 1]))
        if depth > 1:  # the chain's newest token has been verified
            self.parents[starts] += follows
            p = torch.where(follows.unsqueeze(-1), p, self._beyond(starts, ~follows, seen, grammars))
        step = DraftStep(1, logits, q, hidden.to(logits.device), tokens)
        self.run[starts] += accepted
        self.newest[starts] = tokens
        if self.seen is not None:
            self.seen[starts, tokens] = True
        columns = recorder.facts_of(step, p, grammars)
        if self.grammars is not None:
            for start, token in zip(starts.tolist(), tokens.tolist(), strict=True):
                self.grammars[start] = along(self.grammars[start], [token])[-1]
            if depth == recorder.max_drafted:  # what rides along after an accepted last token is accepted, too
                self.run[starts] += torch.where(self.run[starts] == depth, columns["certain_after"].to(self.device), 0)
        if depth > 1:
            return columns
        own = {
            "text_accept_prob": accept_prob,
            "accepted": accepted,
            "text_prob": step.raw_probs.gather(-1, emitted).squeeze(-1).float(),
        }
        return {**columns, **{name: value.cpu() for name, value in own.items()}}

    def _beyond(self, starts: Tensor, off: Tensor, seen: Tensor | None, grammars: Grammars | None) -> Tensor:
        """p [n, V] where chains have left the text (`off` [n]); not numbers elsewhere, and if the target does not read them."""
        probs = self.probs.new_full((len(starts), self.probs.shape[1]), torch.nan)
        leaving = starts[off]
        if self.target is None or not len(leaving):
            return probs
        first = self.target.index.num_nodes(0)
        tokens, parents = (values[leaving].unsqueeze(0) for values in (self.newest, self.parents))
        logits = self.target.extend(tokens, counts=[0], parents=parents, last=len(leaving)).logits[0]
        of_leaving = None if grammars is None else [grammars[number] for number in off.nonzero().squeeze(1).tolist()]
        logits = self.recorder.within(logits, of_leaving)
        probs[off] = warp(logits, self.recorder.plain, None if seen is None else seen[off])
        self.parents[leaving] = first + torch.arange(len(leaving), device=leaving.device)
        return probs

    def _assembled(self, columns: list[tuple[Tensor, dict[str, Tensor]]]) -> Trace:
        """The trace of one text from the columns of every depth, with the starts [n] that they are of."""
        (_, first), *deeper = columns
        size = len(self.starts)
        of_starts: dict[str, Any] = {name: first.pop(name) for name in PER_START}
        starts = torch.cat([self.starts[:0].cpu(), *(starts.cpu() for starts, _ in deeper)])
        order = starts.argsort(stable=True)
        steps = first if not deeper else {**first, **{
            name: torch.cat([value, torch.cat([part[name] for _, part in deeper])[order]]) for name, value in first.items()
        }}  # fmt: skip
        lengths = torch.bincount(starts, minlength=size)
        begins = size + lengths.cumsum(0) - lengths
        names = [name for name in self.recorder.heads if f"estimates/{name}" in steps]
        estimates = {name: steps.pop(f"estimates/{name}") for name in names}
        return Trace(
            text_first=torch.tensor([0, size]),
            room=torch.tensor([self.recorder.room]),
            rows=torch.tensor([self.text.row]),
            prompt_lengths=torch.tensor([len(self.text.prompt)]),
            roll_first=torch.where(lengths > 0, begins, 0),
            roll_length=lengths.int(),
            run=self.run.int().cpu(),
            text_tokens=self.produced.int().cpu(),
            target_entropy=-torch.special.xlogy(self.probs, self.probs).sum(-1).float().cpu(),
            max_drafted=self.recorder.max_drafted,
            blocks=gives_blocks(self.draft),
            estimates=estimates,
            **of_starts,
            **steps,  # type: ignore[arg-type]
        )


def depth_that_pays(
    pair: ModelPair, sequences: Sequence[Text], sampling: Sampling, draft_temperatures: Sequence[float | None] = (None,)
) -> int:
    """The depth for these texts, at the draft temperature that needs the deepest one; from 1 to DEEPEST."""
    if reads_states(pair.draft):
        depths = []
        for temperature in draft_temperatures:
            recorder = recorder_of(pair, sampling, DEEPEST, draft_temperature=temperature, sound=True)
            trace = recorder.record(sequences[:TEXTS], range(len(sequences[:TEXTS])))
            if not trace.num_texts:  # the recording itself names the reason
                depths.append(1)
                continue
            assert trace.run is not None
            run, left = trace.run, Geometry.of(trace).left
            most = trace.max_drafted
            shares = [float((run[left >= depth] >= depth).double().mean()) for depth in range(1, most)]
            depths.append(next((depth for depth, share in enumerate(shares, 1) if not share >= PAYS), most))
        return max(depths)
    alphas: dict[float | None, list[Tensor]] = {temperature: [] for temperature in draft_temperatures}
    if any(grammar_key(sampling, text) for text in sequences):
        raise InputError("max_drafted: expected a number beside a grammar, got auto")
    for prompt, produced in sequences[:TEXTS]:
        for reading in readings_along(pair, [(prompt, produced[:TOKENS])], sampling, check=False):
            if not reading.holds_numbers:
                continue
            for temperature, values in alphas.items():
                q = reading.draft_probs(temperature)
                values.append(torch.minimum(reading.target_probs, q).sum(-1).double().cpu())
    return max(map(depth_of, alphas.values()))


def depth_of(alphas: Sequence[Tensor]) -> int:
    """The first depth that is accepted in less than PAYS of the rounds, from alpha [N] of every text."""
    for depth in range(1, DEEPEST):
        products = [text.unfold(0, depth, 1).prod(-1) for text in alphas if len(text) >= depth]
        if not products or float(torch.cat(products).mean()) < PAYS:
            return depth
    return DEEPEST
