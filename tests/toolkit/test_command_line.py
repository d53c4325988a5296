"""The command line and Python calls: words mean what they say, a user's own files count, stages are handed on as they are."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from analysis.tables.grid import Setting, expand
from tests.toolkit.test_stage import NAMES
from toolkit import ModelPair, config, generate, train
from toolkit.config import CONF, choices, compose, plain, searching, use_folders, user_folders
from toolkit.config.command_line import prepare, tidy_overrides
from toolkit.decoding import Beams, Method, Sampling
from toolkit.errors import DecodingError, InputError
from toolkit.files.atomic import write_text
from toolkit.runs.pipeline import compose_for, expand_stages, fill_folders, run_stages
from toolkit.runs.stage import open_stage
from toolkit.stopping import Survival, Tail


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


# -- words ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "tidy"),
    [
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
        ("sampling.stop=['a\\tb', \"\\r\\n\"]", ["a\tb", "\r\n"]),
        (r'sampling.stop=["\\n", "\d", "\\"]', [r"\n", r"\d", "\\"]),
        ('sampling.stop=["~/", "~", "a ~/b"]', ["~/", "~", "a ~/b"]),
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


@pytest.mark.parametrize("value", ["a(1).jsonl", "['a]", "é,ü"])
def test_an_override_that_cannot_be_read_is_named(value):
    with pytest.raises(InputError) as raised:
        compose("decode", ["method=speculative", f"prompts.path={value}", "batch_size=2"])
    assert f"prompts.path={value}" in str(raised.value) and "'prompts.path=\"TEXT\"'" in str(raised.value)


def test_values_of_grids_are_texts_as_they_are():
    sequences = ["a\nb", r"a\nb", "a\\", 'a"b']
    grid = {"batch_rate": {"policy.costs": sequences}}
    assert [setting.method_config().policy.costs for setting in expand(grid)] == sequences


# -- files and folders of the user's own ------------------------------------------------------------------------------------


def test_a_folder_of_the_users_own_adds_choices(own_folder):
    assert "mine" not in choices("method")
    with searching(own_folder):
        assert {"mine", "speculative"} <= set(choices("method"))
        built = config.method("mine", ["policy.threshold=.05"])
        assert built.policy == Tail(0.05) and built.max_drafted == 7
        settings = expand(plain(compose("sweep", ["grid=mine"]).grid))
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


def test_a_method_is_built_once_and_again_when_a_file_has_changed(own_folder):
    """Files count however deep in a group they are; every caller gets a config of its own."""
    (own_folder / "sampling" / "base").mkdir(parents=True)
    (own_folder / "sampling" / "mine.yaml").write_text("defaults: [default, base/own]\n")
    policy, deep = own_folder / "stopping" / "eager.yaml", own_folder / "sampling" / "base" / "own.yaml"
    with searching(own_folder):
        for second, threshold in enumerate((0.25, 0.75)):
            policy.write_text(f"_target_: toolkit.stopping.Tail\nthreshold: {threshold}\n")
            os.utime(policy, (2_000_000_000 + second,) * 2)
            config.method_config("mine").policy.threshold = 0.5
            assert config.method_config("mine").policy.threshold == threshold
            assert config.method("mine").policy.threshold == threshold
            assert config.method("mine") is config.method("mine")
            assert config.method("mine", ["policy.threshold=.3"]).policy.threshold == 0.3
            with pytest.raises(InputError, match="treshold"):
                config.method_config("mine", ["policy.treshold=.3"])
        for second, number in enumerate((3, 4)):
            deep.write_text(f"# @package sampling\nmax_new_tokens: {number}\n")
            os.utime(deep, (2_100_000_000 + second,) * 2)
            assert compose("decode", ["sampling=mine"]).sampling.max_new_tokens == number
        os.utime(policy, (2_200_000_000,) * 2)
        for number in (5, 6):  # copies that keep the times of files which are older than another one
            deep.write_text(f"# @package sampling\nmax_new_tokens: {number}\n")
            os.utime(deep, (1_000_000_000 + number,) * 2)
            assert compose("decode", ["sampling=mine"]).sampling.max_new_tokens == number
    heads = [config.method_config("specdec_pp", head=name).policy.estimator.head for name in ("one", "two")]
    assert heads == ["one", "two"]


@pytest.mark.slow
def test_a_method_of_ones_own_is_decoded_with(own_folder, tmp_path):
    words = ["--config-dir", str(own_folder), "method=mine", "prompts.limit=2", "sampling.max_new_tokens=4"]
    done = python(tmp_path, "-m", "toolkit.decode", *words, f"paths.output_dir={tmp_path}/out")
    assert done.returncode == 0, done.stderr
    assert (Path(tmp_path) / "out" / "generations.jsonl").exists()


def python(folder, *words, without=()):
    """A Python process in a folder, which finds this repository."""
    environment = {name: value for name, value in os.environ.items() if name not in without}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=folder, timeout=300,
        env={**environment, "PYTHONPATH": str(CONF.parent)},
    )  # fmt: skip


def test_a_package_of_the_users_that_hides_ours_is_named(tmp_path, monkeypatch):
    """One line, before anything is made: a class of a config, or a stage, would come from it."""
    (tmp_path / "data_gen").mkdir()
    (tmp_path / "data_gen" / "__init__.py").touch()
    done = python(tmp_path, "-m", "toolkit.decode", "prompts=toy_math")
    words = f"{tmp_path / 'data_gen' / '__init__.py'} hides this toolkit's data_gen: rename it"
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert words in done.stderr.rstrip("\n").split("\n")[-1]
    assert not (tmp_path / "outputs").exists()
    (tmp_path / "analysis.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=f"{tmp_path / 'analysis.py'} hides this toolkit's analysis: rename it"):
        run_stages({"swept": {"run": "analysis.sweep.run", "config": "sweep", "overrides": []}}, tmp_path / "outputs")


@pytest.mark.parametrize("module", ["analysis.sweep", "data_gen.responses"])
@pytest.mark.parametrize("file", ["toolkit/__init__.py", "toolkit.py"])
def test_a_toolkit_of_the_users_in_the_folder_of_a_command_is_named(module, file, tmp_path):
    """The command is ours, and what it would import first is not."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    done = python(tmp_path, "-m", module)
    line = f"error: {tmp_path / file} hides this toolkit's toolkit: rename it, or run the command in another folder\n"
    assert (done.returncode, done.stderr) == (1, line)


