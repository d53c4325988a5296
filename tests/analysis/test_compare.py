"""Comparisons: every setting on every group, resumable, figures that follow from the counts, quality outside the timing."""

import json
import re
import shutil
import sys

import numpy as np
import pandas as pd
import pytest

from analysis import compare
from analysis.quality.exact_match import ExactMatch
from analysis.reporting import method_table
from analysis.reporting.method_table import groups_to_choose_on
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import read_table
from analysis.tables.grid import Setting
from analysis.tables.rows import COUNTS
from toolkit.config import compose
from toolkit.costs.energy import Energy
from toolkit.errors import InputError

GRID = ["~grid", "+grid={autoregressive: {}, speculative: {policy.num_drafted: [2, 4]}, dsbd: {}, mtad: {}}"]


def config(folder, tiny_overrides, tiny_responses, *overrides):
    return compose("compare", [
        *tiny_overrides, *GRID, "prompts=jsonl", f"prompts.path={tiny_responses.parent}/prompts.jsonl", "prompts.limit=5",
        "sampling.max_new_tokens=8", "group_size=2", "warmup=0", "idle_seconds=0", "metrics=[perplexity]", "resamples=200",
        "track=false", f"paths.output_dir={folder}", *overrides,
    ])  # fmt: skip


@pytest.fixture(scope="module")
def compared(tmp_path_factory, tiny_overrides, tiny_responses):
    folder = tmp_path_factory.mktemp("compare") / "out"
    return compare.run(config(folder, tiny_overrides, tiny_responses))


def test_every_cell_decodes_every_group_in_turn(compared):
    rows = read_table(compared, "rows")
    assert sorted(set(rows.name)) == ["autoregressive", "dsbd", "mtad", "speculative K=2", "speculative K=4"]
    assert rows.groupby("name").group.apply(list).map(lambda groups: groups == [0, 1, 2]).all()
    assert rows.groupby("group").prompts.first().tolist() == [2, 2, 1]
    parts = [json.loads((compared / "parts" / f"0000{n}.json").read_text())["settings"] for n in range(3)]
    assert [next(iter(part)) for part in parts] == ["autoregressive", "speculative K=2", "speculative K=4"]
    table = read_table(compared, "comparison")
    speculative = table[table.method == "speculative"]
    assert speculative["policy.num_drafted"].to_list() == speculative.levels.to_list() == [2, 4]
    assert table["policy.num_drafted"].isna().sum() == len(table) - 2
    lengths = [len(g["prompt_ids"]) for part in parts for g in part["mtad"]["generations"]]
    assert table.prompt_tokens.to_list() == [np.mean(lengths)] * len(table)
    if parts[0]["mtad"]["energy"]["joules"] is None:  # never estimated
        text = (compared / "comparison.md").read_text()
        assert table.joules_per_token.isna().all() and "J/token" not in text and "Energy: not available: " in text
    else:
        assert table.joules_per_token.notna().all()


def test_figures_follow_from_the_counts(compared):
    rows, table = read_table(compared, "rows"), read_table(compared, "comparison")
    names = ["num_generated", "num_target_calls", "num_draft_calls", "seconds", "num_discarded"]
    sums = rows.groupby("name", sort=False)[names].sum()
    line = table.set_index(table.method + " " + table.setting).rename(index=str.strip)
    for setting in sums.index:
        s, t = sums.loc[setting], line.loc[setting]
        assert t.tokens_per_second == pytest.approx(s.num_generated / s.seconds)
        assert t.throughput == pytest.approx(s.num_generated / (0.2 * s.num_draft_calls + s.num_target_calls))
        assert t.discard_rate == pytest.approx(s.num_discarded / s.num_generated)
        assert t.tokens_per_second_low <= t.tokens_per_second <= t.tokens_per_second_high
    assert line.loc["autoregressive", ["speedup", "speedup_low", "speedup_high"]].tolist() == [1, 1, 1]
    assert line.loc["dsbd"].mean_width >= 2
    assert np.isnan(line.loc["mtad"].mean_width)
    nll, tokens = (rows[rows.name == "mtad"][f"perplexity.{name}"].sum() for name in ("nll", "tokens"))
    assert line.loc["mtad"].perplexity == pytest.approx(np.exp(nll / tokens))
    assert tokens == rows[rows.name == "mtad"].num_generated.sum()


