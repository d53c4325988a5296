"""Cost tables: interpolation, files, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.costs.load import LoadCost, grid_of
from toolkit.errors import InputError

POINTS = {(b, w, x): 1e-3 * (b + 2 * w) + 1e-6 * x for b in (1.0, 4.0) for w in (1.0, 3.0) for x in (0.0, 100.0)}


def test_a_table_is_linear_between_its_points_and_beyond():
    grid = grid_of(POINTS, "here")
    for batch, width, context in ((1, 1, 0), (2, 2, 50), (4, 3, 100), (16, 9, 400)):
        assert grid(batch, width, context) == pytest.approx(1e-3 * (batch + 2 * width) + 1e-6 * context)
    assert grid(0.5, 1, 0) == grid(1, 1, 0), "below the first point: its value"


def test_a_ratio_is_a_table_that_no_batch_changes():
    costs = LoadCost.ratio(0.2, column=0.1)
    for batch in (1, 32):
        assert costs.round(batch, 3) == pytest.approx(3 * 0.2 + 1 + 3 * 0.1)


def test_what_is_saved_is_loaded(tmp_path):
    costs = LoadCost(grid_of(POINTS, "a"), grid_of(POINTS, "b"), "measured", {"machine": "here"})
    again = LoadCost.load(costs.save(tmp_path / "costs.json"))
    assert again.source == "measured" and dict(again.about) == {"machine": "here"}
    np.testing.assert_array_equal(again.target.seconds, costs.target.seconds)
    assert again.round(3, 2, 70) == costs.round(3, 2, 70)
    assert again.middle == 50.0


def lines(*rows: str) -> str:
    return "\n".join(["model,batch,width,context,seconds", *rows]) + "\n"


def test_a_csv_of_ones_own(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(lines("draft,1,1,0,0.001", "target,1,1,0,0.01", "target,1,5,0,0.012"))
    costs = LoadCost.load(path)
    assert costs.round(1, 4) == pytest.approx(4 * 0.001 + 0.012) and costs.source == str(path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", lines("draft,1,1,0,0.001", "target,1,1,0,0.01", "target,2,5,0,0.012"), "hole at batch=1 width=5"),
        ("a.csv", lines("draft,1,1,0,-0.001", "target,1,1,0,0.01"), "expected seconds above 0 at batch=1 width=1"),
        ("a.csv", lines("draft,1,1,0,nan", "target,1,1,0,0.01"), "expected seconds above 0"),
        ("a.csv", lines("draft,1,1,0,0.001"), "target: expected at least one time"),
        ("a.csv", lines("drat,1,1,0,0.001"), "line 2: expected model draft or target, got drat"),
        ("a.csv", lines("draft,1,one,0,0.001"), "line 2: expected numbers"),
        ("a.csv", "", "expected a CSV with the columns model, batch"),
        ("a.json", "{}", "not a cost table .KeyError: 'draft'"),
        ("a.json", "[", "not a cost table"),
    ],
)
def test_bad_tables_are_refused(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(InputError, match=words):
        LoadCost.load(path)


def test_a_missing_table(tmp_path):
    with pytest.raises(InputError, match="expected a cost table at"):
        LoadCost.load(tmp_path / "none.json")