NOBODY = """
import os, pwd, sys
def nobody(number): raise KeyError(number)
pwd.getpwuid = nobody
from toolkit.runs.command import main
sys.argv = ["sync", "folder=.", "dry_run=true"]
try:
    main("sync")
except SystemExit as end:
    print(end)
import wandb
from toolkit.files.digests import cache_folder
wandb.init(mode="offline", dir=".", settings=wandb.Settings(silent=True)).finish()
assert cache_folder().is_absolute() and not os.path.exists("~")
"""


def test_a_user_without_a_home_has_caches_for_the_time_of_the_command(tmp_path):
    removed = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "WANDB_API_KEY")
    done = python(tmp_path, "-c", NOBODY, without=removed)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("this user has no home folder: caches last as long as this process")


# -- pipelines --------------------------------------------------------------------------------------------------------------


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
    expanded = expand_stages(stages)
    assert list(expanded) == ["first", "dev_math", "dev_code", "test_math", "test_code"]
    assert expanded["test_code"] == {
        "run": "a.b", "config": "c", "overrides": ["prompts=toy_code", 'head="{train}"', "split=test", "on=code"],
    }  # fmt: skip
    with pytest.raises(InputError, match="expected a name of its own for each, got x twice"):
        expand_stages({"x": {**stages["first"], "for_each": {"domain": ["math", "code"]}}})


def first(cfg) -> Path:
    stage = open_stage("first", cfg)
    write_text(stage.folder / "a.txt", str(cfg.paths.root_dir))
    return stage.finish()


def second(cfg) -> Path:
    assert Path(cfg.responses).is_dir() and (Path(cfg.responses) / "a.txt").exists()
    assert [Path(one).name for one in plain(cfg.heads).values()] == ["a.txt"]
    return open_stage("second", cfg).finish()


STAGES = {
    "made": {"run": f"{__name__}.first", "config": "responses", "overrides": ["prompts=toy_math"]},
    "read": {
        "run": f"{__name__}.second",
        "config": "traces",
        "overrides": ['responses="{made}"', 'heads={x: "{made}/a.txt"}'],
    },
}


def test_folders_of_any_name_are_handed_on(tmp_path):
    """The odd characters of all names at once, and the names that mean something to Hydra or Python as they are."""
    for name in ("".join(NAMES[:-1]), "${y}", "{x}", "[1]", "\\", "\udcff"):
        folders = run_stages(STAGES, tmp_path / name)
        assert all(folder.parent == tmp_path / name and folder.is_dir() for folder in folders.values())


def test_quoted_texts_stay_as_they_are():
    words = [f"+pair.chat_template_options.n{number}={config.quoted(name)}" for number, name in enumerate(NAMES)]
    cfg = compose("decode", words, checked=False)
    assert [cfg.pair.chat_template_options[f"n{number}"] for number in range(len(NAMES))] == NAMES
    odd = "".join(NAMES[:-1])
    assert config.method_config("specdec_pp", [], odd).policy.estimator.head == odd
    assert config.method("specdec_pp", [], odd).policy.estimator.head == odd


