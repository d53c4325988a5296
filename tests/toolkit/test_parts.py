"""Choices that classes declare: what they hold is what the class says, and a user's folder may replace or extend them."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
from hydra.core.config_store import ConfigStore

from toolkit import config
from toolkit.config import CONF, choices, classes, compose, parts, plain, searching, use_folders
from toolkit.config.command_line import prepare
from toolkit.config.notes import REQUIRED, Internal, notes
from toolkit.config.values import is_known, options
from toolkit.errors import InputError
from toolkit.stopping import Confidence, Rate, Svip, Tail

DECLARED = [(group, name) for group in parts.GROUPS for name in parts.classes_in(group)]


@pytest.mark.parametrize(("group", "name"), DECLARED)
def test_a_choice_has_the_defaults_of_its_class(group, name):
    """Those that its constructor has, of every argument that a config may set."""
    module, class_name = parts.classes_in(group)[name]
    assert vars(getattr(import_module(module), class_name))["name"] == name
    expected = {}
    for key in classes.keys_of(f"{module}.{class_name}").keys.values():
        filled = any(isinstance(note, Internal) for note in notes(key.annotation))
        if key.default is not REQUIRED and not filled and any(map(is_known, options(key.annotation))):
            expected[key.name] = key.default
    assert parts.defaults_of(module, class_name) == expected


@pytest.mark.parametrize("group", parts.GROUPS)
def test_a_choice_stands_in_one_file(group):
    """A yaml replaces what a class declares, so it begins with that."""
    for name in parts.classes_in(group):
        path = CONF / group / f"{name}.yaml"
        assert not path.exists() or f"base/{name}@_here_" in path.read_text(), path


@pytest.fixture
def folder(tmp_path):
    """A config folder of a user's own: one policy replaces a class's choice, two extend one."""
    files = {
        "tail": "_target_: toolkit.stopping.Confidence\nthreshold: 0.9\n",
        "svip": "defaults: [base/svip@_here_, _self_]\nfactor: 0.5\n",
        "mine": "defaults: [rate, _self_]\nmemory: 7.0\n",
    }
    (tmp_path / "stopping").mkdir()
    for name, text in files.items():
        (tmp_path / "stopping" / f"{name}.yaml").write_text(text)
    yield tmp_path
    use_folders()
    parts.register(ConfigStore.instance(), [CONF])


def policy(name):
    return config.method("confidence", [f"stopping@method.policy={name}"]).policy


@pytest.mark.filterwarnings("error")
def test_a_users_yaml_replaces_or_extends_what_a_class_declares(folder):
    with searching(folder):
        assert policy("tail") == Confidence(0.9) and policy("svip") == Svip(factor=0.5)
        assert isinstance(policy("mine"), Rate) and (policy("mine").memory, policy("mine").evidence) == (7.0, 5.0)
        assert config.method("tail").policy == Confidence(0.9)
        assert {"mine", "tail", "fixed"} <= set(choices("stopping"))
    assert policy("tail") == Tail() and policy("svip") == Svip()


def test_an_unknown_name_is_answered_with_those_of_classes():
    for word, message in (
        ("stopping@method.policy=tial", "unknown stopping 'tial'.*: did you mean tail"),
        ("rule@method.rule=mtat", "unknown rule 'mtat'.*: did you mean mtad"),
    ):
        with pytest.raises(InputError, match=message):
            prepare("decode", ["method=speculative", word])
        with pytest.raises(InputError, match=message):
            compose("decode", ["method=speculative", word])


def test_a_command_reads_the_same(folder):
    """By Hydra's own loader, without a warning of a schema."""
    words = ["method=confidence", "stopping@method.policy=tail", "rule@method.rule=block", "--cfg", "job"]
    command = [sys.executable, "-m", "toolkit.decode", "--config-dir", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CONF.parent, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "toolkit.stopping.Confidence\n    threshold: 0.9\n" in done.stdout and "rules.block.Block" in done.stdout


def test_choices_of_a_loss_are_composed_into_its_command():
    loss = plain(compose("distill", ["responses=x", "loss=jsd"]).loss)
    assert loss == {"_target_": "toolkit.distillation.JensenShannon", "beta": 0.5}
