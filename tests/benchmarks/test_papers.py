"""The experiments of the papers: every one composes with its pairs, every table is made or explained, pages are there."""

from __future__ import annotations

import pytest

from benchmarks import papers
from toolkit import config
from toolkit.config import compose
from toolkit.train import run as train

NAMES = papers.names()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_composes_with_the_toy_pair_and_with_its_papers_pairs(name, tmp_path, capsys):
    for pair in ("toy", *papers.table_config(name)["pairs"]):
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
