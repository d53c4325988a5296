"""analysis.heads statistics=[TRACES]: fitted by the public command, scored on other sequences, and used."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from analysis.heads import run
from analysis.replay.calibrate import fitted_maps
from analysis.replay.fit_samples import Samples, samples, split
from analysis.replay.fit_statistics import fitted, labelled_by
from analysis.tables.files import read_table
from data_gen import responses, traces
from toolkit import ModelPair, config, generate
from toolkit.acceptance import PrereadEstimator, StatisticsEstimator
from toolkit.acceptance.folder import head_hash
from toolkit.acceptance.statistics import NUMBERS, read_statistics
from toolkit.errors import InputError
from toolkit.trace import join
from toolkit.trace.steps import RecordedStep
from toolkit.trace.store import read_traces


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    root = tmp_path_factory.mktemp("statistics")
    words = ["prompts=toy_math", "prompts.split=train", "prompts.limit=32", "sampling.max_new_tokens=32"]
    answers = responses.run(config.compose("responses", [*words, f"paths.root_dir={root}"]))
    words = [f"responses={answers}", "max_drafted=1", "hidden=true", "heads={}", f"paths.root_dir={root}"]
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


def test_recordings_of_one_name_are_scored_each(recorded, tmp_path):
    """Two runs may have called their folders alike: each has its lines, and all held-out positions count."""
    copies = [shutil.copytree(recorded, tmp_path / name / "traces") for name in ("first", "second")]
    folder = fit(list(map(str, copies)), tmp_path, "max_drafted=4")
    drawn = read_table(folder, "scores").query("output == 'drawn' and depth == 'all'")
    positions = json.loads((folder / "manifest.json").read_text())["positions"]
    assert len(drawn) == 2 and drawn.positions.sum() == positions[1]
    assert sum(positions) == 2 * read_traces(recorded).num_positions


def test_calibration_leaves_out_the_sequences_that_it_is_scored_on(recorded, tmp_path):
    """The same recording for both: ECE before and after is of texts that neither has seen."""
    folder = fit([str(recorded)], tmp_path, "max_drafted=2", f"calibration=[{recorded}]")
    part = samples(read_traces(recorded, replicate=None), 2)
    learned = part.where(~split(part.sequence, 0.33, seed=0))
    outputs, record = read_statistics(folder / "statistics.json")
    expected = fitted_maps(labelled_by(outputs, learned)).facts()
    for name, by_depth in record["calibration"].items():
        assert by_depth["scales"] == pytest.approx(expected[name]["scales"])
        assert by_depth["shifts"] == pytest.approx(expected[name]["shifts"])


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


def test_the_replicates_of_a_text_are_held_out_together(trace):
    joined = join([trace, trace, trace])
    part = samples(joined, 4)
    out = split(part.sequence, 0.3, seed=0)
    row_of = joined.rows[joined.step_sequences[part.steps]]
    held_out, learned = ({*row_of[chosen].tolist()} for chosen in (out, ~out))
    assert held_out and learned and not held_out & learned
    assert torch.equal(part.sequence.unique(), trace.rows.unique())


def test_what_cannot_be_fitted_is_one_line(trace, recorded, tmp_path):
    with pytest.raises(InputError, match="statistics: 1 of"):
        samples(replace(trace, entropy=trace.entropy.index_fill(0, torch.tensor([3]), torch.nan)), 3)
    part: Samples = samples(trace, 3)
    numbers, depth, labels = part.of("drawn")
    with pytest.raises(InputError, match="an accepted token at least"):
        fitted(numbers, depth, torch.ones_like(labels), list(NUMBERS))
    with pytest.raises(InputError, match="4 positions for 7 weights"):
        fitted(numbers[:4], torch.tensor([1, 2, 3, 1]), labels[:4], list(NUMBERS))
    with pytest.raises(InputError, match="expected folders of data_gen.traces"):
        fit([], tmp_path)


METRICS = """vllm:spec_decode_num_drafts_total{model_name="m"} 1000.0
vllm:spec_decode_num_draft_tokens_total{model_name="m"} 2000.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 400.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 80.0
"""


def test_heads_are_copied_with_their_calibration(recorded, tmp_path):
    head = ModelPair.toy().head
    words = [
        f"calibration=[{recorded}]",
        f"heads=[{head}]",
        "max_drafted=3",
        f"paths.root_dir={tmp_path}",
        "track=false",
    ]
    folder = run(config.compose("heads", words))
    table = read_table(folder, "calibration")
    assert set(table.output) == {"read", "drawn", "following"} and {"all", "1", "2", "3"} <= set(table.depth)
    whole = table[table.depth == "all"].set_index("output")
    assert whole.log_loss_calibrated["read"] < whole.log_loss["read"]
    (copied,) = (path for path in folder.iterdir() if path.is_dir())
    calibrated = PrereadEstimator(str(copied)).bind(ModelPair.toy())
    assert len(calibrated.calibration.outputs["drawn"].scales) == 3
    assert head_hash(copied) == head_hash(head)  # recorded logits stay theirs
    (produced,) = generate(ModelPair.toy(), ["Q: 3 + 4\nA:"], "rate", head=str(copied), max_new_tokens=8, seed=1)
    assert produced.counts.num_generated > 0


def test_statistics_are_calibrated_by_recordings_or_by_the_counts_of_an_engine(recorded, tmp_path):
    counts = tmp_path / "metrics.txt"
    counts.write_text(METRICS)
    folder = fit([str(recorded)], tmp_path, "max_drafted=2", f"counts={counts}")
    estimator = StatisticsEstimator(str(folder / "statistics.json")).bind(None)
    part = samples(read_traces(recorded), 2)
    for depth, rate in ((1, 0.4), (2, 0.2)):
        step = RecordedStep(read_traces(recorded), depth, part.steps[part.depth == depth])
        assert float(estimator.drawn_probs(step)[0].mean()) == pytest.approx(rate, abs=0.03)
        assert float(estimator.position_prob(step).mean()) == pytest.approx(rate, abs=0.03)
    table = read_table(fit([str(recorded)], tmp_path, f"calibration=[{recorded}]"), "scores")
    assert (table.ECE_calibrated - table.ECE)[table.depth == "all"].mean() < 0.01
    with pytest.raises(InputError, match="not both"):
        fit([str(recorded)], tmp_path, f"calibration=[{recorded}]", f"counts={counts}")


def test_a_recording_of_another_temperature_is_warned_of_with_how_far_it_is_off(recorded, tmp_path):
    words = ["prompts=toy_math", "prompts.split=train", "prompts.limit=8", "sampling.max_new_tokens=24"]
    words += ["sampling.temperature=0", f"paths.root_dir={tmp_path}"]
    answers = responses.run(config.compose("responses", words))
    words = [f"responses={answers}", "max_drafted=1", "heads={}", f"paths.root_dir={tmp_path}"]
    greedy = traces.run(config.compose("traces", words))
    with pytest.warns(
        RuntimeWarning, match=r"another temperature .*: on its .* mean estimate is 0\.\d+, .* ECE 0\.\d+"
    ):
        fit([str(recorded), str(greedy)], tmp_path)


def test_a_depth_that_was_never_seen_has_the_weight_of_the_one_before(trace):
    part: Samples = samples(trace, 4)
    numbers, depth, labels = part.of("drawn")
    logistic = fitted(numbers, torch.where(depth == 3, 4, depth), labels, list(NUMBERS))
    assert logistic.intercepts[2] == logistic.intercepts[1] != logistic.intercepts[3]
