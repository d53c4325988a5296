"""Record traces: make the acceptance draws of speculative sampling for given texts, and let the draft roll on after
rejections.

Each model makes one teacher-forced pass, then the draft one forward per depth of the roll-outs (`toolkit.trace.roll_outs`).
Recordings of one draft at several temperatures differ in its warped distributions and in what follows from them: one pass of
each model serves all of them (`record_together`). A repetition penalty changes p and q of a position by the tokens before it.

Shapes: B texts of a batch, N tokens of a text, n of a part of it, V vocabulary, M max_drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from toolkit.acceptance.folder import Scorer
from toolkit.engine import Reading, Session
from toolkit.engine.engine import engine_of
from toolkit.errors import NOT_NUMBERS, InputError
from toolkit.grammar import grammars_of, masked
from toolkit.grammar.walk import along, certainty, stacked
from toolkit.models.pair import ModelPair
from toolkit.models.teacher import Text, hidden_size, seen_before
from toolkit.sampling import Sampling, draw, penalized, row_generator, warp
from toolkit.stopping import StoppingPolicy
from toolkit.trace import Trace, join
from toolkit.trace.roll_outs import NODES, OF_POSITIONS, Grammars, RecordedText, RollOuts, columns_of, row_of
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
    policies           bound ones: roll-outs end one by one, where none of them goes on. None: at max_drafted, as all do with
                       `upper_bound`, and for heads that read earlier positions or the depth unless `hidden`
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
    policies: Sequence[StoppingPolicy] | None = None
    sound: bool = False

    def __post_init__(self) -> None:
        if self.max_drafted < 1:
            raise InputError(f"max_drafted: expected at least 1, got {self.max_drafted}")
        if self.sampling.max_length is not None:
            raise InputError(
                "traces know one limit for all texts: expected sampling.max_length=null (source=live decodes)"
            )
        if self.upper_bound or (self.late and not self.hidden):
            object.__setattr__(self, "policies", None)

    def record(self, sequences: Sequence[Text], rows: Sequence[int]) -> Trace:
        """The trace of texts (prompt ids, produced ids); `rows` seed the draws. Raises InputError for another's texts, and
        for those that hold what is not a number, unless `sound`.
        """
        return record_together([self], sequences, rows)[0]

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
    def recorded(self, sequences: Sequence[Text], rows: Sequence[int], others: Sequence[Recorder]) -> list[Trace]:
        """Its trace of texts and those of `others`, as `record_together` makes them, whether or not they hold numbers."""
        batch = self._texts(sequences, rows)
        target, draft = self._sessions(batch)
        recorders = [self, *others]
        columns = self._on_path(recorders, batch, target, draft)
        read = [(session, list(session.lengths)) for session in (target, draft)]
        traces = []
        for recorder, of_texts in zip(recorders, columns, strict=True):
            for session, lengths in read:  # without the roll-outs of the recorder before
                session.forget(lengths)
            rolls = RollOuts(recorder, batch, of_texts, draft, target if self.upper_bound else None)
            traces.append(rolls.whole() if recorder.policies is None else rolls.as_far_as(recorder.policies))
        return traces

    @torch.inference_mode()
    def deepened(self, trace: Trace, sequences: Sequence[Text], positions: Tensor, batch_size: int = BATCH) -> Trace:
        """A cut trace of texts with the roll-outs after `positions` [n] to their ends, and the logits of its own heads.

        The target reads nothing. Steps are those of a whole recording, up to rounding.
        """
        recorder = replace(self, hidden=trace.hidden is not None)
        trace = replace(trace, estimates={name: trace.estimates[name] for name in self.heads})
        wanted = torch.zeros_like(trace.accepted).index_fill(0, positions, True)
        number, parts = torch.arange(trace.num_texts), []
        for first in range(0, trace.num_texts, batch_size):
            chosen = (number >= first) & (number < first + batch_size)
            part, of_part = trace.only(chosen), wanted[chosen[trace.step_sequences[: trace.num_positions]]]
            if bool(of_part.any()):
                part = recorder._resumed(part, sequences[first : first + batch_size], of_part.nonzero().squeeze(1))
            parts.append(part)
        joined = recorder.checked(join(parts))
        return joined if joined.roll_cut is not None and bool(joined.roll_cut.any()) else replace(joined, roll_cut=None)

    def _resumed(self, trace: Trace, sequences: Sequence[Text], positions: Tensor) -> Trace:
        trace = replace(trace, estimates={name: trace.estimates[name] for name in self.heads if name not in self.late})
        batch = self._texts(sequences, trace.rows.tolist())
        _, draft = self._sessions(batch)
        longest = max(len(text.produced) for text in batch)
        for first in range(0, longest, NODES):
            self.path(draft, batch, first, min(first + NODES, longest), last=1)
        edges = trace.text_first.tolist()
        columns = [
            {**columns_of(trace, slice(*ends)), **{name: getattr(trace, name)[slice(*ends)] for name in OF_POSITIONS}}
            for ends in pairwise(edges)
        ]
        return RollOuts(self, batch, columns, draft).resumed(trace, positions)

    def _texts(self, sequences: Sequence[Text], rows: Sequence[int]) -> list[RecordedText]:
        """The texts with their draws. Raises InputError for another's."""
        batch = [
            RecordedText(row, *text, self._uniforms(row, len(text[1])))
            for row, text in zip(rows, sequences, strict=True)
        ]
        self.prepare(batch, sequences)
        return batch

    def prepare(self, batch: Sequence[RecordedText], sequences: Sequence[Text]) -> None:
        """Check texts, and note what stands before each of their tokens. Raises InputError for another's."""
        grammars = grammars_of(self.pair, self.sampling, sequences)
        for name, head in self.heads.items() if grammars is not None else ():
            if getattr(head, "num_history", 0):
                raise InputError(f"head {name}: beside a grammar expected a head that reads no earlier positions")
        for number, text in enumerate(batch):
            self.check(text)
            if self.sampling.repetition_penalty != 1.0:
                text.seen = seen_before(text.prompt, text.produced, self.pair.vocab_size).to(self.pair.device)
            if grammars is not None:
                text.grammars = along(grammars[number], text.produced)[:-1]

    def _sessions(self, batch: Sequence[RecordedText]) -> tuple[Session, Session]:
        """Empty caches of target and draft for texts."""
        longest = max(len(text.prompt) for text in batch) + max(len(text.produced) for text in batch)
        sessions = engine_of(self.pair).open(len(batch), longest, captured=False)  # shapes hardly recur
        return sessions.target, sessions.drafts[0]

    def scored(self, trace: Trace) -> Trace:
        """With the logits of heads that read earlier positions or the depth: known once all steps are."""
        if not self.late:
            return trace
        late = {name: recorded_logits(trace, self.heads[name], self.pair.device) for name in self.late}
        estimates = {name: late[name] if name in late else trace.estimates[name] for name in self.heads}
        return replace(trace, estimates=estimates, hidden=trace.hidden if self.hidden else None)

    @property
    def late(self) -> list[str]:
        """Names of the heads that `scored` scores."""
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
        return record_all_together([self], sequences, rows, batch_size, on_batch)[0]

    def work(self, num_texts: int, num_tokens: int, batch_size: int = BATCH, temperatures: int = 1) -> str:
        """What recording so many texts, at so many draft temperatures, takes: tokens, forward passes, bytes at most."""
        batches, depth = -(-num_texts // batch_size), self.max_drafted
        target = batches * (depth if self.upper_bound else 1)
        numbers = (hidden_size(self.pair.draft) if self.hidden else 0) + 10 + 2 * len(self.heads)
        draft, most = batches * (1 + (depth - 1) * temperatures), "" if self.policies is None else "at most "
        size = 4 * numbers * num_tokens * depth * temperatures / 2**20
        return (
            f"traces: {num_texts:,} texts, {num_tokens:,} tokens, roll-outs of up to {depth}: about {target:,} target and "
            f"{most}{draft:,} draft forward passes, at most {size:,.0f} MiB"
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

    def _on_path(
        self, recorders: Sequence[Recorder], batch: list[RecordedText], target: Session, draft: Session
    ) -> list[list[dict[str, Tensor]]]:
        """For every recorder the columns of every text's N positions, from one pass of each model."""
        parts: list[list[list[dict[str, Tensor]]]] = [[[] for _ in batch] for _ in recorders]
        longest, width = max(len(text.produced) for text in batch), self.width(len(batch))
        for first in range(0, longest, width):
            end = min(first + width, longest)
            scores = self.path(target, batch, first, end).logits
            reading = self.path(draft, batch, first, end)
            logits, hidden = self.pair.fit(reading.logits), reading.hidden
            for row, text in enumerate(batch):
                if (count := min(end, len(text.produced)) - first) > 0:
                    readings = (scores[row, :count], logits[row, :count], hidden[row, :count].to(logits.device))
                    for recorder, of_texts in zip(recorders, parts, strict=True):
                        of_texts[row].append(recorder._part(text, first, *readings))
            del scores, reading, logits, hidden
        return [
            [{name: torch.cat([part[name] for part in of_text]) for name in of_text[0]} for of_text in of_texts]
            for of_texts in parts
        ]

    def _part(
        self, text: RecordedText, first: int, target_logits: Tensor, logits: Tensor, hidden: Tensor
    ) -> dict[str, Tensor]:
        """The columns of a text's positions from `first` on [n], from logits [n, V] and states [n, D] that predict them."""
        device = logits.device
        part = slice(first, first + len(logits))
        emitted = torch.tensor(text.produced[part], device=device).unsqueeze(-1)
        seen = None if text.seen is None else text.seen[part]
        grammars = None if text.grammars is None else text.grammars[part]
        target_logits, logits = self.within(target_logits, grammars), self.within(logits, grammars)
        target_probs, draft_probs = warp(target_logits, self.plain, seen), self.warp_draft(logits, seen)
        self.check_possible(text, first, target_logits, target_probs, seen)
        accept_prob, accepted, drafted = decided(target_probs, draft_probs, emitted, text.uniforms[part].to(device))
        step = DraftStep(1, logits, draft_probs, hidden, drafted)
        return {
            **self.facts_of(step, target_probs, grammars),
            "text_accept_prob": accept_prob.cpu(),
            "accepted": accepted.cpu(),
            "text_prob": step.raw_probs.gather(-1, emitted).squeeze(-1).float().cpu(),
            "target_entropy": -torch.special.xlogy(target_probs, target_probs).sum(-1).float().cpu(),
        }

    def path(
        self, session: Session, batch: list[RecordedText], first: int, end: int, last: int | None = None
    ) -> Reading:
        """What predicts each text's tokens `first` to `end`; the tokens before them become tree nodes, prompts the context.

        last  of the last so many alone; None: of all
        """
        prompts = [text.prompt if not first else [] for text in batch]
        produced = [text.produced[max(first - 1, 0) : end - 1] for text in batch]
        width, nodes = max(map(len, prompts)), max(end - 1, 0) - max(first - 1, 0)
        tokens = torch.tensor([
            [0] * (width - len(prompt)) + prompt + tokens + text.prompt[:1] * (nodes - len(tokens))
            for text, prompt, tokens in zip(batch, prompts, produced, strict=True)
        ], device=session.index.device)  # fmt: skip
        chain = torch.arange(max(first - 1, 0) - 1, end - 2, device=tokens.device).expand(len(batch), -1)
        counts = list(map(len, prompts))
        return session.extend(tokens, counts=counts, parents=chain if nodes else None, last=last or end - first)

    def width(self, num_rows: int) -> int:
        return max(1, LOGITS // (num_rows * self.pair.vocab_size))

    def check_possible(self, text: RecordedText, first: int, logits: Tensor, p: Tensor, seen: Tensor | None) -> None:
        """Raises InputError if the target could not have produced a token from `first` on, rounding at an edge apart."""
        produced = text.produced[first : first + len(p)]
        emitted = torch.tensor(produced, device=p.device).unsqueeze(-1)
        emitted_probs = p.gather(-1, emitted).squeeze(-1)
        for where in (emitted_probs == 0).nonzero().squeeze(-1).tolist():
            if not self._at_the_edge(penalized(logits[where], self.sampling, row_of(seen, where)), produced[where]):
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
        wider = replace(self.plain, top_p=top_p, min_p=min_p, repetition_penalty=1.0)
        return bool(warp(lifted.unsqueeze(0), wider)[0, token] > 0)

    def facts_of(
        self, step: DraftStep, target_probs: Tensor | None, grammars: Grammars | None = None
    ) -> dict[str, Tensor]:
        """The columns of steps [n]; grammars: those before their tokens [n], None where no text has one."""
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
            if name not in self.late:
                facts[f"estimates/{name}"] = kept_logits(head, step)
        if self.hidden or self.late:
            facts["hidden"] = step.hidden.clone()
        if grammars is not None:
            facts |= certainty(grammars, step.tokens.tolist())
        return {name: value.cpu() for name, value in facts.items()}

    @property
    def room(self) -> int:
        """Positions that can hold a draft: the last token a length limit allows is always the target's own."""
        return self.sampling.max_new_tokens - 1

    def warp_draft(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        return warp(logits, self.plain.at(self.draft_temperature), seen)

    @property
    def plain(self) -> Sampling:
        """The sampling of logits that are masked already (`within`)."""
        return replace(self.sampling, grammar=None)

    def within(self, logits: Tensor, grammars: Grammars | None) -> Tensor:
        """Logits [n, V] of what the grammars before n tokens leave; None: no text has one."""
        if grammars is None:
            return logits
        return masked(logits, stacked(grammars, self.pair.vocab_size).to(logits.device))

    def _uniforms(self, row: int, length: int) -> Tensor:
        """[N, 1 + M]: acceptance, the drafted token instead, and one per step of the roll-out."""
        generator = row_generator(self.sampling.seed + 1_000_003 * (self.replicate + 1), row)
        widths = (2, self.max_drafted - 1)  # apart: the acceptance draws are the same for every max_drafted
        return torch.cat([torch.rand(length, n, generator=generator, dtype=torch.float64) for n in widths], 1)


def decided(p: Tensor, q: Tensor, emitted: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Acceptance probability, min(1, q/p) of the text's tokens [n, 1]; whether accepted; the drafted tokens."""
    p_emitted, q_emitted = p.gather(-1, emitted).squeeze(-1), q.gather(-1, emitted).squeeze(-1)
    # Probability 0 comes from rounding (`check_possible`); the draft may still have the token.
    accept_prob = torch.where(p_emitted <= 0, q_emitted.sign(), q_emitted / p_emitted).clamp(max=1)
    accepted = uniforms[:, 0] < accept_prob
    instead = draw(normalized((q - p).clamp(min=0), q), uniforms[:, 1])
    return accept_prob, accepted, torch.where(accepted, emitted.squeeze(-1), instead)


def record_together(recorders: Sequence[Recorder], sequences: Sequence[Text], rows: Sequence[int]) -> list[Trace]:
    """`Recorder.record` of each of several that differ in the draft's temperature: the models read the texts once."""
    traces = recorders[0].recorded(sequences, rows, recorders[1:])
    return [recorder.checked(trace) for recorder, trace in zip(recorders, traces, strict=True)]


def record_all_together(
    recorders: Sequence[Recorder],
    sequences: Sequence[Text],
    rows: Sequence[int],
    batch_size: int = BATCH,
    on_batch: Callable[[int], object] | None = None,
) -> list[Trace]:
    """`Recorder.record_all` of each, as `record_together`."""
    parts = []
    for first in range(0, len(sequences), batch_size):
        batch = sequences[first : first + batch_size]
        parts.append(record_together(recorders, batch, rows[first : first + batch_size]))
        if on_batch is not None:
            on_batch(sum(len(produced) for _, produced in batch))
    return [join([part[number] for part in parts]) for number in range(len(recorders))]
