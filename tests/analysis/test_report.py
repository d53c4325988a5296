"""The report: everything it shows is in it."""

import importlib.util
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import frontier, report
from analysis.figures.method_styles import METHODS, look
from analysis.reporting.charts import DARK
from analysis.reporting.folders import grouped, read_folder
from analysis.reporting.panels import headline
from analysis.tables.files import DEFINITIONS, save_table
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


@pytest.fixture(scope="module")
def made(tmp_path_factory, inputs):
    """A report with all that can be had without a server."""
    words = ["title='A <b>title</b>'"]
    if importlib.util.find_spec("wandb_workspaces"):
        words += ["publish=true", "entity=team", "project=lab", "dry_run=true"]
    return run(tmp_path_factory.mktemp("report"), inputs, *words)


def test_html_is_whole_and_needs_nothing_else(made):
    text = (made / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    outside = [address for address in page.addresses if not address.startswith(("#", "data:image/png;base64,"))]
    assert outside == []
    assert "default-src 'none'" in text, "the page itself forbids every request"
    assert len(text.encode()) < 5_000_000
    assert sum(address.startswith("data:") for address in page.addresses) == 5
    for words in ("A <b>title</b>", "SpecDec++", "way to the oracle", *DEFINITIONS.values()):
        assert words in page.text
    (said,) = re.findall(r'<p class="headline">(.*?)</p>', text)
    assert re.fullmatch(r"Gain in tokens per target time over the best fixed K at c = 0\.2: .* on ids.*\.", said)
    figures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", (made / "report.md").read_text())
    assert len(figures) == 5
    for figure in figures:
        assert (made / figure).read_bytes().startswith(b"\x89PNG")
    assert "| ids | SpecDec++ |" in (made / "report.md").read_text()


def test_tables_are_complete_and_larger_ones_named(tmp_path, inputs, made):
    settings = pd.read_csv(inputs[0] / "settings.csv")
    assert f"settings ({len(settings)} lines)" in (made / "report.html").read_text()
    small = (run(tmp_path, inputs, "max_cells=30") / "report.html").read_text()
    assert "72 lines of" in small, "single rows are named, not shown"
    with pytest.raises(InputError, match="inputs: expected an output folder"):
        run(tmp_path, [tmp_path / "nowhere"])


NASTY = "<script>alert(1)</script> | [x](javascript:1) `a` </pre>\u2028"
CONTROLS = "\0\x07\x1b[31m\x7f\x9b\u202e\u2066"


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
    assert "ok␀␇␛[31m␡\ufffd\ufffd\ufffd" in html
    assert html.count('class="tok accepted"') == 2 and "[1 rejected]" in html, "one in the legend"
    for name in ("frontier", "sweep"):
        assert f"Missing: none of the folders is a {name}" in html, "what is not there is said to be missing"


def test_calibration_says_which_kind_of_head_it_is_of(tmp_path):
    about = {"stage": "train", "config": {"head": {"_target_": "toolkit.acceptance.PrereadHead"}}}
    write_manifest(tmp_path / "run", about)
    columns = ["scores", "count", "mean_prob", "mean_label"]
    pd.DataFrame([["raw", 5, 0.2, 0.3], ["raw", 9, 0.7, 0.6]], columns=columns).to_csv(
        tmp_path / "run" / "reliability.csv"
    )
    assert "reliability of run (PrereadHead)" in (run(tmp_path / "out", [tmp_path / "run"]) / "report.html").read_text()


def test_the_speed_of_few_groups_is_told_with_a_range(tmp_path):
    """Seconds are measured per group, so 64 prompts in eight groups have no interval."""
    write_manifest(tmp_path / "run", {"stage": "compare"})
    ends = {"speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6}
    table = pd.DataFrame([{"method": "rate", "setting": "", "prompts": 64, "groups": 8, **ends}])
    save_table(table, tmp_path / "run", "comparison")
    sentence = headline([read_folder(tmp_path / "run")])
    assert sentence.endswith("1.50 [1.40 to 1.60] times the baseline's speed.")


def test_runs_of_other_sampling_are_kept_apart(tmp_path):
    for name, temperature in (("a", 1.0), ("b", 0.5), ("c", 1.0)):
        sampling = {"temperature": temperature, "seed": len(name)}
        about = {"stage": "sweep", "config": {"pair": {"target": "t", "draft": "d"}, "sampling": sampling}}
        write_manifest(tmp_path / name, about)
    write_manifest(tmp_path / "head", {"stage": "train", "config": {"pair": {"target": "t", "draft": "d"}}})
    write_manifest(tmp_path / "other", {"stage": "train", "config": {"pair": {"target": "t", "draft": "e"}}})
    groups = grouped([read_folder(tmp_path / name) for name in ("a", "b", "c", "head", "other")])
    names = [[folder.path.name for folder in group.folders] for group in groups]
    assert names == [["a", "c", "head"], ["b"], ["other"]]
    page = (run(tmp_path / "out", [tmp_path / "a", tmp_path / "b"]) / "report.html").read_text()
    assert "2 different pairs or sampling settings" in page
    assert page.count('class="headline"') == 1, "neither has a result: that is said once"


def test_titles_have_names_and_no_whole_paths_and_predictors_are_shown(tmp_path):
    """Of a model in a folder the last two parts of its path; shares of the way, a column per domain."""
    pair = {"target": "/data/models/target", "draft": "/data/runs/draft", "dtype": "float32"}
    about = {"stage": "heads", "config": {"pair": pair, "sampling": {"temperature": 0.5}}}
    write_manifest(tmp_path / "heads", about)
    shares = [
        ("statistics", "math", 0.5, 0.4, 0.6, 16),
        ("statistics", "code", 0.3, 0.2, 0.4, 15),
        ("a head", "math", 0.7, 0.6, 0.8, 16),
        ("a head", "code", float("nan"), float("nan"), float("nan"), 15),
    ]
    columns = ["method", "domain", "upper_bound_share", "upper_bound_share_low", "upper_bound_share_high", "prompts"]
    pd.DataFrame(shares, columns=columns).to_csv(tmp_path / "heads" / "predictors.csv", index=False)
    page = (run(tmp_path / "out", [tmp_path / "heads"]) / "report.html").read_text()
    assert "models/target with runs/draft, temperature=0.5" in page
    shown = page[page.index("What predicts acceptance") :]
    assert "50% [40%, 60%]" in shown and "70% [60%, 80%]" in shown
    assert "30% [20% to 40%]" in shown and "nan%" not in shown  # the range of few prompts; nothing where no way is left


def test_the_specification_becomes_a_wandb_report_without_a_server(made, inputs):
    """Its serialised form holds the headline, the table, and for every panel the runs and the keys that they logged."""
    (logged,) = (inputs[0] / "wandb").glob("offline-run-*")
    tables = {path.name.split("_")[0] for path in (logged / "files" / "media" / "table" / "frontier").iterdir()}
    assert tables == {"frontier", "settings", "costs", "settings-ids", "curves-ids"}
    assert len(list((logged / "files" / "media" / "images" / "frontier").iterdir())) == 2
    spec = read_json(made / "report.json")
    (group,) = spec["groups"]
    frontier_panel, _, _, calibration, comparison = group["panels"]
    names = [panel["name"] for panel in group["panels"]]
    assert names == ["frontier", "costs", "positions", "calibration", "comparison"]
    assert calibration["missing"] and not frontier_panel["missing"]
    assert frontier_panel["logged"] == ["frontier/pareto-ids"]
    (run_id,) = frontier_panel["runs"]
    assert group["pair"]["target"] and group["sampling"]["max_new_tokens"]
    pytest.importorskip("wandb_workspaces")
    report = read_json(made / "wandb_report.json")
    assert report["project"]["name"] == "lab" and report["project"]["entityName"] == "team"
    assert report["displayName"] == spec["title"]
    text = json.dumps(report)
    shown = [
        json.dumps(group["headline"]),
        json.dumps(comparison["table"]),
        calibration["missing"],
        f'"value": ["{run_id}"]',
    ]
    for words in (*shown, *(f'"mediaKeys": ["frontier/{name}-ids"]' for name in ("pareto", "costs"))):
        assert words in text, words


def test_colours_stand_out_on_a_dark_page():
    for color in DARK.values():
        channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        assert (np.array([0.2126, 0.7152, 0.0722]) @ linear + 0.05) / (0.008 + 0.05) > 4.5, color
    assert {look(method).color for method in METHODS} <= set(DARK)


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


# -- the report in a real browser: no console error, every panel filled, readable at any width ------------------------


FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver are installed (Debian: apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


def opened(browser, folder: Path, width: int, dark: bool):
    """The page at this width, once every chart has been drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get((folder / "report.html").resolve().as_uri())
    drawn = "return [...document.querySelectorAll('.chart')].every(chart => chart.dataset.drawn)"
    WebDriverWait(browser, 60).until(lambda one: one.execute_script(drawn))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_all_panels_are_filled_without_an_error(browser, made, width, dark):
    opened(browser, made, width, dark)
    assert browser.get_log("browser") == []
    marks = "return [...document.querySelectorAll('.chart')].map(chart => chart.querySelectorAll('svg path').length)"
    counts = browser.execute_script(marks)
    assert len(counts) >= 3 and min(counts) > 5
    wide, view = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide <= view, "nothing reaches beyond the screen; tables scroll by themselves"
    cut = """return [...document.querySelectorAll('.chart')].flatMap(chart => [...chart.querySelectorAll('svg text')]
        .filter(text => text.getBoundingClientRect().right > chart.getBoundingClientRect().right + 1)
        .map(text => text.textContent))"""
    assert browser.execute_script(cut) == [], "titles and legends fit a phone"
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark
    requests = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in requests if not name.startswith("data:")] == []


@pytest.mark.slow
def test_tables_are_sorted_by_a_click_and_back(browser, made):
    opened(browser, made, 1280, False)
    script = """
        const table = document.querySelector('table'), cells = [...table.tHead.rows[0].cells];
        const index = cells.findIndex(cell => cell.className === 'number');
        const button = table.tHead.rows[0].cells[index].querySelector('button');
        const read = () => [...table.tBodies[0].rows].map(row => parseFloat(row.cells[index].textContent));
        button.click(); const up = read(); button.click(); return [up, read()];"""
    up, down = browser.execute_script(script)
    assert up == sorted(up) and down == sorted(up, reverse=True) and len(set(up)) > 1


@pytest.mark.slow
def test_a_point_says_its_setting_and_counts(browser, made):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.ui import WebDriverWait

    opened(browser, made, 1280, False)
    point = browser.find_element("css selector", "#chart-1-1 .mark-symbol.role-mark path")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", point)
    ActionChains(browser).move_to_element(point).perform()
    tip = (
        WebDriverWait(browser, 10)
        .until(lambda one: one.find_element("css selector", "#vg-tooltip-element.visible"))
        .text
    )
    assert all(word in tip for word in ("method", "setting", "head", "num generated", "discard rate")), tip


@pytest.mark.slow
def test_on_paper_nothing_stays_closed_but_long_tables(browser, made):
    """As printed from a dark screen: white, sections open, tables whole, long and wide ones left to their files."""
    opened(browser, made, 1280, True)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 718, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    heights = """return [...document.querySelectorAll('details')].map(one => [
        one.classList.contains('long'), one.lastElementChild.getBoundingClientRect().height])"""
    rows = browser.execute_script(heights)
    assert {long for long, _ in rows} == {True, False}
    assert all((height == 0) is long for long, height in rows)
    overflow = (
        "return [...document.querySelectorAll('table')].map(one => one.getBoundingClientRect().right - innerWidth)"
    )
    assert max(browser.execute_script(overflow)) <= 1, "no table is cut at the right"
    blank = """return [...document.querySelectorAll('.chart svg')].map(svg => {
        const box = svg.getBoundingClientRect(), drawn = svg.viewBox.baseVal;
        return Math.abs(box.height / box.width - drawn.height / drawn.width) })"""
    assert max(browser.execute_script(blank)) < 0.01, "charts keep their shape: no blank above and below"
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
