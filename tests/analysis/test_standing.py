"""The standing of every method at several cost ratios: the frontier's own figures, side by side, and what loses."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
import pytest

from analysis import frontier
from analysis.tables.files import read_table
from analysis.tables.standing import notes
from toolkit import config


@pytest.fixture(scope="module")
def folder(tmp_path_factory, sweeps):
    root = tmp_path_factory.mktemp("standing")
    options = ["track=false", "resamples=200", "table_costs=[.6,.1,.1]", f"paths.root_dir={root}"]
    return frontier.run(config.compose("frontier", [f"dev=[{sweeps['dev']}]", f"test=[{sweeps['test']}]", *options]))


@pytest.mark.parametrize("cost_ratio", [0.1, 0.6])
def test_every_cost_ratio_is_a_frontier_of_its_own(folder, sweeps, tmp_path, cost_ratio):
    options = ["track=false", "resamples=200", f"cost_ratio={cost_ratio}", f"paths.root_dir={tmp_path}"]
    of_frontier = frontier.run(
        config.compose("frontier", [f"dev=[{sweeps['dev']}]", f"test=[{sweeps['test']}]", *options])
    )
    expected = read_table(of_frontier, "frontier").set_index("method")
    found = read_table(folder, "standing")
    assert not found.duplicated(["dataset", "cost_ratio", "method"]).any()
    found = found[found.cost_ratio == cost_ratio].set_index("method")
    assert set(found.index) <= set(expected.index)  # the frontier also knows the best K of every prompt
    for method, line in found.iterrows():
        assert line.setting == expected.setting[method]
        for name in ("throughput", "throughput_low", "gain", "gain_high", "share"):
            assert line[name] == pytest.approx(expected[name][method], nan_ok=True)


def test_tables_hold_every_method_and_say_what_loses(folder):
    text = (folder / "standing.md").read_text()
    assert text.index("## c = 0.1") < text.index("## c = 0.6")
    found = read_table(folder, "standing")
    losing = found[(found.throughput_high < 1) & (found.method != "oracle")]
    assert set(found[found.note == "slower than plain decoding"].index) == set(losing.index)
    assert not losing.empty  # drafting costs more than half a target forward, and a few methods know no way back
    assert "slower than plain decoding" in text


@pytest.mark.parametrize(
    ("throughput_high", "gain_high", "said"),
    [
        (0.99, -0.5, "slower than plain decoding"),
        (1.0, -0.01, "below the best fixed K"),
        (1.4, 0.0, ""),
        (1.4, float("nan"), ""),
    ],
)
def test_a_line_loses_only_beyond_its_interval(throughput_high, gain_high, said):
    lines = pd.DataFrame(
        {"method": ["rate", "autoregressive", "oracle"], "throughput_high": throughput_high, "gain_high": gain_high}
    )
    assert notes(lines, "fixed K") == [said, "", ""]


def test_a_merged_command_names_its_successor():
    """The old name ends with one line and exit code 2, whatever follows it."""
    words = [sys.executable, "-m", "analysis.standing", "dev=[x]", "cost_ratios=[.2]"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "python -m analysis.frontier" in done.stderr
