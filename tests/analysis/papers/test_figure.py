"""Figures: panels with axes of their own, what was not measured is left out, lines through what nothing beats."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.papers.page import draw
from analysis.papers.table import Runs
from analysis.tables.files import save_table
from toolkit.errors import InputError

LINES = pd.DataFrame({
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
def runs(tmp_path):
    save_table(LINES, tmp_path, "comparison")
    return Runs({"x": tmp_path})


def test_panels_have_their_own_axes_and_hold_what_was_measured(runs, tmp_path):
    shown = draw(TOLD, runs, "Figure 1", tmp_path / "figure.png")
    assert list(shown.panel.unique()) == ["speed", "width"]
    of_a = shown[(shown.curve == "A")].groupby("panel")
    assert of_a.get_group("speed").x.to_list() == [1.0, 2.0, 3.0]
    assert of_a.get_group("speed").y.to_list() == [0.9, 0.1, 0.2]
    assert of_a.get_group("width").x.to_list() == [1.0, 2.0]
    drawn = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert "mean width" in drawn
    assert "J/token" not in drawn


def test_a_line_joins_what_nothing_beats(runs, tmp_path, monkeypatch):
    lines = []
    from matplotlib.axes import Axes

    plot = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, *a, **k: (lines.append((list(a[0]), k)), plot(self, *a, **k))[1])
    draw({**TOLD, "panels": {"speed": TOLD["panels"]["speed"]}}, runs, "Figure 1", tmp_path / "figure.png")
    joined = [xs for xs, about in lines if "marker" not in about]
    assert joined == [[1.0, 3.0], [9.0]], "the setting at speed 2 is worse in both than the one at 3"


def test_a_figure_of_unknown_columns_is_one_line(runs, tmp_path):
    with pytest.raises(InputError, match="exat"):
        draw({**TOLD, "y": "exat"}, runs, "Figure 1", tmp_path / "figure.png")


def test_a_figure_can_have_names_across(runs, tmp_path):
    panels = {"p": {"run": "x", "table": "comparison"}}
    names = {**TOLD, "x": "method", "better": None, "panels": panels, "curves": {"c": {"where": {"speed": [1.0, 9.0]}}}}
    shown = draw(names, runs, "x", tmp_path / "figure.png")
    assert shown[["x", "y"]].to_numpy().tolist() == [["a", 0.9], ["b", 0.5]]
