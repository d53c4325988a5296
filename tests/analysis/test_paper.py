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
from benchmarks import papers
from toolkit import config
from toolkit.config import compose
from toolkit.errors import InputError
from toolkit.stage import open_stage
from toolkit.train import run as train

NAMES = papers.names()
REPEATED = {"mcsd_table3": 1, "mcsd_table5": 1, "mcsd_table7": 2}  # rows that a paper itself has twice
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


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_composes_with_the_toy_pair_and_with_its_papers_pairs(name, tmp_path, capsys):
    spec = of_config(papers.table_config(name))
    assert spec.experiment == name
    for pair in ("toy", *spec.pairs):
        words = [
            f"+experiment={name}",
            f"pair={pair}",
            "dry_run=true",
            f"paths.root_dir={config.quoted(str(tmp_path))}",
        ]
        train(compose("train", words))
        plan = capsys.readouterr().out
        assert f"table={name}" in plan
    assert not list(tmp_path.iterdir())


def test_every_table_and_figure_of_the_papers_is_made_or_explained():
    page = papers.index()
    assert papers.MISSING not in page
    for paper_of in papers.listed()["items"].values():
        assert f"## {paper_of['name']}" in page
    made = {name for name in NAMES if (papers.DOCS / f"{name}.md").exists()}
    assert made == set(NAMES), "python -m benchmarks.papers writes the pages"
    assert (papers.DOCS / "index.md").read_text(encoding="utf-8") == page


def test_published_figures_differ_from_row_to_row():
    """A copied row would stand there twice; so do REPEATED rows, in the papers."""
    for name in NAMES:
        rows = [tuple(row) for row in papers.table_config(name).get("published", {}).values()]
        assert len(rows) - len(set(rows)) == REPEATED.get(name, 0), name
