"""Choosing on dev rows only, and the undominated rows against brute force."""

import numpy as np
import pandas as pd
import pytest

from analysis.tables.grid import FIXED, UPPER_BOUND
from analysis.tables.rows import COUNTS, settings_table, sweep_scalars, throughput, totals, undominated
from analysis.tables.selection import best_per_prompt, choose, comparable, unseen
from analysis.tables.standing import Cost
from toolkit.errors import InputError


def rows(settings, prompts=("a", "b"), split="dev"):
    """Rows of settings {(method, setting): (draft calls, target calls)} that produce 10 tokens per prompt."""
    lines = []
    for (method, setting), (drafted, calls) in settings.items():
        for prompt in prompts:
            counts = dict(zip(COUNTS, (drafted, drafted, calls, 10, drafted + calls - 10), strict=True))
            lines.append({
                "dataset": "d", "split": split, "method": method, "setting": setting, "lossless": True,
                "prompt": prompt, "prompt_hash": f"{split}-{prompt}", "error": None, **counts,
            })  # fmt: skip
    return pd.DataFrame(lines)


DEV = {("speculative", "K=2"): (8, 4), ("speculative", "K=6"): (15, 3), ("autoregressive", ""): (0, 10)}
DEV_TOTALS = totals(rows(DEV))


def test_choice_follows_the_cost_ratio():
    test = totals(rows(DEV, split="test"))
    assert choose(DEV_TOTALS, test, 0.05, "d")["speculative"] == "K=6"
    assert choose(DEV_TOTALS, test, 0.5, "d")["speculative"] == "K=2"
    better = totals(rows({**DEV, ("speculative", "K=2"): (1, 1), ("oracle", ""): (7, 3)}, split="test"))
    choice = choose(DEV_TOTALS, better, 0.05, "d")
    assert choice["speculative"] == "K=6", "test counts are not looked at"
    assert choice["oracle"] == "", "a method without a choice needs no dev rows"


@pytest.mark.parametrize("methods", [DEV, {("autoregressive", ""): (0, 10)}])
def test_every_sweep_has_both_rates_throughput_and_its_gain(methods):
    """Of its best setting; of plain decoding, where there is no other."""
    scalars = sweep_scalars(settings_table(rows(methods), 0.5), 0.5)
    drafted, calls = min(methods.values(), key=lambda counts: 0.5 * counts[0] + counts[1])
    throughput = 10 / (0.5 * drafted + calls)
    expected = {"verification_rate": calls / 10, "discard_rate": (drafted + calls - 10) / 10, "throughput": throughput}
    assert {name: scalars[name] for name in expected} == pytest.approx(expected)
    assert scalars["gain"] == pytest.approx(throughput - 1)


def test_the_upper_bound_of_a_sweep_decodes_autoregressively_where_that_is_faster():
    """The way from the best fixed K to it: 10 tokens at 13 forward passes, at 11, and at 10 without a draft."""
    methods = {(FIXED, "K=2"): (14, 6), ("tail", "h=0.1"): (8, 7), (UPPER_BOUND, ""): (8, 7)}
    share = sweep_scalars(settings_table(rows(methods), 0.5), 0.5)["upper_bound_share"]
    assert share == pytest.approx((10 / 11 - 10 / 13) / (1 - 10 / 13))


def test_what_cannot_be_chosen_is_refused():
    test = totals(rows({**DEV, ("tail", "h=0.1"): (7, 3), ("tail", "h=0.2"): (7, 3)}, split="test"))
    with pytest.raises(InputError, match="dev rows lack tail, so none of its 2 settings"):
        choose(DEV_TOTALS, test, 0.2, "d")
    fewer = totals(rows({setting: counts for setting, counts in DEV.items() if setting[1] != "K=2"}, split="test"))
    with pytest.raises(InputError, match="speculative K=2 is best on dev, and the test rows lack it"):
        choose(DEV_TOTALS, fewer, 0.5, "d")


def test_test_prompts_do_not_choose(capsys):
    dev, test = rows(DEV, ("a", "b", "c")), rows(DEV, ("b",))
    assert set(unseen(dev, test, "d").prompt) == {"a", "c"}
    assert "1 dev prompts left out" in capsys.readouterr().out
    with pytest.raises(InputError, match="every dev prompt is a test prompt too"):
        unseen(dev, dev, "d")


def test_only_prompts_that_all_cells_decoded_are_compared(capsys):
    table = rows(DEV, ("a", "b", "c"))
    table.loc[0, "error"] = "too long"
    table = table.drop(index=5)  # K=6 lacks c
    assert set(comparable(table, "d, dev").prompt) == {"b"}
    assert "2 prompts left out" in capsys.readouterr().out
    with pytest.raises(InputError, match="no prompt was decoded by every setting"):
        comparable(table[table.prompt != "b"], "d, dev")


@pytest.mark.parametrize("seed", range(20))
def test_undominated_against_brute_force(seed):
    points = np.random.default_rng(seed).integers(0, 7, size=(17, 2)).astype(float)  # many ties and duplicates
    expected = [not any((other <= point).all() and (other < point).any() for other in points) for point in points]
    assert undominated(points).tolist() == expected


def test_the_oracle_and_lossy_methods_dominate_nobody():
    table = rows({**DEV, ("oracle", ""): (7, 3), ("mtad", "t=1"): (8, 2)})
    table.loc[table.method == "mtad", "lossless"] = False
    marked = settings_table(table, 0.2).set_index("method").undominated
    assert not marked["oracle"]
    assert not marked["mtad"]
    assert marked["speculative"].all()


def test_nodes_beyond_one_per_draft_forward_cost_where_they_are_priced():
    """A chain drafts a node per forward: its throughput stays. A tree's falls by its other nodes."""
    counts = np.zeros((2, len(COUNTS)))
    for row, (drafted, calls) in enumerate(((8.0, 8.0), (40.0, 8.0))):
        given = {"num_drafted": drafted, "num_draft_calls": calls, "num_target_calls": 4.0, "num_generated": 12.0}
        for name, value in given.items():
            counts[row, COUNTS.index(name)] = value
    free, priced = throughput(counts, 0.25), throughput(counts, 0.25, 0.05)
    assert free.tolist() == [2.0, 2.0]
    assert priced.tolist() == pytest.approx([2.0, 12 / (4 + 2 + 0.05 * 32)])
    with pytest.raises(InputError, match="node_cost: expected a number of at least 0"):
        Cost.of(0.2, None, None, -1.0)


def test_the_best_setting_of_a_prompt_pays_for_its_nodes():
    """Copied tokens take no draft forward: without their price the longest copies are always the best."""
    table = rows({("prompt_lookup", "K=2"): (6, 5), ("prompt_lookup", "K=9"): (36, 4)}).assign(num_draft_calls=0)
    for node_cost, setting in ((0.0, "K=9"), (0.1, "K=2")):
        best = table[table.setting == setting]
        hindsight = best_per_prompt(table, "prompt_lookup", 0.2, node_cost)
        assert hindsight[list(COUNTS)].values.tolist() == best[list(COUNTS)].values.tolist()
