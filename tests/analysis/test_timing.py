"""Timing: regressions that find what was put in, and the whole command on the tiny pair."""

import numpy as np
import pandas as pd
import pytest

from analysis import timing
from analysis.loads import regression
from toolkit import ModelPair
from toolkit.config import compose
from toolkit.costs.load import LoadCost
from toolkit.drafts.eagle3 import format as eagle3
from toolkit.drafts.eagle3.training import Unrolled
from toolkit.errors import InputError


def test_noise_lowers_the_share_that_counts_explain():
    rng = np.random.default_rng(0)
    x = rng.random((400, 1))
    line = np.concatenate([np.ones_like(x), x], 1)
    beta, r2 = regression.least_squares(line, line @ [0.01, 0.002])
    assert beta == pytest.approx([0.01, 0.002]) and r2 == pytest.approx(1.0)
    _, r2 = regression.least_squares(line, x[:, 0] + rng.normal(0, x.std(), 400))
    assert r2 == pytest.approx(0.5, abs=0.08)


def test_the_command_writes_its_tables(tiny_overrides, tmp_path, capsys):
    lines = [f'{{"id": {i}, "prompt": "the cat and {i}"}}\n' for i in range(5)]
    lines.append(f'{{"id": 5, "prompt": "{"the cat and " * 400}"}}\n')  # beyond the context: it fails
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    options = [
        *tiny_overrides, "prompts=jsonl", f"prompts.path={tmp_path}/prompts.jsonl", "num_drafted=[1,3]", "warm_up=1",
        "sampling.max_new_tokens=24", "track=false", f"paths.output_dir={tmp_path}/t",
    ]  # fmt: skip
    folder = timing.run(compose("timing", options))
    responses = pd.read_csv(folder / "responses.csv")
    assert "seconds per forward pass, 4 prompts, batch 1" in capsys.readouterr().out
    assert len(responses) == 4 * 4 and set(responses.way) == {"target alone", "draft alone", "K=1", "K=3"}
    assert (responses.wall_seconds > responses.seconds).all() and (responses.seconds > 0).all()
    alone = responses[responses.way.str.contains("alone")]
    assert (alone.draft_calls == 0).all() and (alone.target_calls == alone.tokens).all()
    table = pd.read_csv(folder / "timing.csv").set_index("decoding")
    line = table.loc["speculative"]
    assert line.c == pytest.approx(line.t_draft / line.t_target)
    assert folder.name == "t" and table.loc["forward passes, 3 drafted", "t_target"] > 0
    assert (folder / "timing.png").stat().st_size > 1000
    with pytest.raises(InputError, match="more prompts than warm_up"):
        timing.run(compose("timing", [*options, "warm_up=6", f"paths.output_dir={tmp_path}/u"]))


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
    line = table.loc["speculative"]  # noise may be more than what such a draft takes
    assert "draft alone" not in table.index and "each alone" not in table.index
    assert line.c == pytest.approx(line.t_draft / line.t_target)
    costs = LoadCost.load(folder / "costs.json")
    assert costs.target.batch == (1.0, 2.0) and {1.0, 2.0, 3.0} < set(costs.target.width) and costs.draft(1, 1, 16) > 0
    loads = pd.read_csv(folder / "loads.csv")
    assert loads.seconds.gt(0).all() and set(loads.columns) == {"model", "batch", "width", "context", "seconds"}


def test_what_a_head_costs_is_what_fixed_k_does_not_explain():
    draft, target, head = 0.002, 0.01, 0.0005
    calls = np.array([[10.0, 4.0], [20.0, 5.0], [7.0, 3.0], [16.0, 6.0]])
    seconds = calls @ [draft + head, target]
    part = pd.DataFrame({"draft_calls": calls[:, 0], "target_calls": calls[:, 1], "seconds": seconds})
    line = regression.beyond_fixed(part, np.array([draft, target]))
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
