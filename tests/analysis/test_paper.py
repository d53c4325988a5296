"""Tables of the papers: cells are looked up right, every specification and every experiment composes, bad input is one line."""

from __future__ import annotations

import pandas as pd
import pytest
from omegaconf import OmegaConf

from analysis import paper
from analysis.papers.cells import Runs, cells_of
from analysis.papers.page import as_markdown, side_by_side
from analysis.papers.spec import of_config
from analysis.tables.files import read_table, save_table
from toolkit import config
from toolkit.config import compose
from toolkit.errors import InputError
from toolkit.stage import open_stage

SPEC = {
    "paper": "MCSD",
    "item": "Table 1",
    "title": "a table",
    "experiment": "mcsd_table1",
    "pairs": ["toy"],
    "cell": {"table": "frontier", "value": "throughput"},
    "rows": {
        "ours": {"where": {"method": "a"}, "best": "max dev"},
        "base": {"where": {"method": "b"}},
        "ours over base": {
            "where": {"method": "a"},
            "best": "max dev",
            "over": {"where": {"method": "b"}, "best": None},
        },
    },
    "columns": {"X": {"run": "x"}, "Y": {"run": "y"}},
    "published": {"ours": [2, 3], "base": [1, None]},
    "claims": [{"text": "ours over base", "left": "ours", "right": "base"}],
}
LINES = pd.DataFrame({
    "method": ["a", "a", "b"], "setting": ["h=1", "h=2", "K=1"], "dev": [1.0, 2.0, 9.0], "throughput": [5.0, 3.0, 2.0],
    "throughput_low": [4.0, 2.5, 1.0], "throughput_high": [6.0, 3.5, 3.0],
})  # fmt: skip


def folder_of(tmp_path, lines=LINES):
    save_table(lines, tmp_path, "frontier")
    return tmp_path


def cells(tmp_path, spec=SPEC):
    spec = of_config(spec)
    return spec, cells_of(spec, Runs({"x": folder_of(tmp_path)}))


def test_cells_are_the_chosen_lines_numbers_and_quotients(tmp_path):
    spec, found = cells(tmp_path)
    assert (found["ours", "X"].value, found["ours", "X"].low, found["ours", "X"].high) == (3.0, 2.5, 3.5)
    assert found["base", "X"].value == 2.0
    assert found["ours over base", "X"].value == pytest.approx(1.5)
    shown = side_by_side(spec, found).set_index("")
    assert shown.loc["ours", "X"] == "3.00 [2.50, 3.50] (2)"
    assert shown.loc["base"].to_list() == ["2.00 [1.00, 3.00] (1)", "not run"]


def test_a_page_says_the_papers_claim_and_what_came_out_here(tmp_path):
    spec, found = cells(tmp_path)
    page = as_markdown(spec, found, Runs({}), "a drafts for b", None, None)
    assert "ours over base: +50.0%, – here, +100.0%, – in the paper (X, Y)." in page
    assert "+experiment=mcsd_table1 pair=toy" in page


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": {"ours": {"wher": {}}}, "published": {}, "claims": []}, "wher"),
        ({"published": {"ours": [1]}}, "one per column"),
        ({"published": {"our": [1, 2]}}, "our"),
        ({"claims": [{"text": "", "left": "ours", "right": "bse"}]}, "bse"),
        ({"titel": ""}, "titel"),
        ({"cell": {"table": "frontier", "value": "thrughput"}}, "thrughput"),
        ({"cell": {"table": "fronter", "value": "throughput"}}, "fronter"),
        ({"rows": {"r": {"where": {"method": "c"}}}, "published": {}, "claims": []}, "method=c"),
        ({"rows": {"r": {"where": {"methd": "a"}}}, "published": {}, "claims": []}, "methd"),
        ({"rows": {"r": {"where": {"method": "a"}}}, "published": {}, "claims": []}, "2 lines"),
        ({"rows": {"r": {"best": "most dev"}}, "published": {}, "claims": []}, "most dev"),
    ],
)
def test_a_wrong_specification_is_one_line(tmp_path, change, said):
    with pytest.raises(InputError, match=said) as caught:
        cells(tmp_path, {**SPEC, **change})
    assert "\n" not in str(caught.value)


def test_runs_that_are_no_runs_are_refused(tmp_path):
    with pytest.raises(InputError, match="runs"):
        paper.run(compose("paper", ["table=specdecpp_table1"]))
    with pytest.raises(InputError, match="runs.alpaca"):
        paper.run(compose("paper", ["table=specdecpp_table1", f"runs={{alpaca: {tmp_path}}}"]))


def test_a_page_is_made_of_finished_runs(tmp_path):
    (tmp_path / "run").mkdir()
    cfg = OmegaConf.create(
        {"paths": {"output_dir": str(tmp_path / "run"), "root_dir": str(tmp_path)}, "overwrite": False}
    )
    stage = open_stage("heads", cfg)
    heads = pd.DataFrame({
        "head": ["fixed K", "a", "b"], "kind": [None, "survival", "survival"], "dev_throughput": [1.0, 2.0, 3.0],
        "throughput": [1.5, 9.0, 1.8],
    })  # fmt: skip
    save_table(heads, stage.folder, "heads")
    stage.finish()
    words = ["table=specdecpp_table1", f"runs={{alpaca: {config.quoted(str(stage.folder))}}}", "track=false"]
    folder = paper.run(compose("paper", [f"paths.root_dir={config.quoted(str(tmp_path / 'out'))}", *words]))
    table = read_table(folder, "table").set_index(["row", "column"])
    assert table.value["SpecDec++", "Alpaca"] == 1.8
    assert table.published["SpecDec++", "Alpaca"] == "18.88"
    assert "+20.0%" in (folder / "page.md").read_text()
