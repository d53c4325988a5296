"""Cells: the first column that a table has, rows of another pair, claims between columns."""

from __future__ import annotations

import pandas as pd
import pytest
from omegaconf import OmegaConf

from analysis.papers.cells import Runs, cells_of
from analysis.papers.page import as_markdown
from analysis.papers.spec import of_config
from analysis.tables.files import save_table
from toolkit.errors import InputError
from toolkit.stage import open_stage

LINES = pd.DataFrame({"method": ["a", "b"], "speed": [3.0, 2.0], "joules": [float("nan")] * 2, "exact": [0.5, 0.25]})
SPEC = {
    "paper": "MTAD",
    "item": "Table 4",
    "title": "a table",
    "experiment": "mtad_table4",
    "pairs": ["small", "large"],
    "cell": {"run": "x", "table": "comparison"},
    "rows": {
        "small: speed": {"of_pair": "small", "value": "speed"},
        "large: speed": {"of_pair": "large", "value": "speed"},
        "energy": {"value": "joules"},
        "score": {"value": ["execution", "exact"]},
    },
    "columns": {"A": {"where": {"method": "a"}}, "B": {"where": {"method": "b"}}},
    "published": {"small: speed": [4, 2]},
    "claims": [{"text": "A over B", "left": "A", "right": "B", "only": ["small: speed", "energy"]}],
}


def run_of(tmp_path, pair):
    cfg = {"paths": {"output_dir": str(tmp_path / "run"), "root_dir": str(tmp_path)}, "overwrite": False, "pair": pair}
    (tmp_path / "run").mkdir()
    stage = open_stage("compare", OmegaConf.create(cfg))
    save_table(LINES, stage.folder, "comparison")
    stage.finish()
    return Runs({"x": stage.folder})


@pytest.mark.parametrize(
    ("pair", "small", "large"),
    [
        ({"target": "toy/target"}, "3.00", "3.00"),
        ({"name": "large"}, "not run: another pair", "3.00"),
        ({"name": "one that the paper does not have"}, "3.00", "3.00"),
    ],
)
def test_rows_of_a_papers_pair_are_empty_where_its_other_pair_ran(tmp_path, pair, small, large):
    spec = of_config(SPEC)
    found = cells_of(spec, run_of(tmp_path, pair))
    assert found["small: speed", "A"].text() == small
    assert found["large: speed", "A"].text() == large


def test_the_first_column_that_there_is_and_nothing_where_nothing_was_measured(tmp_path):
    spec, runs = of_config(SPEC), run_of(tmp_path, {})
    found = cells_of(spec, runs)
    assert found["score", "B"].value == 0.25
    assert found["energy", "A"].value is None
    assert "0" not in found["energy", "A"].text()
    page = as_markdown(spec, found, Runs({}), "a drafts for b", None, None)
    assert "A over B: +50.0%, – here, +100.0%, – in the paper (small: speed, energy)." in page


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cell": {**SPEC["cell"], "value": ["execution", "exat"]}, "rows": {"r": {}}}, "execution"),
        ({"claims": [{"text": "", "left": "A", "right": "C"}]}, "C"),
        ({"claims": [{"text": "", "left": "A", "right": "B", "only": ["sped"]}]}, "sped"),
    ],
)
def test_columns_and_rows_that_do_not_exist_are_one_line(tmp_path, change, said):
    rest = {} if "claims" in change else {"published": {}, "claims": []}
    with pytest.raises(InputError, match=said) as caught:
        cells_of(of_config({**SPEC, **rest, **change}), run_of(tmp_path, {}))
    assert "\n" not in str(caught.value)
