"""Frontiers of replayed sweeps: the upper bound beside the oracle, the best K of every prompt, the table over cost ratios."""

import numpy as np
import pandas as pd
import pytest

from analysis import frontier, sweep
from analysis.replay import upper_bound
from analysis.tables.files import read_table
from analysis.tables.rows import COUNTS
from tests.analysis.table_sweeps import PAIR, sweep_config, table
from toolkit import config
from toolkit.errors import InputError
from toolkit.trace import Trace, join

# Some tokens are easy to accept here and others hard, so that knowing p and q is worth something.
UNEVEN = {
    **PAIR,
    "target": {**table(1), "order": 1, "sharpness": 2.5},
    "draft": {**table(5), "order": 1, "sharpness": 1.5},
}
PRICES = [0.1, 0.3, 0.6]
GRID = {
    "speculative": {"policy.num_drafted": [1, 2, 4]},
    "confidence": {"policy.threshold": [0.2, 0.5]},
    "upper_bound": {"price": PRICES},
    "oracle": {"max_drafted": [None]},
}
RATIOS = [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5]


def cost_of(rows, cost_ratio):
    return cost_ratio * rows.num_draft_calls + rows.num_target_calls


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("yardsticks")
    return {
        split: sweep.run(
            sweep_config(root, grid=GRID, pair=UNEVEN, split=split, limit=100, source="traces", max_drafted=6)
        )
        for split in ("dev", "test")
    }


def run(root, folders, *overrides):
    options = ["track=false", "resamples=200", "cost_range=[.05,2]", f"paths.root_dir={root}", *overrides]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("analysis.tables.standing.NUM_COSTS", 5)
        return frontier.run(
            config.compose("frontier", [f"dev=[{folders['dev']}]", f"test=[{folders['test']}]", *options])
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory, folders):
    return run(tmp_path_factory.mktemp("frontier"), folders)


def test_a_sweep_scores_the_upper_bound_on_its_own_recording(folders):
    rows = read_table(folders["test"], "rows")
    trace = join([Trace.load(path) for path in sorted((folders["test"] / "settings").glob("trace-*"))])
    for price in PRICES:
        mine = rows[(rows.method == "upper_bound") & (rows.setting == f"price={price}")]
        assert mine[list(COUNTS)].sum().to_dict() == vars(upper_bound.at_price(trace, price).total)
    table = read_table(folders["test"], "summary")
    assert not table[table.method.isin(["upper_bound", "oracle"])].undominated.any()


def test_shares_of_the_way_to_both_yardsticks(folder):
    table = read_table(folder, "frontier").set_index("method")
    assert list(table.index) == [
        "autoregressive", "speculative", "confidence", "fixed_per_prompt", "upper_bound", "oracle",
    ]  # fmt: skip
    rate = table.throughput
    assert rate["speculative"] < rate["upper_bound"] < rate["oracle"]
    for name, end in (("share", "oracle"), ("upper_bound_share", "upper_bound")):
        expected = (rate["confidence"] - rate["speculative"]) / (rate[end] - rate["speculative"])
        assert table[name]["confidence"] == pytest.approx(expected)
        assert table[name][end] == table[f"{name}_low"][end] == 1
    assert table.upper_bound_share["oracle"] > 1 > table.share["upper_bound"]
    text = (folder / "frontier.md").read_text()
    assert "| way to the oracle | way to the upper bound |" in text and "| upper bound: p and q known | price=" in text


def test_the_best_k_of_every_prompt_against_a_loop(folder, folders):
    rows = read_table(folders["test"], "rows")
    fixed = rows[rows.method == "speculative"]
    tokens = cost = 0.0
    for _, mine in fixed.groupby("prompt"):
        tokens += mine.num_generated.iloc[0]
        cost += cost_of(mine, 0.2).min()
    table = read_table(folder, "frontier").set_index("method")
    assert table.throughput["fixed_per_prompt"] == pytest.approx(tokens / cost)
    assert table.throughput["fixed_per_prompt"] > table.throughput["speculative"]


