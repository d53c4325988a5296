"""Work is found again when its inputs have moved, and never when they have changed."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from analysis import quality
from analysis.multi_draft.target_texts import MethodRule
from toolkit.config import compose, plain, searching
from toolkit.config.identity import contents_of
from toolkit.errors import StaleError
from toolkit.files import digests, journal
from toolkit.runs import stage

LOADER = "toolkit.models.pair.ModelPair.from_pretrained"
COMMIT, OTHER = "a" * 40, "b" * 40


def model(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text("{}")
    return folder


def config_of(tmp_path: Path, target: object, **more):
    pair = {"_target_": LOADER, "target": str(target), "draft": None, "revision": None}
    paths = {"root_dir": str(tmp_path), "output_dir": None}
    return OmegaConf.create({"paths": paths, "overwrite": False, "pair": pair, **more})


def test_weights_count_by_their_content_not_by_their_place(tmp_path):
    stage.open_stage("demo", config_of(tmp_path, model(tmp_path / "one"))).finish()
    moved = model(tmp_path / "two")
    (moved / "README.md").write_text("notes do not count")
    assert stage.open_stage("demo", config_of(tmp_path, moved)).finished
    opened = stage.open_stage("demo", config_of(tmp_path, moved, size=2))
    assert opened.manifest["given"] == {"pair.target": str(moved)}
    assert plain(opened.manifest["config"])["pair"]["target"].startswith("sha256:")
    (moved / "model.safetensors").write_bytes(b"Weights")
    changed = config_of(tmp_path, moved)
    assert stage.finished_stage("demo", changed) is None
    changed.paths.output_dir = str(next(tmp_path.glob("demo-*")))
    with pytest.raises(StaleError, match=rf"pair.target has other content \({moved}\);"):
        stage.open_stage("demo", changed)


def test_every_shard_of_a_split_model_counts(tmp_path):
    first, second = (tmp_path / f"x-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(b"weights")
    named = []
    for content in (b"more", b"more", b"else"):
        second.write_bytes(content)
        named.append(contents_of({"pair": {"target": str(first)}}, "decode").identity["pair"]["target"])
    assert named[0] == named[1] != named[2]


def test_a_head_counts_without_what_lies_beside_its_folder(tmp_path):
    (tmp_path / "run").mkdir()
    head = model(tmp_path / "run" / "head")
    named = [contents_of({"head": str(path)}, "decode").identity["head"] for path in (head, head.parent)]
    (head.parent / "config.json").write_text("of the training")
    named.append(contents_of({"head": str(head.parent)}, "decode").identity["head"])
    assert named[0].startswith("sha256:") and len(set(named)) == 1


def test_work_from_before_a_key_or_a_null_is_found_again():
    """`packed` and `writable` have no place in older folders at their defaults; a null figure is the one that it stands for."""

    def parts(*overrides):
        cfg = plain(compose("decode", ["method=best_source", *overrides]))
        return cfg, contents_of(cfg, "decode").identity

    cfg, identity = parts()
    assert cfg["pair"]["writable"] is False and not {"packed", "writable"} & identity["pair"].keys()
    other = parts("pair.packed=off", "pair.writable=true")[1]["pair"]
    assert (other["packed"], other["writable"]) == ("off", True)
    assert cfg["method"]["policy"]["cost_ratio"] is None and identity["method"]["policy"]["cost_ratio"] == 0.2
    written_out = parts("method.policy.cost_ratio=.2", "method.policy.column_cost=.05")
    assert written_out[1] == identity and written_out[0] != cfg
    assert parts("method.policy.cost_ratio=.3")[1] != identity


def test_a_model_that_came_or_went_is_named_by_its_path(tmp_path):
    target, draft = model(tmp_path / "one"), model(tmp_path / "two", b"other")
    with_draft, without = config_of(tmp_path, target), config_of(tmp_path, target)
    with_draft.pair.draft = str(draft)
    for first, second, words in (
        (without, with_draft, f"pair.draft was None, is '{draft}';"),
        (with_draft, without, f"pair.draft was '{draft}', is None;"),
    ):
        for cfg in (first, second):
            cfg.paths.output_dir = str(tmp_path / f"out-{first.pair.draft is None}")
        stage.open_stage("demo", first).finish()
        with pytest.raises(StaleError, match=words):
            stage.open_stage("demo", second)


@pytest.mark.parametrize(
    ("command", "overrides", "key"),
    [
        ("decode", ["method=specdec_pp", "head={0}"], "method.policy.estimator.head"),
        ("decode", ["method=specdec_pp", "head={0}"], "head"),
        ("decode", ["pair.target={0}"], "pair.target"),
        ("heads", ["heads=[{0}]"], "heads.0"),
        ("serving", ["costs={0}/config.json"], "costs"),
        ("distill", ["responses=[x]", "from_pretrained={0}"], "from_pretrained"),
        ("traces", ["heads={{mine: {0}}}"], "heads.mine"),
        ("sweep", ["grid.specdec_pp.head=[{0}]"], "grid.specdec_pp.head.0"),
        ("train", ["from_pretrained={0}"], "from_pretrained"),
        ("train", ["pair.draft={0}"], "data.draft.source"),
        ("decode", ["prompts.path={0}/config.json"], "prompts.path"),
        ("decode", ["method=batch_rate_confidence", "method.policy.costs={0}/config.json"], "method.policy.costs"),
        ("sweep", ["+grid.batch_rate.policy.costs=[{0}/config.json]"], "grid.batch_rate.policy.costs.0"),
        ("decode", ["prompts=hub", "prompts.name=x", "prompts.join={{file: {0}/config.json, key: id}}"], "prompts.join.file"),
        ("decode", ["prompts=hub", "prompts.name=x", 'prompts.data_files="{0}/[c]*.json"'], "prompts.data_files"),
        ("decode", ["prompts=hub", "prompts.name=x", "prompts.dataset={0}"], "prompts.dataset"),
    ],
)  # fmt: skip
def test_all_kinds_of_inputs_count_by_content_whatever_their_key_is_called(tmp_path, command, overrides, key):
    folder = model(tmp_path / "x")

    def named() -> str:
        cfg = plain(compose(command, [word.format(folder) for word in overrides]))
        contents = contents_of(cfg, command)
        assert contents.paths[key].startswith(str(folder))
        value = contents.identity
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        return value

    before = named()
    assert before.startswith("sha256:")
    assert named() == before
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes() + b" ")
    assert named() != before


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the hub with one model, whose blobs cannot be read."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(digests, "commit_on_hub", lambda *_, **__: None)
    folder = cache / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "snapshots" / COMMIT / "model.safetensors").symlink_to("../../blobs/0123")  # there is no such blob
    return folder


def test_models_of_the_hub_are_known_by_commit_and_nothing_is_read(tmp_path, hub):
    cfg = config_of(tmp_path, "org/name")
    stage.open_stage("demo", cfg).finish()
    finished = stage.finished_stage("demo", cfg)
    assert finished.manifest["config"]["pair"]["target"] == f"commit:{COMMIT}"
    about = {"name": "org/name", "revision": None, "commit": COMMIT, "files": {"model.safetensors": "0123"}}
    assert finished.manifest["models"] == {"pair.target": about}
    (hub / "refs" / "main").write_text(OTHER)
    assert stage.finished_stage("demo", cfg) is None


def test_finished_work_is_found_when_the_model_has_left_the_cache(tmp_path, hub):
    cfg = config_of(tmp_path, "org/name")
    stage.open_stage("demo", cfg).finish()
    shutil.rmtree(hub)
    assert stage.finished_stage("demo", cfg) is not None
    assert stage.open_stage("demo", cfg).finished
    assert stage.finished_stage("demo", config_of(tmp_path, "org/other")) is None
    cfg.pair.revision = "v2"
    assert stage.finished_stage("demo", cfg) is None


def test_the_hub_is_asked_where_work_begins_and_only_there(tmp_path, hub, monkeypatch):
    asked = []
    monkeypatch.setattr(digests, "commit_on_hub", lambda *given, **_: asked.append(given) or OTHER)
    shutil.rmtree(hub)
    cfg = config_of(tmp_path, "org/name")
    assert stage.finished_stage("demo", cfg) is None and asked == []
    opened = stage.open_stage("demo", cfg)
    assert len(asked) == 1 and opened.manifest["models"]["pair.target"]["commit"] == OTHER


def test_it_is_found_in_a_folder_of_any_name(tmp_path, hub):
    cfg, folders = config_of(tmp_path, "org/name"), [tmp_path / "outputs" / name for name in ("a[1]", "b*", "c?")]
    for gone in (False, True):
        if gone:
            hub.rename(tmp_path / "away")
        for folder in folders:
            cfg.paths.output_dir = str(folder)
            if not gone:
                stage.open_stage("demo", cfg).finish()
            assert stage.finished_stage("demo", cfg).folder == folder


def test_files_are_read_once_until_they_change(tmp_path, monkeypatch):
    """Young files always: a file can change twice within one tick of a file system's clock."""
    path = model(tmp_path / "x") / "model.safetensors"
    long_ago, reads, read = time.time() - 60, [], journal.digest
    monkeypatch.setattr(journal, "digest", lambda one: reads.append(Path(one).name) or read(one))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def count() -> int:
        reads.clear()
        digests.digest(path)
        return reads.count("model.safetensors")

    assert (count(), count()) == (1, 1)
    monkeypatch.setattr(digests, "RECENT", -1e9)  # as if it had been written long ago
    assert (count(), count()) == (1, 0)
    path.write_bytes(b"weightz")
    os.utime(path, (long_ago, long_ago))
    assert (count(), count()) == (1, 0)
    os.utime(path, (long_ago, long_ago))  # same size, same time, another inode
    copy = path.with_name("copy")
    copy.write_bytes(b"WEIGHTS")
    os.utime(copy, (long_ago, long_ago))
    copy.replace(path)
    assert (count(), count()) == (1, 0)


