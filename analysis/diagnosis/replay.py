"""A draft replayed along an engine's texts: it drafts in every round that the engine counted, with its own cache.

At temperature 0 it drafts greedily, and a drafted token is accepted iff the text goes on with it: so it is where engines
propose their drafts' top tokens, at any temperature. Above it, drafts were drawn, and those that were rejected are not known:
the draft reads the text's own tokens, and each has a probability of having been accepted (`toolkit.drafts.causes.sampled`).

Shapes: b texts side by side, r rounds, K tokens of the longest round, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analysis.diagnosis.along import AlongTexts
from analysis.diagnosis.answers import Answer, most_drafted
from toolkit.drafts.causes import Cause, ReplayedRound, ReplayedText, whole_context
from toolkit.drafts.kinds import block_length, gives_blocks, reads_states
from toolkit.engine import BlockSession, Session, open_session
from toolkit.engine.device import tensor_on
from toolkit.errors import NOT_NUMBERS, InputError
from toolkit.models.teacher import picked
from toolkit.sampling import Sampling, first_maximum, penalized, warp

ROWS = 16
Progress = Callable[[int], object]  # is called with numbers of drafted tokens
Array = NDArray[np.float64]


def num_passes(answers: Sequence[Answer], draft: Any) -> int:
    """Draft forward passes of one replay."""
    parts = [answers[first : first + ROWS] for first in range(0, len(answers), ROWS)]
    depth = 1 if gives_blocks(draft) else most_drafted(answers)
    return depth * sum(max(len(answer.rounds) for answer in part) for part in parts)


def expected(
    draft: Any,
    cause: Cause,
    answers: Sequence[Answer],
    sampling: Sampling,
    undrafted: Sequence[int],
    progress: Progress,
    along: AlongTexts | None = None,
) -> list[list[int]]:
    """Tokens that the draft should accept in every round of every answer, after a cause's change.

    undrafted  tokens that it never proposes
    along      of the same answers, where the draft reads the target's states
    """
    draft, sampling, accepted = cause.draft(draft), cause.sampling(sampling), list[list[int]]()
    for texts in _replayed(draft, cause, answers, TopTokens(sampling, undrafted), progress, along):
        accepted += [[shared(each.drafted, text.token_ids[each.start :]) for each in text.rounds] for text in texts]
    return accepted


@dataclass(frozen=True)
class Terms:
    """Of every round's positions [r, K]: P(accepted) and P(emitted after a rejection) of the text's token, and p of it."""

    accepted: Array
    rejected: Array
    text: Array


def sampled_terms(
    draft: Any,
    causes: Sequence[Cause],
    answers: Sequence[Answer],
    sampling: Sampling,
    fit: Callable[[Tensor], Tensor],
    progress: Progress,
    along: AlongTexts,
    logits: Sequence[Tensor],
) -> list[Terms]:
    """The terms of every cause; all of them share their forward passes (`Cause.passes`).

    fit     puts the draft's logits on the target's vocabulary
    logits  [n, V] of the target, along every answer (`AlongTexts.logits`)
    """
    draft, tokens = causes[0].draft(draft), TextTokens(sampling, causes, fit, answers, logits)
    for _ in _replayed(draft, causes[0], answers, tokens, progress, along if reads_states(draft) else None):
        pass
    terms = np.concatenate(tokens.terms)
    return [Terms(terms[..., 2 * number], terms[..., 2 * number + 1], terms[..., -1]) for number in range(len(causes))]


def _replayed(
    draft: Any, cause: Cause, answers: Sequence[Answer], choose: Choose, progress: Progress, along: AlongTexts | None
) -> Iterator[list[ReplayedText]]:
    """The texts of ROWS answers after another, with their rounds."""
    longest = block_length(draft)
    if longest is not None and (most := most_drafted(answers)) > longest:
        raise InputError(f"expected rounds of at most {longest} drafted tokens, a block of this draft, got {most}")
    states = None if along is None else along.states(draft.target_layers)
    for first in range(0, len(answers), ROWS):
        part = slice(first, first + ROWS)
        session = _session(draft, answers[part], along)
        replay = (BlockReplay if longest else Replay)(
            session, cause, answers[part], first, choose, None if states is None else states[part]
        )
        hook = draft.register_forward_pre_hook(replay.moved, with_kwargs=True) if cause.positions else nullcontext()
        with torch.inference_mode(), hook:
            yield replay.run(progress)


def _session(draft: Any, answers: Sequence[Answer], along: AlongTexts | None) -> Session:
    """A draft's session; of one that reads states with a target's, which reads nothing: its states are written there."""
    rows, capacity = len(answers), max(answer.length for answer in answers)
    layers = () if along is None else draft.target_layers
    target = None if along is None else open_session(along.target, rows, capacity, kept_layers=layers)
    session = open_session(draft, rows, capacity, target=target)
    session.clips_tokens = True  # the target may have more of them
    return session


class Choose(Protocol):
    """What a round goes on with: the token [b] of texts, from the draft's logits [b, V] and the round's tokens so far."""

    def __call__(self, logits: Tensor, texts: Sequence[ReplayedText], drafted: Sequence[Tensor]) -> Tensor: ...


@dataclass
class TopTokens:
    """The draft's top tokens. undrafted: tokens that it never proposes."""

    sampling: Sampling
    undrafted: Sequence[int]

    def __call__(self, logits: Tensor, texts: Sequence[ReplayedText], drafted: Sequence[Tensor]) -> Tensor:
        logits = penalized(logits, self.sampling, seen_in(logits, texts, drafted, self.sampling))
        undrafted = [token for token in self.undrafted if token < logits.shape[-1]]
        return first_maximum(logits.index_fill(-1, tensor_on(logits.device, undrafted).long(), -torch.inf))


