"""Timing: regressions that find what was put in, and the whole command on the tiny pair."""

import numpy as np
import pandas as pd
import pytest

from analysis import timing
from toolkit import ModelPair
from toolkit.config import compose
from toolkit.costs.forward import CostModel, ForwardCost, fit_forward, fit_rounds, least_squares
from toolkit.costs.load import LoadCost
from toolkit.distillation.unrolled import Unrolled
from toolkit.errors import InputError
from toolkit.models import eagle3
from toolkit.types import Generation, Round


def test_a_forwards_cost_is_recovered():
    rng = np.random.default_rng(0)
    width, context = rng.integers(1, 9, 500).astype(float), rng.integers(10, 300, 500).astype(float)
    cost = fit_forward(width, context, 0.01 + 0.002 * width + 1e-5 * context)
    assert (cost.base, cost.per_token, cost.per_context) == pytest.approx((0.01, 0.002, 1e-5))
    assert cost.r2 == pytest.approx(1.0) and cost(4, 100) == pytest.approx(0.019)
    x = rng.random((400, 1))
    _, r2 = least_squares(np.concatenate([np.ones_like(x), x], 1), x[:, 0] + rng.normal(0, x.std(), 400))
    assert r2 == pytest.approx(0.5, abs=0.08), "noise lowers it"
    level = fit_forward(np.ones(5), context[:5], np.full(5, 0.25))
    assert level.per_token == 0 and level(3, 50) == pytest.approx(0.25)


def test_a_cost_model_is_fitted_to_rounds_beyond_the_first():
    draft, target = ForwardCost(0.001, 0.0, 1e-6), ForwardCost(0.01, 0.001, 1e-5)
    generations = []
    for k in (1, 3, 5):
        rounds, context = [], 20
        for number in range(8):
            seconds = (k * draft(1, context), target(k + 1, context)) if number else (9.0, 9.0)  # the prompt's forward
            rounds.append(Round(k, k, k - 1, k, False, *seconds))
            context += k
        generations.append(Generation(0, [1] * 20, [], rounds=rounds))
    model = fit_rounds(generations)
    assert model.target(4, 100) == pytest.approx(target(4, 100)) and model.draft(1, 50) == pytest.approx(draft(1, 50))
    assert model.ratio(3, 60) == pytest.approx(CostModel(draft, target).ratio(3, 60))
    with pytest.raises(InputError, match="decode more or longer texts"):
        fit_rounds(generations[:1])


def test_the_command_writes_its_tables(tiny_overrides, tmp_path):
    lines = [f'{{"id": {i}, "prompt": "the cat and {i}"}}\n' for i in range(5)]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    options = [
        *tiny_overrides, "prompts=jsonl", f"prompts.path={tmp_path}/prompts.jsonl", "num_drafted=[1,3]", "warm_up=1",
        "sampling.max_new_tokens=24", "track=false", f"paths.output_dir={tmp_path}/t",
    ]  # fmt: skip
    folder = timing.run(compose("timing", options))
    responses = pd.read_csv(folder / "responses.csv")
    assert len(responses) == 4 * 4 and set(responses.way) == {"target alone", "draft alone", "K=1", "K=3"}
    assert (responses.wall_seconds > responses.seconds).all() and (responses.seconds > 0).all()
    alone = responses[responses.way.str.contains("alone")]
    assert (alone.draft_calls == 0).all() and (alone.target_calls == alone.tokens).all()
    table = pd.read_csv(folder / "timing.csv").set_index("decoding")
    line = table.loc["speculative"]
    assert line.c == pytest.approx(line.t_draft / line.t_target)
    assert (folder / "timing.png").stat().st_size > 1000
    with pytest.raises(InputError, match="more prompts than warm_up"):
        timing.run(compose("timing", [*options, "warm_up=5", f"paths.output_dir={tmp_path}/u"]))


def test_a_draft_that_reads_the_targets_states_is_timed_beside_it(tiny_pair, tmp_path):
    target = ModelPair.from_pretrained(tiny_pair / "target").target
    eagle3.save(tmp_path / "draft", Unrolled([0, 1]).begin(target, None, 0), "target")
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"id": {i}, "prompt": "the cat and {i}"}}\n' for i in range(3)))
    options = [
        f"pair.target={tiny_pair}/target", f"pair.draft={tmp_path}/draft", "prompts=jsonl", "warm_up=0", "track=false",
        f"prompts.path={tmp_path}/prompts.jsonl", "num_drafted=[1,2]", "batch_sizes=[1,2]", "rounds=8",
        "sampling.max_new_tokens=16", f"paths.output_dir={tmp_path}/t",
    ]  # fmt: skip
    folder = timing.run(compose("timing", options))
    table = pd.read_csv(folder / "timing.csv").set_index("decoding")
    assert "draft alone" not in table.index and "each alone" not in table.index and table.loc["speculative", "c"] > 0
    assert LoadCost.load(folder / "costs.json").draft(1, 1, 16) > 0


def test_what_a_head_costs_is_what_fixed_k_does_not_explain():
    draft, target, head = 0.002, 0.01, 0.0005
    calls = np.array([[10.0, 4.0], [20.0, 5.0], [7.0, 3.0], [16.0, 6.0]])
    seconds = calls @ [draft + head, target]
    part = pd.DataFrame({"draft_calls": calls[:, 0], "target_calls": calls[:, 1], "seconds": seconds})
    line = timing._headed(part, np.array([draft, target]))
    assert line["beyond"] == pytest.approx(head) and line["beyond_low"] == pytest.approx(head)
    assert (line["t_draft"], line["t_target"]) == pytest.approx((draft + head, target))


def test_specdec_pp_has_a_row_where_there_is_a_head(tmp_path):
    options = ["prompts.limit=6", "num_drafted=[2,4]", "warm_up=1", "sampling.max_new_tokens=24", "track=false"]
    folder = timing.run(compose("timing", [*options, f"paths.output_dir={tmp_path}/t"]))
    table = pd.read_csv(folder / "timing.csv").set_index("decoding")
    low, beyond, high = table.loc["SpecDec++", ["beyond_low", "beyond", "beyond_high"]]
    assert low <= beyond <= high
    assert (pd.read_csv(folder / "responses.csv").way == "SpecDec++").sum() == 5
    with pytest.raises(InputError):
        timing.run(compose("timing", [*options, f"head={tmp_path}/none", f"paths.output_dir={tmp_path}/u"]))
