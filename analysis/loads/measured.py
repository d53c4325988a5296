"""Seconds of draft and target forwards by batch size, tokens per row and context, measured in the decoding loop itself.

The method is ours. Every batch size decodes with fixed draft lengths of every draft. All of them are interleaved in short
repeats, also with the other batch sizes, as the speed of a shared machine changes within seconds. Texts are kept from ending.
A first pass captures forwards, as a long-running decoder has captured them, and is discarded. Before a setting of brief rounds
is timed it decodes for a moment, as the processor's caches still hold what the setting before used. Rounds in which all batch
slots hold a text are timed. The seconds of a draft forward are what one more drafted token adds to the draft's seconds in a
round. The rest of the round counts for the target forward: checking, and the loop's own work. So does what a round's first
draft forward takes beyond the others, as it reads up to two tokens. (With a single draft length this part is not known, and
stays with the draft.) So the table holds the cost of a round, Python included, and not that of a bare forward. The clock is
read when the device has finished, at both boundaries between drafting and checking.

Plain decoding has no draft. It is timed once, for all drafts. Drafts are compared within the same repeats.

The reading of prompts is timed in first rounds behind prompts cut to one length, once after every setting. Their forwards are
not captured, as prompts differ in length. A batch of one is always timed: prompts that join a running batch are often read
alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd

from analysis.loads.tabulated import FAR, cost_table, entries_of, noisy_of, steady
from analysis.loads.timed_forwards import WARM_UP, Reader, decoded, forwards, reader
from analysis.loads.timed_texts import STEADY, filled, of_length, texts_of
from toolkit.decoding import Sampling
from toolkit.load_cost import LoadCost
from toolkit.pair import ModelPair
from toolkit.types import Generation

FIRST = 3  # rounds with full drafts that say how long a round takes, and what it makes
BRIEF = 0.02  # seconds: longer rounds gain nothing from captured forwards
LONG, FEW = 0.2, 4  # seconds; how many longer rounds are timed per repeat, as their times hardly vary
LEAST, MOST = 3, 12  # repeats
SPENT = 12.0  # seconds per batch size and draft: as many repeats as fit
# Seconds, and rounds at most, that a setting decodes before it is timed. Small models need some 15 rounds behind other work
# until the processor's caches hold what they use. A decoder with one method is always in that state.
SETTLING, SETTLING_ROUNDS = 0.05, 16
PLAIN = -1  # plain decoding's number of the draft


def measured_costs(
    pair: ModelPair,
    prompts: Sequence[Any],
    sampling: Sampling,
    batch_sizes: Sequence[int],
    drafted: Sequence[int],
    num_rounds: int = 24,
    about: dict[str, Any] | None = None,
    passes: int = 4,
) -> list[tuple[LoadCost, pd.DataFrame]]:
    """For each draft of the pair a cost table and its entries.

    Batch sizes whose times vary too much are measured again, in up to `passes` passes. Raises InputError if they still do.
    """
    kept: dict[int, list[ModelPair]] = {}
    found = pd.DataFrame()
    noisy = sorted({1, *batch_sizes})
    for number in range(passes):
        if number:
            sizes = f"batch size{'s' * (len(noisy) > 1)} {', '.join(map(str, noisy))}"
            print(f"the times of {sizes} vary too much: measuring again (pass {number + 1} of at most {passes})")
        again = measure_loads(pair, prompts, sampling, noisy, drafted, num_rounds, kept=kept)
        again["repeat"] += found.repeat.max() if number else 0
        found = pd.concat([found, again], ignore_index=True)
        by_draft = [of_draft(steady(found), draft) for draft in range(len(pair.drafts))]
        noisy = sorted({int(one.batch) for part in by_draft for one in noisy_of(entries_of(part)).itertuples()})
        if not noisy:
            break
    return [cost_table(part, about or {}) for part in by_draft]


def measure_loads(
    pair: ModelPair,
    prompts: Sequence[Any],
    sampling: Sampling,
    batch_sizes: Sequence[int],
    drafted: Sequence[int],
    num_rounds: int = 24,
    repeats: int | None = None,
    kept: dict[int, list[ModelPair]] | None = None,
) -> pd.DataFrame:
    """One line per timed round and model.

    pair        the target with one or more drafts
    prompts     token ids or texts; batches take some of them, or repeat them
    drafted     draft lengths; 0 is added: plain decoding
    num_rounds  timed rounds per batch size, draft length, texts and repeat; more where they are brief, fewer where long
    repeats     None: as many as fit into some seconds (`SPENT`), from 3 to 12
    kept        from an earlier call, by batch size: captured forwards are replayed, and new ones added for the next call

    Columns: model, batch, width, repeat, and

    draft    its number; -1 (`PLAIN`): plain decoding
    context  of the longest row, as the middle of its window: forwards read as many slots for all contexts of a window
    drafted  the round's draft length
    seconds  of all draft forwards of the round (draft), or of the rest of the round (target)
    texts    "near": where responses are under way; "far": where the longest ones end, with about half of the draft lengths;
             "prompt": readings of prompts of median length, at context 0
    """
    from tqdm.auto import tqdm

    with tqdm(total=0, desc=f"timing, {pair.name}", unit="setting") as bar:
        timings = prepared(pair, prompts, sampling, batch_sizes, drafted, num_rounds, {} if kept is None else kept, bar)
        return pd.DataFrame(_repeated(timings, repeats))


def prepared(
    pair: ModelPair,
    prompts: Sequence[Any],
    sampling: Sampling,
    batch_sizes: Sequence[int],
    drafted: Sequence[int],
    num_rounds: int,
    kept: dict[int, list[ModelPair]],
    bar: Any,
) -> list[Timing]:
    """For every batch size what `measure_loads` repeats, with its forwards captured. Arguments are those of `measure_loads`.

    bar  of tqdm; counts settings
    """
    sizes, lengths = sorted(set(batch_sizes)), sorted({0, *drafted})
    prompts = [pair.encode(prompt) for prompt in prompts]
    usual = max(int(np.median([len(prompt) for prompt in prompts])), max(lengths) + 2)
    room = max(num_rounds * (lengths[-1] + 1), min(sampling.max_new_tokens // 2, STEADY)) + WARM_UP * (lengths[-1] + 1)
    texts = texts_of(pair, prompts, sampling, room + 1)
    capacity = max(map(len, prompts)) + sampling.max_new_tokens + lengths[-1] + 1
    timings = []
    for batch in sizes:
        # They keep this batch size's captured forwards: if they were made again, the memory of the old ones would stay.
        pairs = kept.setdefault(batch, _with_each_draft(pair))
        cut = filled(batch, [of_length(prompt, usual) for prompt in prompts])
        each = {where: filled(batch, chosen) for where, chosen in texts.items()}
        timings.append(Timing(pairs, each, cut, sampling, lengths, num_rounds, capacity, bar))
        timings[-1].warm_up()
    return timings


@dataclass
class Timing:
    """All settings of one batch size: draft lengths of every draft, behind each kind of texts.

    pairs   the target with each of its drafts
    texts   prompts by kind;  cut: prompts of one length, for readings
    capacity  of the caches: a forward's seconds depend on it, so they are those of whole responses
    taken   seconds of the shortest target forward, by texts, draft and draft length
    made    tokens per round of the row that makes most, by the same: how long responses must be for a number of rounds
    """

    pairs: Sequence[ModelPair]
    texts: Mapping[str, Sequence[list[int]]]
    cut: Sequence[list[int]]
    sampling: Sampling
    lengths: Sequence[int]
    num_rounds: int
    capacity: int
    bar: Any
    taken: dict[tuple[str, int, int], float] = field(default_factory=dict)
    made: dict[tuple[str, int, int], float] = field(default_factory=dict)
    readers: list[Reader] = field(default_factory=list)

    @property
    def settings(self) -> list[tuple[str, int, int]]:
        """Texts, draft, draft length. Plain decoding (0) is the first draft's.

        Far texts have every second length, and the longest. What a token of context adds changes evenly with the length.
        """
        far = {*self.lengths[::2], self.lengths[-1]}
        each = itertools.product(self.texts, self.lengths, range(len(self.pairs)))
        return [
            (where, draft, length)
            for where, length, draft in each
            if (length or not draft) and (where != FAR or length in far)
        ]

    def warm_up(self) -> None:
        """Decode every setting once: GPUs capture its forwards."""
        self._show()
        for where, draft, length in self.settings:
            first = self._decoded(where, draft, length, FIRST * (length + 1))
            taken = min((one.target_seconds for one in first[0].rounds), default=BRIEF)
            self.taken[where, draft, length] = taken
            self.made[where, draft, length] = max(len(one.token_ids) / max(len(one.rounds), 1) for one in first)
            if taken < BRIEF:
                self._decoded(where, draft, length, self._tokens(where, draft, length))
            self.bar.update()
        self.readers = [reader(pair, self.cut, self.sampling) for pair in self.pairs]

    def repeat(self, number: int) -> list[dict[str, Any]]:
        """Timed rounds of every setting, behind some that are not timed, and a reading of prompts after each."""
        lines: list[dict[str, Any]] = []
        self._show()
        for where, draft, length in self.settings:
            tokens = self._tokens(where, draft, length)
            if settling := self._settling(where, draft, length):
                self._decoded(where, draft, length, min(settling, tokens))
            timed = self._decoded(where, draft, length, tokens)
            found = [*forwards(timed, length, where), *self.readers[draft]()]
            lines += [{**line, "repeat": number, "draft": draft if line["drafted"] else PLAIN} for line in found]
            self.bar.update()
        return lines

    def _decoded(self, where: str, draft: int, length: int, tokens: int) -> list[Generation]:
        return decoded(self.pairs[draft], self.texts[where], self.sampling, length, tokens, self.capacity)

    def _tokens(self, where: str, draft: int, length: int) -> int:
        """How many tokens the timed rounds make, if they make as many as the first ones.

        At least three rounds have full drafts, whatever is accepted.
        """
        setting = where, draft, length
        # assumes that responses have half of the tokens that they may have
        between = min(self.sampling.max_new_tokens // 2 // len(self.cut), STEADY) / self.made[setting]
        rounds = WARM_UP + _timed_rounds(self.num_rounds, self.taken[setting], int(between))
        return max(math.ceil(rounds * self.made[setting]), 4 * (length + 1))

    def _settling(self, where: str, draft: int, length: int) -> int:
        """How many tokens the setting decodes before it is timed: none where rounds take long."""
        setting = where, draft, length
        if self.taken[setting] >= BRIEF:
            return 0
        rounds = min(SETTLING_ROUNDS, SETTLING / self.taken[setting])
        return math.ceil(rounds * self.made[setting])

    def _show(self) -> None:
        """The bar learns of all settings once more."""
        self.bar.total += len(self.settings)
        self.bar.refresh()


def of_draft(rounds: pd.DataFrame, draft: int) -> pd.DataFrame:
    """The rounds with this draft and those of plain decoding."""
    return rounds[rounds.draft.isin((draft, PLAIN))]


# -- inside -----------------------------------------------------------------------------------------------------------


def _repeated(timings: Sequence[Timing], repeats: int | None) -> list[dict[str, Any]]:
    """The repeats of all batch sizes, interleaved; None: as many as fit into some seconds."""
    lines, counts = list[dict[str, Any]](), list[int]()
    for timing in timings:
        started = perf_counter()
        lines += timing.repeat(1)
        fitting = int(SPENT * len(timing.pairs) / (perf_counter() - started))
        counts.append(repeats or min(max(fitting, LEAST), MOST))
    for _, number, repeat in _spread(counts):
        lines += timings[number].repeat(repeat)
    return lines


def _spread(counts: Sequence[int]) -> list[tuple[float, int, int]]:
    """Second and later repeats of several timings, each spread over the whole time: when (0 to 1), which one, its number."""
    return sorted((n / count, which, n) for which, count in enumerate(counts) for n in range(2, count + 1))


def _timed_rounds(num_rounds: int, seconds: float, between: int) -> int:
    """How many rounds of a setting are timed, if one of them takes this many seconds.

    between  rounds between two prompts that join a batch of this size

    Small models' first rounds behind a prompt take longer. So they are timed for as long as decoding goes on undisturbed.
    """
    if seconds > LONG:
        return min(num_rounds, FEW)
    return max(between, num_rounds) if seconds < BRIEF else num_rounds


def _with_each_draft(pair: ModelPair) -> list[ModelPair]:
    """The target with one draft at a time, and texts that do not end."""
    return [replace(pair, draft=draft, drafts=(), end_ids=()) for draft in pair.drafts]
