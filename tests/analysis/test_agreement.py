"""Decoded against replayed sweeps: honest ones agree, a wrong one is found out, nothing in common is an error."""

import pytest

from analysis import agreement, sweep
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import read_table
from analysis.tables.rows import load_rows
from tests.analysis.table_sweeps import sweep_config
from toolkit.config import compose
from toolkit.errors import InputError

GRID = {"speculative": {"policy.num_drafted": [1, 4]}, "confidence": {"policy.threshold": [0.3]}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("agreement")
    return {s: sweep.run(sweep_config(root, grid=GRID, source=s, limit=300)) for s in ("traces", "live")}


def config(folders, tmp_path, *options):
    options = [f"replayed=[{folders['traces']}]", f"live=[{folders['live']}]", "resamples=2000", *options]
    return compose("agreement", [*options, f"paths.output_dir={tmp_path}/a"])


def test_honest_sweeps_agree(folders, tmp_path, capsys):
    found = read_table(agreement.run(config(folders, tmp_path, "confidence=0.9999")), "agreement").set_index("setting")
    assert set(found.index) == {"K=1", "K=4", "h=0.3"} and (found.prompts == 300).all()  # plain decoding is only in one
    assert ((found.low < 0) & (found.high > 0)).all()
    assert found.loc["K=4", "difference"] == pytest.approx(found.loc["K=4", "live"] / found.loc["K=4", "replayed"] - 1)
    assert "0 of 3 intervals leave out 0" in capsys.readouterr().out


def test_a_wrong_recording_is_found_out(folders):
    """As if the text did not matter for its acceptance draws: rounds from other prompts' rows."""
    replayed, live = load_rows([folders["traces"]], "replayed"), load_rows([folders["live"]], "live")
    wrong = replayed.copy()
    setting = wrong.setting == "K=4"
    wrong.loc[setting, "num_target_calls"] = (wrong.loc[setting, "num_target_calls"] * 1.2).round().astype(int)
    found = agreement.compare(wrong, live, 0.2, Bootstrap(2000, 0.9999)).set_index("setting")
    assert found.loc["K=4", "low"] > 0 and found.loc["K=1", "low"] < 0 < found.loc["K=1", "high"]


def test_a_sweep_on_the_wrong_side_is_refused(folders, tmp_path):
    """Compared with itself, a live sweep would agree however wrong the replay is."""
    swapped = {"traces": folders["live"], "live": folders["live"]}
    with pytest.raises(InputError, match="replayed: expected sweeps with source=traces, .* was made with source=live"):
        agreement.run(config(swapped, tmp_path))
    with pytest.raises(InputError, match="live: expected sweeps with source=live"):
        agreement.run(config({"traces": folders["traces"], "live": folders["traces"]}, tmp_path))


def test_sweeps_without_a_common_setting_are_refused(folders):
    rows = load_rows([folders["traces"]], "replayed")
    other = rows.assign(setting="K=9")
    with pytest.raises(InputError, match="no setting and prompt in common"):
        agreement.compare(rows, other, 0.2, Bootstrap(100))
