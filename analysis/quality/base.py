"""The base of every quality metric: counted quantities per text, which add up, and a value of their totals.

    scores = metric.measure(prompts, generations, pair)      one Score per text
    metric.value(table(metric, scores).sum(0))               of all texts
    Bootstrap().interval(table(...), metric.value, metric.scale)     with its interval (`analysis.tables.bootstrap`)

Totals travel, ratios are formed last: exact match counts hits and texts, perplexity nats and tokens, BLEU n-grams.

Shapes: n texts, k counted quantities.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.tables.bootstrap import Array, Scale
from toolkit.errors import InputError
from toolkit.models.prompts import Prompt
from toolkit.types import Generation

FENCE = re.compile(r"```(?:([\w+]*)(?=\n|\Z))?")  # with the language, if one is named


@dataclass(frozen=True)
class Score:
    """One text's counted quantities [k]; None: it cannot be scored. `reason` says why not, or why it scored badly."""

    counts: tuple[float, ...] | None
    reason: str = ""

    @classmethod
    def of(cls, value: float, reason: str = "") -> Score:
        return cls((float(value), 1.0), reason)


class Metric(ABC):
    """One way to judge texts.

    name       its choice in the config group `quality`, declared by each metric of ours
    label      how tables call it
    columns    names of the counted quantities
    ascending  whether more is better
    scale      on which its intervals are made: "probability" for means of scores from 0 to 1, "log", or "linear"
    provenance  how it judges here, for the record: the confinement of what it runs
    """

    label = ""
    columns: tuple[str, ...] = ("score", "texts")
    ascending = True
    scale: Scale = "linear"
    provenance = ""

    @abstractmethod
    def measure(self, prompts: Sequence[Prompt], generations: Sequence[Generation], pair: Any = None) -> list[Score]:
        """Scores of generations [n], the i-th an answer to prompts[i]; a prompt may occur several times."""

    def value(self, totals: Array) -> Array:
        """The metric [...] at totals [..., k]; not a number where nothing was scored."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(totals[..., 0] / totals[..., 1])


class TextMetric(Metric):
    @abstractmethod
    def score(self, text: str, prompt: Prompt) -> Score:
        pass

    def measure(self, prompts: Sequence[Prompt], generations: Sequence[Generation], pair: Any = None) -> list[Score]:
        """Scores of all; a row that failed in decoding cannot be scored."""
        check_lengths(prompts, generations)
        return [
            Score(None, f"decoding failed: {generation.error}")
            if generation.error is not None
            else self.score(generation.text, prompt)
            for prompt, generation in zip(prompts, generations, strict=True)
        ]


class ReferenceMetric(TextMetric):
    """A metric that compares with the right responses. needed: what a prompt without any lacks, "answer" or "reference"."""

    needed = "answer"
    scale: Scale = "probability"

    def score(self, text: str, prompt: Prompt) -> Score:
        answers = references(prompt)
        return self.compared(text, answers, prompt) if answers else Score(None, f"no {self.needed} is known")

    @abstractmethod
    def compared(self, text: str, answers: Sequence[str], prompt: Prompt) -> Score:
        """The score of a text beside the right responses, of which there is at least one."""


def table(metric: Metric, scores: Sequence[Score]) -> Array:
    """Counted quantities [n, k] of all texts; zeros, which add nothing, where there is no score."""
    none = (0.0,) * len(metric.columns)
    rows = [none if score.counts is None else score.counts for score in scores]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(none))


def reasons(scores: Sequence[Score]) -> dict[str, int]:
    return dict(Counter(score.reason for score in scores if score.reason).most_common())


def references(prompt: Prompt) -> list[str]:
    """The right responses to a prompt: SQuAD's list of answers, or the prompt's one. Empty if nothing is known."""
    answers = prompt.extra.get("answers")
    if isinstance(answers, dict) and answers.get("text"):
        return [str(text) for text in answers["text"]]
    return [] if prompt.answer is None else [prompt.answer]


def fenced(text: str) -> str | None:
    """What stands in the first code fence; before it, if it only closes what the prompt began; None without any."""
    marks = list(FENCE.finditer(text))
    if not marks:
        return None
    before = text[: marks[0].start()]
    if len(marks) == 1 and not marks[0][1] and before.strip() and not before.rstrip().endswith(":"):
        return before
    end = marks[1].start() if len(marks) > 1 else len(text)
    return text[marks[0].end() : end].removeprefix("\n")


def check_lengths(prompts: Sequence[Prompt], generations: Sequence[Generation]) -> None:
    """Raises InputError unless there is a prompt for every generation."""
    if len(prompts) != len(generations):
        raise InputError(f"expected one prompt per generation, got {len(prompts)} for {len(generations)}")
