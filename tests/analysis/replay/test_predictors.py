"""analysis.heads tuning=... tests=...: every row of the table by small recordings; weights carried from text to text."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.heads import run
from analysis.replay.fit_samples import samples
from analysis.replay.predictor_costs import at_costs, priced
from analysis.replay.predictor_domain import Domain
from analysis.replay.predictor_rows import (
    PerfectConfidence,
    counted,
    estimated,
    of_policy,
    online,
    untrained,
    with_calibration,
)
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import read_table
from analysis.tables.grid import FIXED, ORACLE
from analysis.tables.rows import throughput
from data_gen import responses, traces
from toolkit import ModelPair, config, train
from toolkit.acceptance import OnlineLogistic, StatisticsEstimator
from toolkit.acceptance.calibration.by_depth import ByDepth, Calibration
from toolkit.costs.load import LoadCost, grid_of
from toolkit.drafts.eagle3 import format as eagle3
from toolkit.errors import InputError
from toolkit.stopping import Bounded, OnlineRate, Rate
from toolkit.testing import tiny_eagle3
from toolkit.trace.replay import by_rounds, carried


def of_evidence(evidence, rate):
    return Bounded(OnlineRate(OnlineLogistic(evidence=evidence), cost_ratio=1.0, rate=rate), 1, 5)


def test_weights_that_do_not_move_carry_nothing_and_others_do(trace):
    different = []
    for rate in (0.2, 0.35, 0.5):
        fixed, learning = of_evidence(1e9, rate), of_evidence(0.05, rate)
        assert np.array_equal(carried(trace, fixed)[0].per_text, by_rounds(trace, fixed).per_text)
        different.append(not np.array_equal(carried(trace, learning)[0].per_text, by_rounds(trace, learning).per_text))
        first = trace.only(torch.arange(trace.num_texts) == 0)  # nothing is carried into the first text
        assert np.array_equal(carried(first, learning)[0].per_text, by_rounds(first, learning).per_text)
    assert any(different)


def test_the_state_after_the_last_text_is_that_of_its_parts(trace):
    """Carried through the first half and then the second, or through both at once."""
    half = torch.arange(trace.num_texts) < trace.num_texts // 2
    whole, learning = carried(trace, of_evidence(0.5, 0.3))[1], of_evidence(0.5, 0.3)
    state = carried(trace.only(half), learning)[1]
    assert not torch.equal(state["slope"], whole["slope"])
    weights = {"slope", "intercepts", "slope_curvature", "intercept_curvatures"}
    start = {name: value for name, value in state.items() if name in weights}

    class From(Bounded):
        def init(self, num_rows, device):
            return {**super().init(num_rows, device), **start}

    again = carried(trace.only(~half), From(learning.policy, 1, 5))[1]
    for name in weights:
        torch.testing.assert_close(again[name], whole[name])


def test_perfect_confidence_knows_this_position_and_nothing_of_its_token(trace):
    logits, labels, depth = estimated(PerfectConfidence(), trace, samples(trace, 3))["drawn"]
    alpha = trace.alpha[: trace.num_positions].double()
    torch.testing.assert_close(torch.sigmoid(logits), alpha.clamp(1e-6, 1 - 1e-6))
    assert len(labels) == len(depth) == trace.num_positions
    row = of_policy(Rate(PerfectConfidence(), rate=1.0))
    changed = replace(trace, accept_prob=1 - trace.accept_prob, token_prob=1 - trace.token_prob)
    assert np.array_equal(row.counts(trace, [0.3, 0.6]), row.counts(changed, [0.3, 0.6]))


def test_untrained_rows_count_the_same_tokens(trace):
    produced = trace.lengths().sum()
    for name, row in untrained().items():
        counts = row.counts(trace, [0.25, 0.75])
        assert len(counts) == (trace.max_drafted + 1 if name == FIXED else 2)
        assert (counts[..., 3].sum(1) == float(produced)).all(), name
        rounds = counts[..., 5:]
        np.testing.assert_allclose(rounds.sum(-1), counts[..., 2], err_msg=name)
        np.testing.assert_allclose(rounds @ np.arange(trace.max_drafted + 1), counts[..., 0], err_msg=name)
    assert np.array_equal(
        untrained()["online, cold"].counts(trace, [0.4])[0], counted(by_rounds(trace, online(trace, 0.4)))
    )


def test_a_table_with_free_columns_costs_what_its_ratio_does(trace):
    counts = untrained()["confidence"].counts(trace, [0.2, 0.5, 0.8])
    free = priced(counts, LoadCost.ratio(0.3))
    np.testing.assert_allclose(free[..., 0] / free[..., 1], throughput(counts, 0.3))
    table = LoadCost.ratio(0.3, column=0.2)  # the first token of a round pays for the step, as every later one
    spent = (priced(counts, table) - free)[..., 1]
    np.testing.assert_allclose(spent, 0.2 * counts[..., 0])


def test_a_round_costs_what_the_table_says_of_its_width(trace):
    """By hand, from a table whose second token is dear and whose third is free."""
    seconds = {1: 2.0, 2: 5.0, 3: 5.0, 6: 11.0}
    target = grid_of({(1, width, 0): value for width, value in seconds.items()}, "target")
    table = LoadCost(grid_of({(1, 1, 0): 0.5}, "draft"), target, "hand")
    counts = untrained()[FIXED].counts(trace, [])
    for drafted, seconds_of_round in ((0, 2.0), (1, 5.5), (2, 6.0)):
        whole_rounds = counts[drafted][counts[drafted][:, 5 + drafted] == counts[drafted][:, 2]]
        assert len(whole_rounds) or drafted
        cost = priced(whole_rounds, table)[:, 1]
        np.testing.assert_allclose(cost, whole_rounds[:, 2] * seconds_of_round / 2.0)


def test_where_nothing_pays_the_best_fixed_length_is_0_and_the_rule_does_not_draft(trace):
    rows = untrained()
    domain = Domain("a", trace, trace, True, rows, [0.2, 0.5, 0.8])
    lines, of_texts = at_costs(domain, "dear", LoadCost.ratio(3.0, column=1.0), Bootstrap(50))
    lines = lines.set_index("method")
    assert lines.setting[FIXED] == "K=0" and lines.throughput[FIXED] == lines.throughput["upper_bound"] == 1
    assert lines.throughput["confidence"] < lines.throughput["confidence, no level"] <= 1
    sums = of_texts.groupby("method").sum(numeric_only=True)
    np.testing.assert_allclose((sums.tokens / sums.cost)["confidence"], lines.throughput["confidence"])
    cheap, _ = at_costs(domain, "cheap", LoadCost.ratio(0.05), Bootstrap(50))
    assert cheap.set_index("method").throughput[["upper_bound", "oracle"]].is_monotonic_increasing


def test_domains_must_be_the_same(tmp_path):
    words = ["statistics=[A]", "tuning={math: B}", "tests={code: C}", f"paths.root_dir={tmp_path}", "track=false"]
    with pytest.raises(InputError, match="same domains, got math and code"):
        run(config.compose("heads", words))


@pytest.mark.slow
def test_the_table_by_the_public_command(tmp_path):
    recordings = {}
    for domain, split, t in (("math", "dev", 1), ("math", "test", 1), ("instruct", "dev", 1), ("math", "dev", 0)):
        words = [f"prompts=toy_{domain}", f"prompts.split={split}", "prompts.limit=12", "sampling.max_new_tokens=24"]
        words += [f"sampling.temperature={t}", f"paths.root_dir={tmp_path}"]
        answers = responses.run(config.compose("responses", words))
        words = [
            f"responses={answers}",
            "upper_bound=true",
            "hidden=true",
            "max_drafted=4",
            f"paths.root_dir={tmp_path}",
        ]
        recordings[domain, split, t] = traces.run(config.compose("traces", words))
    dev, test, other, greedy = (str(folder) for folder in recordings.values())
    words = [
        f"statistics=[{dev}]", f"heads=[{ModelPair.toy().head}]",
        f"tuning={{math: {dev}, instruct: {other}, greedy: {greedy}}}",
        f"tests={{math: {test}, instruct: {other}, greedy: {greedy}}}", "thresholds=[0.2,0.5,0.8]", "max_drafted=3",
        "resamples=200", f"paths.root_dir={tmp_path}", "track=false",
        f"costs={{one: {LoadCost.ratio(0.1).save(tmp_path / 'one.json')}}}",
    ]  # fmt: skip
    with pytest.warns(RuntimeWarning, match="levels of instruct, greedy are chosen on the very texts"):
        folder = run(config.compose("heads", words))
    table = read_table(folder, "predictors").set_index(["method", "domain"])
    math = table.xs("math", level="domain")
    assert math.upper_bound_share["speculative"] == 0 and math.upper_bound_share["upper_bound"] == 1
    assert math.throughput["oracle"] > math.throughput["upper_bound"] > math.throughput["speculative"]
    assert math.AUC["statistics"] > 0.75 and math.AUC["perfect confidence"] > 0.75
    assert math.states.fillna(False).sum() == 2 and math.home.all() and not table.home["statistics", "greedy"]
    assert {"before", "after"} <= set(read_table(folder, "drift").columns)
    costs = read_table(folder, "costs").set_index(["method", "domain"])
    assert {"statistics, no level", "statistics that ship", "tail product"} <= set(
        costs.index.get_level_values("method")
    )
    assert set(costs.index.get_level_values("domain")) == {"math", "instruct", "greedy"}
    depths = read_table(folder, "calibration")
    assert set(depths.depth) == {"all", "1", "2", "3"} and "statistics of instruct" in set(depths.method)
    assert "statistics of instruct" in (folder / "predictors.md").read_text()


@pytest.mark.slow
def test_a_draft_that_reads_the_targets_states_has_every_row_but_the_oracle(tmp_path):
    target = ModelPair.from_pretrained("toy/target").target
    eagle3.save(tmp_path / "draft", tiny_eagle3(target, kept=torch.arange(target.config.vocab_size)), "toy/target")
    shared = [f"paths.root_dir={tmp_path}", f"pair.draft={tmp_path / 'draft'}"]
    recordings = []
    for split in ("dev", "test"):
        prompts = [f"prompts.split={split}", "prompts.limit=12", "sampling.max_new_tokens=24", "sampling.temperature=8"]
        answers = responses.run(config.compose("responses", [*prompts, f"paths.root_dir={tmp_path}"]))
        words = [f"responses={answers}", "upper_bound=true", "hidden=true", "max_drafted=4"]
        recordings.append(traces.run(config.compose("traces", [*words, *shared])))
    dev, test = recordings
    words = ["model=acceptance_head", "data=traced", f"data.path={dev}", "trainer.max_epochs=1"]
    head = train.run(config.compose("train", [*words, *shared])) / "head"
    words = [f"statistics=[{dev}]", f"tuning={{math: {dev}}}", f"tests={{math: {test}}}", "thresholds=[0.05,0.2,0.5]"]
    words.append(f"heads=[{head}]")
    folder = run(config.compose("heads", [*words, *shared, "max_drafted=3", "resamples=200", "track=false"]))
    table = read_table(folder, "predictors").set_index("method")
    assert set(untrained()) - set(table.index) == {ORACLE}
    assert table.AUC["statistics"] > 0.5 and table.index.str.startswith("SpecDec++ head").any()
    assert table.throughput["upper_bound"] >= table.throughput[[FIXED, "statistics", "perfect confidence"]].max()


def test_a_second_calibration_is_of_what_the_first_gives():
    """It is fitted to calibrated logits, so a head that has its calibration.json keeps it."""
    first = Calibration({"drawn": ByDepth((2.0, 0.5), (1.0, -1.0)), "position": ByDepth((3.0,), (0.5,))})
    second = Calibration({"drawn": ByDepth((0.5, 1.0, 2.0), (0.0, 0.3, -0.2)), "following": ByDepth((2.0,), (0.1,))})
    mapped = with_calibration(StatisticsEstimator(calibration=first), second).calibration
    logits = torch.linspace(-3, 3, 7, dtype=torch.float64)
    for depth in (1, 2, 3, 5):
        calibrated = first.prob("drawn", logits, depth).logit()
        torch.testing.assert_close(mapped.prob("drawn", logits, depth), second.prob("drawn", calibrated, depth))
        for name, alone in (("following", second), ("position", first)):
            torch.testing.assert_close(mapped.prob(name, logits, depth), alone.prob(name, logits, depth))
    assert with_calibration(PerfectConfidence(), second) is None
