"""Record traces: make the acceptance draws of speculative sampling for given texts, and let the draft roll on after
rejections.

Each model makes one teacher-forced pass, then the draft one forward per depth of the roll-outs, which are branches of one tree
in its cache. With `upper_bound` the target reads the branches, too. A repetition penalty changes p and q of a position by the
tokens before it. Where the last token of a text was accepted, there is a roll-out after it, too.

Shapes: B texts of a batch, N tokens of a text, n of a part of it, V vocabulary, M max_drafted, R roll-outs under way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from toolkit.acceptance.folder import Scorer
from toolkit.engine import Reading, Session
from toolkit.engine.engine import engine_of
from toolkit.errors import NOT_NUMBERS, InputError
from toolkit.models.pair import ModelPair
from toolkit.models.teacher import Text, hidden_size, seen_before
from toolkit.sampling import Sampling, draw, penalized, row_generator, warp
from toolkit.trace import Trace, join
from toolkit.trace.score import kept_logits, recorded_logits
from toolkit.types import DraftStep
from toolkit.verification.base import normalized

BATCH = 8  # texts recorded at a time: their roll-outs share one cache
LOGITS = 2**25  # of one model that are held at a time, unless one position of a batch has more
# How far two computations of the same logits may be apart, as a share of the largest one, by the model's number format.
ROUNDED = {torch.float64: 1e-9, torch.float32: 1e-4}
ROUNDED_OTHERS = 1e-2


@dataclass(frozen=True)
class Recorder:
    """How to record.

    max_drafted        M, the most tokens a replayed policy may draft in a round
    heads              name -> what scores a draft step: its raw logits are stored
    hidden             store the states themselves, in the draft's number format: any head can be scored on them later
    upper_bound        run the target along the roll-outs, too: the true acceptance probability of every drafted token
    draft_temperature  the draft's own; None: the sampling's
    replicate          number of the set of acceptance draws: several recordings of the same texts cut variance
    sound              leave out texts of which a model or a head gives what is not a number, instead of an error
    """

    pair: ModelPair
    sampling: Sampling
    max_drafted: int = 20
    heads: Mapping[str, Scorer] = field(default_factory=dict)
    hidden: bool = False
    upper_bound: bool = False
    draft_temperature: float | None = None
    replicate: int = 0
    sound: bool = False

    def __post_init__(self) -> None:
        if self.max_drafted < 1:
            raise InputError(f"max_drafted: expected at least 1, got {self.max_drafted}")
        if self.sampling.max_length is not None:
            raise InputError(
                "traces know one limit for all texts: expected sampling.max_length=null (source=live decodes)"
            )

    def record(self, sequences: Sequence[Text], rows: Sequence[int]) -> Trace:
        """The trace of texts (prompt ids, produced ids); `rows` seed the draws. Raises InputError for another's texts, and
        for those that hold what is not a number, unless `sound`.
        """
        return self.checked(self.recorded(sequences, rows))

    def checked(self, trace: Trace) -> Trace:
        """The trace, without the texts that hold what is not a number if `sound`. Raises InputError for them if not."""
        broken = self._broken(trace)
        if not bool(broken.any()):
            return trace
        if self.sound:
            return trace.only(~broken)
        raise InputError(f"response {trace.rows[broken].tolist()[0]}: {NOT_NUMBERS}")

    def _broken(self, trace: Trace) -> Tensor:
        """Which texts [T] hold what is not a number."""
        names = ("draft_prob", "token_prob", "entropy", "top_probs", *(("alpha",) if self.upper_bound else ()))
        of_positions = [trace.text_accept_prob, trace.target_entropy]
        of_steps = [getattr(trace, name) for name in names] + (
            [trace.hidden] if isinstance(trace.hidden, Tensor) else []
        )
        for logits in trace.estimates.values():
            (of_positions if logits.dim() > 2 else of_steps).append(logits)
        sequences = torch.zeros(trace.num_texts, dtype=torch.bool)
        for values in (*of_positions, *of_steps):
            wrong = ~values.isfinite().flatten(1).all(1) if values.dim() > 1 else ~values.isfinite()
            sequences[trace.step_sequences[: len(wrong)][wrong]] = True
        return sequences

    @torch.inference_mode()
    def recorded(self, sequences: Sequence[Text], rows: Sequence[int]) -> Trace:
        """The trace of texts as `record` makes it, whether or not it holds numbers."""
        batch = [
            RecordedText(row, *text, self._uniforms(row, len(text[1])))
            for row, text in zip(rows, sequences, strict=True)
        ]
        for text in batch:
            self.check(text)
            if self.sampling.repetition_penalty != 1.0:
                text.seen = seen_before(text.prompt, text.produced, self.pair.vocab_size).to(self.pair.device)
        longest = max(len(text.prompt) for text in batch) + max(len(text.produced) for text in batch)
        sessions = engine_of(self.pair).open(len(batch), longest, captured=False)  # shapes hardly recur
        target, draft = sessions.target, sessions.drafts[0]
        on_path = self._on_path(batch, target, draft)
        rolls = self._roll(batch, draft, target if self.upper_bound else None)
        return self.scored(self._assemble(batch, on_path, rolls))

    def scored(self, trace: Trace) -> Trace:
        """With the logits of heads that read earlier positions or the depth: known once all steps are."""
        if not self._late:
            return trace
        late = {name: recorded_logits(trace, self.heads[name], self.pair.device) for name in self._late}
        estimates = {name: late[name] if name in late else trace.estimates[name] for name in self.heads}
        return replace(trace, estimates=estimates, hidden=trace.hidden if self.hidden else None)

    @property
    def _late(self) -> list[str]:
        heads = self.heads.items()
        return [name for name, head in heads if getattr(head, "num_history", 0) or getattr(head, "reads_depth", False)]

    def record_all(
        self,
        sequences: Sequence[Text],
        rows: Sequence[int],
        batch_size: int = BATCH,
        on_batch: Callable[[int], object] | None = None,
    ) -> Trace:
        """`record` of any number of texts, `batch_size` at a time; `on_batch` hears how many tokens each one had."""
        parts = []
        for first in range(0, len(sequences), batch_size):
            batch = sequences[first : first + batch_size]
            parts.append(self.record(batch, rows[first : first + batch_size]))
            if on_batch is not None:
                on_batch(sum(len(produced) for _, produced in batch))
        return join(parts)

    def work(self, num_texts: int, num_tokens: int, batch_size: int = BATCH) -> str:
        """What recording so many texts takes, in a line: tokens, forward passes, bytes at most."""
        batches, depth = -(-num_texts // batch_size), self.max_drafted
        target = batches * (depth if self.upper_bound else 1)
        numbers = (hidden_size(self.pair.draft) if self.hidden else 0) + 10 + 2 * len(self.heads)
        return (
            f"traces: {num_texts:,} texts, {num_tokens:,} tokens, roll-outs of up to {depth}: about {target:,} target and "
            f"{batches * depth:,} draft forward passes, at most {4 * numbers * num_tokens * depth / 2**20:,.0f} MiB"
        )

    def check(self, text: RecordedText) -> None:
        """Raises InputError if live decoding could not have ended in this text."""
        limit, ends = self.sampling.max_new_tokens, set(self.pair.ends(self.sampling))
        vocab, produced = self.pair.vocab_size, text.produced
        problem = None
        if not text.prompt or not produced:
            problem = "is empty: expected a prompt and at least one token"
        elif min(*text.prompt, *produced) < 0 or max(*text.prompt, *produced) >= vocab:
            problem = f"holds ids outside of the vocabulary of {vocab}"
        elif len(produced) > limit:
            problem = f"has {len(produced)} tokens, more than max_new_tokens={limit}"
        elif any(token in ends for token in produced[:-1]):
            problem = "goes on after an end of text"
        elif self._stops(text, produced[:-1]):
            problem = "goes on after a stop string"
        elif produced[-1] not in ends and len(produced) < limit and not self._stops(text, produced):
            what = "neither by an end of text" + (", nor by a stop string" if self.sampling.stop else "")
            problem = f"ends after {len(produced)} tokens, {what} nor by max_new_tokens={limit}"
        elif len(text.prompt) + limit > self.pair.max_length:
            problem = f"and max_new_tokens={limit} exceed {self.pair.context}"
        if problem is not None:
            raise InputError(f"response {text.row} {problem}")

    def _stops(self, text: RecordedText, produced: Sequence[int]) -> bool:
        return self.pair.stop_position(self.sampling.stop, produced, text.prompt) is not None

    def _on_path(self, batch: list[RecordedText], target: Session, draft: Session) -> list[dict[str, Tensor]]:
        """Columns of every text's N positions, from one pass of each model; each `RecordedText` is told what was accepted."""
        parts: list[list[dict[str, Tensor]]] = [[] for _ in batch]
        longest, width = max(len(text.produced) for text in batch), self.width(len(batch))
        for first in range(0, longest, width):
            end = min(first + width, longest)
            scores = self.path(target, batch, first, end).logits
            reading = self.path(draft, batch, first, end)
            logits, hidden = self.pair.fit(reading.logits), reading.hidden
            for row, text in enumerate(batch):
                if (count := min(end, len(text.produced)) - first) > 0:
                    readings = (scores[row, :count], logits[row, :count], hidden[row, :count].to(logits.device))
                    parts[row].append(self._part(text, first, *readings))
            del scores, reading, logits, hidden
        columns = [{name: torch.cat([part[name] for part in of_text]) for name in of_text[0]} for of_text in parts]
        for text, column in zip(batch, columns, strict=True):
            text.accepted, text.drafted = column["accepted"], column["tokens"].long()
        return columns

    def _part(
        self, text: RecordedText, first: int, target_logits: Tensor, logits: Tensor, hidden: Tensor
    ) -> dict[str, Tensor]:
        """The columns of a text's positions from `first` on [n], from logits [n, V] and states [n, D] that predict them."""
        device = logits.device
        part = slice(first, first + len(logits))
        emitted = torch.tensor(text.produced[part], device=device).unsqueeze(-1)
        seen = None if text.seen is None else text.seen[part]
        target_probs, draft_probs = warp(target_logits, self.sampling, seen), self.warp_draft(logits, seen)
        self.check_possible(text, first, target_logits, target_probs, seen)
        accept_prob, accepted, drafted = decided(target_probs, draft_probs, emitted, text.uniforms[part].to(device))
        step = DraftStep(1, logits, draft_probs, hidden, drafted)
        return {
            **self.facts_of(step, target_probs),
            "text_accept_prob": accept_prob.cpu(),
            "accepted": accepted.cpu(),
            "text_prob": step.raw_probs.gather(-1, emitted).squeeze(-1).float().cpu(),
            "target_entropy": -torch.special.xlogy(target_probs, target_probs).sum(-1).float().cpu(),
        }

    def path(self, session: Session, batch: list[RecordedText], first: int, end: int) -> Reading:
        """What predicts each text's tokens `first` to `end`; the tokens before them become tree nodes, prompts the context."""
        prompts = [text.prompt if not first else [] for text in batch]
        produced = [text.produced[max(first - 1, 0) : end - 1] for text in batch]
        width, nodes = max(map(len, prompts)), max(end - 1, 0) - max(first - 1, 0)
        tokens = torch.tensor([
            [0] * (width - len(prompt)) + prompt + tokens + text.prompt[:1] * (nodes - len(tokens))
            for text, prompt, tokens in zip(batch, prompts, produced, strict=True)
        ], device=session.index.device)  # fmt: skip
        chain = torch.arange(max(first - 1, 0) - 1, end - 2, device=tokens.device).expand(len(batch), -1)
        counts = list(map(len, prompts))
        return session.extend(tokens, counts=counts, parents=chain if nodes else None, last=end - first)

    def width(self, num_rows: int) -> int:
        return max(1, LOGITS // (num_rows * self.pair.vocab_size))

    def check_possible(self, text: RecordedText, first: int, logits: Tensor, p: Tensor, seen: Tensor | None) -> None:
        """Raises InputError if the target could not have produced a token from `first` on, rounding at an edge apart."""
        produced = text.produced[first : first + len(p)]
        emitted = torch.tensor(produced, device=p.device).unsqueeze(-1)
        emitted_probs = p.gather(-1, emitted).squeeze(-1)
        for where in (emitted_probs == 0).nonzero().squeeze(-1).tolist():
            if not self._at_the_edge(penalized(logits[where], self.sampling, _row(seen, where)), produced[where]):
                raise InputError(
                    f"response {text.row}: token {first + where + 1} ({produced[where]}) has probability 0 under this target "
                    "and sampling; expected responses of the same target, sampled with the same settings"
                )

    def _at_the_edge(self, logits: Tensor, token: int) -> bool:
        """Whether rounding alone may have cut a token off, by logits [V]: at a tie, or at the edge of top-k, top-p or min-p."""
        share = ROUNDED.get(getattr(self.pair.target, "dtype", logits.dtype), ROUNDED_OTHERS)
        margin = share * float(logits[torch.isfinite(logits)].abs().max())
        lifted = logits.clone()
        lifted[token] += 2 * margin
        top_p, min_p = min(1.0, self.sampling.top_p + margin), max(0.0, self.sampling.min_p - margin)
        wider = replace(self.sampling, top_p=top_p, min_p=min_p, repetition_penalty=1.0)
        return bool(warp(lifted.unsqueeze(0), wider)[0, token] > 0)

    def _roll(self, batch: list[RecordedText], draft: Session, target: Session | None) -> list[list[dict[str, Tensor]]]:
        """For every text a list of facts, one or more per depth; `_Roll.steps` says which belong to each roll-out."""
        facts: list[list[dict[str, Tensor]]] = [[] for _ in batch]
        ends = set(self.pair.ends(self.sampling))
        live: list[list[_Roll]] = []
        for text in batch:
            drafted, after_rejection = text.drafted.tolist(), ~text.accepted
            after_rejection[-1] = True  # a stop string has ended the text, or there is no room
            text.rolls = [
                _Roll(position, drafted[position], position - 1, seen=_row(text.seen, position))
                for position in after_rejection.nonzero().squeeze(-1).tolist()
                if drafted[position] not in ends and position + 1 < self.room
            ]
            live.append(list(text.rolls))
        if not any(live):
            return facts
        for session in (draft, *((target,) if target is not None else ())):
            session.reserve(session.index.capacity + max(map(len, live)) * (self.max_drafted - 1))
        size = self.width(len(batch))
        for depth in range(1, self.max_drafted):
            width = max(map(len, live))
            if not width:
                break
            for begin in range(0, width, size):
                parts = [rolls[begin : begin + size] for rolls in live]
                self._roll_on(batch, parts, facts, depth, draft, target)
            for row, rolls in enumerate(live):
                live[row] = [roll for roll in rolls if roll.token not in ends and roll.position + 1 + depth < self.room]
        return facts

    def _roll_on(
        self,
        batch: list[RecordedText],
        live: list[list[_Roll]],
        facts: list[list[dict[str, Tensor]]],
        depth: int,
        draft: Session,
        target: Session | None,
    ) -> None:
        """One token more for some roll-outs of every text; what is known of these steps is appended to the text's facts."""
        width = max(map(len, live))
        first = [draft.index.num_nodes(row) for row in range(len(batch))]
        padding = [text.prompt[0] for text in batch]  # read in any case
        reading = self._branch(draft, live, width, padding)
        logits, hidden = self.pair.fit(reading.logits), reading.hidden
        target_logits = None if target is None else self._branch(target, live, width, padding).logits
        for row, (text, rolls) in enumerate(zip(batch, live, strict=True)):
            if not rolls:
                continue
            noted = [roll.seen for roll in rolls if roll.seen is not None]  # of all, or of none
            for roll, before in zip(rolls, noted, strict=False):
                before[roll.token] = True
            seen = torch.stack(noted) if noted else None  # tokens before the ones that are drawn now [R, V]
            distribution = self.warp_draft(logits[row, : len(rolls)], seen)
            target_probs = None
            if target_logits is not None:
                target_probs = warp(target_logits[row, : len(rolls)], self.sampling, seen)
            positions = torch.tensor([roll.position for roll in rolls])
            drawn = draw(distribution, text.uniforms[positions, 1 + depth].to(distribution.device))
            states = hidden[row, : len(rolls)].to(distribution.device)
            step = DraftStep(1, logits[row, : len(rolls)], distribution, states, drawn)
            for number, (roll, token) in enumerate(zip(rolls, drawn.tolist(), strict=True)):
                roll.length += 1
                roll.steps.append((len(facts[row]), number))
                roll.token, roll.parent = token, first[row] + number
            facts[row].append(self.facts_of(step, target_probs))

    @staticmethod
    def _branch(session: Session, live: list[list[_Roll]], width: int, padding: Sequence[int]) -> Reading:
        """One forward: the newest token of every roll-out under way becomes a node. Logits [B, R, V], states [B, R, D]."""
        padded = [
            rolls + [_Roll(0, token, -1)] * (width - len(rolls)) for rolls, token in zip(live, padding, strict=True)
        ]
        device = session.index.device
        tokens = torch.tensor([[roll.token for roll in rolls] for rolls in padded], device=device)
        parents = torch.tensor([[roll.parent for roll in rolls] for rolls in padded], device=device)
        return session.extend(tokens, counts=[0] * len(live), parents=parents, last=width)

    def facts_of(self, step: DraftStep, target_probs: Tensor | None) -> dict[str, Tensor]:
        assert step.tokens is not None
        facts = {
            "tokens": step.tokens.int(),
            **{name: getattr(step, name).float() for name in ("draft_prob", "token_prob", "entropy", "top_probs")},
        }
        if target_probs is None:
            unknown = torch.full_like(facts["entropy"], torch.nan)
            facts["accept_prob"] = facts["alpha"] = facts["target_prob"] = unknown
        else:
            p = target_probs.gather(-1, step.tokens.unsqueeze(-1)).squeeze(-1)
            facts["accept_prob"] = (p / step.draft_prob).clamp(max=1).float()
            facts["target_prob"] = p.float()
            facts["alpha"] = torch.minimum(target_probs, step.probs).sum(-1).float()
        for name, head in self.heads.items():
            if name not in self._late:
                facts[f"estimates/{name}"] = kept_logits(head, step)
        if self.hidden or self._late:
            facts["hidden"] = step.hidden.clone()
        return {name: value.cpu() for name, value in facts.items()}

    def _assemble(
        self, batch: list[RecordedText], on_path: list[dict[str, Tensor]], rolled: list[list[dict[str, Tensor]]]
    ) -> Trace:
        lengths = torch.tensor([len(text.produced) for text in batch])
        total = int(lengths.sum())
        roll_first, roll_length = torch.zeros(total, dtype=torch.long), torch.zeros(total, dtype=torch.int32)
        pieces: list[dict[str, Tensor]] = list(on_path)
        begin, next_step = 0, total
        for text, facts in zip(batch, rolled, strict=True):
            offsets = list(accumulate((len(part["tokens"]) for part in facts), initial=0))
            order = [offsets[entry] + number for roll in text.rolls for entry, number in roll.steps]
            if order:
                whole = {name: torch.cat([part[name] for part in facts]) for name in facts[0]}
                pieces.append({name: value[order] for name, value in whole.items()})
            for roll in text.rolls:
                roll_first[begin + roll.position], roll_length[begin + roll.position] = next_step, roll.length
                next_step += roll.length
            begin += len(text.produced)
        of_positions: dict[str, Any] = {
            name: torch.cat([piece.pop(name) for piece in on_path])
            for name in ("accepted", "text_accept_prob", "target_entropy", "text_prob")
        }
        columns = {name: torch.cat([piece[name] for piece in pieces]) for name in on_path[0]}
        estimates = {name: columns.pop(f"estimates/{name}") for name in self.heads if name not in self._late}
        return Trace(
            text_first=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            room=torch.tensor([self.room] * len(batch)),
            rows=torch.tensor([text.row for text in batch]),
            prompt_lengths=torch.tensor([len(text.prompt) for text in batch]),
            roll_first=roll_first,
            roll_length=roll_length,
            text_tokens=torch.tensor([token for text in batch for token in text.produced], dtype=torch.int32),
            max_drafted=self.max_drafted,
            estimates=estimates,
            **of_positions,
            **columns,  # type: ignore[arg-type]
        )

    @property
    def room(self) -> int:
        """Positions that can hold a draft: the last token a length limit allows is always the target's own."""
        return self.sampling.max_new_tokens - 1

    def warp_draft(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        return warp(logits, self.sampling.at(self.draft_temperature), seen)

    def _uniforms(self, row: int, length: int) -> Tensor:
        """[N, 1 + M]: acceptance, the drafted token instead, and one per step of the roll-out."""
        generator = row_generator(self.sampling.seed + 1_000_003 * (self.replicate + 1), row)
        widths = (2, self.max_drafted - 1)  # apart: the acceptance draws are the same for every max_drafted
        return torch.cat([torch.rand(length, n, generator=generator, dtype=torch.float64) for n in widths], 1)


@dataclass
class _Roll:
    """A roll-out under way. seen [V]: tokens before the newest one, for the repetition penalty."""

    position: int
    token: int
    parent: int
    length: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)
    seen: Tensor | None = None


class RecordedText:
    def __init__(self, row: int, prompt: Sequence[int], produced: Sequence[int], uniforms: Tensor):
        self.row, self.prompt, self.produced, self.uniforms = row, list(prompt), list(produced), uniforms
        self.accepted: Any = None
        self.drafted: Any = None
        self.rolls: list[_Roll] = []
        self.seen: Tensor | None = None  # tokens before each of the produced ones [N, V], for the repetition penalty


def decided(p: Tensor, q: Tensor, emitted: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Acceptance probability, min(1, q/p) of the text's tokens [n, 1]; whether accepted; the drafted tokens."""
    p_emitted, q_emitted = p.gather(-1, emitted).squeeze(-1), q.gather(-1, emitted).squeeze(-1)
    # Probability 0 comes from rounding (`check_possible`); the draft may still have the token.
    accept_prob = torch.where(p_emitted <= 0, q_emitted.sign(), q_emitted / p_emitted).clamp(max=1)
    accepted = uniforms[:, 0] < accept_prob
    instead = draw(normalized((q - p).clamp(min=0), q), uniforms[:, 1])
    return accept_prob, accepted, torch.where(accepted, emitted.squeeze(-1), instead)


def _row(seen: Tensor | None, position: int) -> Tensor | None:
    return None if seen is None else seen[position].clone()