class Metered:
    """An energy meter of devices that take so many joules per window, whatever is done."""

    def __init__(self, devices):
        self.energy, self.windows = None, 0
        assert list(devices) == ["cpu"]  # all devices of the pair

    def measure_idle(self, seconds):
        return 6.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.windows += 1
        self.energy = Energy(12.0, 6.0, 0.5, "a fake")


def test_the_ends_of_few_scored_prompts_are_a_range():
    """Twenty prompts, one a group, of which ten could be scored."""
    generator, settings, metrics = np.random.default_rng(0), [Setting("speculative")], {"exact": ExactMatch()}
    prompts = pd.DataFrame(generator.integers(1, 9, (20, len(COUNTS))), columns=list(COUNTS))
    prompts = prompts.assign(name="speculative", group=range(20), prompt=range(20), layers=0, widths=0)
    prompts["exact.texts"] = np.repeat([0.0, 1.0], 10)
    prompts["exact.score"] = prompts["exact.texts"] * (generator.random(20) < 0.5)
    rows = prompts[["name", "group", *COUNTS]].assign(
        method="speculative", setting="", group_size=1, prompts=1, failed=0, cache_bytes=0, target_runs=1,
        seconds=generator.random(20), joules=np.nan, idle_joules=np.nan,
    )  # fmt: skip
    table = method_table.table_of(rows, prompts, settings, metrics, "speculative", 0.2, Bootstrap(50))
    results = method_table.readable(table, metrics, 0.2)
    assert table.exact_scored.tolist() == [10] and re.fullmatch(r"0\.\d+ \[0.* to 1.*\]", results["exact match"][0])
    assert "," in results["tokens/s"][0]


def test_joules_per_token_and_per_forward_of_a_batch(tmp_path, tiny_overrides, tiny_responses, monkeypatch):
    monkeypatch.setattr(compare, "EnergyMeter", Metered)
    folder = compare.run(config(tmp_path, tiny_overrides, tiny_responses, "idle_seconds=1", "metrics=[]"))
    table, rows = read_table(folder, "comparison").iloc[0], read_table(folder, "rows")
    rows = rows[rows.name == "autoregressive"]
    parts = [json.loads(path.read_text())["settings"]["autoregressive"] for path in sorted(folder.glob("parts/*"))]
    forwards = [
        max(len(text["rounds"]) for text in part["generations"]) for part in parts
    ]  # the batch's, not each row's
    assert rows.target_runs.tolist() == forwards and sum(forwards) < rows.num_target_calls.sum()
    assert table.joules_per_token == pytest.approx(36 / rows.num_generated.sum())
    assert table.joules_per_forward == pytest.approx(36 / sum(forwards))
    assert table.joules_per_input == pytest.approx(36 / rows.num_target_calls.sum())
    assert table.seconds_per_input == pytest.approx(rows.seconds.sum() / rows.num_target_calls.sum())
    assert table.idle_joules_per_token == pytest.approx(9 / rows.num_generated.sum())
    assert table.group_size == 2
    text = (folder / "comparison.md").read_text()
    assert "Energy: a fake. Idle power 6.0 W, not subtracted." in text
    assert all(f"| {title} |" in text for title in ("J/token", "J/target forward", "J/input", "of it idle, J/token"))


def test_finished_groups_are_kept(compared, tiny_overrides, tiny_responses, monkeypatch):
    """A stop after two groups: the third is decoded, the others are not."""
    (compared / "parts" / "00002.json").unlink()
    before = [(compared / "parts" / f"0000{n}.json").read_bytes() for n in range(2)]
    decoded = []
    one = compare._decoded
    monkeypatch.setattr(
        compare, "_decoded", lambda context, setting, group: decoded.append(list(group)) or one(context, setting, group)
    )
    compare.run(config(compared, tiny_overrides, tiny_responses))
    assert decoded == [[4]] * 5
    assert [(compared / "parts" / f"0000{n}.json").read_bytes() for n in range(2)] == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confinement is Linux's")
