"""A draft replayed along an engine's texts: it drafts greedily in every round that the engine counted, with its own cache.

A drafted token is accepted iff the text goes on with it: so it is where engines propose their drafts' top tokens, at any
temperature. Shapes: b texts side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from analysis.diagnosis.answers import Answer
from toolkit.drafts.causes import Cause, ReplayedRound, ReplayedText
from toolkit.engine import open_session
from toolkit.engine.device import tensor_on
from toolkit.errors import NOT_NUMBERS, InputError
from toolkit.sampling import Sampling, first_maximum, penalized

ROWS = 16


def num_passes(answers: Sequence[Answer]) -> int:
    """Draft forward passes of one replay."""
    deepest = max(drafted for answer in answers for _, drafted, _ in answer.rounds)
    parts = [answers[first : first + ROWS] for first in range(0, len(answers), ROWS)]
    return deepest * sum(max(len(answer.rounds) for answer in part) for part in parts)


def expected(
    draft: Any,
    cause: Cause,
    answers: Sequence[Answer],
    sampling: Sampling,
    undrafted: Sequence[int],
    progress: Callable[[int], object],
) -> list[list[int]]:
    """Tokens that the draft should accept in every round of every answer, after a cause's change.

    undrafted  tokens that it never proposes
    progress   is called with numbers of drafted tokens
    """
    draft, sampling = cause.draft(draft), cause.sampling(sampling)
    accepted = []
    for first in range(0, len(answers), ROWS):
        replay = Replay(draft, cause, answers[first : first + ROWS], sampling, undrafted)
        hook = draft.register_forward_pre_hook(replay.moved, with_kwargs=True) if cause.positions else nullcontext()
        with torch.inference_mode(), hook:
            texts = replay.run(progress)
        accepted += [[shared(each.drafted, text.token_ids[each.start :]) for each in text.rounds] for text in texts]
    return accepted


class Replay:
    """A session that reads some texts side by side, and the tokens that each of its rows holds."""

    def __init__(
        self, draft: Any, cause: Cause, answers: Sequence[Answer], sampling: Sampling, undrafted: Sequence[int]
    ):
        self.cause, self.answers, self.sampling = cause, answers, sampling
        self.texts = [ReplayedText(answer.prompt_ids, answer.token_ids) for answer in answers]
        self.session = open_session(draft, len(answers), max(answer.length for answer in answers))
        self.session.clips_tokens = True  # the target may have more of them
        self.undrafted = tensor_on(self.session.index.device, list(undrafted)).long()
        self.rows: list[int] = []  # that the forward pass under way reads
        self.held: list[list[int]] = [[] for _ in answers]

    def run(self, progress: Callable[[int], object]) -> list[ReplayedText]:
        for number in range(max(len(answer.rounds) for answer in self.answers)):
            self.rows = [row for row, answer in enumerate(self.answers) if number < len(answer.rounds)]
            rounds = [self.answers[row].rounds[number] for row in self.rows]
            for row, (start, _, _) in zip(self.rows, rounds, strict=True):
                self.texts[row].start = start
            drafts = self.drafted(max(count for _, count, _ in rounds))
            for row, (start, count, accepted), tokens in zip(self.rows, rounds, drafts, strict=True):
                self.texts[row].rounds.append(ReplayedRound(start, tokens[:count], accepted))
            progress(sum(count for _, count, _ in rounds))
        return self.texts

    def drafted(self, depth: int) -> list[list[int]]:
        """`depth` top tokens of every row that is read; what its cache shares with the context stays there."""
        contexts = [self.cause.context(self.texts[row]) for row in self.rows]
        lengths = list(map(len, self.held))
        for row, context in zip(self.rows, contexts, strict=True):
            lengths[row] = shared(self.held[row], context[:-1])
        self.session.truncate(lengths)
        self.session.reserve(max(map(len, contexts)) + depth)
        unread = [context[lengths[row] :] for row, context in zip(self.rows, contexts, strict=True)]
        counts = list(map(len, unread))
        block = tensor_on(self.session.index.device, [[0] * (max(counts) - len(ids)) + ids for ids in unread])
        tokens = [self.top(self.session.extend(block, counts=counts, rows=self.rows).logits, [])]
        while len(tokens) < depth:
            tokens.append(self.top(self.session.extend(tokens[-1].unsqueeze(1), rows=self.rows).logits, tokens))
        drafts: list[list[int]] = torch.stack(tokens, 1).tolist()
        for row, context, drafted in zip(self.rows, contexts, drafts, strict=True):
            self.held[row] = context + drafted[:-1]
        return drafts

    def top(self, logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        """The top token [b] of logits [b, 1, V]. Raises InputError for what is not a number."""
        if bool(logits.isnan().any()):
            raise InputError(NOT_NUMBERS)
        logits, seen = logits[:, -1], None
        if self.sampling.repetition_penalty != 1.0:
            seen = torch.zeros_like(logits, dtype=torch.bool)
            for index, row in enumerate(self.rows):
                text = self.texts[row]
                ids = [*text.prompt_ids, *text.token_ids[: text.start], *(int(each[index]) for each in drafted)]
                seen[index, [token for token in ids if token < seen.shape[1]]] = True
        return first_maximum(penalized(logits, self.sampling, seen).index_fill(-1, self.undrafted, -torch.inf))

    def moved(self, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Arguments of the draft's forward pass, with the cause's positions."""
        assert self.cause.positions is not None
        prompts = tensor_on(self.session.index.device, [[len(self.texts[row].prompt_ids)] for row in self.rows])
        return args, {**kwargs, "position_ids": self.cause.positions(kwargs["position_ids"], prompts)}


def shared(left: Sequence[int], right: Sequence[int]) -> int:
    """How many first tokens two lists share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
