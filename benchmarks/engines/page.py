"""The page: what each engine served beside what is decoded and replayed here, count for count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import pandas as pd

from analysis.diagnosis.compare import explanations
from analysis.diagnosis.sentence import of_rounds
from analysis.tables.bootstrap import Bootstrap
from benchmarks.engines.counts import Answer, Rounds, interval, positions, whole
from toolkit.decoding.proposers.copying import CopyProposer
from toolkit.drafts.causes import AS_IT_SHOULD_BE, Cause
from toolkit.errors import InputError

FEWEST = 20  # rounds of one position, below which an interval over texts says nothing
BOOTSTRAP = Bootstrap()
HEAD = """| draft | T | counted by | rounds | drafted | accepted, position by position | beside what was served |
|---|---|---|---|---|---|---|"""
CONVENTION = """**The convention.** A round counts if at least K + 1 tokens of the text follow its start, so that no limit of
length and no end of the text cuts into it. An answer's first token comes from the reading of its prompt,
without a draft, in the engine and here. At T > 0 vLLM runs with one kernel of its wheel for CPUs corrected
(`benchmarks/engines/start_vllm.py`)."""
NAMES = """| | here | vLLM 0.32.0 | llama.cpp (xllamacpp) |
|---|---|---|---|
| K, at most drafted | `max_drafted`, `policy.num_drafted` | `num_speculative_tokens` | `--spec-draft-n-max` |
| rounds | `rounds`, `num_target_calls` | `num_spec_steps`, `num_drafts`: those that drafted | where `draft_n` grows |
| drafted tokens of a round | `num_drafted` | `per_step_drafted` | `draft_n`: the sum, in a stream so far |
| accepted tokens of a round | `num_accepted` | `per_step_accepted`, `acceptance_histogram` | `draft_n_accepted`: the same |
| tokens of a round | `num_produced` | accepted + 1, as in `mean_acceptance_length` | not said |
| the token after them | extra: bonus if all were accepted, else corrected | bonus, recovered | the sampled token |
| the answer's first token | of a round like any other | of the prompt's reading, no step | of the prompt's reading |
| beyond the length limit | nothing is drafted there | drafted, and counted as accepted | nothing is drafted there |
| beyond the end of a text | counted as accepted | counted as accepted | not looked at |"""


@dataclass(frozen=True)
class Compared:
    """One draft at one temperature: the engine's answers, the rounds of their replay, and the texts decoded here.

    tokens  of the decoded texts, after each answer's first one;  most  K
    diagnosis  sentence of `analysis.diagnose`; "": that of these rounds, without causes
    lookup  what copies here, where the engine takes the first of several occurrences
    """

    name: str
    temperature: int
    most: int
    answers: Sequence[Answer]
    replay: Sequence[Rounds]
    decoding: Sequence[Rounds]
    tokens: Sequence[Sequence[int]]
    diagnosis: str = ""
    lookup: CopyProposer | None = None

    def sentence(self) -> str:
        """Why the engine accepts what it accepts, as `analysis.diagnose` says it."""
        if self.diagnosis:
            return f"{self.name}, T = {self.temperature}: {self.diagnosis}."
        replay, theirs = self._whole()
        texts = [(each, own) for each, own in zip(theirs, replay, strict=True) if own]
        lines = [
            (number, at, *served, kept)
            for number, (rounds, own) in enumerate(texts)
            for at, (served, (_, kept)) in enumerate(zip(rounds, own, strict=False))
        ]
        rounds = pd.DataFrame(lines, columns=["text", "start", "drafted", "accepted", "replay"])
        rounds = rounds.assign(third=1, category="")
        replays = {AS_IT_SHOULD_BE: rounds.pop("replay").to_numpy()}
        if self.lookup is not None:
            first = Cause("the first of several occurrences is copied")
            replays = {AS_IT_SHOULD_BE: np.array(self._copied(self.lookup)), first: replays[AS_IT_SHOULD_BE]}
        result = of_rounds(rounds, explanations(rounds, replays), BOOTSTRAP)
        return f"{self.name}, T = {self.temperature}: {result['sentence']}."

    def _copied(self, lookup: CopyProposer) -> list[int]:
        """Accepted tokens of what another lookup copies in the engine's rounds."""
        accepted = []
        for answer, rounds in zip(self.answers, self.replay, strict=True):
            prompt, text = answer.text
            for start, drafted, _ in rounds:
                if drafted and start + self.most + 1 <= len(text):
                    copied = lookup.lookup([*prompt, *text[:start]], self.most, ()).tokens
                    same = (own == after for own, after in zip(copied, text[start:], strict=False))
                    accepted.append(sum(takewhile(bool, same)))
        return accepted

    def lines(self) -> list[str]:
        """The rows of the table."""
        every, (replay, theirs) = self._every(), self._whole()
        decoding = [
            whole(rounds, len(text), self.most) for rounds, text in zip(self.decoding, self.tokens, strict=True)
        ]
        equal = sum(list(text) == answer.text[1] for text, answer in zip(self.tokens, self.answers, strict=True))
        if self.temperature:
            beside = f"other texts; difference of acceptance {self._difference(decoding, theirs)}"
        else:
            beside = f"texts equal {equal} of {len(self.answers)}; {_verdict(decoding, theirs)}"
        return [
            self._line("the engine, all rounds", every, ""),
            self._line("the engine", theirs, ""),
            self._line("replay of its answers", replay, _verdict(replay, theirs)),
            self._line("decoding here", decoding, beside),
        ]

    def counted(self) -> str:
        """The engine's rounds that the replay of its texts has, too, in a few words."""
        replay, theirs = self._whole()
        rounds = [pair for pairs in zip(theirs, replay, strict=True) for pair in zip(*pairs, strict=True)]
        return f"{sum(own == other for own, other in rounds)} of {len(rounds)} rounds equal at T = {self.temperature}"

    def _whole(self) -> tuple[list[list[tuple[int, int]]], list[list[tuple[int, int]]]]:
        """Rounds that no end cuts, text by text: of the replay, and the engine's own."""
        lengths = [len(answer.text[1]) for answer in self.answers]
        replay = [whole(rounds, n, self.most) for rounds, n in zip(self.replay, lengths, strict=True)]
        return replay, [every[: len(own)] for every, own in zip(self._every(), replay, strict=True)]

    def _every(self) -> list[list[tuple[int, int]]]:
        """All rounds that the engine lists, text by text."""
        return [list(zip(answer.drafted, answer.accepted, strict=True)) for answer in self.answers]

    def _line(self, source: str, texts: Sequence[Sequence[tuple[int, int]]], beside: str) -> str:
        accepted = [sum(kept >= at for rounds in texts for _, kept in rounds) for at in range(1, self.most + 1)]
        rounds, drafted = sum(map(len, texts)), sum(count for rounds in texts for count, _ in rounds)
        shown = " / ".join(map(str, accepted[: max(3, np.count_nonzero(accepted))]))
        return f"| {self.name} | {self.temperature} | {source} | {rounds} | {drafted} | {shown} | {beside} |"

    def _difference(
        self, ours: Sequence[Sequence[tuple[int, int]]], theirs: Sequence[Sequence[tuple[int, int]]]
    ) -> str:
        """The difference at each position that `FEWEST` rounds of either side reached, and whether its interval holds 0."""
        counts = positions(ours, self.most), positions(theirs, self.most)
        reached, ends, parts = [each.reached.sum(0) for each in counts], interval(*counts, BOOTSTRAP), []
        for at in range(self.most):
            middle, low, high = ends[:, at]
            if min(rounds[at] for rounds in reached) >= FEWEST:
                parts.append(f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]{'' if low <= 0 <= high else ' (unexplained)'}")
        return ", ".join(parts) or "too few to tell"


