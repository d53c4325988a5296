"""The inputs' page: columns of the widest inputs, shares from sums, products along chains."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.head_inputs import BINS, VARIANTS, WIDEST, _auroc, _share, columns
from benchmarks.head_kinds import Scale, products_at
from data_gen.recording import Recorder
from tests.analysis.replay.plain import Text, small_trace
from toolkit.acceptance.calibration.scores import CalibrationScores
from toolkit.config import method
from toolkit.decoding import decode
from toolkit.sampling import Sampling
from toolkit.trace.step import RecordedStep


def test_features_are_columns_of_the_widest(exact_pair, prompts):
    sampling = Sampling(max_new_tokens=8)
    texts = [(g.prompt_ids, g.token_ids) for g in decode(exact_pair, prompts[:2], method("autoregressive"), sampling)]
    trace = Recorder(exact_pair, sampling, 2, hidden=True).record(texts, [0, 1])
    table = exact_pair.draft.get_input_embeddings().weight
    step = RecordedStep(trace, 1, torch.arange(trace.num_positions))
    widest = WIDEST.features(step, table)
    for inputs in VARIANTS.values():
        assert torch.equal(widest[:, columns(inputs, 16, 16)], inputs.features(step, table))


def test_shares_and_aurocs_of_sums():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(400, generator=generator).double(), torch.rand(400, generator=generator).double()
    scores = CalibrationScores(sync_on_compute=False)
    scores.update(logits, labels)
    expected = scores.compute()
    entropy = float(expected["log_loss"] - expected["binary_kl"]) * 400
    sums = np.array([[400.0, float(labels.sum()), float(expected["log_loss"]) * 400, entropy]])
    rate = float(labels.mean())
    prior = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    share = (prior - float(expected["log_loss"])) / (prior - entropy / 400)
    assert float(_share(sums)[0]) == pytest.approx(share)
    place = torch.searchsorted(logits.sort().values, logits)
    ranks = [torch.bincount(place, w, BINS + 1).numpy()[None] for w in (labels, 1 - labels)]
    assert float(_auroc(np.concatenate([sums, *ranks], 1))[0]) == pytest.approx(float(expected["auroc"]), abs=2e-3)


def test_products_run_along_the_chain_of_every_start():
    trace = small_trace(count=9, upper_bound=True)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(trace.num_steps, generator=generator)
    chains = [Text(trace, n).visited(s) for n in range(9) for s in range(Text(trace, n).first, Text(trace, n).end)]
    depths = torch.tensor(
        [1 + (number * 7) % min(len(chain), trace.max_drafted) for number, chain in enumerate(chains)]
    )
    found = products_at(logits, trace, depths)
    for chain, depth, product in zip(chains, depths.tolist(), found, strict=True):
        assert float(product) == pytest.approx(float(torch.sigmoid(logits[chain[:depth]].double()).prod()))
    assert len(depths.unique()) > 2


def test_a_part_of_the_scale_has_something_of_everything():
    small = Scale().part(0.001)
    assert set(small.texts.values()) == set(small.splits.values()) == {4} and small.texts.keys() == Scale().texts.keys()