class TextTokens:
    """The texts' own tokens, and what every cause says of each. terms: per answer [rounds, K, 2 causes + 1], as of `Terms`."""

    def __init__(
        self,
        sampling: Sampling,
        causes: Sequence[Cause],
        fit: Callable[[Tensor], Tensor],
        answers: Sequence[Answer],
        logits: Sequence[Tensor],
    ):
        self.sampling, self.causes, self.fit, self.logits = sampling, causes, fit, logits
        deepest = most_drafted(answers)
        self.terms = [np.ones((len(answer.rounds), deepest, 2 * len(causes) + 1)) for answer in answers]

    def __call__(self, logits: Tensor, texts: Sequence[ReplayedText], drafted: Sequence[Tensor]) -> Tensor:
        depth, logits = len(drafted), self.fit(logits)
        columns = [min(text.start + depth, len(text.token_ids) - 1) for text in texts]
        tokens = [text.token_ids[column] for text, column in zip(texts, columns, strict=True)]
        emitted = tensor_on(logits.device, tokens)
        rows = torch.stack([self.logits[text.number][column] for text, column in zip(texts, columns, strict=True)])
        seen = seen_in(logits, texts, drafted, self.sampling)
        unpenalized = replace(self.sampling, repetition_penalty=1.0)  # which the target's logits have had
        terms = list[Tensor]()
        for cause in self.causes:
            p, q = warp(rows, cause.texts(unpenalized)), warp(logits, cause.sampling(self.sampling), seen)
            terms += cause.scheme(p, q, emitted)
        values = torch.stack([*terms, picked(warp(rows, unpenalized), emitted)], -1).double().cpu().numpy()
        for text, value in zip(texts, values, strict=True):
            if depth < self.terms[text.number].shape[1]:
                self.terms[text.number][len(text.rounds), depth] = value
        return emitted


def seen_in(
    logits: Tensor, texts: Sequence[ReplayedText], drafted: Sequence[Tensor], sampling: Sampling
) -> Tensor | None:
    """Which tokens [b, V] the texts and their rounds hold so far; None: no penalty asks. Raises InputError for no numbers."""
    if bool(logits.isnan().any()):
        raise InputError(NOT_NUMBERS)
    if sampling.repetition_penalty == 1.0:
        return None
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids = [*text.prompt_ids, *text.token_ids[: text.start], *(int(each[row]) for each in drafted)]
        seen[row, [token for token in ids if token < seen.shape[1]]] = True
    return seen


