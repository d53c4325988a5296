"""The report in a real browser: no console error, every panel filled, readable at any width, light and dark."""

import shutil
from pathlib import Path

import pytest

from analysis import report
from toolkit import config

pytestmark = pytest.mark.slow
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
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


@pytest.fixture(scope="module")
def page(tmp_path_factory, sweeps):
    from analysis import frontier

    root = tmp_path_factory.mktemp("report")
    options = ["resamples=50", "track=false", f"paths.root_dir={root}"]
    made = frontier.run(config.compose("frontier", [f"dev=[{sweeps['dev']}]", f"test=[{sweeps['test']}]", *options]))
    inputs = f"inputs=[{made},{sweeps['test']}]"
    return report.run(config.compose("report", [inputs, f"paths.root_dir={root}"])) / "report.html"


def opened(browser, page: Path, width: int, dark: bool):
    """The page at this width, once every chart has been drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.resolve().as_uri())
    drawn = "return [...document.querySelectorAll('.chart')].every(chart => chart.dataset.drawn)"
    WebDriverWait(browser, 60).until(lambda one: one.execute_script(drawn))


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_all_panels_are_filled_without_an_error(browser, page, width, dark):
    opened(browser, page, width, dark)
    assert browser.get_log("browser") == []
    marks = "return [...document.querySelectorAll('.chart')].map(chart => chart.querySelectorAll('svg path').length)"
    counts = browser.execute_script(marks)
    assert len(counts) >= 3 and min(counts) > 5
    wide, view = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide <= view, "nothing reaches beyond the screen; tables scroll by themselves"
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark
    requests = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in requests if not name.startswith("data:")] == []


def test_tables_are_sorted_by_a_click_and_back(browser, page):
    opened(browser, page, 1280, False)
    script = """
        const table = document.querySelector('table'), cells = [...table.tHead.rows[0].cells];
        const index = cells.findIndex(cell => cell.className === 'number');
        const button = table.tHead.rows[0].cells[index].querySelector('button');
        const read = () => [...table.tBodies[0].rows].map(row => parseFloat(row.cells[index].textContent));
        button.click(); const up = read(); button.click(); return [up, read()];"""
    up, down = browser.execute_script(script)
    assert up == sorted(up) and down == sorted(up, reverse=True) and len(set(up)) > 1


def test_a_point_says_its_setting_and_counts(browser, page):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.ui import WebDriverWait

    opened(browser, page, 1280, False)
    point = browser.find_element("css selector", "#chart-1-1 .mark-symbol.role-mark path")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", point)
    ActionChains(browser).move_to_element(point).perform()
    tip = (
        WebDriverWait(browser, 10)
        .until(lambda one: one.find_element("css selector", "#vg-tooltip-element.visible"))
        .text
    )
    assert all(word in tip for word in ("method", "setting", "head", "num generated", "discard rate")), tip


def test_on_paper_nothing_stays_closed_but_long_tables(browser, page):
    """As printed from a dark screen: white, sections open, tables whole, long and wide ones left to their files."""
    opened(browser, page, 1280, True)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 718, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    heights = """return [...document.querySelectorAll('details')].map(one => [
        one.classList.contains('long'), one.lastElementChild.getBoundingClientRect().height])"""
    found = browser.execute_script(heights)
    assert {long for long, _ in found} == {True, False}
    assert all((height == 0) is long for long, height in found)
    overflow = (
        "return [...document.querySelectorAll('table')].map(one => one.getBoundingClientRect().right - innerWidth)"
    )
    assert max(browser.execute_script(overflow)) <= 1, "no table is cut at the right"
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
