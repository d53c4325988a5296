"""The schema knows every key of conf/, says what it means, and refuses what does not fit in one line each."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from hydra.utils import get_object
from omegaconf import OmegaConf

from toolkit import config, verification
from toolkit.config import CONF, choices, classes, compose, papers, plain
from toolkit.config.check import MISSING, check, resolved
from toolkit.config.classes import meanings_in
from toolkit.config.command_line import check_choices, prepare
from toolkit.config.commands import COMMANDS, Command, Grid, command_of, group_of, keys_of, section_in
from toolkit.config.files import unresolved
from toolkit.config.help import WIDTH, help_text, without_repeats
from toolkit.config.notes import Above, AtLeast, Between, Interval, Probability, notes
from toolkit.config.others import OTHERS
from toolkit.config.store import composed
from toolkit.config.values import fits, is_known, is_node, say
from toolkit.errors import InputError
from toolkit.stopping import AdaEdl

ROOTS = sorted(path.stem for path in CONF.glob("*.yaml"))
NAMES = [name for name in ROOTS if issubclass(command_of(name) or Grid, Command)]
PARTS = {  # groups that methods and commands are made of: their files are looked at one by one
    group: choices(group)
    for group in ("stopping", "rule", "proposer", "beams", "quality", "sampling", "pair", "prompts")
}
FILLED = {  # root -> groups whose choices are tried in it
    "train": ("data", "model", "trainer", "callbacks", "logger"),
    "distill": ("loss", "teacher"),
}


def part(group: str, name: str) -> Any:
    """A choice of a group by itself, interpolations as they are written."""
    return unresolved(composed(f"{group}/{name}"))[group]


def undocumented(path: str, value: Any, annotation: Any) -> list[str]:
    """Paths below a value that the schema has no type or no meaning for."""
    section = section_in(annotation)
    if is_node(value):
        known = classes.keys_of(value["_target_"])
        assert known is not None, f"{path}: {value['_target_']}"
    elif section is not None and not issubclass(section, Grid) and isinstance(value, dict):
        known = keys_of(section)
    elif isinstance(value, dict) and section is None and value and all(map(is_node, value.values())):
        return [lost for name, one in value.items() for lost in undocumented(f"{path}.{name}", one, Any)]
    else:
        return []
    lost = []
    for name, one in value.items():
        key = known.keys.get(name)
        if name.startswith("_"):
            continue
        typed = key is not None and (is_known(key.annotation) or group_of(key.annotation) is not None)
        if key is None or (not isinstance(one, dict) and not (key.meaning and typed)):
            lost.append(f"{path}.{name}")
        else:
            lost += undocumented(f"{path}.{name}", one, key.annotation)
    return lost


def undocumented_of(root: str, overrides: list[str]) -> list[str]:
    return undocumented("", resolved(compose(root, overrides), root), command_of(root))


@pytest.mark.parametrize(("root", "group"), [(root, group) for root, groups in FILLED.items() for group in groups])
def test_every_choice_of_the_commands_groups_is_known(root, group):
    for name in choices(group):
        assert undocumented_of(root, [f"{group}={name}"]) == [], name


class Parent:
    """Of its keys.

    rows     as the parent says
    columns  as the parent says
    """

    def __init__(self, rows: int = 1, columns: int = 1):
        self.size = rows, columns


class Child(Parent):
    """Of one of them.

    rows  as the child says
    """


def test_a_class_says_what_its_keys_mean_and_its_parents_the_rest():
    keys = classes.keys_of(f"{__name__}.Child").keys
    assert {name: key.meaning for name, key in keys.items()} == {
        "rows": "as the child says",
        "columns": "as the parent says",
    }


@pytest.mark.parametrize("group", PARTS)
def test_every_key_of_a_part_has_a_type_and_a_meaning(group):
    for name in PARTS[group]:
        node = part(group, name)
        if is_node(node):
            assert undocumented(name, node, Any) == []
            if group in ("rule", "stopping", "proposer", "beams"):
                assert set(classes.keys_of(node["_target_"]).keys) - SET_BY_THE_METHOD <= set(node), name


def test_every_grid_is_one_of_methods_and_their_parameters():
    cfg = compose("sweep", given("sweep"))
    for name in choices("grid"):
        grid = OmegaConf.load(CONF / "grid" / f"{name}.yaml")
        if "defaults" in grid:
            compose("sweep", [*given("sweep"), f"grid={name}"])
        else:
            cfg.grid = grid
            check(cfg, "sweep")


@pytest.mark.parametrize("group", ["experiment", "hparams_search", "debug"])
def test_what_is_appended_to_a_training_is_known(group):
    rest = {name.partition("_")[0]: name for name in papers.names((CONF,))}  # one entry of each paper is enough
    names = {path.stem for path in (CONF / group).glob("*.yaml")}
    for name in sorted(names.union(rest.values() if group == "experiment" else ())):
        root = "distill" if name.startswith("distill") else "train"
        check(compose(root, [f"+{group}={name}"]), root, complete=False)


def test_declared_keys_of_other_classes_exist_there():
    for target, declared in OTHERS.items():
        parameters = inspect.signature(get_object(target)).parameters.values()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        assert takes_any or set(declared) <= {parameter.name for parameter in parameters}, target


@pytest.mark.parametrize("path", sorted((CONF / "stopping").glob("*.yaml")), ids=lambda path: path.stem)
def test_comments_of_a_policy_name_keys_that_it_has(path):
    """A word in backticks or with an underscore, in a comment of conf/stopping."""
    keys = {word for key in config.flatten(part("stopping", path.stem)) for word in key.split(".")}
    for line in path.read_text().split("\n"):
        for quoted, word in re.findall(r"`(\w+)`|\b([a-z]+_[a-z_]+)\b", line.partition("#")[2]):
            assert (quoted or word) in keys, line


def test_every_rule_is_a_methods():
    assert [verification.get(name).name for name in verification.names()] == choices("rule")
    named = {part("rule", name)["_target_"] for name in choices("rule")}
    used = {plain(config.method_config(name))["rule"]["_target_"] for name in choices("method")}
    small = "toolkit.verification.rules.importance_lp.ImportanceLP"  # for vocabularies of at most 62 tokens
    assert named - used == {small}


# Arguments that a policy gets from its method, when it is bound.
SET_BY_THE_METHOD = {"deepest", "prices", "table", "known", "weights", "lookup", "reading", "blocks", "calibration",
                     "levels", "outputs"}  # fmt: skip
# groups, and objects that no config can write
BY_HAND = {"beams", "proposer", "scorer", "log_w_rej", "instead", "draws", *SET_BY_THE_METHOD}


@pytest.mark.parametrize("name", choices("method"))
def test_every_argument_of_a_method_is_known_and_can_be_set_without_a_plus(name):
    def lost(node):
        keys = set(classes.keys_of(node["_target_"]).keys) - set(node) - BY_HAND
        return keys | {key for one in node.values() if is_node(one) for key in lost(one)}

    node = plain(config.method_config(name))
    plain_decoding = {"min_drafted", "draft_temperature"} if node.get("max_drafted") == 0 else set()
    assert lost(node) <= plain_decoding and undocumented("", node, Any) == []


def test_keys_of_a_method_are_set_from_python_and_in_grids():
    changes = ["draft_temperature=.5", "rule.num_free=15", "rule.alphabet=7", "++min_drafted=2"]
    method = config.method("importance", changes)
    assert (method.draft_temperature, method.rule.num_free, method.rule.alphabet, method.min_drafted) == (0.5, 15, 7, 2)
    for change, words in (
        ("+max_drafted=3", "max_drafted is in the config already: expected max_drafted=VALUE"),
        ("rule.num_fre=3", "unknown key 'rule.num_fre': did you mean rule.num_free"),
        ("rule.num_free=16", "rule.num_free: expected a number in .1, 15., got 16"),
    ):
        with pytest.raises(InputError, match="^" + words):
            config.method("importance", [change])
    grid = ["grid.importance.rule.num_free=[5,12]", "grid.importance.draft_temperature=[null,.5]", "+grid.tail={}"]
    composed = plain(compose("sweep", grid).grid)
    assert composed["importance"] == {"rule": {"num_free": [5, 12]}, "draft_temperature": [None, 0.5]}
    assert prepare("sweep", ["grid.importance.rule.num_free=[5]"]) == ["++grid.importance.rule.num_free=[5]"]
    assert "rule.num_free" in refusal("sweep", "grid.importance.rule.num_fre=[5]")


# -- what is refused --------------------------------------------------------------------------------------------------


def given(root: str) -> list[str]:
    """Overrides that give every missing key some value."""
    values = {"table": "specdecpp_table1"}
    return [f"{key}={values.get(key, 'x')}" for key in missing(root)]


def missing(root: str) -> list[str]:
    return [key for key, value in config.flatten(resolved(compose(root), root)).items() if value == MISSING]


def refusal(root: str, *words: str) -> str:
    with pytest.raises(InputError) as caught:
        prepare(root, [*given(root), *words])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def out_of_range(root: str) -> str:
    """An override of one of the command's own keys with a number that its range leaves out."""
    for name, key in keys_of(command_of(root)).keys.items():
        for interval in (note for note in notes(key.annotation) if isinstance(note, Interval)):
            return f"{name}={interval.low - 1:g}"
    return "sampling.temperature=-1"


