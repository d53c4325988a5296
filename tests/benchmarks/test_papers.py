"""The experiments of the papers: every one composes with its pairs, every table is made or explained, pages are there."""

from __future__ import annotations

import pytest

from analysis.papers.spec import of_config
from benchmarks import papers
from toolkit import config
from toolkit.config import compose
from toolkit.train import run as train

NAMES = papers.names()
REPEATED = {"mcsd_table3": 1, "mcsd_table5": 1, "mcsd_table7": 2}  # rows that a paper itself has twice


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
    assert {path.stem for path in papers.DOCS.glob("*.md")} <= {*NAMES, "index", "equations"}
    assert (papers.DOCS / "equations.md").read_text(encoding="utf-8") == papers.equations()
    assert (papers.DOCS / "index.md").read_text(encoding="utf-8") == page


def test_published_figures_differ_from_row_to_row():
    """A copied row would stand there twice; so do REPEATED rows, in the papers."""
    for name in NAMES:
        rows = [tuple(row) for row in papers.table_config(name).get("published", {}).values()]
        assert len(rows) - len(set(rows)) == REPEATED.get(name, 0), name
