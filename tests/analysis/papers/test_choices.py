"""Cells that name a pair, follow another line's choice, look at any value, or may be empty."""

import pandas as pd
import pytest

from analysis.papers.cells import NOTHING, NoLine, Runs
from analysis.papers.figure import draw
from analysis.papers.page import sentence
from analysis.papers.spec import Figure, of_config, source_of
from analysis.tables.files import save_table
from toolkit.errors import InputError

LINES = pd.DataFrame({
    "method": ["chain", "chain", "tree", "tree"], "levels": [1, 2, 1, 2], "dev": [9.0, 1.0, 2.0, 3.0],
    "speed": [1.0, 2.0, 4.0, 5.0], "free": [None, None, 5.0, 5.0],
})  # fmt: skip
CHOSEN = {"column": "levels", "where": {"method": "tree"}, "best": "max dev"}
CELL = {"run": "a", "table": "lines", "value": "speed"}


@pytest.fixture
def runs(tmp_path):
    save_table(LINES, tmp_path, "lines")
    return Runs({"a": tmp_path})


def test_a_line_can_be_like_the_chosen_line_of_another_method(runs):
    told = {**CELL, "where": {"method": "chain"}, "like": CHOSEN}
    assert runs.cell(told, "x").value == 2.0  # the best tree has two levels; the best chain has one
    assert runs.cell({**CELL, "where": {"method": "chain"}, "best": "max dev"}, "x").value == 1.0
    with pytest.raises(InputError, match="like.column"):
        runs.cell({**told, "like": {**CHOSEN, "column": "level"}}, "x")


def test_null_looks_at_any_value(runs):
    told = {**CELL, "where": {"method": "tree", "free": 5, "levels": 2}}
    over = {"where": {"method": "chain", "free": None}}
    assert runs.cell({**told, "over": over}, "x").value == pytest.approx(2.5)


def test_only_an_optional_cell_may_be_empty(runs):
    told = {**CELL, "where": {"method": "tree", "levels": 7}}
    with pytest.raises(NoLine):
        runs.cell(told, "x")
    assert runs.cell({**told, "optional": True}, "x").text() == NOTHING


def test_a_run_is_told_by_its_row_and_its_pair_by_the_column():
    assert source_of({"run": "{pair}_t0"}, {"pair": "small_large"})["run"] == "small_large_t0"


def test_a_claim_looks_at_the_columns_it_names(runs):
    spec = of_config({
        "paper": "MCSD", "item": "Table 2", "title": "t", "experiment": "e", "pairs": [], "cell": CELL,
        "rows": {"ours": {"where": {"method": "tree", "levels": 1}}, "base": {"where": {"method": "chain", "levels": 2}}},
        "columns": {"name": {"value": "method"}, "speed": {}}, "published": {"ours": ["x", "3.0 ± 0.1"], "base": ["y", 2]},
        "claims": [{"text": "ours over base", "left": "ours", "right": "base", "only": ["speed"]}],
    })  # fmt: skip
    cells = {(row, column): runs.cell(spec.source(row, column), "x") for row in spec.rows for column in spec.columns}
    assert sentence(spec, spec.claims[0], cells) == "ours over base: +100.0% here, +50.0% in the paper (speed)."
    told = {"left": "ours", "right": "base", "text": "", "only": ["sped"]}
    with pytest.raises(InputError, match="sped"):
        of_config(
            {
                **{
                    key: getattr(spec, key)
                    for key in ("paper", "item", "title", "experiment", "pairs", "rows", "columns")
                },
                "claims": [told],
            }
        )


def test_a_figure_can_have_names_across(runs, tmp_path):
    told = Figure(
        "method", "speed", "", "", panels={"p": {"run": "a", "table": "lines"}}, curves={"c": {"where": {"levels": 2}}}
    )
    shown = draw(told, runs, "x", tmp_path / "figure.png")
    assert shown[["x", "y"]].to_numpy().tolist() == [["chain", 2.0], ["tree", 5.0]]