@pytest.mark.parametrize("root", ROOTS)
def test_every_key_of_a_command_has_a_type_and_a_meaning_and_faults_are_one_line(root):
    assert root in COMMANDS
    assert undocumented_of(root, []) == []
    if root not in NAMES:
        return
    if missing(root):
        with pytest.raises(InputError, match=r"^missing key [\w.]+: expected [\w.]+=VALUE, [^\n]*$"):
            check(compose(root), root)
    good = plain(compose(root, given(root)))
    cases = [
        ({"overwrit": True}, "unknown key 'overwrit': did you mean overwrite"),
        (
            {"paths": {**good["paths"], "outpt_dir": "x"}},
            "unknown key 'paths.outpt_dir': did you mean paths.output_dir",
        ),
        ({"overwrite": "maybe"}, "overwrite: expected true or false, got 'maybe'"),
        ({"overwrite": None}, "overwrite: expected true or false"),
    ]
    key, _, number = out_of_range(root).partition("=")
    if key in good:
        cases.append(({key: float(number)}, f"{key}: expected "))
    for change, words in cases:
        with pytest.raises(InputError) as caught:
            check(OmegaConf.create({**good, **change}), root)
        assert str(caught.value).startswith(words) and "\n" not in str(caught.value)
    del good["overwrite"]
    with pytest.raises(InputError, match="^missing key overwrite: expected overwrite=VALUE, true/false .replace what"):
        check(OmegaConf.create(good), root)


