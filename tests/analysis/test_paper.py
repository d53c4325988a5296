"""analysis.paper: a page is made of finished runs, and each entry of conf/papers is a table that can be made."""

import re
from collections import Counter

import pandas as pd
import pytest
import yaml
from omegaconf import OmegaConf

from analysis import paper
from analysis.papers.page import differences, runs_list, sentence, side_by_side
from analysis.papers.table import FACT, PaperTable, Runs, cells_of
from analysis.tables.files import read_table, save_table
from toolkit import config
from toolkit.config import CONF, compose, papers
from toolkit.runs.pipeline import expand_stages
from toolkit.runs.stage import open_stage

ENTRIES = {f"{key}_{item}": (key, item, whole) for key, whole in papers.read(CONF) for item in whole["entries"]}
REPEATED = {"mcsd_table3": 1, "mcsd_table5": 1, "mcsd_table7": 2}  # published rows that a paper itself has twice


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_is_a_table_of_runs_that_its_stages_make(name, tmp_path):
    """Sizes come from the runs: 7 prompts where 7 ran; what is said of the toy pair is left out where another one ran."""
    key, item, whole = ENTRIES[name]
    table, entry = PaperTable.of(papers.table(key, item, whole)), whole["entries"][item]
    assert table.rows or table.figure
    assert all(pair in config.choices("pair") for pair in table.pairs)
    assert set(entry["runs"].values()) <= set(expand_stages(papers.experiment(key, item, whole)["before"]))
    rows = Counter(tuple(row) for row in table.published.values())
    assert sum(rows.values()) - len(rows) == REPEATED.get(name, 0), "a copied row would stand there twice"
    size = re.compile(r"([\w,]+)(?: new| test| training)? (?:prompts|tokens|positions|configurations)\b")
    runs = Runs(dict.fromkeys(entry["runs"], run_of(tmp_path)))
    for models, other in (("toy/draft drafts for toy/target", "models"), ("a drafts for b", "toy")):
        lines = differences(table, runs, models)
        assert not any(FACT.search(line) for line in lines)
        assert not any(line.get(other) in lines for line in table.differs if isinstance(line, dict))
        numbers = [word for line in lines for word in size.findall(line) if word[0].isdigit() or word in WORDS]
        assert set(numbers) <= PUBLISHED.get(name, set()), (name, numbers)


WORDS = ("two", "three", "four", "six", "seven", "eight", "twelve", "sixteen")
PUBLISHED = {"limits_figure2": {"three"}}  # of the vocabulary that is enumerated


def run_of(folder):
    """A run whose manifest answers every question."""
    stage = open_stage("compare", OmegaConf.create({"paths": {"output_dir": str(folder)}, "overwrite": False}))
    stage.finish(num_prompts=7)
    return stage.folder


def test_sentences_say_what_ran(tmp_path):
    cfg = {"paths": {"output_dir": str(tmp_path)}, "overwrite": False, "cost_ratio": 0.25}
    cfg |= {"grid": {"dsbd": {"proposer": {"num_beams": [1, 2]}}}, "sampling": {"top_k": 9}}
    stage = open_stage("compare", OmegaConf.create(cfg))
    stage.finish(num_prompts=1234)
    runs = Runs({"x": stage.folder})
    words = (
        "{x.num_prompts} prompts, c = {x.cost_ratio}, widths {x.grid.dsbd.proposer.num_beams}, top-k {x.sampling.top_k}"
    )
    assert runs.filled(words) == "1,234 prompts, c = 0.25, widths 1 and 2, top-k 9"
    assert runs.filled("{y.num_prompts} prompts") is None and runs.filled("{x.batches} batches") is None
    assert "num_prompts 1234" in runs_list(runs)


def test_published_figures_keep_their_zeros(tmp_path):
    table = PaperTable.of(papers.table("mtad", "table5", dict(papers.read(CONF))["mtad"]))
    assert table.printed("spec", "OPT") == "2.60" and table.printed("MTAD", "OPT") == "4.30"
    assert "(2.60)" in side_by_side(table, cells_of(table, Runs({}))).set_index("").loc["spec", "OPT"]
    claim = sentence(table, table.claims[0], cells_of(table, Runs({})))
    assert "+56.9%, +65.4% in the paper" in claim


def test_a_cell_in_percent_holds_percents(tmp_path):
    table = PaperTable.of(papers.table("limits", "table2", dict(papers.read(CONF))["limits"]))
    lines = pd.DataFrame({
        "method": ["speculative", "importance"], "tokens_per_second": [200.0, 213.0], "block_efficiency": [1.5, 2.0],
        "rule.alphabet": [None, 40], "rule.num_free": [None, 5],
    })  # fmt: skip
    save_table(lines, tmp_path, "comparison")
    source = table.source("alphabet 40, s = 5", "token rate over one draft")
    assert Runs({"alphabet": tmp_path}).cell(source, "w").text() == "+6.50 %"


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


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "papers").glob("*.yaml")))
def test_what_a_paper_records_has_one_limit_for_all_texts(name):
    """Recordings refuse sampling.max_length: the responses that they are made of have none."""
    stages = yaml.safe_load((CONF / "papers" / f"{name}.yaml").read_text("utf-8")).get("stages", {})
    for group in stages.values():
        for stage in group.values():
            if stage["run"] != "data_gen.traces.run":
                continue
            (read,) = [word for word in stage["overrides"] if word.startswith("responses=")]
            overrides = group[read.split('"')[1][1:-1]]["overrides"]
            flat = [word for part in overrides for word in ([part] if isinstance(part, str) else part)]
            assert not any(word.startswith("sampling.max_length=") for word in flat)
