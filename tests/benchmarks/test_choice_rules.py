"""The page that says which importance rule to take: its table on a few prompts."""

from benchmarks.choice_rules import measured, shown
from toolkit import ModelPair


def test_grouped_weights_win_on_flat_drafts_and_no_rule_beats_the_optimum():
    table = measured(ModelPair.toy(), 4, domains=["code"], temperatures=[1.5], num_drafts=[2, 6])
    by_rule = table.set_index(["K", "method"]).drafted
    assert by_rule[6, "importance_grouped"] > by_rule[6, "importance"] + 0.02
    assert (table.drafted <= table.optimum + 0.03).all()
    lines = shown(table)
    assert list(lines.columns) == ["domain", "draft temperature", "K", "importance", "importance_grouped", "optimum"]
    assert list(lines.K) == [2, 6]