@pytest.mark.parametrize(
    ("root", "words", "message"),
    [
        ("train", ["experimnt=toy_head"], "unknown key 'experimnt': did you mean experiment"),
        ("train", ["+trainer.max_step=3"], "unknown key 'trainer.max_step': did you mean trainer.max_steps"),
        ("decode", ["policy.num_drafted=3"], "unknown key 'policy': did you mean method.policy"),
        ("decode", ["sampling.temperature=hot"], "sampling.temperature: expected a number of at least 0, got 'hot'"),
        ("decode", ["pair.revision=x"], "pair.revision is not in the config yet: expected +pair.revision=VALUE"),
        ("sweep", ["grid={tail: {}}"], "grid is chosen by name: for a mapping of your own expected ~grid"),
        ("decode", ["+batch_size=3"], "batch_size is in the config already: expected batch_size=VALUE"),
        ("decode", ["batch_size=1,2"], "batch_size=1,2: expected one value"),
        ("decode", ["+pair.name=7"], "pair.name: expected text, got 7 (a text of digits is written"),
        ("decode", ["head=''"], "head: expected text or null, not empty"),
        ("decode", ["foo"], "expected KEY=VALUE, got 'foo'"),
        ("decode", ["-prompts.limit=2"], "expected KEY=VALUE, got '-prompts.limit=2': an override takes no -"),
        ("decode", ["method=null"], "expected a choice of a config group, got method=null"),
        ("decode", ["--config-dr", "x"], "unrecognized arguments: --config-dr"),
        ("decode", ["--config-dir", "nowhere"], "--config-dir: expected a folder laid out like conf/, got nowhere"),
        ("decode", ["method.policy._target_=toolkit.stopping.Fixd"], "in toolkit.stopping: did you mean Fixed"),
        ("decode", ["method.policy._target_=toolkit.stoping.Fixed"], "no module toolkit.stoping"),
        ("decode", ["method=specdec_pp", "pair.target=x"], "method specdec_pp needs an acceptance head, and this pair"),
        ("decode", ["-m", "method=svip,blok"], "unknown method 'blok': did you mean block"),
        ("sweep", ["+grid.tial={}"], "unknown method 'tial': did you mean tail"),
        ("compare", ["metrics=[exact_mach]"], "unknown quality metric 'exact_mach': did you mean exact_match"),
        ("toy", ["shares=3"], "shares: expected keys with values, got 3"),
        ("train", ["seed=4294967296"], "seed: expected a number in [0, 4294967295], got 4294967296"),
        ("distill", ["seed=4294967296"], "seed: expected a number in [0, 4294967295], got 4294967296"),
        ("toy", ["seed=-1"], "seed: expected a number in [0, 4294967295], got -1"),
    ],
)  # fmt: skip
def test_faults_are_said_in_one_line(root, words, message):
    assert message in refusal(root, *words)


