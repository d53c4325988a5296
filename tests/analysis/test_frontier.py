"""The frontier of two small sweeps: choice, intervals, tables, figures, the standing at several cost ratios, refusals."""

import shlex
import shutil

import numpy as np
import pandas as pd
import pytest

from analysis import frontier, sweep
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import read_table, save_table
from analysis.tables.rows import COUNTS
from analysis.tables.selection import apart, as_one_part, check_comparable, halves
from analysis.tables.standing import notes
from tests.analysis.table_sweeps import PAIR, sweep_config, table
from toolkit import config
from toolkit.errors import InputError
from toolkit.files.atomic import write_json
from toolkit.runs.stage import MANIFEST, checksum, read_manifest
from toolkit.trace import Trace, join
from toolkit.trace import bounds as upper_bound


def cost_of(rows, cost_ratio):
    return cost_ratio * rows.num_draft_calls + rows.num_target_calls


STANDING = "table_costs=[.6,.1,.1]"
TABLES = ("frontier", "results", "settings", "costs", "costs_table")


def run(root, sides, *overrides):
    """With enough cost ratios for the ends and the middle of the curves."""
    options = [*(f"{side}=[{folders}]" for side, folders in sides.items()), "track=false", "resamples=300"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("analysis.tables.standing.NUM_COSTS", 7)
        return frontier.run(config.compose("frontier", [*options, f"paths.root_dir={root}", *overrides]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, sweeps):
    return run(tmp_path_factory.mktemp("frontier"), sweeps, STANDING)


def test_one_line_per_method_with_what_dev_chose(folder, sweeps):
    table = read_table(folder, "frontier").set_index("method")
    dev = read_table(sweeps["dev"], "summary")
    best = dev.loc[dev.groupby("method").throughput.idxmax()].set_index("method").setting
    assert dict(table.setting) == dict(best)
    assert set(table.split) == {"test"}
    assert table.throughput["autoregressive"] == 1
    assert table.gain["speculative"] == 0
    assert table.share["oracle"] == 1
    for name in ("throughput", "gain", "share"):
        inside = table[f"{name}_low"] - 1e-9 <= table[name]
        assert (inside & (table[name] <= table[f"{name}_high"] + 1e-9)).all()
    for name in TABLES:
        assert len(pd.read_csv(folder / f"{name}.csv")) == len(read_table(folder, name)) > 0
    text = (folder / "frontier.md").read_text()
    assert "| SpecDec++ |" in text and "figures/pareto-ids.png" in text
    assert "the extra token (corrected or bonus) is included" in text


def test_numbers_are_ratios_of_sums_and_gains_are_paired_over_test_prompts(folder, sweeps):
    table = read_table(folder, "frontier").set_index("method")
    rows = read_table(sweeps["test"], "rows")
    for method, line in table.iterrows():
        sums = rows[(rows.method == method) & (rows.setting == line.setting)][list(COUNTS)].sum()
        assert line.throughput == pytest.approx(sums.num_generated / cost_of(sums, 0.2))
        assert line.discard_rate == pytest.approx(sums.num_discarded / sums.num_generated)
    base, oracle = table.throughput["speculative"], table.throughput["oracle"]
    assert table.share["specdec_pp"] == pytest.approx((table.throughput["specdec_pp"] - base) / (oracle - base))
    counts = np.concatenate([
        rows[(rows.method == method) & (rows.setting == table.setting[method])].set_index("prompt").loc[
            list(dict.fromkeys(rows.prompt)), ["num_generated", "num_draft_calls", "num_target_calls"]
        ]
        for method in ("speculative", "specdec_pp")
    ], axis=1)  # fmt: skip

    def gain(totals):
        base, other = (totals[..., i] / (0.2 * totals[..., i + 1] + totals[..., i + 2]) for i in (0, 3))
        return other / base - 1

    expected = [float(number) for number in Bootstrap(300).spread(counts, gain)]
    assert table.loc["specdec_pp", ["gain", "gain_low", "gain_high"]].tolist() == pytest.approx(expected)


def test_figures_come_from_the_tables_alone(tmp_path, folder):
    """Settings of a second data set are not looked for among those of the first."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("frontier", "settings", "costs"):
        shutil.copy(folder / f"{name}.parquet", copy)
    figures = frontier.draw(copy)
    assert [path.name for path in figures["ids"]] == ["pareto-ids.png", "costs-ids.png"]
    for path in figures["ids"]:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000
        assert path.read_bytes() == (folder / "figures" / path.name).read_bytes()
    table = pd.DataFrame({
        "dataset": ["one", "two"], "method": "speculative", "setting": "K=2", "verification_rate": 0.5, "discard_rate": 0.3,
        "undominated": True, "chosen": True, "prompts": 3, "cost_ratio": 0.2, "throughput": [1.0, 2.0],
    })  # fmt: skip
    for name in frontier.TABLES:
        save_table(table, tmp_path, name)
    for figures in frontier.draw(tmp_path).values():
        assert "fixed K" in figures[0].with_suffix(".svg").read_text()


def test_the_oracle_never_loses_to_plain_decoding(folder):
    costs = read_table(folder, "costs")
    assert costs.cost_ratio.min() == pytest.approx(0.05)
    assert costs.cost_ratio.max() == pytest.approx(5)
    oracle = costs[costs.method == "oracle"]
    assert (oracle.throughput >= 1).all()
    assert (oracle[oracle.cost_ratio > 1].throughput == 1).all()
    assert costs[costs.method == "speculative"].setting.nunique() > 1, "chosen anew at every cost ratio"


def test_finished_work_is_kept(folder, sweeps, monkeypatch):
    monkeypatch.setattr(frontier, "compare", None)
    assert run(folder.parent, sweeps, STANDING) == folder


def test_the_next_command_decodes_with_the_best_method_its_head_and_setting(tmp_path):
    """Over all data sets; not with a reference, and not with what is best on one data set alone."""
    words = [
        "pair=toy_padded",
        "pair.dtype=float64",
        "prompts=toy_math",
        "prompts.split=test",
        "sampling.temperature=0",
    ]
    swept = config.plain(config.compose("sweep", [*words, "max_drafted=7"]))
    head, ratio = str(tmp_path / "my head"), {"policy.cost_ratio": 1.0, "policy.num_drafted": np.nan}
    best = {"rate": (ratio | {"head": head}, "c=1", 2.0), "speculative": ({"policy.num_drafted": 3.0}, "K=3", 1.5)}
    lines, rows = [], []
    for dataset in ("one", "two"):
        for method, (parameters, setting, speed) in {**best, "oracle": ({}, "", 9.0), "tail": ({}, "", 0.1)}.items():
            place = {"dataset": dataset, "split": "test", "method": method, "setting": setting}
            lines.append({**place, "throughput": 3.0 if (dataset, method) == ("two", "tail") else speed})
            rows.append({**place, **parameters, "error": None})
    save_table(pd.DataFrame(rows), tmp_path, "rows")
    given = {"pair.target": swept["pair"]["target"], "prompts.path": None}
    manifest = {"stage": "sweep", "config": {**swept, "pair": {**swept["pair"], "target": "sha256:1"}}, "given": given}
    write_json(tmp_path / MANIFEST, {**manifest, "checksum": checksum(manifest)})
    command = frontier.next_command(pd.DataFrame(lines), pd.DataFrame(rows), [tmp_path])
    python, flag, module, *words = shlex.split(command)
    assert (python, flag, module) == ("python", "-m", "toolkit.decode")
    cfg = config.plain(config.compose("decode", words))
    assert (cfg["method"]["name"], cfg["method"]["max_drafted"], cfg["method"]["policy"]["cost_ratio"]) == (
        "rate",
        7,
        1,
    )
    assert cfg["head"] == head
    assert all(cfg[part] == swept[part] for part in ("pair", "sampling", "prompts"))


def test_several_folders_of_one_data_set_are_joined(tmp_path, sweeps):
    more = {"tail": {}, "autoregressive": {}}
    tails = {split: sweep.run(sweep_config(tmp_path, grid=more, split=split, limit=9)) for split in ("dev", "test")}
    joined = run(tmp_path, {split: f"{sweeps[split]},{tails[split]}" for split in tails})
    methods = read_table(joined, "frontier").method.tolist()
    assert sorted(methods) == ["autoregressive", "oracle", "specdec_pp", "speculative", "tail"]


@pytest.mark.parametrize(("overrides", "message"), [
    (["test=[nowhere]"], "test: expected a sweep's output folder at nowhere, found none"),
    (["baseline=speculativ"], "nothing to compare with: the sweeps hold no speculativ; add it to"),
    (["draft_seconds=.1"], "expected draft_seconds and target_seconds above 0, or neither of them"),
])  # fmt: skip
def test_bad_input_is_one_line(tmp_path, sweeps, overrides, message):
    with pytest.raises(InputError, match=r"^[^\n]*$") as error:
        run(tmp_path, sweeps, *overrides)
    assert message in str(error.value)


def test_without_test_sweeps_the_prompts_of_one_file_are_split(tmp_path, sweeps, capsys):
    """No prompt is on both sides, equal prompts are on one, and the order of the file does not matter."""
    folder = run(tmp_path, {"dev": sweeps["test"]})
    rows = read_table(sweeps["test"], "rows")
    dev, test = halves(rows)
    assert not set(dev.prompt_hash) & set(test.prompt_hash)
    assert len(dev) + len(test) == len(rows)
    assert 0 <= test.prompt_hash.nunique() - dev.prompt_hash.nunique() <= 1
    shuffled = halves(rows.sample(frac=1, random_state=1))[0]
    assert set(shuffled.prompt_hash) == set(dev.prompt_hash)
    table = read_table(folder, "frontier").set_index("method")
    assert set(table.prompts) == {test.prompt.nunique()}
    best = dev.groupby(["method", "setting"], sort=False)[list(COUNTS)].sum()
    best["throughput"] = best.num_generated / cost_of(best, 0.2)
    for method, line in table.iterrows():
        assert line.setting == best.loc[method].throughput.idxmax()
    assert "settings are chosen on" in capsys.readouterr().out
    with pytest.raises(InputError, match="expected at least 2 different prompts"):
        halves(rows[rows.prompt == rows.prompt.iloc[0]])


def test_settings_of_one_method_stand_side_by_side():
    """Two heads: each has its own best threshold; methods that lack the parameter stay as they are."""
    one, two = "depth=2,w_rej=6@1a2b3c", "mine@4d5e6f"
    heads, others = [("0.3", one), ("0.7", one), ("0.3", two)], [("rate", ""), ("speculative", "K=4")]
    settings = [("specdec_pp", f"min=2 h={h} head={head}") for h, head in heads]
    rows = pd.DataFrame([*settings, *others], columns=["method", "setting"])
    told_apart = apart(rows, ["head"])
    assert list(zip(told_apart.method, told_apart.setting, strict=True)) == [
        *((f"specdec_pp head={head}", f"min=2 h={h}") for h, head in heads), *others,
    ]  # fmt: skip
    assert apart(rows, ["K"]).equals(rows)  # one value only: nothing to tell apart
    assert apart(rows, []).equals(rows)
    assert apart(rows, ["h", "head"]).method.nunique() == 5
    with pytest.raises(InputError, match="heads.*did you mean head"):
        apart(rows, ["heads"])


def test_thresholds_apart_are_methods_in_every_table(tmp_path, sweeps):
    folder = run(tmp_path, sweeps, "apart=[h]")
    with pytest.raises(InputError, match="apart"):
        run(tmp_path, sweeps, "apart=[max_drafted]")  # only the oracle has it
    table = read_table(folder, "frontier")
    rows = read_table(sweeps["test"], "rows")
    assert rows[rows.method == "oracle"].setting.nunique() > 1 and "oracle" in set(table.method)
    thresholds = set(rows[rows.method == "specdec_pp"].setting)
    assert sum(method.startswith("specdec_pp h=") for method in table.method) == len(thresholds) > 1
    assert set(read_table(folder, "costs").method) >= set(table.method[table.method.str.startswith("specdec_pp")])


def test_parts_of_one_data_set_are_one_part(tmp_path, sweeps):
    """Sweeps of the dev and of the test prompts, given together: one line per method, split in halves."""
    table = read_table(run(tmp_path, {"dev": f"{sweeps['dev']},{sweeps['test']}"}), "frontier")
    assert table.method.is_unique
    assert set(table.split) == {"dev+test"}
    assert table.set_index("method").throughput["autoregressive"] == 1
    rows = read_table(sweeps["dev"], "rows")
    with pytest.raises(InputError, match="is in two parts; give only one of them"):
        as_one_part(pd.concat([rows, rows.assign(split="other")]))


def test_sweeps_that_do_not_belong_together_are_not_compared(tmp_path, sweeps):
    rows = read_table(sweeps["dev"], "rows")
    with pytest.raises(InputError, match="dev and test must hold the same data sets, got ids and math"):
        list(frontier.by_dataset(rows, rows.assign(dataset="math")))
    other = shutil.copytree(sweeps["dev"], tmp_path / "other")
    about = read_manifest(other)
    about["config"]["max_drafted"] = 7
    write_json(other / MANIFEST, {**about, "checksum": checksum(about)})
    with pytest.raises(InputError, match=r"the sweeps differ in max_drafted: \[7, 20\]"):
        run(tmp_path, {**sweeps, "dev": other})
    del about["bound_reaches_methods"]  # an earlier version's: its methods kept their own bound, 20
    write_json(other / MANIFEST, {**about, "checksum": checksum(about)})
    check_comparable([other, sweeps["test"]])


# -- the standing at several cost ratios ------------------------------------------------------------------------------


def test_every_cost_ratio_is_a_frontier_of_its_own(folder, sweeps, tmp_path):
    expected = read_table(run(tmp_path, sweeps, "cost_ratio=0.6"), "frontier").set_index("method")
    every = read_table(folder, "standing")
    assert not every.duplicated(["dataset", "cost_ratio", "method"]).any()
    at_ratio = every[every.cost_ratio == 0.6].set_index("method")
    assert set(at_ratio.index) <= set(expected.index)  # the frontier also knows the best K of every prompt
    for method, line in at_ratio.iterrows():
        assert line.setting == expected.setting[method]
        for name in ("throughput", "throughput_low", "gain", "gain_high", "share"):
            assert line[name] == pytest.approx(expected[name][method], nan_ok=True)
    text = (folder / "standing.md").read_text()
    assert text.index("## c = 0.1") < text.index("## c = 0.6") < text.index("slower than plain decoding")
    losing = every[(every.throughput_high < 1) & (every.method != "oracle")]
    assert set(every[every.note == "slower than plain decoding"].index) == set(losing.index)
    assert not losing.empty  # drafting costs more than half a target forward, and a few methods know no way back


@pytest.mark.parametrize(("throughput_high", "gain_high", "said"), [
    (0.99, -0.5, "slower than plain decoding"),
    (1.0, -0.01, "below the best fixed K"),
    (1.4, 0.0, ""),
    (1.4, float("nan"), ""),
])  # fmt: skip
def test_a_line_loses_only_beyond_its_interval(throughput_high, gain_high, said):
    lines = pd.DataFrame(
        {"method": ["rate", "autoregressive", "oracle"], "throughput_high": throughput_high, "gain_high": gain_high}
    )
    assert notes(lines, "fixed K") == [said, "", ""]


# -- replayed sweeps: the upper bound beside the oracle, the best K of every prompt, the table over cost ratios ----------

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


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    root = tmp_path_factory.mktemp("references")
    words = {"grid": GRID, "pair": UNEVEN, "limit": 60, "source": "traces", "max_drafted": 6}
    return {split: sweep.run(sweep_config(root, split=split, **words)) for split in ("dev", "test")}


@pytest.fixture(scope="module")
def replayed(tmp_path_factory, uneven):
    return run(tmp_path_factory.mktemp("frontier"), uneven, "cost_range=[.05,2]")


def test_a_sweep_scores_the_upper_bound_on_its_own_recording(uneven):
    rows = read_table(uneven["test"], "rows")
    trace = join([Trace.load(path) for path in sorted((uneven["test"] / "settings").glob("traces-*"))])
    for price in PRICES:
        at_price = rows[(rows.method == "upper_bound") & (rows.setting == f"price={price}")]
        assert at_price[list(COUNTS)].sum().to_dict() == vars(upper_bound.at_price(trace, price).total)
    table = read_table(uneven["test"], "summary")
    assert not table[table.method.isin(["upper_bound", "oracle"])].undominated.any()


def test_shares_of_the_way_to_both_references(replayed):
    table = read_table(replayed, "frontier").set_index("method")
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
    text = (replayed / "frontier.md").read_text()
    assert "| way to the oracle | way to the upper bound |" in text and "| upper bound: p and q known | price=" in text


def test_the_best_k_of_every_prompt_against_a_loop(replayed, uneven):
    rows = read_table(uneven["test"], "rows")
    fixed = rows[rows.method == "speculative"]
    tokens = cost = 0.0
    for _, of_prompt in fixed.groupby("prompt"):
        tokens += of_prompt.num_generated.iloc[0]
        cost += cost_of(of_prompt, 0.2).min()
    table = read_table(replayed, "frontier").set_index("method")
    assert table.throughput["fixed_per_prompt"] == pytest.approx(tokens / cost)
    assert table.throughput["fixed_per_prompt"] > table.throughput["speculative"]


def test_hindsight_is_not_taken_over_texts_of_their_own(tmp_path, uneven):
    """Decoded sweeps have another text for every K: the best of them would be the luckiest."""
    grid = {"speculative": GRID["speculative"]}
    endless = {**PAIR, "end_ids": []}  # so that at least their lengths are the same
    live = {s: sweep.run(sweep_config(tmp_path, grid=grid, pair=endless, split=s)) for s in ("dev", "test")}
    assert read_table(live["test"], "rows").num_generated.nunique() == 1
    assert "fixed_per_prompt" not in set(read_table(run(tmp_path, live), "frontier").method)


def test_the_table_over_cost_ratios_chooses_anew_at_each(replayed, uneven):
    wide = pd.read_csv(replayed / "costs_table.csv").set_index("method")
    assert list(wide.columns) == ["dataset", *(f"c={c:g}" for c in RATIOS)]
    assert list(wide.index) == list(read_table(replayed, "frontier").method)
    dev, test = (read_table(uneven[split], "rows") for split in ("dev", "test"))
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
    text = (replayed / "frontier.md").read_text()
    assert "| method | c=0.05 | c=0.1 | c=0.15 | c=0.2 | c=0.25 | c=0.3 | c=0.4 | c=0.5 |" in text
    at_two_tenths = read_table(replayed, "frontier").set_index("method").throughput
    np.testing.assert_allclose(wide["c=0.2"][list(at_two_tenths.index)], at_two_tenths)


def test_seconds_reach_the_table_over_costs(tmp_path, uneven):
    words = ["draft_seconds=.02", "target_seconds=.1", "table_costs=[.2,.4]", "cost_ratio=9"]
    made = run(tmp_path, uneven, *words)
    costs, table = read_table(made, "costs"), read_table(made, "frontier")
    np.testing.assert_allclose(table.cost_ratio, 0.2)
    np.testing.assert_allclose(table.tokens_per_second, table.throughput * 10)
    np.testing.assert_allclose(costs.tokens_per_second, costs.throughput * 10)
    assert list(read_table(made, "costs_table").columns) == ["dataset", "method", "c=0.2", "c=0.4"]


def test_the_upper_bound_knows_a_penalty_and_a_limit_by_text_is_refused(tmp_path):
    made = sweep.run(sweep_config(tmp_path, grid=GRID, source="traces", sampling={"repetition_penalty": 1.2}))
    expected = {"autoregressive", "speculative", "confidence", "oracle", "upper_bound"}
    assert set(read_table(made, "rows").method) == expected
    with pytest.raises(InputError, match=r"^replays know one limit for all texts[^\n]*source=live$"):
        sweep.run(sweep_config(tmp_path, grid=GRID, source="traces", sampling={"max_length": 60}))


def test_the_default_grid_holds_every_head_once():
    settings = {"rate": [None], "specdec_pp": [None]}
    for overrides, expected in (([], settings), (["grid.specdec_pp.head=[A,B]"], {k: ["A", "B"] for k in settings})):
        grid = config.plain(config.compose("sweep", overrides).grid)
        assert {name: grid[name]["head"] for name in settings} == expected
    grid = config.plain(config.compose("sweep", ["grid=policies", "~grid.specdec_pp"]).grid)
    assert grid["rate"]["head"] == [None] and {"confidence", "tail", "upper_bound", "oracle"} <= set(grid)
