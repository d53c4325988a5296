"""The same rounds counted three times: by the engine that answered, by decoding here, and by replaying the engine's answers.

An answer's first token comes from the reading of its prompt, without a draft: so does the engine. Rounds here begin after it.

**Which rounds count.** Those whose start is followed by at least K + 1 more tokens of the text, so that no limit and no end of
the text cuts into them. What an engine, decoding and replay do in a text's last rounds differs (`NAMES` says how), and
these rounds are left out on all sides. An engine lists rounds that drafted; which of them are whole, its text tells by replay.

Drafts are a text's top tokens, or copies: so a drafted token is accepted iff the text goes on with it, at any
temperature. A replay of the engine's answers has to count exactly what the engine counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.loads.engine_counts import PositionCounts, answer_of, counts_of, rounds_of
from toolkit import ModelPair
from toolkit.decoding import Method, Sampling, decode
from toolkit.decoding.proposers import PromptLookupProposer
from toolkit.decoding.proposers.copying import NOTHING, Copy, CopyProposer
from toolkit.errors import InputError
from toolkit.trace.copies import Copies
from toolkit.trace.replay import replay_rounds
from toolkit.trace.store import Store

LONGEST_COPY = 48  # of llama.cpp's lookup, by default
Rounds = list[tuple[int, int, int]]  # of a text: where each begins, drafted and accepted tokens


@dataclass(frozen=True)
class Answer:
    """What an engine answered: the tokens, and drafted and accepted tokens of every round that drafted."""

    prompt_ids: list[int]
    token_ids: list[int]
    drafted: list[int]
    accepted: list[int]

    @property
    def text(self) -> tuple[list[int], list[int]]:
        """The text as it is decoded and replayed here: the first token belongs to the prompt."""
        return [*self.prompt_ids, *self.token_ids[:1]], self.token_ids[1:]


def read_answers(path: Path, most: int) -> list[Answer]:
    """vLLM's answers. Raises InputError for counts of another K than `most`, or answers without counts and token ids."""
    answers = []
    for number, line in enumerate(path.read_text("utf-8").split("\n")[:-1], start=1):
        where = f"{path}, line {number}: "
        rounds = rounds_of(answer := answer_of(line))
        if isinstance(rounds, str) and rounds != "no rounds":
            raise InputError(f"{where}expected counts of {most} drafted tokens, got {rounds}")
        width, drafted, accepted = (most, [], []) if isinstance(rounds, str) else rounds
        if width != most:
            raise InputError(
                f"{where}expected counts of K = {most}, got K = {width}: answers of another server; delete the file"
            )
        choice: Mapping[str, Any] = answer["choices"][0]
        if not choice.get("token_ids") or not choice.get("prompt_token_ids"):
            raise InputError(
                f"{where}expected token_ids and prompt_token_ids, got none: ask with return_token_ids=true"
            )
        answers.append(Answer(choice["prompt_token_ids"], choice["token_ids"], drafted, accepted))
    return answers


def whole(rounds: Rounds, length: int, most: int) -> list[tuple[int, int]]:
    """Drafted and accepted tokens of the rounds that drafted and that no end cuts; length: of the text."""
    return [(drafted, accepted) for start, drafted, accepted in rounds if drafted and start + most + 1 <= length]


def decoded(
    pair: ModelPair, answers: Sequence[Answer], method: Method, sampling: Sampling
) -> tuple[list[Rounds], list[list[int]]]:
    """Every text decoded here, one at a time: its rounds and its tokens after the first."""
    generations = [
        decode(pair, [answer.text[0]], method, replace(sampling, seed=number))[0]
        for number, answer in enumerate(answers)
    ]
    every = []
    for generation in generations:
        if generation.error:
            raise InputError(generation.error)
        ends = np.cumsum([0, *(each.num_produced for each in generation.rounds)])
        counts = zip(ends, generation.rounds, strict=False)
        every.append([(int(start), each.num_drafted, each.num_accepted) for start, each in counts])
    return every, [list(generation.token_ids) for generation in generations]


def replayed(
    pair: ModelPair, answers: Sequence[Answer], method: Method, sampling: Sampling, folder: Path
) -> list[Rounds]:
    """The engine's texts replayed here: the rounds of each."""
    bound, sequences = method.bind(pair), [answer.text for answer in answers]
    if isinstance(method.proposer, CopyProposer):
        trace: Any = Copies(method.proposer, sequences, bound.limit, sampling.max_new_tokens, pair.ends(sampling))
    else:
        temperature = method.draft_temperature
        trace = Store(folder).trace(pair, sampling, sequences, bound.limit, draft_temperature=temperature)
    every: list[Rounds] = [[] for _ in answers]
    for text, start, drafted, _, accepted, _ in replay_rounds(trace, bound.policy):
        for row, *counts in zip(
            text.tolist(), (start - trace.text_first[text]).tolist(), drafted.tolist(), accepted.tolist(), strict=True
        ):
            every[row].append((counts[0], counts[1], counts[2]))
    return every


def positions(texts: Sequence[Sequence[tuple[int, int]]], most: int) -> PositionCounts:
    """Counts by position of rounds, text by text."""
    return counts_of([([d for d, _ in rounds], [a for _, a in rounds]) for rounds in texts], most)


def interval(ours: PositionCounts, theirs: PositionCounts, bootstrap: Any) -> NDArray[np.float64]:
    """Per position the difference of P(accepted | all before it), theirs less ours, with its ends [3, K]."""
    columns = np.hstack([ours.accepted, ours.reached, theirs.accepted, theirs.reached])

    def difference(totals: NDArray[np.float64]) -> NDArray[np.float64]:
        own, reached, other, others = np.split(totals, 4, axis=-1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(other / others - own / reached)

    return np.stack(bootstrap.spread(columns, difference))


@dataclass(frozen=True)
class FirstOccurrence(PromptLookupProposer):
    """Prompt lookup as vLLM 0.32.0 does it: of several earlier occurrences the first one counts, and a copy goes on after
    an end of text."""

    def lookup(self, text: Sequence[int], most: int, end_ids: Sequence[int]) -> Copy:
        for size in range(min(self.max_ngram, len(text) - 1), self.min_ngram - 1, -1):
            last = list(text[len(text) - size :])
            for start in range(len(text) - size):
                if list(text[start : start + size]) == last:
                    return Copy.of(text[start + size : start + size + most], size)
        return NOTHING


@dataclass(frozen=True)
class NgramSimple(PromptLookupProposer):
    """llama.cpp's NGRAM_SIMPLE by default: up to 48 tokens after the last earlier occurrence of the last 12, if 12 follow."""

    max_ngram: int = 12
    min_ngram: int = 12

    def lookup(self, text: Sequence[int], most: int, end_ids: Sequence[int]) -> Copy:
        read = len(text) - 1  # the newest token is sampled, and not yet in its history
        if read <= self.max_ngram + LONGEST_COPY + 1:
            return NOTHING
        last = list(text[len(text) - self.max_ngram :])
        for start in range(read - self.max_ngram - 1, 0, -1):
            after = start + self.max_ngram
            if list(text[start:after]) == last:
                copied = text[after : min(after + LONGEST_COPY, read)]
                return Copy.of(copied[:most], self.max_ngram) if len(copied) >= self.max_ngram else NOTHING
        return NOTHING