def test_parts_of_a_method_that_do_not_go_together_are_refused_before_anything_is_loaded():
    for words, message in (
        (["method.proposer.scheme=greedy"], "is exact only for iid, independent"),
        (["stopping@method.policy=adaedl"], "method specinfer: AdaEdl learns from rounds of chains"),
    ):
        assert message in refusal("decode", "method=specinfer", *words, "pair.target=nowhere")
    assert "need each other" in refusal("decode", "method=speculative_beam", "method.beams=null")


def test_jobs_of_a_sweep_are_checked_one_by_one_and_globs_are_left_to_hydra():
    assert prepare("decode", ["-m", "batch_size=0,1"]) == ["-m", "batch_size=0,1"]
    check_choices(["experiment=glob(*)", "pair.target=x", "method=null"])


def test_the_library_checks_what_it_composes_but_waits_for_missing_values():
    assert compose("mix").mixing_ratio == 0.15
    with pytest.raises(InputError, match=r"^mixing_ratio: expected a number in \(0, 1\), got 2$"):
        compose("mix", ["mixing_ratio=2"])


# -- types, ranges, sources -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (int, [0, -3, np.int64(3)], [1.0, True, "1", None, np.bool_(True)]),
        (float, [0, 1.5, np.int64(3), np.float32(0.5)], [True, "1", None, np.bool_(True), torch.tensor(3)]),
        (str, ["a", ""], [1, None, ["a"]]),
        (bool, [True], [1, 0, "true"]),
        (int | None, [None, 1], ["", 0.5]),
        (Literal["a", 1], ["a", 1], [True, "b"]),
        (list[Annotated[int, AtLeast(1)]], [[], [1, 2]], [[0], 1, "1"]),
        (dict[str, float], [{}, {"a": 1}], [{"a": "b"}, [1]]),
        (Annotated[float, Above(0)] | None, [None, 0.1], [0, float("nan"), float("inf")]),
        (Annotated[float, Between(0, 1, "[)")], [0, 0.9], [1, -0.1]),
    ],
)
def test_values_fit_types_and_ranges(annotation, good, bad):
    assert all(fits(value, annotation) for value in good)
    assert not any(fits(value, annotation) for value in bad)


def test_types_are_said_as_people_read_them_and_ranges_hold_in_python_too():
    assert say(Annotated[float, Probability] | None) == "number in [0, 1] or null"
    assert say(list[Annotated[float, Above(0)]]) == "a list of numbers above 0"
    with pytest.raises(InputError, match=r"^policy.rate_decay: expected a number in \[0, 1\], got 1.5$"):
        AdaEdl(rate_decay=1.5)