@dataclass(frozen=True)
class Summed:
    """What llama.cpp says of one question: its text, and drafted and accepted tokens in all; and the same counted here."""

    text: str
    drafted: int
    accepted: int
    text_here: str
    drafted_here: int
    accepted_here: int


def summed_table(name: str, questions: Sequence[Summed]) -> str:
    """llama.cpp's sums beside decoding here: of all questions, and of those whose texts are equal."""
    equal = [each for each in questions if each.text == each.text_here]
    lines = [
        "| draft | questions | llama.cpp: drafted, accepted | decoded here: drafted, accepted |",
        "|---|---|---|---|",
    ]
    for which, some in ((f"{len(questions)}", questions), (f"{len(equal)} of equal text", equal)):
        theirs = f"{sum(each.drafted for each in some)}, {sum(each.accepted for each in some)}"
        ours = f"{sum(each.drafted_here for each in some)}, {sum(each.accepted_here for each in some)}"
        lines.append(f"| {name} | {which} | {theirs} | {ours} |")
    return "\n".join(lines)


def _verdict(ours: Sequence[Sequence[tuple[int, int]]], theirs: Sequence[Sequence[tuple[int, int]]]) -> str:
    """Whether every round of every text is the same, and where not, how many texts differ."""
    different = sum(list(one) != list(other) for one, other in zip(ours, theirs, strict=True))
    return "every round equal" if not different else f"rounds of {different} of {len(theirs)} texts differ: unexplained"


def page(compared: Sequence[Compared], facts: Sequence[str], tables: Sequence[str]) -> str:
    """The page's text. Raises InputError if nothing was compared."""
    if not compared:
        raise InputError("engines: expected at least one engine's answers, got none; run the steps before")
    rows = [line for each in compared for line in each.lines()]
    parts = ["# Engines beside this package", " ".join(facts), CONVENTION, "\n".join([HEAD, *rows])]
    sentences = [f"- {each.sentence()}" for each in compared]
    return "\n\n".join([*parts, "\n".join(sentences), *tables, "## Names", NAMES]) + "\n"
