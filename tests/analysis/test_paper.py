"""analysis.paper: a page is made of finished runs, and each entry of conf/papers is a table that can be made."""

from __future__ import annotations

from collections import Counter

import pandas as pd
import pytest
from omegaconf import OmegaConf

from analysis import paper
from analysis.papers.table import PaperTable
from analysis.tables.files import read_table, save_table
from toolkit import config
from toolkit.config import CONF, compose, papers
from toolkit.errors import InputError
from toolkit.runs.pipeline import expand_stages
from toolkit.runs.stage import open_stage

ENTRIES = {f"{key}_{item}": (key, item, whole) for key, whole in papers.read(CONF) for item in whole["entries"]}
REPEATED = {"mcsd_table3": 1, "mcsd_table5": 1, "mcsd_table7": 2}  # published rows that a paper itself has twice


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_is_a_table_of_runs_that_its_stages_make(name):
    key, item, whole = ENTRIES[name]
    table, entry = PaperTable.of(papers.table(key, item, whole)), whole["entries"][item]
    assert table.rows or table.figure
    assert all(pair in config.choices("pair") for pair in table.pairs)
    assert set(entry["runs"].values()) <= set(expand_stages(papers.experiment(key, item, whole)["before"]))
    rows = Counter(tuple(row) for row in table.published.values())
    assert sum(rows.values()) - len(rows) == REPEATED.get(name, 0), "a copied row would stand there twice"


def test_runs_that_are_no_runs_are_refused(tmp_path):
    with pytest.raises(InputError, match="runs"):
        paper.run(compose("paper", ["table=specdecpp_table1"]))
    with pytest.raises(InputError, match="runs.alpaca"):
        paper.run(compose("paper", ["table=specdecpp_table1", f"runs={{alpaca: {tmp_path}}}"]))


def test_a_page_is_made_of_finished_runs(tmp_path):
    paths = {"output_dir": str(tmp_path / "run"), "root_dir": str(tmp_path)}
    stage = open_stage("heads", OmegaConf.create({"paths": paths, "overwrite": False}))
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
