"""The command line: flags keep their values, a user's own config folder counts everywhere, stages are multiplied out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from analysis.tables.grid import Setting, expand
from toolkit import config
from toolkit.config import CONF, choices, compose, plain, searching, use_folders, user_folders
from toolkit.config.command_line import prepare, tidy_overrides
from toolkit.errors import InputError
from toolkit.runs.pipeline import expand_stages
from toolkit.stopping import Tail


@pytest.fixture
def own_folder(tmp_path):
    """A config folder of a user's own: a method, a policy and a grid."""
    folder = tmp_path / "my conf"
    files = {
        "method/mine.yaml": "defaults: [speculative, override /stopping@policy: eager, _self_]\nname: mine\nmax_drafted: 7\n",
        "stopping/eager.yaml": "_target_: toolkit.stopping.Tail\nthreshold: 0.01\n",
        "grid/mine.yaml": "mine:\n  policy: {threshold: [0.1, 0.2]}\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    yield folder
    use_folders()


@pytest.mark.parametrize(
    ("words", "tidy"),
    [
        (["x=1", "+debug=fdr", "--cfg", "job"], ["x=1", "+debug=fdr", "--cfg", "job"]),
        (["debug=fdr", "x=1", "--cfg", "job"], ["x=1", "+debug=fdr", "--cfg", "job"]),
        (["-m", "debug=fdr", "experiment=a", "x=1,2"], ["-m", "+experiment=a", "x=1,2", "+debug=fdr"]),
        (["x=1", "--cfg", "job", "y=2"], ["x=1", "y=2", "--cfg", "job"]),
        (["--config-dir", "a=b", "+debug=fdr", "y=2", "-p", "a.b"], ["--config-dir", "a=b", "y=2", "+debug=fdr", "-p", "a.b"]),
        (["--info", "x=1"], ["--info", "x=1"]),
        (["--info", "defaults", "x=1"], ["--info", "defaults", "x=1"]),
        (["--config-dir=here", "~grid.oracle"], ["--config-dir=here", "~grid.oracle"]),
    ],
)  # fmt: skip
def test_flags_keep_their_values_and_debug_comes_last(words, tidy):
    assert tidy_overrides(words) == tidy
    assert tidy_overrides(tidy) == tidy


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ('sampling.stop=["\\n"]', ["\n"]),
        ("sampling.stop=['a\\tb', \"\\r\"]", ["a\tb", "\r"]),
        (r'sampling.stop=["\\n", "\d", "\\"]', [r"\n", r"\d", "\\"]),
        ('sampling.stop=["~/", "~", "a ~/b"]', ["~/", "~", "a ~/b"]),
        ("paths.root_dir=~/runs", "/home/me/runs"),
        ('paths.root_dir="~/my runs"', "/home/me/my runs"),
        ('pair.draft=[~/a,"~/b"]', ["/home/me/a", "/home/me/b"]),
        ("prompts.path=x/epoch=1-step=2.ckpt", "x/epoch=1-step=2.ckpt"),
        ("prompts.path=~/données;1.jsonl", "/home/me/données;1.jsonl"),
    ],
)  # fmt: skip
def test_overrides_mean_what_a_shell_hands_on(word, value, monkeypatch):
    """Escapes in quotes, the home folder, texts that Hydra wants in quotes; also as one job of several hands them on."""
    monkeypatch.setenv("HOME", "/home/me")
    key = word.partition("=")[0]
    assert OmegaConf.select(compose("decode", ["prompts=jsonl", word], checked=False), key) == value
    (tidy,) = tidy_overrides([word])
    (parsed,) = OverridesParser.create().parse_overrides([tidy])
    (again,) = OverridesParser.create().parse_overrides([f"{key}={parsed.get_value_element_as_str()}"])
    assert again.value() == parsed.value() == value


@pytest.mark.parametrize("value", ["a(1).jsonl", "{a", "['a]", "a'b", "é,ü", '["a"'])
def test_an_override_that_cannot_be_read_is_named(value):
    with pytest.raises(InputError) as raised:
        compose("decode", ["method=speculative", f"prompts.path={value}", "batch_size=2"])
    assert f"prompts.path={value}" in str(raised.value) and "'prompts.path=\"TEXT\"'" in str(raised.value)


def test_values_of_grids_are_texts_as_they_are():
    texts = ["a\nb", r"a\nb", "a\\", 'a"b']
    grid = {"batch_rate": {"policy.costs": texts}}
    assert [setting.method_config().policy.costs for setting in expand(grid)] == texts


