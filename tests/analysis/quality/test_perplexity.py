"""Perplexity: a table's likelihoods by hand, a transformers model token by token, texts alone and in batches."""

import math

import numpy as np
import pytest
import torch

from analysis.quality.base import table
from analysis.quality.perplexity import Perplexity, negative_log_likelihoods
from analysis.tables.bootstrap import resampled_totals
from toolkit import ModelPair
from toolkit.engine import TabularModel
from toolkit.errors import InputError
from toolkit.models.prompts import Prompt
from toolkit.sampling import Sampling
from toolkit.types import Generation


def prompts_for(generations):
    return [Prompt(str(i), "text") for i in range(len(generations))]


def test_a_table_by_hand():
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [1.0, 0.0, 0.0]], dtype=torch.float64)
    pair = ModelPair(target=TabularModel(probs))
    texts = [Generation(0, [0], [1, 2, 0]), Generation(1, [2, 1], [0]), Generation(2, [2], [1])]
    nll = [-math.log(0.25 * 0.7 * 1.0), -math.log(0.1)]
    assert negative_log_likelihoods(pair, texts[:2]) == pytest.approx(nll, rel=1e-12)
    metric = Perplexity()
    scores = metric.measure(prompts_for(texts), texts, pair)
    assert [score.counts[1] for score in scores] == [3, 1, 1]
    assert metric.value(table(metric, scores[:2]).sum(0)) == pytest.approx((0.25 * 0.7 * 0.1) ** (-1 / 4), rel=1e-12)
    assert math.isinf(scores[2].counts[0]) and math.isinf(metric.value(table(metric, scores).sum(0)))


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_it_is_the_models_own_likelihood_in_any_batch(exact_pair, prompts, batch_size):
    generator = torch.Generator().manual_seed(1)
    texts = [
        Generation(i, prompt, torch.randint(6, 97, (length,), generator=generator).tolist())
        for i, (prompt, length) in enumerate(zip(prompts, (5, 1, 9, 2, 14, 3, 7), strict=True))
    ]
    expected = []
    for text in texts:
        nll = 0.0
        for position, token in enumerate(text.token_ids):
            context = torch.tensor([[*text.prompt_ids, *text.token_ids[:position]]])
            nll -= float(exact_pair.target(input_ids=context).logits[0, -1].log_softmax(-1)[token])
        expected.append((nll, float(len(text.token_ids))))
    scores = Perplexity(batch_size).measure(prompts_for(texts), texts, exact_pair)
    for score, (nll, tokens) in zip(scores, expected, strict=True):
        assert score.counts == (pytest.approx(nll, rel=1e-10), tokens)
    samples = Perplexity().value(resampled_totals(table(Perplexity(), scores), 50, seed=0))
    whole = math.exp(sum(nll for nll, _ in expected) / sum(tokens for _, tokens in expected))
    assert samples.min() < whole < samples.max() and np.isfinite(samples).all()


def test_a_decoded_text_is_scored_unwarped(exact_pair, prompts):
    from toolkit.config import method
    from toolkit.decoding import decode

    greedy = decode(exact_pair, prompts[:2], method("autoregressive"), Sampling(temperature=0, max_new_tokens=4))
    (nll, tokens) = Perplexity().measure(prompts_for(greedy), greedy, exact_pair)[0].counts
    assert (
        tokens == len(greedy[0].token_ids) and nll > 0.1
    )  # a greedy text is certain under the warped distribution: 0 nats


def test_what_cannot_be_read_is_said(exact_pair):
    long = exact_pair.max_length
    texts = [
        Generation(0, [5], [7], error="broke"), Generation(1, [5], []), Generation(2, [], [7]),
        Generation(3, [5] * long, [7]), Generation(4, [5], [7]),
    ]  # fmt: skip
    scores = Perplexity().measure(prompts_for(texts), texts, exact_pair)
    assert [score.counts is None for score in scores] == [True] * 4 + [False]
    assert [score.reason for score in scores] == [
        "decoding failed: broke", "no tokens were generated", "no prompt stands before the first token",
        "longer than the context", "",
    ]  # fmt: skip
    with pytest.raises(InputError, match="expected a pair, got none"):
        Perplexity().measure(prompts_for(texts), texts)
    with pytest.raises(InputError, match="batch_size: expected at least 1, got 0"):
        Perplexity(0)
