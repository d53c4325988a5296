"""The report: everything it shows is in it."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from analysis import frontier, report
from analysis.figures.method_styles import METHODS, look
from analysis.reporting.charts import DARK
from analysis.reporting.folders import grouped, read_folder
from analysis.tables.files import DEFINITIONS
from toolkit import config
from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_json, write_text
from toolkit.runs.stage import MANIFEST, checksum


class Page(HTMLParser):
    """Tags that are open, and every address the page refers to."""

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "img", "link", "wbr"):
            self.open.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def write_manifest(folder, about):
    write_json(folder / MANIFEST, {**about, "checksum": checksum(about)})


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
    text = (run(tmp_path, inputs, "title='A <b>title</b>'") / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    outside = [address for address in page.addresses if not address.startswith(("#", "data:image/png;base64,"))]
    assert outside == []
    assert "default-src 'none'" in text, "the page itself forbids every request"
    assert len(text.encode()) < 5_000_000
    assert sum(address.startswith("data:") for address in page.addresses) == 5
    for words in ("A <b>title</b>", "SpecDec++", "way to the oracle", *DEFINITIONS.values()):
        assert words in page.text


def test_the_result_is_one_sentence(tmp_path, inputs):
    page = (run(tmp_path, inputs) / "report.html").read_text()
    (said,) = re.findall(r'<p class="headline">(.*?)</p>', page)
    assert re.fullmatch(r"Gain in tokens per target time over the best fixed K at c = 0\.2: .* on ids.*\.", said)


def test_markdown_refers_to_figures_that_are_there(tmp_path, inputs):
    folder = run(tmp_path, inputs)
    text = (folder / "report.md").read_text()
    figures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(figures) == 5
    for figure in figures:
        assert (folder / figure).read_bytes().startswith(b"\x89PNG")
    assert "| ids | SpecDec++ |" in text


def test_tables_are_complete_and_larger_ones_named(tmp_path, inputs):
    page = (run(tmp_path, inputs) / "report.html").read_text()
    settings = pd.read_csv(inputs[0] / "settings.csv")
    assert f"settings ({len(settings)} lines)" in page
    small = (run(tmp_path, inputs, "max_cells=30") / "report.html").read_text()
    assert "72 lines of" in small, "single rows are named, not shown"


NASTY = "<script>alert(1)</script> | [x](javascript:1) `a` </pre>\u2028"
CONTROLS = "\0\x07\x1b[31m\x7f\x9b"


def test_any_folder_with_a_manifest_will_do_and_no_text_of_it_is_markup(tmp_path):
    manifest = {
        "stage": f"train{NASTY}",
        "status": "finished",
        "config": {"lr": 0.1, "name": NASTY},
        "argv": [NASTY, CONTROLS],
    }
    write_manifest(tmp_path / "run", manifest)
    write_text(tmp_path / "run" / "metrics.csv", f'epoch,"{NASTY}"\n0,0.5\n1,<i>0.25</i>\n2,"{NASTY}"\n')
    write_text(tmp_path / "run" / "empty.csv", "")
    rounds = [
        {"num_drafted": 2, "num_draft_calls": 2, "num_accepted": 1, "num_produced": 2, "bonus": False, "widths": []}
    ]
    line = {"id": NASTY, "prompt": NASTY + CONTROLS, "pieces": [NASTY, f"ok{CONTROLS}"], "rounds": rounds}
    write_text(tmp_path / "run" / "generations.jsonl", json.dumps(line) + "\n")
    folder = run(tmp_path, [tmp_path / "run"], f"title={json.dumps('<script>' + 'title')}")
    html, text = ((folder / name).read_text() for name in ("report.html", "report.md"))
    assert Page(html).open == []
    assert "alert(1)</script>" not in html and "<script>title" not in html
    assert "&lt;i&gt;0.25&lt;/i&gt;" in html
    assert "empty.csv could not be read as a table" in html
    assert "<script" not in text and "](javascript" not in text
    library = html.index('<script type="module">') if '<script type="module">' in html else len(html)
    assert not set(CONTROLS) - set("[31m") & {*html[:library], *text}
    assert "ok␀␇␛[31m␡\ufffd" in html
    assert html.count('class="tok accepted"') == 2 and "[1 rejected]" in html, "one in the legend"
    for name in ("frontier", "sweep"):
        assert f"Missing: none of the folders is a {name}" in html, "what is not there is said to be missing"


def test_runs_of_other_sampling_are_kept_apart(tmp_path):
    for name, temperature in (("a", 1.0), ("b", 0.5), ("c", 1.0)):
        sampling = {"temperature": temperature, "seed": len(name)}
        about = {"stage": "sweep", "config": {"pair": {"target": "t", "draft": "d"}, "sampling": sampling}}
        write_manifest(tmp_path / name, about)
    write_manifest(tmp_path / "head", {"stage": "train", "config": {"pair": {"target": "t", "draft": "d"}}})
    write_manifest(tmp_path / "other", {"stage": "train", "config": {"pair": {"target": "t", "draft": "e"}}})
    groups = grouped([read_folder(tmp_path / name) for name in ("a", "b", "c", "head", "other")])
    assert [[folder.path.name for folder in group.folders] for group in groups] == [
        ["a", "c", "head"],
        ["b"],
        ["other"],
    ]
    page = (run(tmp_path / "out", [tmp_path / "a", tmp_path / "b"]) / "report.html").read_text()
    assert "2 different pairs or sampling settings" in page
    assert page.count('class="headline"') == 2


def test_what_the_specification_says(tmp_path, inputs):
    spec = read_json(run(tmp_path, inputs) / "report.json")
    (group,) = spec["groups"]
    assert [panel["name"] for panel in group["panels"]] == [
        "frontier",
        "costs",
        "positions",
        "calibration",
        "comparison",
    ]
    by_name = {panel["name"]: panel for panel in group["panels"]}
    assert by_name["calibration"]["missing"] and not by_name["frontier"]["missing"]
    assert by_name["frontier"]["logged"] == ["frontier/pareto-ids"]
    assert len(by_name["frontier"]["runs"]) == 1, "the frontier was tracked"
    assert group["pair"]["target"] and group["sampling"]["max_new_tokens"]


def test_the_specification_becomes_a_wandb_report_without_a_server(tmp_path, inputs):
    """Its serialised form holds the headline, the table, and for every panel the runs and the keys that they logged."""
    pytest.importorskip("wandb_workspaces")
    made = run(tmp_path, inputs, "publish=true", "entity=team", "project=lab", "dry_run=true")
    spec, found = read_json(made / "report.json"), read_json(made / "wandb_report.json")
    assert found["project"]["name"] == "lab" and found["project"]["entityName"] == "team"
    assert found["displayName"] == spec["title"]
    text = json.dumps(found)
    run_id = spec["groups"][0]["panels"][0]["runs"][0]
    assert (
        json.dumps(spec["groups"][0]["headline"]) in text
        and json.dumps(spec["groups"][0]["panels"][4]["table"]) in text
    )
    for words in (
        f'"value": ["{run_id}"]',
        '"mediaKeys": ["frontier/pareto-ids"]',
        '"mediaKeys": ["frontier/costs-ids"]',
    ):
        assert words in text, words
    assert spec["groups"][0]["panels"][3]["missing"] in text


def test_colours_stand_out_on_a_dark_page():
    for color in DARK.values():
        channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        assert (np.array([0.2126, 0.7152, 0.0722]) @ linear + 0.05) / (0.008 + 0.05) > 4.5, color
    assert {look(method).color for method in METHODS} <= set(DARK)


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(InputError, match="inputs: expected an output folder"):
        run(tmp_path, [tmp_path / "nowhere"])


def test_titles_call_models_as_the_command_did(tmp_path):
    """Manifests compare models by content; people read the names that were given, here two stages back."""
    content = {"target": "sha256:aa", "draft": ["sha256:bb", "sha256:cc"], "chat_template_options": {}}
    given = {"pair.target": "toy/target", "pair.draft.0": "one", "pair.draft.1": "two"}
    sweep = {"stage": "sweep", "config": {"pair": content, "sampling": {"temperature": 1.0}}, "given": given}
    write_manifest(tmp_path / "sweep", sweep)
    inputs = {str(tmp_path / "sweep" / "rows.parquet"): "sha256:dd"}
    write_manifest(tmp_path / "frontier", {"stage": "frontier", "config": {}, "inputs": inputs})
    (group,) = grouped([read_folder(tmp_path / name) for name in ("frontier", "sweep")])
    assert group.title == "toy/target with one and two, temperature=1.0"
    assert group.called("sha256:unknown") == "sha256:unknown"