def test_keys_of_classes_of_the_users_own_are_those_of_the_nearest_constructor(tmp_path, monkeypatch):
    """What only a type checker imports counts as anything; a file that is no Python is named."""
    (tmp_path / "base_of_mine.py").write_text(
        "from dataclasses import dataclass\n\n@dataclass\nclass Base:\n    level: int = 1\n"
    )
    (tmp_path / "policies_of_mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from typing import TYPE_CHECKING, Annotated\nfrom base_of_mine import Base as Common\n"
        "from toolkit.config.notes import Above\nif TYPE_CHECKING:\n    import not_installed\n\n@dataclass\n"
        'class Mine(Common):\n    """Stops.\n\n    patience  rounds without\n              luck\n    """\n\n'
        "    patience: Annotated[float, Above(0)] = 2.0\n    other: not_installed.Thing = None\n\n"
        "class Constructed(Common):\n    def __init__(self, notes: int = 3):\n        pass\n\n"
        "class Like(Constructed):\n    pass\n\n"
        "def policy(patience: Annotated[float, Above(0)] = 2.0):\n    from toolkit.stopping import Fixed\n"
        "    return Fixed(3)\n"
    )
    (tmp_path / "broken.py").write_text("class Mine(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = classes.keys_of("policies_of_mine.Mine").keys
    assert list(keys) == ["level", "patience", "other"]
    assert keys["patience"].meaning == "rounds without luck" and keys["patience"].default == 2.0
    assert say(keys["patience"].annotation) == "number > 0" and not is_known(keys["other"].annotation)
    for name in ("Constructed", "Like"):
        assert list(classes.keys_of(f"policies_of_mine.{name}").keys) == ["notes"]
    words = ["method.policy._target_=policies_of_mine.policy", "~method.policy.num_drafted", "method.max_drafted=3"]
    assert prepare("decode", [*words, "+method.policy.patience=1"])
    assert (
        refusal("decode", *words, "+method.policy.patience=0")
        == "method.policy.patience: expected a number above 0, got 0"
    )
    assert "broken.py, line 1: expected Python, got" in refusal("decode", "method.policy._target_=broken.Mine")


def test_docstrings_say_what_keys_mean():
    text = "Mean of things. stem: compare word stems (English).\n\n    a, b  both of\n          them; c: the third\n    d: last"
    assert meanings_in(text, ["stem", "a", "b", "c", "d", "e"]) == {
        "stem": "compare word stems (English)", "a": "both of them", "b": "both of them", "c": "the third", "d": "last",
    }  # fmt: skip


# -- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", NAMES)
def test_help_shows_every_key_within_120_columns(root):
    text = help_text(root)
    lines = text.split("\n")
    assert all(len(line) <= WIDTH and line == line.rstrip() for line in lines)
    assert lines[0].startswith(f"{command_of(root).module}: ")
    assert f"  python -m {command_of(root).module} " in text
    shown = {line.split()[0] for line in lines if line.startswith("  ")}
    shown |= {line.partition(":")[0] for line in lines if not line.startswith(" ")}  # groups to choose from
    raw = compose(root)
    leaves = config.flatten(without_repeats(resolved(raw, root), unresolved(raw)))
    asked = {path for path in leaves if not path.startswith(("before", "after")) and "._" not in path}
    assert {path for path in asked if leaves[path] != {}} <= shown


def test_help_follows_the_choices():
    assert "method.rule.tau " in help_text("decode", ["method=mtad"])
    with pytest.raises(InputError, match="unknown method 'mtat'"):
        help_text("decode", ["method=mtat"])


def test_every_command_answers_before_it_imports_what_its_work_needs():
    imports = ("import ", "from ", "if ")
    for root in set(NAMES) - {"quickstart_sweep"}:
        source = classes.module_file(command_of(root).module).read_text()
        first = next(line for line in source.split("\n") if line.startswith(imports) and "__future__" not in line)
        assert first.startswith('if __name__ == "__main__"') and f'    main("{root}"' in source


def test_importing_the_toolkit_does_no_work_and_never_ends_the_process():
    code = "import sys; sys.argv = ['-m', '--help']; import toolkit; assert 'toolkit.config' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(CONF).parent)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data_gen.mix", "responses=x", "mixing_ratio=2"], "mixing_ratio: expected a number in (0, 1), got 2"),
        (["toolkit.decode", "batch_siz=2"], "unknown key 'batch_siz': did you mean batch_size"),
        (["toolkit.decode", "method=tail", "method.policy.treshold=.2"], "unknown key 'method.policy.treshold': did "),
        (["toolkit.train", "trainr=gpu"], "unknown key 'trainr': did you mean trainer"),
        (["analysis.sweep", "grid.tail.policy.treshold=[.2]"], "unknown parameter of tail 'policy.treshold': did you"),
        (["toolkit.decode", "method=mtat"], "unknown method 'mtat': did you mean mtad"),
    ],
)
def test_a_misspelt_key_and_a_commands_own_value_are_answered_before_anything_heavy_is_imported(words, message):
    command = [sys.executable, "-X", "importtime", "-m", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CONF.parent, timeout=120)
    lines = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    (said,) = [line for line in lines if not line.startswith("import time:")]
    assert done.returncode == 1 and said.startswith(f"error: {message}")
    assert not imported & {"torch", "transformers", "pytorch_lightning", "pandas", "numpy", "scipy"}


@pytest.mark.parametrize("group", [*PARTS, "data", "loss", "teacher", "model"])
def test_no_key_that_a_yaml_lacks_looks_like_one_that_it_has(group):
    """Else it would be refused as misspelt where it could be added."""
    for name in choices(group):
        node = part(group, name)
        if is_node(node):
            for key in set(classes.keys_of(node["_target_"]).keys) - set(node):
                assert not classes.is_misspelt(key, node), f"{group}/{name}: {key}"


def test_a_config_whose_name_no_file_can_have_is_unknown():
    with pytest.raises(InputError, match="unknown config 'xxx"):
        compose("x" * 300)