def test_other_metrics_do_not_decode_again(compared, tiny_overrides, tiny_responses, tmp_path, monkeypatch):
    """What confines programs and who judged is recorded; the toy target says no ratings, and that is no score of 0."""
    before = read_table(compared, "comparison")
    monkeypatch.setattr(compare, "_decoded", lambda *_: pytest.fail("decoded again"))
    (tmp_path / "template").write_text("{question}{answer}")
    judge = f"{{judge: {{model: toy/target, max_tokens: 4, template: {tmp_path}/template}}}}"
    metrics = f"metrics=[{judge},{{pass_at_k: {{allow_code_execution: true}}}}]"
    compare.run(config(compared, tiny_overrides, tiny_responses, metrics, "cost_ratio=.4"))
    table, text = read_table(compared, "comparison"), (compared / "comparison.md").read_text()
    assert "perplexity" not in table and table.judge.isna().all()
    assert table.throughput.iloc[1] != before.throughput.iloc[1]  # at the other cost
    manifest = json.loads((compared / "manifest.json").read_text())
    assert manifest["judged"]["pass_at_k"] == "programs confined by bubblewrap"
    assert re.match(r"rated by toy/target \(weights \w+, \w+\), greedily, template ", manifest["judged"]["judge"])
    assert all(f"{name}: {about}." in text for name, about in manifest["judged"].items())
    assert manifest["unscored"]["judge"]["speculative K=2"] == {"the judge gave no rating": 5}
    assert "left out of it: autoregressive 5 (the judge gave no rating); speculative K=2 5 (" in text


def test_texts_do_not_depend_on_the_group(tmp_path, compared, tiny_overrides, tiny_responses):
    """Prompt r draws from the stream of r: groups of 5 give what groups of 2 gave, up to rounding at ties."""
    words = ["group_size=5", "~grid.dsbd", "~grid.mtad", "metrics=[]"]
    other = compare.run(config(tmp_path / "five", tiny_overrides, tiny_responses, *words))
    (five,) = [json.loads(path.read_text())["settings"] for path in sorted((other / "parts").glob("*.json"))]
    twos = [json.loads(path.read_text())["settings"] for path in sorted((compared / "parts").glob("*.json"))]
    for setting in ("autoregressive", "speculative K=4"):
        sequences = [g["token_ids"] for part in twos for g in part[setting]["generations"]]
        assert sequences == [g["token_ids"] for g in five[setting]["generations"]]


@pytest.mark.parametrize(("override", "words"), [
    ("group_size=6", "group_size: expected 1 to 5 (the prompts), got 6"),
    ("baseline=fixed", "baseline: expected one of autoregressive; "),
    ("+grid.oracle={}", "grid.oracle: expected methods that decode"),
    ("metrics=[{pass_at_k: {k: 2, allow_code_execution: true}}]", "each method writes one; expected k=1"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(tmp_path, tiny_overrides, tiny_responses, override, words):
    with pytest.raises(InputError) as caught:
        compare.run(config(tmp_path / "out", tiny_overrides, tiny_responses, override))
    assert words in str(caught.value)
    assert not (tmp_path / "out" / "parts").exists()


def test_settings_can_be_chosen_on_groups_that_are_not_reported(compared, tmp_path, tiny_overrides, tiny_responses):
    whole = read_table(compared, "comparison")
    rows = read_table(compared, "rows").set_index("name")
    copy = shutil.copytree(compared, tmp_path / "out")
    folder = compare.run(config(copy, tiny_overrides, tiny_responses, "dev_share=.34"))  # one group of three
    table = read_table(folder, "comparison")
    dev = groups_to_choose_on(3, 0.34, 0)
    assert folder == copy and len(dev) == 1
    for line in table.itertuples():
        of_line = rows.loc[f"{line.method} {line.setting}".strip()]
        chosen_on = of_line[of_line.group.isin(dev)]
        assert line.dev_tokens_per_second == pytest.approx(chosen_on.num_generated.sum() / chosen_on.seconds.sum())
        assert line.num_generated == of_line[~of_line.group.isin(dev)].num_generated.sum()
    assert "dev_tokens_per_second" not in whole
    compare.run(config(copy, tiny_overrides, tiny_responses, "dev_share=.34", "metrics=[exact_match]"))
    unscored = json.loads((copy / "manifest.json").read_text())["unscored"]["exact_match"]["autoregressive"]
    assert sum(unscored.values()) == table.prompts[0] < whole.prompts[0], "texts of the reported groups"
    with pytest.raises(InputError, match="dev_share"):
        groups_to_choose_on(3, 0.1, 0)
    assert groups_to_choose_on(3, 0, 0) == []
