"""Chains of stages: a folder is a value of a config, whatever its name holds."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.toolkit.test_stage import NAMES
from toolkit import config, train
from toolkit.errors import InputError
from toolkit.files.atomic import write_text
from toolkit.runs.pipeline import _Marks, compose_for, fill_folders, run_stages
from toolkit.runs.stage import open_stage


def first(cfg) -> Path:
    stage = open_stage("first", cfg)
    write_text(stage.folder / "a.txt", str(cfg.paths.root_dir))
    return stage.finish()


def second(cfg) -> Path:
    assert Path(cfg.responses).is_dir() and (Path(cfg.responses) / "a.txt").exists()
    assert [Path(one).name for one in config.plain(cfg.heads).values()] == ["a.txt"]
    stage = open_stage("second", cfg)
    return stage.finish()


STAGES = {
    "made": {"run": f"{__name__}.first", "config": "responses", "overrides": ["prompts=toy_math"]},
    "read": {
        "run": f"{__name__}.second",
        "config": "traces",
        "overrides": ['responses="{made}"', 'heads={x: "{made}/a.txt"}'],
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_folders_of_any_name_are_handed_on(tmp_path, name):
    root = tmp_path / name
    folders = run_stages(STAGES, root)
    assert all(folder.parent == root and folder.is_dir() for folder in folders.values())


@pytest.mark.parametrize("name", NAMES)
def test_quoted_texts_stay_as_they_are(name):
    assert config.compose("decode", [f"paths.output_dir={config.quoted(name)}"]).paths.output_dir == name
    if "\udcff" not in name:
        assert config.method_config("specdec_pp", [], name).policy.estimator.head == name


@pytest.mark.parametrize("target", ["/data/my target,2", '${x}/a"b', "C:\\x\\"])
def test_a_plan_is_printed_as_one_would_type_it(target, tmp_path, capsys):
    """Every printed line composes, with values in the places of keys, and with capitals for folders that are made later."""
    words = ["+experiment=heads", f"pair.target={config.quoted(target)}", "prompts.path=mine.jsonl"]
    said = planned([*words, "sampling.temperature=.5"], tmp_path, capsys)
    assert list(said) == ["responses", "mix", "traces", "preread", "dev", "test", "frontier", "report"]
    assert all(name in ("frontier", "report") or cfg.pair.target == target for name, cfg in said.items())
    assert said["dev"].sampling.temperature == 0.5 and said["dev"].prompts.path == "mine.jsonl"
    assert said["dev"].grid.rate.head == ["PREREAD/head"]


@pytest.mark.parametrize("pair", [["pair.target=mine/t", "pair.draft=mine/d"], ["pair=llama_2x68m_2_13b"]])
def test_a_plan_says_what_a_stage_inherits(pair, tmp_path, capsys):
    words = ["+experiment=dsbd_figure6", *pair]
    expected = config.compose("train", words).pair
    for cfg in planned(words, tmp_path, capsys).values():
        if "pair" in cfg:
            assert {**config.plain(cfg.pair), **config.plain(expected)} == config.plain(cfg.pair)


def planned(words, root, capsys):
    """The composed configs of the lines that a dry run prints, by stage."""
    train.run(config.compose("train", [*words, "dry_run=true", f"paths.root_dir={root}"]))
    lines = dict(re.findall(r"^(\w+): python -m (.*)$", capsys.readouterr().out, re.MULTILINE))
    told = {name: shlex.split(line) for name, line in lines.items()}
    made = {name: config.compose(module.rpartition(".")[2], words) for name, (module, *words) in told.items()}
    assert all(str(cfg.paths.root_dir) == str(root) for cfg in made.values())
    return made


def test_a_folders_name_is_not_looked_into():
    assert fill_folders("{a}/{b}", {"a": "{b}", "b": "{a}"}) == "{b}/{a}"
    cfg = compose_for("traces", ['responses="{a}"'], {"a": "{b}", "b": "x"}, "{a}")
    assert (cfg.responses, cfg.paths.root_dir) == ("{b}", "{a}")


def test_overrides_may_name_keys_of_the_config_they_come_from():
    name = 'a "b"'
    within = config.compose("train", [f"pair.target={config.quoted(name)}"]).pair
    cfg = compose_for("responses", ['pair.target="${pair.target}"', "pair.draft=${pair.draft}"], {}, None, within)
    assert (cfg.pair.target, cfg.pair.draft) == (name, "toy/draft")


def test_a_key_that_may_be_missing_has_its_default():
    config = OmegaConf.create({"there": "a b", "stages": {"one": {"overrides": []}}})
    for word, expected in (("x=${oc.select:there,???}", "a b"), ("x=${oc.select:not.there,7}", "7")):
        marks = _Marks({})
        assert marks.filled(marks.put(word, config.stages)) == f"x={expected}"


def test_a_run_of_nothing_is_one_line():
    with pytest.raises(InputError, match=r"^model: null trains nothing[^\n]*$"):
        train.run(config.compose("train", ["model=none", "~data"]))
