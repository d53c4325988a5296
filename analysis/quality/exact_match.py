"""Does a response reach the known answer? Exact match and token F1.

Toy domains judge their own final answers. Everything else is compared as SQuAD does it (arXiv:1606.05250, its evaluation
script): lower case, without punctuation, articles and superfluous blanks. The best of several references counts.
Deviation: of a response only the first line is read, because base models go on with the next example of the template.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from analysis.quality.base import ReferenceMetric, Score
from data_gen import domains
from toolkit.errors import InputError
from toolkit.models.prompts import Prompt

JUDGES = ("auto", "math", "instruct", "squad")
TOY_ID = re.compile(r"(math|instruct)-(?:train|dev|test)-\d+-\d+")
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


class ExactMatch(ReferenceMetric):
    """Share of responses with the right answer.

    judge  math or instruct: that toy domain's; squad; auto: the domain's for prompts with a toy domain's id, else squad
    """

    name = "exact_match"
    label = "exact match"

    def __init__(self, judge: str = "auto"):
        if judge not in JUDGES:
            raise InputError(f"judge: expected {', '.join(JUDGES[:-1])} or {JUDGES[-1]}, got {judge!r}")
        self.judge = judge

    def compared(self, text: str, answers: Sequence[str], prompt: Prompt) -> Score:
        judge = self.judge
        if judge == "auto":
            toy = TOY_ID.fullmatch(prompt.id)
            judge = toy[1] if toy else "squad"
        if judge == "squad":
            return Score.of(any(normalise(first_line(text)) == normalise(answer) for answer in answers))
        return Score.of(any(domains.get(judge).is_correct(text, answer) for answer in answers))


class TokenF1(ReferenceMetric):
    """Mean F1 of the words of response and reference, normalised."""

    name = "f1"
    label = "F1"

    def compared(self, text: str, answers: Sequence[str], prompt: Prompt) -> Score:
        return Score.of(max(f1(first_line(text), answer) for answer in answers))


def first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def normalise(text: str) -> str:
    """Text as SQuAD's script has it: lower case, no punctuation, no articles, single blanks."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def f1(text: str, reference: str) -> float:
    """2 * common / (words of both). Two texts without words are equal (SQuAD 2.0)."""
    ours, theirs = normalise(text).split(), normalise(reference).split()
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (Counter(ours) & Counter(theirs)).total() / (len(ours) + len(theirs))
