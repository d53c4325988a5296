"""analysis.heads statistics=[TRACES]: fitted by the public command, scored on other sequences, and used."""

import json
from dataclasses import replace

import pytest
import torch

from analysis.heads import run
from analysis.replay.fit_statistics import Samples, fitted, samples
from analysis.tables.files import read_table
from data_gen import responses, traces
from toolkit import ModelPair, config, generate
from toolkit.acceptance.statistics import NUMBERS
from toolkit.errors import InputError
from toolkit.trace.store import read_traces


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    root = tmp_path_factory.mktemp("statistics")
    words = ["prompts=toy_math", "prompts.split=train", "prompts.limit=32", "sampling.max_new_tokens=32"]
    answers = responses.run(config.compose("responses", [*words, f"paths.root_dir={root}"]))
    words = [f"responses={answers}", "max_drafted=1", "heads={}", f"paths.root_dir={root}"]
    return traces.run(config.compose("traces", words))


def fit(recordings, folder, *words):
    words = [f"statistics={recordings}", f"paths.root_dir={folder}", "track=false", *words]
    return run(config.compose("heads", words))


def test_the_fit_is_scored_on_sequences_that_it_has_not_seen_and_used(recorded, tmp_path):
    folder = fit([str(recorded)], tmp_path, "max_drafted=4")
    table = read_table(folder, "scores").set_index(["output", "depth"])
    whole, trace = table.xs("all", level="depth"), read_traces(recorded)
    assert json.loads((folder / "manifest.json").read_text())["positions"][1] == whole.positions["drawn"]
    assert whole.positions["position"] < trace.num_positions and whole.positions["following"] < whole.positions["drawn"]
    assert whole.AUC["drawn"] > 0.8 and whole.ECE["drawn"] < 0.15
    assert table.positions["drawn"].drop("all").sum() == whole.positions["drawn"]
    record = json.loads((folder / "statistics.json").read_text())
    assert record["temperatures"] == [1.0] and len(record["held_out"]) == len(table)
    headless = ModelPair(ModelPair.toy().target, ModelPair.toy().draft, ModelPair.toy().tokenizer)
    headless.costs = "assumed"  # as measured, drafting may not pay here
    (produced,) = generate(headless, ["Q: 3 + 4\nA:"], "rate", statistics=folder / "statistics.json", max_new_tokens=8)
    assert produced.counts.num_draft_calls > 0
    assert fit([str(recorded)], tmp_path, "max_drafted=4") == folder
    assert fit([str(recorded)], tmp_path, "max_drafted=4", "form=log_odds") != folder


def test_weights_are_those_that_made_the_labels():
    """Labels of a known regression, with a depth that adds to it; fitted weights are per standard deviation."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(20000, 4, generator=generator, dtype=torch.float64) * 2 + 1
    depth = torch.randint(1, 3, (20000,), generator=generator)
    logits = 0.5 * numbers[:, 0] - 0.25 * numbers[:, 3] + 0.4 * (depth - 1) - 0.3
    logistic = fitted(numbers, depth, torch.sigmoid(logits), list(NUMBERS))
    bias, weights = logistic.column(NUMBERS)
    assert weights == pytest.approx([0.5, 0.0, 0.0, -0.25], abs=5e-3)
    assert (bias, *logistic.intercepts) == pytest.approx((-0.3, 0.0, 0.4), abs=1e-2)
    again = logistic.logits(numbers, NUMBERS, depth)
    torch.testing.assert_close(again, logits, atol=2e-2, rtol=0)


def test_labels_are_the_recordings(trace):
    """Every position's own acceptance; the next one's alpha where the draw accepted the token."""
    part = samples(trace, 3)
    assert torch.equal(part.labels["drawn"].float(), trace.accept_prob[: trace.num_positions])
    last = trace.text_first[1:] - 1
    for position in range(trace.num_positions):
        known = bool(trace.accepted[position]) and position not in last
        following = part.labels["following"][position]
        assert bool(following.isnan()) != known
        assert not known or float(following) == pytest.approx(float(trace.alpha[position + 1]))
    before = torch.tensor([bool(trace.accepted[position - 1]) for position in range(trace.num_positions)])
    assert bool((part.depth[~before] == 1).all()) and part.depth.max() == 3


def test_what_cannot_be_fitted_is_one_line(trace, recorded, tmp_path):
    with pytest.raises(InputError, match="statistics: 1 of"):
        samples(replace(trace, entropy=trace.entropy.index_fill(0, torch.tensor([3]), torch.nan)), 3)
    part: Samples = samples(trace, 3)
    numbers, depth, labels = part.of("drawn")
    with pytest.raises(InputError, match="some are accepted and some are not"):
        fitted(numbers, depth, torch.ones_like(labels), list(NUMBERS))
    with pytest.raises(InputError, match="4 positions for 7 weights"):
        fitted(numbers[:4], torch.tensor([1, 2, 3, 1]), labels[:4], list(NUMBERS))
    with pytest.raises(InputError, match="expected folders of data_gen.traces"):
        fit([], tmp_path)
