"""The frontier of two small sweeps: choice, intervals, tables, figures, refusals."""

import shutil

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis import frontier, sweep
from analysis.tables.files import read_table, save_table
from analysis.tables.rows import COUNTS, apart, as_one_part, check_comparable
from analysis.tables.selection import halves
from tests.analysis.table_sweeps import sweep_config
from toolkit import config
from toolkit.errors import InputError
from toolkit.files.atomic import write_json
from toolkit.runs.stage import MANIFEST, checksum, read_manifest

TABLES = ("frontier", "results", "settings", "costs", "costs_table")


def run(root, dev, test, *overrides):
    options = ["track=false", "resamples=300", f"paths.root_dir={root}", *overrides]
    return frontier.run(config.compose("frontier", [f"dev=[{dev}]", f"test=[{test}]", *options]))


@pytest.fixture(autouse=True, scope="module")
def few_cost_ratios():
    """Enough for the ends and the middle of the curves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("analysis.tables.standing.NUM_COSTS", 7)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory, sweeps):
    return run(tmp_path_factory.mktemp("frontier"), sweeps["dev"], sweeps["test"])


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


def test_numbers_are_ratios_of_sums_over_test_prompts(folder, sweeps):
    table = read_table(folder, "frontier").set_index("method")
    rows = read_table(sweeps["test"], "rows")
    for method, line in table.iterrows():
        sums = rows[(rows.method == method) & (rows.setting == line.setting)][list(COUNTS)].sum()
        assert line.throughput == pytest.approx(
            sums.num_generated / (0.2 * sums.num_draft_calls + sums.num_target_calls)
        )
        assert line.discard_rate == pytest.approx(sums.num_discarded / sums.num_generated)
    base, oracle = table.throughput["speculative"], table.throughput["oracle"]
    assert table.share["specdec_pp"] == pytest.approx((table.throughput["specdec_pp"] - base) / (oracle - base))


def test_intervals_against_a_loop_over_resamples(folder, sweeps):
    table = read_table(folder, "frontier").set_index("method")
    rows = read_table(sweeps["test"], "rows")
    wide = {
        method: rows[(rows.method == method) & (rows.setting == table.setting[method])].set_index("prompt")
        for method in ("speculative", "specdec_pp")
    }
    prompts, rng = list(dict.fromkeys(rows.prompt)), np.random.default_rng(0)

    def gain(drawn):
        rates = {}
        for method, setting in wide.items():
            sums = setting.loc[drawn][list(COUNTS)].sum()
            rates[method] = sums.num_generated / (0.2 * sums.num_draft_calls + sums.num_target_calls)
        return rates["specdec_pp"] / rates["speculative"] - 1

    size = len(prompts)
    gains = [gain(np.repeat(prompts, rng.multinomial(size, [1 / size] * size))) for _ in range(300)]
    without_one = np.array([gain([other for other in prompts if other != prompt]) for prompt in prompts])
    shares = without_one - without_one.mean()
    kurtosis = (shares**4).mean() / (shares**2).mean() ** 2
    freedom = np.clip(2 * size / (kurtosis - 1 + 2 / (size - 1)), 2, size - 1)
    error = np.std(gains) * np.sqrt(size / (size - 1)) * stats.t.ppf(0.975, freedom)
    expected = table.gain["specdec_pp"] + error * np.array([-1, 1])
    np.testing.assert_allclose(table.loc["specdec_pp", ["gain_low", "gain_high"]].to_numpy(dtype=float), expected)


def test_test_counts_do_not_change_the_choice(tmp_path, sweeps, folder):
    other = tmp_path / "other"
    shutil.copytree(sweeps["test"], other)
    rows = read_table(other, "rows")
    rows.loc[rows.setting == "K=5", ["num_drafted", "num_draft_calls", "num_target_calls"]] = [9, 9, 1]
    save_table(rows, other, "rows")
    chosen = read_table(run(tmp_path, sweeps["dev"], other), "frontier")
    assert chosen.setting.tolist() == read_table(folder, "frontier").setting.tolist()


def test_figures_come_from_the_tables_alone(tmp_path, folder):
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


def test_tables_are_written_thrice_and_say_what_they_mean(folder):
    for name in TABLES:
        assert len(pd.read_csv(folder / f"{name}.csv")) == len(read_table(folder, name)) > 0
    text = (folder / "frontier.md").read_text()
    assert "| SpecDec++ |" in text
    assert "figures/pareto-ids.png" in text
    assert "the extra token (corrected or bonus) is included" in text


def test_the_oracle_never_loses_to_plain_decoding(folder):
    costs = read_table(folder, "costs")
    assert costs.cost_ratio.min() == pytest.approx(0.05)
    assert costs.cost_ratio.max() == pytest.approx(5)
    oracle = costs[costs.method == "oracle"]
    assert (oracle.throughput >= 1).all()
    assert (oracle[oracle.cost_ratio > 1].throughput == 1).all()
    assert costs[costs.method == "speculative"].setting.nunique() > 1, "chosen anew at every cost ratio"


def test_seconds_give_the_ratio_and_tokens_per_second(tmp_path, sweeps):
    table = read_table(
        run(tmp_path, sweeps["dev"], sweeps["test"], "draft_seconds=.02", "target_seconds=.1", "cost_ratio=9"),
        "frontier",
    )
    assert (table.cost_ratio - 0.2).abs().max() < 1e-12
    np.testing.assert_allclose(table.tokens_per_second, table.throughput * 10)


def test_finished_work_is_kept(folder, sweeps, monkeypatch):
    monkeypatch.setattr(frontier, "compare", None)
    assert run(folder.parent, sweeps["dev"], sweeps["test"]) == folder


def test_several_folders_of_one_data_set_are_joined(tmp_path, sweeps, grid):
    more = {"tail": {}, "autoregressive": {}}
    tails = {split: sweep.run(sweep_config(tmp_path, grid=more, split=split, limit=9)) for split in ("dev", "test")}
    for split in tails:  # a folder of its own: the same content has the same place
        assert tails[split] != sweeps[split]
    joined = run(tmp_path, f"{sweeps['dev']},{tails['dev']}", f"{sweeps['test']},{tails['test']}")
    methods = read_table(joined, "frontier").method.tolist()
    assert sorted(methods) == ["autoregressive", "oracle", "specdec_pp", "speculative", "tail"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "math"}, "dev and test must hold the same data sets, got ids and math"),
        ({"sampling": {"temperature": 0.5}}, "the sweeps differ in sampling.temperature: [1.0] and [0.5]"),
    ],
)
def test_sweeps_that_do_not_belong_together(tmp_path, sweeps, changes, message):
    small = {"autoregressive": {}, "speculative": {"policy.num_drafted": [1]}}
    other = sweep.run(sweep_config(tmp_path, grid=small, split="test", limit=3, **changes))
    with pytest.raises(InputError, match=r"^[^\n]*$") as error:
        run(tmp_path, sweeps["dev"], other)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["test=[nowhere]"], "test: expected a sweep's output folder at nowhere, found none"),
        (["dev=[]"], "dev: expected sweep folders"),
        (["baseline=speculativ"], "nothing to compare with: the sweeps hold no speculativ; add it to"),
        (["draft_seconds=.1"], "expected draft_seconds and target_seconds above 0, or neither of them"),
        (["cost_ratio=0"], "cost_ratio: expected a number above 0, got 0"),
        (["cost_range=[2,1]"], "cost_range: expected 0 < low < high"),
        (["confidence=95"], "confidence: expected a number in (0, 1)"),
    ],
)
def test_bad_input_is_one_line(tmp_path, sweeps, overrides, message):
    with pytest.raises(InputError, match=r"^[^\n]*$") as error:
        run(tmp_path, sweeps["dev"], sweeps["test"], *overrides)
    assert message in str(error.value)


def test_a_folder_without_rows_is_named(tmp_path, sweeps):
    with pytest.raises(InputError, match=r"holds no rows\.parquet"):
        run(tmp_path, sweeps["dev"], tmp_path)


def test_dev_cannot_be_test(tmp_path, sweeps):
    with pytest.raises(InputError, match="every dev prompt is a test prompt too"):
        run(tmp_path, sweeps["dev"], sweeps["dev"])


def test_every_data_set_has_its_figures_filled(tmp_path):
    """Settings of the second data set must not be looked for among those of the first."""
    table = pd.DataFrame({
        "dataset": ["one", "two"], "method": "speculative", "setting": "K=2", "verification_rate": 0.5, "discard_rate": 0.3,
        "undominated": True, "chosen": True, "prompts": 3, "cost_ratio": 0.2, "throughput": [1.0, 2.0],
    })  # fmt: skip
    for name in frontier.TABLES:
        save_table(table, tmp_path, name)
    for figures in frontier.draw(tmp_path).values():
        assert "fixed K" in figures[0].with_suffix(".svg").read_text()


def test_without_test_sweeps_the_prompts_of_one_file_are_split(tmp_path, sweeps, capsys):
    """No prompt is on both sides, equal prompts are on one, and the order of the file does not matter."""
    options = ["track=false", "resamples=100", f"paths.root_dir={tmp_path}"]
    folder = frontier.run(config.compose("frontier", [f"dev=[{sweeps['test']}]", *options]))
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
    best["throughput"] = best.num_generated / (0.2 * best.num_draft_calls + best.num_target_calls)
    for method, line in table.iterrows():
        assert line.setting == best.loc[method].throughput.idxmax()
    assert "settings are chosen on" in capsys.readouterr().out
    with pytest.raises(InputError, match="expected at least 2 different prompts"):
        halves(rows[rows.prompt == rows.prompt.iloc[0]])


def test_settings_of_one_method_stand_side_by_side():
    """Two heads: each has its own best threshold; methods that lack the parameter stay as they are."""
    one, two = "depth=2,w_rej=6@1a2b3c", "mine@4d5e6f"
    settings = [
        ("specdec_pp", f"min=2 h=0.3 head={one}"),
        ("specdec_pp", f"min=2 h=0.7 head={one}"),
        ("specdec_pp", f"min=2 h=0.3 head={two}"),
        ("rate", ""),
        ("speculative", "K=4"),
    ]
    rows = pd.DataFrame(settings, columns=["method", "setting"])
    found = apart(rows, ["head"])
    assert list(zip(found.method, found.setting, strict=True)) == [
        (f"specdec_pp head={one}", "min=2 h=0.3"),
        (f"specdec_pp head={one}", "min=2 h=0.7"),
        (f"specdec_pp head={two}", "min=2 h=0.3"),
        ("rate", ""),
        ("speculative", "K=4"),
    ]
    assert apart(rows, ["K"]).equals(rows)  # one value only: nothing to tell apart
    assert apart(rows, []).equals(rows)
    assert apart(rows, ["h", "head"]).method.nunique() == 5
    with pytest.raises(InputError, match="heads.*did you mean head"):
        apart(rows, ["heads"])


def test_thresholds_apart_are_methods_in_every_table(tmp_path, sweeps):
    folder = run(tmp_path, sweeps["dev"], sweeps["test"], "apart=[h]")
    table = read_table(folder, "frontier")
    rows = read_table(sweeps["test"], "rows")
    thresholds = set(rows[rows.method == "specdec_pp"].setting)
    assert sum(method.startswith("specdec_pp h=") for method in table.method) == len(thresholds) > 1
    assert set(read_table(folder, "costs").method) >= set(table.method[table.method.str.startswith("specdec_pp")])


def test_parts_of_one_data_set_are_one_part(tmp_path, sweeps):
    """Sweeps of the dev and of the test prompts, given together: one line per method, split in halves."""
    options = ["track=false", "resamples=50", f"paths.root_dir={tmp_path}"]
    both = f"dev=[{sweeps['dev']},{sweeps['test']}]"
    table = read_table(frontier.run(config.compose("frontier", [both, *options])), "frontier")
    assert table.method.is_unique
    assert set(table.split) == {"dev+test"}
    assert table.set_index("method").throughput["autoregressive"] == 1
    rows = read_table(sweeps["dev"], "rows")
    with pytest.raises(InputError, match="is in two parts; give only one of them"):
        as_one_part(pd.concat([rows, rows.assign(split="other")]))


def test_yardsticks_are_never_taken_apart(sweeps):
    rows = read_table(sweeps["test"], "rows")
    assert rows[rows.method == "oracle"].setting.nunique() > 1
    found = apart(rows, ["h"])
    assert set(found.method) & {"oracle"}
    with pytest.raises(InputError, match="apart"):
        apart(rows, ["max_drafted"])  # only the oracle has it


def test_sweeps_of_other_bounds_are_not_compared(tmp_path, sweeps):
    other = shutil.copytree(sweeps["dev"], tmp_path / "other")
    about = read_manifest(other)
    about["config"]["max_drafted"] = 7
    write_json(other / MANIFEST, {**about, "checksum": checksum(about)})
    with pytest.raises(InputError, match=r"the sweeps differ in max_drafted: \[7, 20\]"):
        run(tmp_path, other, sweeps["test"])
    del about["bound_reaches_methods"]  # an earlier version's: its methods kept their own bound, 20
    write_json(other / MANIFEST, {**about, "checksum": checksum(about)})
    check_comparable([other, sweeps["test"]])


def test_a_baseline_that_loses_to_plain_decoding_is_marked(tmp_path, sweeps):
    table = read_table(run(tmp_path, sweeps["dev"], sweeps["test"], "cost_ratio=3"), "results")
    fixed = table[table.method == "fixed K"].iloc[0]
    assert fixed.note == "slower than plain decoding"