def test_files_that_a_users_own_class_names_count_by_content(tmp_path, monkeypatch):
    (tmp_path / "policy_of_mine.py").write_text(
        "from typing import Annotated\nfrom toolkit.config.notes import File\n\nclass Mine:\n"
        "    def __init__(self, table: str, folder: Annotated[str, File()], label: str = ''):\n        pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    table, folder = tmp_path / "table.csv", tmp_path / "folder" / "deep"
    folder.mkdir(parents=True)
    node = {"_target_": "policy_of_mine.Mine", "table": str(table), "folder": str(folder.parent), "label": str(folder)}
    made = []
    for first, second in (("a", "a"), ("b", "a"), ("a", "b"), ("a", "a")):
        table.write_text(first)
        (folder / "file.sqlite").write_text(second)
        contents = contents_of({"method": {"policy": node}})
        assert set(contents.paths) == {f"method.policy.{key}" for key in ("_target_", "table", "folder")}
        made.append(contents.identity)
    assert made[0] == made[3] and made[0] != made[1] != made[2] != made[0]


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    """A package of a user's own in tmp_path, with a method `mine` in tmp_path/conf."""
    package, conf = tmp_path / "mine", tmp_path / "conf"
    for folder in (package, conf / "method"):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text("from .policy import Mine\n")
    (package / "policy.py").write_text(
        "from dataclasses import dataclass\nfrom typing import Annotated\nfrom toolkit.config.notes import File\n"
        "from toolkit.stopping import Fixed\n\n@dataclass(frozen=True)\nclass Mine(Fixed):\n"
        "    notes: Annotated[str | None, File()] = None\n\n    @property\n    def limit(self):\n"
        "        from mine import lengths\n        return lengths.K\n"
    )
    (package / "lengths.py").write_text("K = 1\n")
    (package / "unused.py").write_text("")
    (conf / "method" / "mine.yaml").write_text(
        "defaults: [base/chain@_here_, _self_]\nname: mine\npolicy: {_target_: mine.Mine, notes: null}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with searching(conf):
        yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def test_a_users_own_class_counts_by_its_source_files(tmp_path, own_package):
    """Its own file and what that imports count; other files and the folder that they are in do not."""
    cfg = compose("decode", ["method=mine", f"paths.root_dir={tmp_path}"])
    stage.open_stage("decode", cfg).finish()
    (own_package / "unused.py").write_text("K = 9\n")
    assert stage.finished_stage("decode", cfg) is not None
    (own_package / "lengths.py").write_text("K = 2\n")
    assert stage.finished_stage("decode", cfg) is None
    cfg.paths.output_dir = str(next(tmp_path.glob("decode-*")))
    with pytest.raises(StaleError, match=r"method\.policy\._target_ has other content \(mine\.Mine\);"):
        stage.open_stage("decode", cfg)


def test_classes_of_this_toolkit_and_of_installed_packages_count_by_name():
    for target in ("toolkit.stopping.Fixed", "analysis.quality.exact.Any", "torch.optim.AdamW", "functools.partial"):
        assert contents_of({"policy": {"_target_": target}}).identity == {"policy": {"_target_": target}}


def test_parts_of_a_comparison_of_rules_are_those_of_the_rules_source(tmp_path, own_package):
    """The sums of a rule that are kept while a run is under way."""
    (own_package.parent / "conf" / "method" / "rule.yaml").write_text(
        "defaults: [specinfer, _self_]\nname: rule\nrule: {_target_: mine.rule.Rule}\n"
    )
    keys = []
    for text in ("one", "two", "one"):
        base = "from toolkit.verification.rules.specinfer import SpecInfer"
        code = f"{base}\nclass Rule(SpecInfer):\n    '{text}'\n"
        (own_package / "rule.py").write_text(code)
        keys.append(MethodRule.of("rule").key)
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize("nested", [False, True])
def test_a_folder_that_a_class_declares_counts_in_a_grid(tmp_path, own_package, nested):
    folder = tmp_path / "notes"
    folder.mkdir()
    key = "policy: {notes: [%s]}" if nested else "policy.notes: [%s]"
    cfg = compose("sweep", ["~grid", f"+grid={{mine: {{{key % folder}}}, oracle: {{max_drafted: [2]}}}}"])
    hashes = []
    for text in ("one", "two", "one"):
        (folder / "notes.txt").write_text(text)
        hashes.append(stage.settings_hash("sweep", cfg, ("grid",)))
    assert hashes[0] == hashes[2] != hashes[1]


def test_a_draft_of_the_hub_to_begin_with_counts_by_its_commit(hub):
    cfg = plain(compose("distill", ["responses=[x]", "from_pretrained=org/name"]))
    assert contents_of(cfg, "distill").identity["from_pretrained"] == f"commit:{COMMIT}"


def test_the_databases_of_a_metric_count_by_content(tmp_path):
    file = tmp_path / "db" / "db.sqlite"
    file.parent.mkdir()
    hashes = []
    for text in ("one", "two", "one"):
        file.write_text(text)
        judged = quality.configs([{"execution": {"databases": str(tmp_path)}}])
        hashes.append(stage.settings_hash("compare", {}, (), judged_by=judged))
    assert hashes[0] == hashes[2] != hashes[1]