def test_a_folder_of_the_users_own_adds_choices(own_folder):
    assert "mine" not in choices("method")
    with searching(own_folder):
        assert {"mine", "speculative"} <= set(choices("method"))
        built = config.method("mine", ["policy.threshold=.05"])
        assert built.policy == Tail(0.05) and built.max_drafted == 7
        grid = plain(compose("sweep", ["grid=mine"]).grid)
        settings = expand(grid)
        assert [setting.name for setting in settings] == ["mine h=0.1", "mine h=0.2"]
        assert settings[0].method_config().policy.threshold == 0.1
        with pytest.raises(InputError, match="unknown method 'mien': did you mean mine"):
            expand({"mien": {}})
        with pytest.raises(InputError, match="grid.mine.policy.threshold: expected a probability"):
            compose("sweep", ["grid=mine", "grid.mine.policy.threshold=[2]"])
    assert user_folders() == ()
    with pytest.raises(InputError, match="unknown method 'mine'"):
        Setting("mine").method_config()


def test_the_flag_counts_for_the_whole_run(own_folder):
    prepare("sweep", ["--config-dir", str(own_folder), "grid=mine"])
    assert user_folders() == (own_folder.resolve(),)
    with pytest.raises(InputError, match="unknown grid 'mien': did you mean mine"):
        prepare("sweep", [f"--config-dir={own_folder}", "grid=mien"])
    prepare("sweep", ["grid=default"])
    assert user_folders() == ()


@pytest.mark.slow
def test_a_method_of_ones_own_is_decoded_with(own_folder, tmp_path):
    words = ["--config-dir", str(own_folder), "method=mine", "prompts.limit=2", "sampling.max_new_tokens=4",
             f"paths.output_dir={tmp_path}/out"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.decode", *words], capture_output=True, text=True, cwd=tmp_path, timeout=300,
        env={**os.environ, "PYTHONPATH": str(CONF.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (Path(tmp_path) / "out" / "generations.jsonl").exists()


def test_stages_are_multiplied_out():
    stages = {
        "first": {"run": "a.b", "config": "c"},
        "{part}_{domain}": {
            "run": "a.b",
            "config": "c",
            "overrides": ["prompts=toy_{domain}", 'head="{train}"'],
            "for_each": {
                "part": {"dev": ["split=dev"], "test": ["split=test", "on={domain}"]},
                "domain": ["math", "code"],
            },
        },
    }
    made = expand_stages(stages)
    assert list(made) == ["first", "dev_math", "dev_code", "test_math", "test_code"]
    assert made["test_code"] == {
        "run": "a.b", "config": "c", "overrides": ["prompts=toy_code", 'head="{train}"', "split=test", "on=code"],
    }  # fmt: skip
    with pytest.raises(InputError, match="expected a name of its own for each, got x twice"):
        expand_stages({"x": {**stages["first"], "for_each": {"domain": ["math", "code"]}}})


def test_the_quickstart_sweeps_three_domains_in_three_parts():
    after = expand_stages(plain(compose("train", ["+experiment=quickstart"]).after))
    assert list(after)[:10] == ["preread"] + [
        f"{part}_{on}" for part in ("dev", "test", "live") for on in ("instruct", "math", "code")
    ]
    live = set(after["live_math"]["overrides"])
    assert {"prompts=toy_math", "prompts.split=test", "prompts.limit=32", "source=live", "grid=quickstart_live"} <= live
    assert 'grid.specdec_pp.head=["{train}/head"]' in live and "source=live" not in after["test_math"]["overrides"]


@pytest.mark.parametrize("name", ["analysis.py", "data_gen/__init__.py"])
def test_a_package_of_the_users_that_hides_ours_is_named(name, tmp_path):
    """One line, before anything is made: a stage, or a class of a config, would come from it."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    command = [sys.executable, "-m", "toolkit.train", "+experiment=quickstart"]
    environment = {**os.environ, "PYTHONPATH": str(CONF.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, check=False)
    package = name.partition("/")[0].removesuffix(".py")
    assert done.returncode == 1
    assert f"{tmp_path / name} hides this toolkit's {package}: rename it" in done.stderr.rstrip("\n").split("\n")[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outputs").exists()


NOBODY = """
import os, pwd, sys
def nobody(number): raise KeyError(number)
pwd.getpwuid = nobody
from toolkit.config.command_line import check_command_line
sys.argv = ["decode", "method=speculative"]
check_command_line("decode")
import wandb
from toolkit.files.digests import cache_folder
wandb.init(mode="offline", dir=".", settings=wandb.Settings(silent=True)).finish()
assert cache_folder().is_absolute() and not os.path.exists("~")
"""


def test_a_user_without_a_home_has_caches_for_the_time_of_the_command(tmp_path):
    removed = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "WANDB_API_KEY")
    environment = {key: value for key, value in os.environ.items() if key not in removed} | {
        "PYTHONPATH": str(CONF.parent)
    }
    done = subprocess.run(
        [sys.executable, "-c", NOBODY], cwd=tmp_path, env=environment, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("this user has no home folder: caches last as long as this process")
