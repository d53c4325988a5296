"""Decoded against replayed sweeps: honest ones agree, a wrong one is found out, nothing in common is an error."""

import pytest

from analysis import sweep
from analysis.sweep import agreement, agreement_of
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import read_table
from analysis.tables.rows import load_rows
from tests.analysis.table_sweeps import sweep_config
from toolkit.errors import InputError

GRID = {"speculative": {"policy.num_drafted": [1, 4]}, "confidence": {"policy.threshold": [0.3]}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A replayed sweep, and a live one that is compared with it."""
    root = tmp_path_factory.mktemp("agreement")
    replayed = sweep.run(sweep_config(root, grid=GRID, source="traces", limit=300, max_drafted=6))
    live = sweep.run(sweep_config(root, grid=GRID, source="live", limit=300, max_drafted=6, replayed=[str(replayed)]))
    return {"traces": replayed, "live": live}


def test_honest_sweeps_agree(folders):
    tables = load_rows([folders["traces"]], "replayed"), load_rows([folders["live"]], "live")
    table = agreement(*tables, 0.2, Bootstrap(2000, 0.9999)).set_index("setting")
    assert set(table.index) == {"K=1", "K=4", "h=0.3"} and (table.prompts == 300).all()  # the others are only in one
    assert ((table.low < 0) & (table.high > 0)).all()
    assert table.loc["K=4", "difference"] == pytest.approx(table.loc["K=4", "live"] / table.loc["K=4", "replayed"] - 1)


def test_a_live_sweep_says_how_far_it_agrees(folders, capsys):
    """Also one that was finished before."""
    table = read_table(folders["live"], "agreement").set_index("setting")
    assert set(table.index) == {"K=1", "K=4", "h=0.3"}
    root = folders["live"].parent
    config = sweep_config(root, grid=GRID, source="live", limit=300, max_drafted=6, replayed=[str(folders["traces"])])
    assert sweep.run(config) == folders["live"]
    assert "of 3 intervals leave out 0" in capsys.readouterr().out


def test_a_wrong_recording_is_found_out(folders):
    """As if the text did not matter for its acceptance draws: rounds from other prompts' rows."""
    replayed, live = load_rows([folders["traces"]], "replayed"), load_rows([folders["live"]], "live")
    wrong = replayed.copy()
    setting = wrong.setting == "K=4"
    wrong.loc[setting, "num_target_calls"] = (wrong.loc[setting, "num_target_calls"] * 1.4).round().astype(int)
    table = agreement(wrong, live, 0.2, Bootstrap(2000, 0.9999)).set_index("setting")
    assert table.loc["K=4", "low"] > 0 and table.loc["K=1", "low"] < 0 < table.loc["K=1", "high"]


def test_a_sweep_on_the_wrong_side_is_refused(folders, tmp_path):
    """Compared with itself, a live sweep would agree however wrong the replay is."""
    with pytest.raises(InputError, match=r"replayed: expected sweeps with source=traces, .* was made with source=live"):
        agreement_of(folders["live"], [folders["live"]], 0.2)
    with pytest.raises(InputError, match="replayed: expected source=live"):
        sweep.run(sweep_config(tmp_path, grid=GRID, source="traces", replayed=[str(folders["traces"])]))


def test_sweeps_without_a_common_setting_are_refused(folders):
    rows = load_rows([folders["traces"]], "replayed")
    with pytest.raises(InputError, match="no setting and prompt in common"):
        agreement(rows, rows.assign(setting="K=9"), 0.2, Bootstrap(100))
