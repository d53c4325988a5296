"""Tables of papers: cells are looked up as their sources say, sources multiply out, and what they cannot mean is one line."""

import pandas as pd
import pytest
from omegaconf import OmegaConf

from analysis.papers.page import as_markdown, draw, sentence, side_by_side
from analysis.papers.table import NOTHING, PaperTable, Runs, cells_of, expanded, merged
from analysis.tables.files import save_table
from toolkit.errors import InputError
from toolkit.runs.stage import open_stage

LINES = pd.DataFrame({
    "method": ["chain", "chain", "tree", "tree"], "levels": [1, 2, 1, 2], "dev": [9.0, 1.0, 2.0, 3.0],
    "speed": [1.0, 2.0, 4.0, 3.0], "speed_low": [0.5, 1.5, 3.5, 2.5], "speed_high": [1.5, 2.5, 4.5, 3.5],
    "free": [None, None, 5.0, 5.0], "joules": [None] * 4, "exact": [0.5, 0.25, 0.125, 1.0],
}).astype({"joules": float})  # fmt: skip
CHAIN, TREE = {"method": "chain", "levels": 2}, {"method": "tree"}
ABOUT = {"paper": "MCSD", "cite": "MCSD (arXiv)", "item": "Table 1", "title": "t", "experiment": "mcsd_table1"}
TABLE = {
    **ABOUT,
    "pairs": ["small", "large"],
    "cell": {"table": "lines", "value": "speed"},
    "rows": {
        "ours": {"where": TREE, "best": "max dev"},
        "base": {"where": CHAIN},
        "ours over base": {"where": TREE, "best": "max dev", "over": {"where": CHAIN, "best": None}},
    },
    "columns": {"X": {"run": "x"}, "Y": {"run": "y"}},
    "published": {"ours": [2, "3.0 ± 0.1"], "base": [1, None]},
    "claims": [{"text": "ours over base", "left": "ours", "right": "base"}],
}
CELL = {"run": "x", "table": "lines", "value": "speed"}


@pytest.fixture
def runs(tmp_path):
    save_table(LINES, tmp_path, "lines")
    return Runs({"x": tmp_path})


def test_cells_are_the_chosen_lines_numbers_and_quotients(runs):
    table = PaperTable.of(TABLE)
    cells = cells_of(table, runs)
    assert (cells["ours", "X"].value, cells["ours", "X"].low, cells["ours", "X"].high) == (3.0, 2.5, 3.5)
    assert cells["ours over base", "X"].value == pytest.approx(1.5)
    shown = side_by_side(table, cells).set_index("")
    assert shown.loc["ours", "X"] == "3.00 [2.50, 3.50] (2)"
    assert shown.loc["base"].to_list() == ["2.00 [1.50, 2.50] (1)", "not run"]
    page = as_markdown(table, cells, Runs({}), "a drafts for b", None)
    assert "ours over base: +50.0%, – here, +100.0%, – in the paper (X, Y)." in page
    assert "+experiment=mcsd_table1 pair=small" in page


def test_a_figure_of_few_texts_has_a_range(tmp_path):
    """Tables count prompts, or the texts of a recording."""
    for name in ("prompts", "texts"):
        save_table(LINES.assign(**{name: 8}), tmp_path, "lines")
        assert Runs({"x": tmp_path}).cell({**CELL, "where": CHAIN}, "w").text() == "2.00 [1.50 to 2.50]"


def test_the_mean_of_runs_a_line_like_another_one_any_value_and_an_empty_cell(runs):
    assert runs.cell({**CELL, "runs": ["x", "x"], "where": CHAIN}, "w").value == 2.0
    assert runs.cell({**CELL, "runs": ["x", "y"], "where": CHAIN}, "w").value is None
    like = {"column": "levels", "where": TREE, "best": "max dev"}  # the best tree has two levels, the best chain one
    assert runs.cell({**CELL, "where": {"method": "chain"}, "like": like}, "w").value == 2.0
    free = {**CELL, "where": {**TREE, "free": 5, "levels": 1}, "over": {"where": {"method": "chain", "free": None}}}
    assert runs.cell(free, "w").value == 4.0
    assert runs.cell({**CELL, "where": {"levels": 7}, "optional": True}, "w").text() == NOTHING
    assert runs.cell({**CELL, "where": CHAIN, "value": ["execution", "exact"]}, "w").value == 0.25
    assert runs.cell({**CELL, "where": CHAIN, "value": "joules"}, "w").text() == "not measured"
    assert runs.cell({**CELL, "where": CHAIN, "note": "levels", "scale": 2}, "w").text() == "4.00 [3.00, 5.00], 2"


def test_sources_multiply_out_and_names_in_braces_are_filled_in_when_row_and_column_meet():
    axes = {"data": {"Alpaca": "alpaca", "none": {"run": None}}, "k": [1, 4]}
    rows = expanded({"{data}, k = {k}": {"for_each": axes, "run": "{pair}_{data}", "where": {"K": "{k}"}}})
    assert list(rows) == ["Alpaca, k = 1", "Alpaca, k = 4", "none, k = 1", "none, k = 4"]
    cell = merged(rows["Alpaca, k = 4"], {"pair": "here"})
    assert (cell["run"], cell["where"]) == ("here_alpaca", {"K": 4})
    assert rows["none, k = 1"]["run"] is None


