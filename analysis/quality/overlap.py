"""Overlap with a reference text: ROUGE-L for summaries, BLEU for translations, by the libraries everybody uses.

ROUGE-L (Lin 2004) through rouge-score: F measure of the longest common subsequence, stemmed; mean over texts.
BLEU (Papineni et al. 2002) through sacrebleu with its defaults (13a tokens, exponential smoothing). It is that of the
corpus, from n-gram counts that add up, so a bootstrap sample of texts has its own corpus BLEU.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from analysis.quality.base import Array, ReferenceMetric, Score
from toolkit.errors import InputError
from toolkit.models.prompts import Prompt

ORDERS = (1, 2, 3, 4)


class RougeL(ReferenceMetric):
    """Mean ROUGE-L F, between 0 and 1. stem: compare word stems (English)."""

    name = "rouge_l"
    label, needed = "ROUGE-L", "reference"

    def __init__(self, stem: bool = True):
        self._scorer = library("rouge_score.rouge_scorer", "rouge-score").RougeScorer(["rougeL"], use_stemmer=stem)

    def compared(self, text: str, answers: Sequence[str], prompt: Prompt) -> Score:
        return Score.of(self._scorer.score_multi(answers, text)["rougeL"].fmeasure)


class Bleu(ReferenceMetric):
    """Corpus BLEU, between 0 and 100. tokenize: sacrebleu's name of how texts are cut into words."""

    name = "bleu"
    label, needed = "BLEU", "reference"
    scale = "log"
    columns = ("length", "reference_length", *(f"correct_{n}" for n in ORDERS), *(f"total_{n}" for n in ORDERS))

    def __init__(self, tokenize: str = "13a"):
        self._class = library("sacrebleu.metrics.bleu", "sacrebleu").BLEU
        try:  # effective_order silences a warning about single sentences; counts do not depend on it
            self._counter = self._class(tokenize=tokenize, effective_order=True)
        except Exception as error:
            raise InputError(f"tokenize: expected a tokenizer of sacrebleu, got {tokenize!r}: {error!r}") from None

    def compared(self, text: str, answers: Sequence[str], prompt: Prompt) -> Score:
        bleu = self._counter.sentence_score(text, answers)
        return Score(tuple(map(float, (bleu.sys_len, bleu.ref_len, *bleu.counts, *bleu.totals))))

    def value(self, totals: Array) -> Array:
        """BLEU [...] of totals [..., 10]; not a number where nothing was scored."""

        def corpus(totals: Array) -> float:
            length, reference_length, *grams = (round(count) for count in totals)
            if not reference_length:
                return float("nan")
            correct, total = grams[: len(ORDERS)], grams[len(ORDERS) :]
            return float(self._class.compute_bleu(correct, total, length, reference_length, smooth_method="exp").score)

        return np.apply_along_axis(corpus, -1, totals)


def library(module: str, package: str) -> Any:
    """An optional library. Raises InputError that says how to install it."""
    try:
        return import_module(module)
    except ImportError:
        raise InputError(f"{package} is not installed: pip install 'acceptance-toolkit[quality]'") from None
