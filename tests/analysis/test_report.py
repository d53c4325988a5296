"""The report: everything it shows is in it."""

import re
from html.parser import HTMLParser

import pytest

from analysis import frontier, report
from analysis.tables.definitions import DEFINITIONS
from toolkit import config
from toolkit.errors import InputError
from toolkit.io import write_text
from toolkit.stage import MANIFEST


class Page(HTMLParser):
    """Tags that are open, and every address the page refers to."""

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "img", "link"):
            self.open.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def run(root, inputs, *overrides):
    return report.run(
        config.compose("report", [f"inputs=[{','.join(map(str, inputs))}]", f"paths.root_dir={root}", *overrides])
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, sweeps):
    root = tmp_path_factory.mktemp("inputs")
    options = ["resamples=50", f"paths.root_dir={root}"]
    made = frontier.run(config.compose("frontier", [f"dev=[{sweeps['dev']}]", f"test=[{sweeps['test']}]", *options]))
    return [made, sweeps["test"]]


def test_a_tracked_frontier_leaves_an_offline_run(inputs):
    (run,) = (inputs[0] / "wandb").glob("offline-run-*")
    tables = {path.name.split("_")[0] for path in (run / "files" / "media" / "table" / "frontier").iterdir()}
    assert tables == {"frontier", "settings", "costs", "settings-ids", "curves-ids"}
    assert len(list((run / "files" / "media" / "images" / "frontier").iterdir())) == 2


def test_html_is_whole_and_needs_nothing_else(tmp_path, inputs):
    page = Page((run(tmp_path, inputs, "title='A <b>title</b>'") / "report.html").read_text())
    assert page.open == []
    outside = [address for address in page.addresses if not address.startswith(("#", "data:image/png;base64,"))]
    assert outside == []
    assert sum(address.startswith("data:") for address in page.addresses) == 3
    for text in ("A <b>title</b>", "SpecDec++", "way to the oracle", *DEFINITIONS.values()):
        assert text in page.text


def test_markdown_refers_to_figures_that_are_there(tmp_path, inputs):
    folder = run(tmp_path, inputs)
    text = (folder / "report.md").read_text()
    figures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(figures) == 3
    for figure in figures:
        assert (folder / figure).read_bytes().startswith(b"\x89PNG")
    assert "| ids | SpecDec++ |" in text
    assert "72 lines of" in text, "single rows are named, not shown"


def test_any_folder_with_a_manifest_will_do(tmp_path):
    write_text(tmp_path / "run" / MANIFEST, '{"stage": "train", "status": "finished", "config": {"lr": 0.1}}')
    write_text(tmp_path / "run" / "metrics.csv", "epoch,val/loss\n0,0.5\n1,<i>0.25</i>\n")
    write_text(tmp_path / "run" / "empty.csv", "")
    folder = run(tmp_path, [tmp_path / "run"])
    html = (folder / "report.html").read_text()
    assert "&lt;i&gt;0.25&lt;/i&gt;" in html
    assert "empty.csv could not be read as a table" in html


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(InputError, match="inputs: expected an output folder"):
        run(tmp_path, [tmp_path / "nowhere"])