def test_claims_are_about_columns_too_multiply_out_and_name_what_ends_so(runs):
    rows = {"a: speed": {"where": CHAIN}, "b: speed": {"where": CHAIN}, "b: exact": {"where": CHAIN, "value": "exact"}}
    claim = {"for_each": {"m": ["X"]}, "text": "{m} over Z", "left": "{m}", "right": "Z", "only": ": speed"}
    columns = {"X": {"run": "x"}, "Z": {"run": "x", "where": {"levels": 1}}}
    table = PaperTable.of({**TABLE, "rows": rows, "columns": columns, "published": {}, "claims": [claim]})
    assert (
        sentence(table, table.claims[0], cells_of(table, runs))
        == "X over Z: +100.0%, +100.0% here (a: speed, b: speed)."
    )


@pytest.mark.parametrize(
    ("pair", "small"), [({"name": "large"}, "not run: another pair"), ({"name": "other"}, "3.00"), ({}, "3.00")]
)
def test_rows_of_a_papers_pair_are_empty_where_its_other_pair_ran(tmp_path, pair, small):
    cfg = {"paths": {"output_dir": str(tmp_path), "root_dir": str(tmp_path)}, "overwrite": False, "pair": pair}
    stage = open_stage("compare", OmegaConf.create(cfg))
    save_table(LINES.drop(columns=["speed_low", "speed_high"]), stage.folder, "lines")
    stage.finish()
    rows = {name: {"of_pair": name, "where": TREE, "best": "max dev"} for name in ("small", "large")}
    table = PaperTable.of({**TABLE, "rows": rows, "published": {}, "claims": []})
    cells = cells_of(table, Runs({"x": stage.folder}))
    assert (cells["small", "X"].text(), cells["large", "X"].text()) == (small, "3.00")


@pytest.mark.parametrize(("change", "message"), [
    ({"rows": {"ours": {"wher": {}}}}, "wher"),
    ({"cell": {"table": "lines", "value": "sped"}}, "sped"),
    ({"rows": {"r": {"where": {"method": "c"}}}}, "method=c"),
    ({"rows": {"r": {"where": TREE}}}, "2 lines"),
    ({"rows": {"r": {"where": CHAIN, "like": {"column": "level"}}}}, "like.column"),
    ({"published": {"ours": [1]}, "rows": TABLE["rows"]}, "one per column"),
    ({"claims": [{"text": "", "left": "ours", "right": "bse"}], "rows": TABLE["rows"]}, "bse"),
])  # fmt: skip
def test_a_wrong_table_is_one_line(runs, change, message):
    with pytest.raises(InputError, match=message) as caught:
        cells_of(PaperTable.of({**TABLE, "published": {}, "claims": [], **change}), runs)
    assert "\n" not in str(caught.value)


# -- figures ----------------------------------------------------------------------------------------------------------


POINTS = pd.DataFrame({
    "method": ["a", "a", "a", "b"], "speed": [1.0, 3.0, 2.0, 9.0], "joules": [float("nan")] * 4,
    "exact": [0.9, 0.2, 0.1, 0.5], "width": [1.0, float("nan"), 2.0, 3.0],
})  # fmt: skip
TOLD = {
    "x": "speed",
    "y": ["execution", "exact"],
    "x_label": "tokens/s",
    "y_label": "score",
    "panels": {
        "speed": {"run": "x", "table": "comparison"},
        "width": {"run": "x", "table": "comparison", "x": "width", "x_label": "mean width"},
        "energy": {"run": "x", "table": "comparison", "x": "joules", "x_label": "J/token"},
    },
    "curves": {"A": {"where": {"method": "a"}}, "B": {"where": {"method": "b"}}},
    "better": "more x, more y",
}


@pytest.fixture
def figure_runs(tmp_path):
    save_table(POINTS, tmp_path, "comparison")
    return Runs({"x": tmp_path})


def test_panels_have_their_own_axes_and_hold_what_was_measured(figure_runs, tmp_path):
    shown = draw(TOLD, figure_runs, "Figure 1", tmp_path / "figure.png")
    assert list(shown.panel.unique()) == ["speed", "width"]
    of_a = shown[(shown.curve == "A")].groupby("panel")
    assert of_a.get_group("speed").x.to_list() == [1.0, 2.0, 3.0]
    assert of_a.get_group("speed").y.to_list() == [0.9, 0.1, 0.2]
    assert of_a.get_group("width").x.to_list() == [1.0, 2.0]
    drawn = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert "mean width" in drawn
    assert "J/token" not in drawn


def test_a_line_joins_what_nothing_beats(figure_runs, tmp_path, monkeypatch):
    lines = []
    from matplotlib.axes import Axes

    plot = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, *a, **k: (lines.append((list(a[0]), k)), plot(self, *a, **k))[1])
    draw({**TOLD, "panels": {"speed": TOLD["panels"]["speed"]}}, figure_runs, "Figure 1", tmp_path / "figure.png")
    joined = [xs for xs, about in lines if "marker" not in about]
    assert joined == [[1.0, 3.0], [9.0]], "the setting at speed 2 is worse in both than the one at 3"


def test_a_figure_can_have_names_across(figure_runs, tmp_path):
    panels = {"p": {"run": "x", "table": "comparison"}}
    names = {**TOLD, "x": "method", "better": None, "panels": panels, "curves": {"c": {"where": {"speed": [1.0, 9.0]}}}}
    shown = draw(names, figure_runs, "x", tmp_path / "figure.png")
    assert shown[["x", "y"]].to_numpy().tolist() == [["a", 0.9], ["b", 0.5]]
