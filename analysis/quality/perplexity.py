"""Perplexity of texts under the target, at temperature 1 and unwarped, whatever they were decoded with.

    perplexity = exp( - sum_t log p(x_t | x_<t) / number of tokens )       over all generated tokens, end of text included

Papers: DSBD (arXiv:2409.16560) and MTAD (arXiv:2407.09722) judge outputs so. MTAD's -log p (joint) is `nll` here.
Deviation: the mean is over tokens of all texts together, not over texts of their own perplexities.

Shapes: B texts of a batch, T longest text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from analysis.quality.base import Array, Metric, Score, check_lengths
from toolkit.errors import InputError
from toolkit.models.pair import ModelPair
from toolkit.models.prompts import Prompt
from toolkit.models.teacher import bounded, produced_logits
from toolkit.types import Generation


class Perplexity(Metric):
    """exp of the mean negative log-likelihood. batch_size: texts per forward pass of the target."""

    name = "perplexity"
    label = "perplexity"
    columns = ("nll", "tokens")
    ascending = False
    scale = "log"

    def __init__(self, batch_size: int = 8):
        if batch_size < 1:
            raise InputError(f"batch_size: expected at least 1, got {batch_size}")
        self.batch_size = batch_size

    def measure(self, prompts: Sequence[Prompt], generations: Sequence[Generation], pair: Any = None) -> list[Score]:
        """(nats, tokens) of every generation. Texts of like length share a forward pass."""
        check_lengths(prompts, generations)
        if pair is None:
            raise InputError("perplexity needs the target: expected a pair, got none")
        scores = []
        for generation in generations:
            reason = ""
            if generation.error is not None:
                reason = f"decoding failed: {generation.error}"
            elif not generation.token_ids:
                reason = "no tokens were generated"
            elif not generation.prompt_ids:
                reason = "no prompt stands before the first token"
            elif len(generation.prompt_ids) + len(generation.token_ids) > pair.max_length:
                reason = "longer than the context"
            scores.append(Score(None, reason))
        readable = [row for row, score in enumerate(scores) if not score.reason]
        readable.sort(key=lambda row: len(generations[row].prompt_ids) + len(generations[row].token_ids))
        for first in range(0, len(readable), self.batch_size):
            rows = readable[first : first + self.batch_size]
            batch = [generations[row] for row in rows]
            for row, generation, nll in zip(rows, batch, negative_log_likelihoods(pair, batch), strict=True):
                scores[row] = Score((nll, float(len(generation.token_ids))))
        return scores

    def value(self, totals: Array) -> Array:
        with np.errstate(over="ignore"):
            return np.exp(super().value(totals))


@torch.inference_mode()
def negative_log_likelihoods(pair: ModelPair, generations: Sequence[Generation]) -> list[float]:
    """Nats of each generation's new tokens given its prompt, by one teacher-forced pass of the target."""
    texts = [(generation.prompt_ids, generation.token_ids) for generation in generations]
    values = []
    for part in bounded([len(produced) for _, produced in texts], pair.vocab_size):
        counts = [len(produced) for _, produced in texts[part]]
        every = produced_logits(pair.target, texts[part]).split(counts)
        for scores, (_, produced) in zip(every, texts[part], strict=True):
            logits = scores if scores.dtype == torch.float64 else scores.float()  # summed in float64
            chosen = torch.tensor(produced, device=logits.device).unsqueeze(-1)
            values.append(-float(logits.log_softmax(-1).gather(-1, chosen).sum(dtype=torch.float64)))
    return values
