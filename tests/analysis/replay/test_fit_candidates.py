"""The acceptance of candidates, fitted along texts: labels and weights by hand, and a draft that is its target."""

from __future__ import annotations

import pytest
import torch

from analysis.replay.fit_candidates import along, regression, scores
from toolkit import ModelPair
from toolkit.decoding import Sampling
from toolkit.engine import TabularModel
from toolkit.sampling import warp

VOCAB = 9


def tables(same: bool = False) -> ModelPair:
    generator = torch.Generator().manual_seed(3)
    target, other = (TabularModel.random(VOCAB, 1, generator, sharpness=1.5) for _ in range(2))
    return ModelPair(target=target, draft=target if same else other, end_ids=())


def texts(count: int) -> list[tuple[list[int], list[int]]]:
    drawn = torch.randint(VOCAB, (count, 12), generator=torch.Generator().manual_seed(5)).tolist()
    return [(text[:2], text[2:]) for text in drawn]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_label_is_p_of_the_candidate_among_what_those_before_it_leave(temperature):
    pair, sampling = tables(), Sampling(temperature=temperature)
    numbers, labels, weights = along(pair, texts(3), sampling)
    row = 0
    for prompt, produced in texts(3):
        for n in range(len(produced)):
            text = prompt + produced[:n]
            logits = [model.probs[model.state(text)].log() for model in (pair.target, pair.draft)]
            p, q = warp(logits[0], sampling), warp(logits[1], Sampling(temperature=temperature or 1.0))
            left, shown = 1.0, 1.0
            for rank, token in enumerate(logits[1].argsort(descending=True)[:8].tolist()):
                assert float(weights[row, rank]) == pytest.approx(left if left > 1e-3 else 0, abs=1e-6)
                if left > 1e-3:
                    assert float(labels[row, rank]) == pytest.approx(float(p[token]) / left, abs=1e-4)
                share = float(numbers[row, rank, 0].sigmoid())
                assert share == pytest.approx(float(q[token]) / shown, abs=1e-4)
                left, shown = max(0.0, left - float(p[token])), shown - float(q[token])
            row += 1
    assert row == len(labels)


def test_of_a_draft_that_is_its_target_the_regression_is_q():
    examples = along(tables(same=True), texts(60), Sampling())
    table = scores("sampled", regression(*examples), *examples)
    assert all(line["log_loss"] == pytest.approx(line["of_q"], abs=3e-3) for line in table)
    assert all(line["mean_estimate"] == pytest.approx(line["mean_label"], abs=0.03) for line in table)
