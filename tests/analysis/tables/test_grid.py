"""Grids: which settings they hold, what settings are called, what is refused."""

import shutil

import pandas as pd
import pytest

from analysis.figures.plots import curves_of
from analysis.tables.grid import Setting, expand
from analysis.tables.selection import PARAMETER
from toolkit import config
from toolkit.acceptance import AcceptanceHead
from toolkit.errors import InputError


def names(grid):
    return [setting.name for setting in expand(grid)]


def test_lists_are_multiplied_out_and_scalars_taken_as_they_are():
    """Nested and dotted parameters are the same; a value given twice is one cell."""
    grid = {
        "speculative": {"policy": {"num_drafted": [2, 4, 2]}},
        "tail": {"policy.threshold": 0.2, "max_drafted": [5, 9]},
    }
    assert names(grid) == [
        "speculative K=2", "speculative K=4", "tail h=0.2 max_drafted=5", "tail h=0.2 max_drafted=9",
    ]  # fmt: skip
    assert names({"speculative": {"policy.num_drafted": [2, 4]}}) == names(grid)[:2]


def test_the_bound_of_a_sweep_reaches_methods_that_name_none():
    grid = {
        "rate": {},
        "speculative": {"policy.num_drafted": [2, 20]},
        "bild": {},
        "tail": {"max_drafted": [5, 20]},
        "mcsd": {"proposer.k_config": "2x2x1"},
        "oracle": {},
    }
    for bound in (2, 40):
        bounds = {setting.name: setting.max_drafted for setting in expand(grid, max_drafted=bound)}
        assert bounds.pop("rate") == bound
        assert set(bounds.values()) == {None}  # a draft length of 20 is no default, and a tree has its own depth
    with pytest.raises(InputError, match="specdec_pp: a round has at least min_drafted=2 tokens, more than max_dr"):
        expand({"specdec_pp": {}}, max_drafted=1)
    built = {setting.name: config.plain(setting.method_config()) for setting in expand({"rate": {}}, max_drafted=40)}
    assert built["rate"]["max_drafted"] == 40
    (default,) = expand({"rate": {}}, max_drafted=20)
    assert default == Setting("rate")  # sweeps of earlier versions are found finished
    assert default.content["method"]["max_drafted"] == 20


def test_the_oracle_comes_last_and_brings_plain_decoding_along():
    grid = {"oracle": {"max_drafted": [None, 4]}, "speculative": {"policy.num_drafted": 2}}
    assert names(grid) == ["autoregressive", "speculative K=2", "oracle", "oracle max_drafted=4"]


def test_heads_are_told_apart_by_their_weights(head):
    setting = Setting("specdec_pp", {"head": head, "policy.threshold": 0.3})
    assert setting.label.startswith("h=0.3 head=head@")
    assert setting.method_config().policy.estimator.head == head


def test_trained_heads_are_called_by_what_their_runs_changed(tmp_path):
    named = AcceptanceHead(3).save(tmp_path / "run" / "head", {"name": "depth=2 w_rej=6"})
    assert Setting("specdec_pp", {"head": str(named)}).label.startswith("head=depth=2,w_rej=6@")
    elsewhere = AcceptanceHead(3).save(tmp_path / "my own")
    assert Setting("specdec_pp", {"head": str(elsewhere)}).label.startswith("head=my,own@")


def test_labels_are_words_of_names_and_values(tmp_path):
    """Figures and `apart` read them back."""
    head = AcceptanceHead(3).save(tmp_path / "run" / "head", {"name": "depth=2 toy_head"})
    setting = Setting("specinfer", {"proposer.temperatures": [0.5, 5], "policy.threshold": 0.3, "head": str(head)})
    parameters = PARAMETER.findall(setting.label)
    assert [name for name, _ in parameters] == ["proposer.temperatures", "h", "head"]
    assert [value for _, value in parameters][:2] == ["[0.5,5]", "0.3"]
    assert " ".join(f"{name}={value}" for name, value in parameters) == setting.label
    settings = pd.DataFrame({"method": "specinfer", "setting": [setting.label, setting.label.replace("0.3", "0.4")]})
    assert [name for _, curve in curves_of(settings) for name in curve.setting] == list(settings.setting)


def test_a_file_is_called_by_its_name_and_content(tmp_path):
    """Wherever it lies: tables of two machines name the setting alike."""
    labels = []
    for folder, text in (("a", "{}"), ("b c", "{}"), ("d", "[]")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "match.json").write_text(text)
        path = str(tmp_path / folder / "match.json")
        labels.append(Setting("lookup_rate", {"policy.estimator.path": path}).label)
    assert labels[0] == labels[1] != labels[2] and labels[0].startswith("estimator.path=match.json@")


def test_a_head_may_live_anywhere(head, tmp_path):
    odd = shutil.copytree(head, tmp_path / 'epoch=3, "a" [b]')
    assert Setting("specdec_pp", {"head": str(odd)}).method_config().policy.estimator.head == str(odd)


@pytest.mark.parametrize(("grid", "message"), [
    ({"specdecpp": {}}, "unknown method 'specdecpp': did you mean specdec_pp"),
    ({"oracle": {"max_draft": 3}}, "unknown oracle parameter 'max_draft': did you mean max_drafted"),
    ({"upper_bound": {}}, "grid.upper_bound.price: expected numbers above 0"),
    ({"upper_bound": {"price": [-1]}}, "grid.upper_bound.price: expected numbers above 0"),
    ({"speculative": 4}, "grid.speculative: expected parameters with lists of values, got 4"),
    ({"specdec_pp": {"head": ["nowhere"]}}, "expected an acceptance head"),
])  # fmt: skip
def test_bad_grids_are_refused_in_one_line(grid, message):
    with pytest.raises(InputError, match=r"^[^\n]*$") as error:
        expand(grid)
    assert message in str(error.value)


def test_settings_that_contradict_each_other_are_skipped_aloud_on_request(capsys):
    values = {"proposer.num_beams": [2, 3], "beams.min_width": [1, 3]}
    expanded = expand({"dsbd": {**values, "impossible": "skip"}})
    assert [tuple(s.parameters[name] for name in values) for s in expanded] == [(2, 1), (3, 1), (3, 3)]
    said = capsys.readouterr().out
    assert said.startswith("grid.dsbd: 1 of 4 settings skipped, WS=2 Wmin=3: beams.min_width: expected 1 to 2")
    assert len(expand({"dsbd": values})) == 4
    with pytest.raises(InputError, match="beams.min_width: expected 1 to 2"):
        expand({"dsbd": {"proposer.num_beams": [2], "beams.min_width": [3, 4], "impossible": "skip"}})
    with pytest.raises(InputError, match="grid.dsbd.impossible: expected skip, got 'fail'"):
        config.compose("sweep", ["grid=dsbd", "grid.dsbd.impossible=fail"])


def test_the_grid_of_dsbd_has_every_setting_that_is_possible():
    few = ["grid.dsbd.proposer={num_beams: [2, 3], num_layers: [2]}", "grid.dsbd.beams.threshold=[.9]"]
    settings = expand(config.plain(config.compose("compare", ["grid=dsbd", "~grid.dsbd_one_cache", *few]).grid))
    of_dsbd = [s for s in settings if s.method == "dsbd"]
    assert len(of_dsbd) == 2 * 3 - 1  # without W_S = 2 and W_min = 3