def planned(words, root, capsys):
    """The composed configs of the lines that a dry run prints, by stage."""
    train.run(compose("train", [*words, "dry_run=true", f"paths.root_dir={root}"]))
    lines = dict(re.findall(r"^(\w+): python -m (.*)$", capsys.readouterr().out, re.MULTILINE))
    split = {name: shlex.split(line) for name, line in lines.items()}
    plan = {name: compose(module.rpartition(".")[2], words) for name, (module, *words) in split.items()}
    assert all(str(cfg.paths.root_dir) == str(root) for cfg in plan.values())
    return plan


def test_a_plan_is_printed_as_one_would_type_it(tmp_path, capsys):
    """Every printed line composes, with values in the places of keys, and with capitals for folders that are made later."""
    target = '/my ${x}/a"b,2\\'
    words = ["+experiment=heads", f"pair.target={config.quoted(target)}", "prompts.path=mine.jsonl"]
    plan = planned([*words, "sampling.temperature=.5"], tmp_path, capsys)
    assert list(plan) == ["responses", "mix", "traces", "preread", "dev", "test", "frontier", "report"]
    assert all(name in ("frontier", "report") or cfg.pair.target == target for name, cfg in plan.items())
    assert plan["dev"].sampling.temperature == 0.5 and plan["dev"].prompts.path == "mine.jsonl"
    assert plan["dev"].grid.rate.head == ["PREREAD/head"]


@pytest.mark.parametrize("pair", [["pair.target=mine/t", "pair.draft=mine/d"], ["pair=llama_2x68m_2_13b"]])
def test_a_plan_says_what_a_stage_inherits(pair, tmp_path, capsys):
    words = ["+experiment=dsbd_figure6", *pair]
    expected = compose("train", words).pair
    for cfg in planned(words, tmp_path, capsys).values():
        if "pair" in cfg:
            assert {**plain(cfg.pair), **plain(expected)} == plain(cfg.pair)


def test_a_folders_name_is_not_looked_into_and_keys_may_be_named():
    assert fill_folders("{a}/{b}", {"a": "{b}", "b": "{a}"}) == "{b}/{a}"
    stage = {"config": "traces", "overrides": ['responses="{a}"']}
    cfg = compose_for(stage, {"a": "{b}", "b": "x"}, "{a}")
    assert (cfg.responses, cfg.paths.root_dir) == ("{b}", "{a}")
    name = 'a "b"'
    within = compose("train", [f"pair.target={config.quoted(name)}"]).pair
    words = ['pair.target="${pair.target}"', "pair.draft=${pair.draft}"]
    words += ["batch_size=${oc.select:not.there,7}", 'head="${oc.select:pair.target,???}"']
    cfg = compose_for({"config": "decode", "overrides": words}, {}, None, within)
    assert (cfg.pair.target, cfg.pair.draft, cfg.batch_size, cfg.head) == (name, "toy/draft", 7, name)


def test_a_run_of_nothing_is_one_line():
    with pytest.raises(InputError, match=r"^model: null trains nothing[^\n]*$"):
        train.run(compose("train", ["model=none", "~data"]))


# -- arguments of Python calls ----------------------------------------------------------------------------------------------


def refusal(call):
    with pytest.raises(InputError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": ["a", 3]}, "prompts: expected a list of prompts"),
        ({"temperature": math.nan}, "temperature: expected at least 0, got nan"),
        ({"method": 3}, "method: expected text or a Method, got 3"),
        ({"temprature": 1}, "unknown argument 'temprature': did you mean temperature"),
    ],
)  # fmt: skip
def test_generate_refuses(table_pair, arguments, words):
    assert refusal(lambda: generate(**{"pair": table_pair, "prompts": [[0, 1]], **arguments})).startswith(words)


@pytest.mark.parametrize(
    "prompt", [[True], [1.5], [[1]], ["a"], [{"role": "user"}], [{"role": "u", "content": "x"}, 3]]
)
def test_a_prompt_that_is_none_is_named(table_pair, prompt):
    with pytest.raises(DecodingError, match="expected "):
        generate(table_pair, [prompt], "speculative", max_new_tokens=2)


def test_numbers_of_any_library_suit(table_pair):
    prompts = [[0, 1], (0, 1), np.array([0, 1]), torch.tensor([0, 1]), [np.int64(0), torch.tensor(1)], range(2)]
    assert [table_pair.encode(prompt) for prompt in prompts] == [[0, 1]] * len(prompts)
    assert Sampling(temperature=np.float32(0.5), top_k=np.int64(3)).top_k == 3


def test_parts_of_a_method_are_checked():
    rule = config.method("speculative").rule
    for part, words in (
        (lambda: Method("m", Tail(), rule, max_drafted=10**9), "max_drafted: expected a number in [0, 4096], got 1000"),
        (lambda: Survival(object()), "policy.estimator: expected a ReadEstimator, got a object"),
        (lambda: Beams(selection="tpo"), "beams.selection: expected one of sample, top, got 'tpo'"),
        (lambda: ModelPair.toy(device="gpu"), "device: expected a device like cpu, cuda or cuda:1, got 'gpu'"),
    ):
        assert refusal(part).startswith(words)