def test_hindsight_is_not_taken_over_texts_of_their_own(tmp_path, folders):
    """Decoded sweeps have another text for every K: the best of them would be the luckiest."""
    grid = {"speculative": GRID["speculative"]}
    endless = {**PAIR, "end_ids": []}  # so that at least their lengths are the same
    live = {
        s: sweep.run(sweep_config(tmp_path, grid=grid, pair=endless, split=s, limit=9, source="live"))
        for s in ("dev", "test")
    }
    assert read_table(live["test"], "rows").num_generated.nunique() == 1
    assert "fixed_per_prompt" not in set(read_table(run(tmp_path, live), "frontier").method)


def test_the_table_over_cost_ratios_chooses_anew_at_each(folder, folders):
    wide = pd.read_csv(folder / "costs_table.csv").set_index("method")
    assert list(wide.columns) == ["dataset", *(f"c={c:g}" for c in RATIOS)]
    assert list(wide.index) == list(read_table(folder, "frontier").method)
    dev, test = (read_table(folders[split], "rows") for split in ("dev", "test"))
    chosen = set()
    for cost_ratio in RATIOS:
        for method in ("speculative", "upper_bound"):
            sums = [rows[rows.method == method].groupby("setting")[list(COUNTS)].sum() for rows in (dev, test)]
            rates = [part.num_generated / cost_of(part, cost_ratio) for part in sums]
            best = rates[0].idxmax()
            chosen.add((method, best))
            least = 1.0 if method == "upper_bound" else 0.0
            assert wide[f"c={cost_ratio:g}"][method] == pytest.approx(max(rates[1][best], least))
    assert len(chosen) > 2, "the same setting everywhere shows nothing"
    text = (folder / "frontier.md").read_text()
    assert "| method | c=0.05 | c=0.1 | c=0.15 | c=0.2 | c=0.25 | c=0.3 | c=0.4 | c=0.5 |" in text
    at_two_tenths = read_table(folder, "frontier").set_index("method").throughput
    np.testing.assert_allclose(wide["c=0.2"][list(at_two_tenths.index)], at_two_tenths)


def test_seconds_reach_the_table_over_costs(tmp_path, folders):
    made = run(tmp_path, folders, "draft_seconds=.02", "target_seconds=.1", "table_costs=[.2,.4]")
    costs = read_table(made, "costs")
    np.testing.assert_allclose(costs.tokens_per_second, costs.throughput * 10)
    assert list(read_table(made, "costs_table").columns) == ["dataset", "method", "c=0.2", "c=0.4"]


def test_the_upper_bound_knows_a_penalty_and_a_limit_by_text_is_refused(tmp_path):
    made = sweep.run(sweep_config(tmp_path, grid=GRID, source="traces", sampling={"repetition_penalty": 1.2}))
    expected = {"autoregressive", "speculative", "confidence", "oracle", "upper_bound"}
    assert set(read_table(made, "rows").method) == expected
    with pytest.raises(InputError, match=r"^replays know one limit for all texts[^\n]*source=live$"):
        sweep.run(sweep_config(tmp_path, grid=GRID, source="traces", sampling={"max_length": 60}))


@pytest.mark.parametrize("price", [None, -1, "low"])
def test_an_upper_bound_needs_a_price(tmp_path, price):
    with pytest.raises(InputError, match=r"^grid\.upper_bound\.price: expected numbers above 0[^\n]*$"):
        sweep.run(sweep_config(tmp_path, grid={"upper_bound": {} if price is None else {"price": [price]}}))


def test_costs_of_the_table_are_checked(tmp_path, folders):
    with pytest.raises(InputError, match="table_costs: expected a list of numbers above 0"):
        run(tmp_path, folders, "table_costs=[0,.2]")


def test_the_default_grid_holds_every_head_once():
    settings = {"rate": [None], "specdec_pp": [None]}
    for overrides, expected in (([], settings), (["grid.specdec_pp.head=[A,B]"], {k: ["A", "B"] for k in settings})):
        grid = config.plain(config.compose("sweep", overrides).grid)
        assert {name: grid[name]["head"] for name in settings} == expected
    grid = config.plain(config.compose("sweep", ["grid=policies", "~grid.specdec_pp"]).grid)
    assert grid["rate"]["head"] == [None] and {"confidence", "tail", "upper_bound", "oracle"} <= set(grid)