class Replay:
    """A session that reads some texts side by side, and the tokens that each of its rows holds.

    first   number of the first answer
    states  of the target along every answer [m, W], where the draft reads them
    """

    def __init__(
        self,
        session: Session,
        cause: Cause,
        answers: Sequence[Answer],
        first: int,
        choose: Choose,
        states: Sequence[Tensor] | None,
    ):
        self.session, self.cause, self.answers, self.choose, self.states = session, cause, answers, choose, states
        self.texts = [
            ReplayedText(answer.prompt_ids, answer.token_ids, number=first + row) for row, answer in enumerate(answers)
        ]
        self.rows: list[int] = []  # that the forward pass under way reads
        self.held: list[list[int]] = [[] for _ in answers]

    def run(self, progress: Progress) -> list[ReplayedText]:
        for number in range(max(len(answer.rounds) for answer in self.answers)):
            self.rows = [row for row, answer in enumerate(self.answers) if number < len(answer.rounds)]
            rounds = [self.answers[row].rounds[number] for row in self.rows]
            for row, (start, _, _) in zip(self.rows, rounds, strict=True):
                self.texts[row].start = start
            drafts = self.drafted(max(count for _, count, _ in rounds))
            for row, (start, count, accepted), tokens in zip(self.rows, rounds, drafts, strict=True):
                self.texts[row].rounds.append(ReplayedRound(start, tokens[:count], accepted))
                self.cause.keeps(self.session, row, self.texts[row].rounds[-1])
            progress(sum(count for _, count, _ in rounds))
        return self.texts

    def drafted(self, depth: int) -> list[list[int]]:
        """`depth` tokens of every row that is read; what its cache shares with the context stays there."""
        texts = [self.texts[row] for row in self.rows]
        contexts = list(map(self.cause.context, texts))
        lengths = list(map(len, self.held))
        for row, text, context in zip(self.rows, texts, contexts, strict=True):
            again = self.states is not None and len(context) < len(whole_context(text))  # equal tokens, other states
            lengths[row] = 0 if again else shared(self.held[row], context[:-1])
        self.session.truncate(lengths)
        self.session.reserve(max(map(len, contexts)) + depth)
        if self.states is not None:
            self._show(self.states, texts, contexts)
        unread = [context[self.session.lengths[row] :] for row, context in zip(self.rows, contexts, strict=True)]
        tokens = [self.choose(self.begun(unread), texts, [])]
        while len(tokens) < depth:
            tokens.append(self.choose(self.after(tokens), texts, tokens))
        drafts: list[list[int]] = torch.stack(tokens, 1).tolist()
        for row, context, drafted in zip(self.rows, contexts, drafts, strict=True):
            self.held[row] = context + drafted[:-1]
        return drafts

    def _show(self, states: Sequence[Tensor], texts: Sequence[ReplayedText], contexts: Sequence[list[int]]) -> None:
        """Write the target's states of the contexts, ends of the texts so far, where the draft's session reads them."""
        target: Any = self.session.target  # type: ignore[attr-defined]
        if target.states is None:
            rows, slots = target.index.num_rows, target.index.capacity + 1
            target.states = states[0].new_zeros(rows, slots, 1, states[0].shape[1])
        for row, text, context in zip(self.rows, texts, contexts, strict=True):
            first, size = len(whole_context(text)) - len(context), len(context) - 1
            target.states[row, :size, 0] = states[row][first : first + size]
            target.index.lengths[row] = size

    def begun(self, unread: Sequence[list[int]]) -> Tensor:
        """Logits [b, V] after what rows have not read."""
        tokens, counts = self._block(unread)
        return self.session.extend(tokens, counts=counts, rows=self.rows).logits[:, -1]

    def after(self, tokens: Sequence[Tensor]) -> Tensor:
        """Logits [b, V] after a round's tokens so far, each [b]."""
        return self.session.extend(tokens[-1].unsqueeze(1), rows=self.rows).logits[:, -1]

    def _block(self, unread: Sequence[list[int]]) -> tuple[Tensor, list[int]]:
        """Tokens of rows, aligned on the right, and how many there are of each."""
        counts = list(map(len, unread))
        longest = max(counts)
        return tensor_on(self.session.index.device, [[0] * (longest - len(ids)) + ids for ids in unread]), counts

    def moved(self, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Arguments of the draft's forward pass, with the cause's positions."""
        assert self.cause.positions is not None
        prompts = tensor_on(self.session.index.device, [[len(self.texts[row].prompt_ids)] for row in self.rows])
        return args, {**kwargs, "position_ids": self.cause.positions(kwargs["position_ids"], prompts)}


class BlockReplay(Replay):
    """The same of a draft that gives blocks: all rows draft, and those whose rounds are over draft their last one again."""

    def begun(self, unread: Sequence[list[int]]) -> Tensor:
        assert isinstance(self.session, BlockSession)
        every = [ids[-1:] or [0] for ids in self.held]
        for row, ids in zip(self.rows, unread, strict=True):
            every[row] = ids
        self.session.draft(*self._block(every))
        return self.session.position(1, None).logits[self.rows, -1]

    def after(self, tokens: Sequence[Tensor]) -> Tensor:
        assert isinstance(self.session, BlockSession)
        before = (
            tokens[-1].new_zeros(len(self.texts)).index_copy(0, tensor_on(tokens[-1].device, self.rows), tokens[-1])
        )
        return self.session.position(len(tokens) + 1, before).logits[self.rows, -1]


def shared(left: Sequence[int], right: Sequence[int]) -> int:
    """How many first tokens two lists share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
