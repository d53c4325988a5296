"""Stages: folders named by content, stale work refused, clear lines for bad input, conf/ in an installed wheel."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import sysconfig
import zipfile
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from analysis.reporting.folders import read_folder
from toolkit.config import CONF, compose
from toolkit.errors import InputError, StaleError
from toolkit.files import atomic, digests, journal
from toolkit.runs import stage

ROOT = CONF.parent


def config_of(tmp_path: Path, **values):
    return OmegaConf.create({"paths": {"root_dir": str(tmp_path), "output_dir": None}, "overwrite": False, **values})


def test_folders_are_named_by_what_determines_their_content(tmp_path):
    one = stage.open_stage("demo", config_of(tmp_path, size=1, batch_size=4))
    same = stage.open_stage("demo", config_of(tmp_path, size=1, batch_size=9))
    other = stage.open_stage("demo", config_of(tmp_path, size=2, batch_size=4))
    assert one.folder == same.folder != other.folder
    assert not one.finished
    one.finish(rows=3)
    assert stage.open_stage("demo", config_of(tmp_path, size=1)).manifest["rows"] == 3


def test_whatever_is_not_declared_free_determines_the_content(tmp_path):
    """A seed above all: two seeds are two results. Folders of free keys alone are one."""
    values = {"seed": 0, "limit": 3, "sampling": {"seed": 0, "top_k": 1}, "name": "a"}
    changed = [{"seed": 1}, {"limit": 4}, {"sampling": {"seed": 1, "top_k": 1}}, {"sampling": {"seed": 0, "top_k": 2}},
               {"name": "b"}, {"new": None}]  # fmt: skip
    folders = [
        stage.open_stage("demo", config_of(tmp_path, **{**values, **change})).folder for change in ({}, *changed)
    ]
    assert len(set(folders)) == len(folders)
    free = {key: 5 for key in stage.FREE_KEYS if key not in ("paths", "overwrite")}
    assert stage.open_stage("demo", config_of(tmp_path, **values, **free)).folder == folders[0]
    assert "seed" not in stage.FREE_KEYS
    assert (
        stage.open_stage("demo", config_of(tmp_path, **{**values, "name": "c"}), ignore=["name"]).folder not in folders
    )


def test_inputs_count_by_their_content(tmp_path):
    source = tmp_path / "in.txt"
    source.write_text("a")
    cfg = OmegaConf.merge(config_of(tmp_path), {"paths": {"output_dir": str(tmp_path / "out")}})
    stage.open_stage("demo", cfg, inputs=[source]).finish()
    assert stage.open_stage("demo", cfg, inputs=[source]).finished
    source.write_text("b")
    with pytest.raises(StaleError, match="its inputs have changed .*in.txt"):
        stage.open_stage("demo", cfg, inputs=[source])
    cfg.overwrite = True
    assert not stage.open_stage("demo", cfg, inputs=[source]).finished


def test_foreign_folders_are_not_overwritten(tmp_path):
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    cfg = OmegaConf.merge(config_of(tmp_path), {"paths": {"output_dir": str(folder)}, "overwrite": True})
    with pytest.raises(InputError, match="was not made by this toolkit"):
        stage.open_stage("demo", cfg)
    stage.open_stage("other", OmegaConf.merge(cfg, {"paths": {"output_dir": str(tmp_path / "b")}, "overwrite": False}))
    with pytest.raises(StaleError, match="it was made by other, not demo"):
        stage.open_stage(
            "demo", OmegaConf.merge(cfg, {"paths": {"output_dir": str(tmp_path / "b")}, "overwrite": False})
        )
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_files_are_whole_or_absent(tmp_path):
    def half(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    atomic.write_text(tmp_path / "a.txt", "old")
    with pytest.raises(InputError, match="could not write .*a.txt: No space left on device; nothing was changed there"):
        atomic.write_atomic(tmp_path / "a.txt", half)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_tidy_overrides_take_the_templates_spelling_and_put_debug_last():
    words = ["debug=fdr", "experiment=a", "x=1", "+hparams_search=g"]
    assert stage.tidy_overrides(words) == ["+experiment=a", "x=1", "+hparams_search=g", "+debug=fdr"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("+experiment=quickstrat", "unknown experiment 'quickstrat': did you mean quickstart"),
        ("method=specdecpp", "unknown method 'specdecpp': did you mean specdec_pp"),
        ("prompts=toy_mth", "unknown prompts 'toy_mth': did you mean toy_math"),
        ("method=speculative,blok", "unknown method 'blok': did you mean block"),
    ],
)
def test_unknown_choices_suggest_the_near_ones(word, message):
    with pytest.raises(InputError, match=message):
        stage.check_choices([word])
    stage.check_choices(["experiment=glob(*)", "pair.target=x", "method=null"])


@pytest.mark.parametrize("root", [path.stem for path in sorted(CONF.glob("*.yaml"))])
def test_every_root_config_composes(root):
    assert compose(root) is not None


# -- what a stage writes and finds ------------------------------------------------------------------------------------


def config_at(folder: Path, **values):
    return OmegaConf.create({"paths": {"output_dir": str(folder)}, "overwrite": False, **values})


def finished(folder: Path, name: str = "demo", files: tuple[str, ...] = ("a.txt",), **values) -> Path:
    opened = stage.open_stage(name, config_at(folder, **values))
    for file in files:
        atomic.write_text(folder / file, file)
    return opened.finish()


def test_the_manifest_says_what_was_done_with_what(tmp_path):
    source = tmp_path / "in.txt"
    source.write_text("a")
    cfg = config_at(tmp_path / "out", size=1, batch_size=4)
    opened = stage.open_stage("demo", cfg, inputs=[source])
    running = opened.manifest
    assert (running["stage"], running["status"], running["config"]) == ("demo", "running", {"size": 1})
    assert (running["given"], running["models"]) == ({}, {})
    assert list(running["inputs"]) == [str(source)] and len(running["inputs"][str(source)]) == 16
    assert digests.digest(source).startswith(running["inputs"][str(source)])
    assert running["argv"] == sys.argv and running["python"] == platform.python_version()
    assert running["machine"] == f"{platform.machine()}, {platform.system()}"
    assert datetime.fromisoformat(running["time"]).utcoffset() == timedelta(0)
    assert len(running["time"]) == len("2026-01-02T03:04:05+00:00")  # no fractions of seconds
    assert set(running["versions"]) == set(stage.PACKAGES) and running["versions"]["torch"] == version("torch")
    assert running["revision"] == stage.revision()
    assert running["checksum"] == stage.checksum(running) and len(running["checksum"]) == 32
    atomic.write_text(opened.folder / "b.txt", "b")
    atomic.write_text(opened.folder / "a.txt", "a")
    assert opened.finish(rows=3) == tmp_path / "out"
    done = opened.manifest
    assert (done["status"], done["rows"], list(done["files"])) == ("finished", 3, ["a.txt", "b.txt"])
    assert done["files"]["a.txt"] == digests.digest(opened.folder / "a.txt")


def test_packages_that_are_not_there_are_named_so(monkeypatch):
    monkeypatch.setattr(stage, "PACKAGES", ("torch", "no_such_package"))
    assert stage.provenance()["versions"] == {"torch": version("torch"), "no_such_package": "not installed"}


@pytest.fixture
def revision_anew():
    stage.revision.cache_clear()
    yield
    stage.revision.cache_clear()


@pytest.mark.usefixtures("revision_anew")
def test_the_revision_says_whether_the_tree_has_changes(monkeypatch):
    said = {"rev-parse": "abc1234\n", "status": " M toolkit/runs/stage.py\n"}
    asked = []

    def git(words, **options):
        asked.append((words, options["cwd"]))
        if said.get("fails") in words:
            if options.get("check"):
                raise subprocess.CalledProcessError(128, words)
            return subprocess.CompletedProcess(words, 128, stdout="", stderr="")
        out = next(text for word, text in said.items() if word in words)
        return subprocess.CompletedProcess(words, 0, stdout=out if options["text"] else b"", stderr="")

    monkeypatch.setattr(subprocess, "run", git)
    assert [stage.revision() for _ in range(2)] == ["abc1234+"] * 2  # git is asked once per process
    assert asked == [
        (words, Path(stage.__file__).resolve().parent)
        for words in (["git", "rev-parse", "--short", "HEAD"], ["git", "--no-optional-locks", "status", "--porcelain"])
    ]
    said["status"] = "\n"
    stage.revision.cache_clear()
    assert stage.revision() == "abc1234"
    for command in ("rev-parse", "status"):  # a repository without commits knows the second only
        said["fails"] = command
        stage.revision.cache_clear()
        assert stage.revision() == "unknown"


@pytest.mark.usefixtures("revision_anew")
def test_the_revision_outside_a_checkout_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "__file__", str(tmp_path / "toolkit" / "stage.py"))
    (tmp_path / "toolkit").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert stage.revision() == "unknown"


def test_a_damaged_or_foreign_manifest_is_named(tmp_path):
    folder = finished(tmp_path / "out", size=1)
    path = folder / stage.MANIFEST
    about = stage.read_manifest(str(folder))
    for key, value in (("status", "running"), ("time", "later"), ("argv", [])):  # these may change
        path.write_text(json.dumps({**about, key: value}))
        assert stage.read_manifest(folder)[key] == value
    path.write_text(json.dumps({**about, "config": {"size": 2}}))
    with pytest.raises(
        InputError, match=r"manifest.json is damaged \(its checksum does not match\); delete it and run"
    ):
        stage.read_manifest(folder)
    path.write_text("[]")
    with pytest.raises(InputError, match="manifest.json is not a manifest of this toolkit; move it"):
        stage.read_manifest(folder)


def test_finished_work_is_found_without_writing(tmp_path):
    folder = tmp_path / "out"
    assert stage.finished_stage("demo", config_at(folder, size=1)) is None
    assert not folder.exists()
    stage.open_stage("demo", config_at(folder, size=1))
    assert stage.finished_stage("demo", config_at(folder, size=1)) is None  # under way
    finished(folder, size=1)
    found = stage.finished_stage("demo", config_at(folder, size=1, batch_size=7, kind="x"), ignore=["kind"])
    assert found is not None and found.folder == folder and found.finished and found.name == "demo"
    assert stage.finished_stage("demo", config_at(folder, size=2)) is None
    assert stage.finished_stage("other", config_at(folder, size=1)) is None
    assert stage.finished_stage("demo", config_at(folder, size=1), inputs=[folder / "a.txt"]) is None
    overwriting = OmegaConf.merge(config_at(folder, size=1), {"overwrite": True})
    assert stage.finished_stage("demo", overwriting) is None


def test_damaged_files_stop_a_stage_unless_it_repairs_them_itself(tmp_path, capsys):
    folder = finished(tmp_path / "out", files=("a.txt", "b.txt"))
    (folder / "a.txt").write_text("changed")
    cfg = config_at(folder)
    for find in (stage.finished_stage, stage.open_stage):
        with pytest.raises(InputError, match="a.txt is damaged"):
            find("demo", cfg)
    assert stage.finished_stage("demo", cfg, repairs=True) is None
    assert capsys.readouterr().out == f"{folder / 'a.txt'} is damaged, made again\n"
    opened = stage.open_stage("demo", cfg, repairs=True)
    assert not opened.finished and opened.manifest["status"] == "running"


def test_a_folder_whose_journal_is_lost_is_checked_by_its_manifest(tmp_path):
    folder = finished(tmp_path / "out")
    (folder / journal.JOURNAL).unlink()
    assert stage.finished_stage("demo", config_at(folder)) is not None
    (folder / "a.txt").write_text("changed")
    with pytest.raises(InputError, match="a.txt is damaged"):
        stage.finished_stage("demo", config_at(folder))


def test_missing_files_are_named_and_checkpoints_may_go(tmp_path, capsys):
    names = tuple(f"{i:02d}.txt" for i in range(11))
    folder = finished(tmp_path / "out", files=(*names, "checkpoints/last", "figures/one"))
    for name in ("checkpoints/last", "figures/one"):
        (folder / name).unlink()
    assert stage.finished_stage("demo", config_at(folder)) is not None
    assert capsys.readouterr().out == ""
    for name in names[:8]:
        (folder / name).unlink()
    assert stage.finished_stage("demo", config_at(folder)) is None
    assert capsys.readouterr().out == f"{folder}: {', '.join(names[:8])} missing, made again\n"
    (folder / names[8]).unlink()
    assert stage.finished_stage("demo", config_at(folder)) is None
    assert capsys.readouterr().out == f"{folder}: {', '.join(names[:8])} and 1 more missing, made again\n"
    assert not stage.open_stage("demo", config_at(folder)).finished


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"size": 2, "kind": "a"}, "size was 1, is 2"),
        ({"size": 1, "kind": "b"}, "kind was 'a', is 'b'"),
        ({"size": 1}, "kind was 'a', is None"),
        ({"size": 1, "kind": "a", "more": {"x": 0}}, r"more.x was None, is 0"),
    ],
)
def test_other_work_is_refused_with_the_first_difference(tmp_path, values, reason):
    folder = finished(tmp_path / "out", size=1, kind="a")
    with pytest.raises(
        StaleError, match=f"out holds other work: {reason}; choose another paths.output_dir or overwrite=true$"
    ):
        stage.open_stage("demo", config_at(folder, **values))


@pytest.mark.parametrize("changed", [{"config": [1]}, {"inputs": 3, "files": []}, {"checksum": None}])
def test_a_manifest_that_was_changed_is_refused(tmp_path, changed):
    """Wherever it is read: by its own stage, by others, by a report."""
    folder = stage.open_stage("demo", config_at(tmp_path / "out", size=1)).finish()
    manifest = stage.read_manifest(folder) | changed
    (folder / stage.MANIFEST).write_text(
        json.dumps({key: value for key, value in manifest.items() if value is not None})
    )
    for read in (lambda: stage.open_stage("demo", config_at(folder, size=1)), lambda: read_folder(folder)):
        with pytest.raises(InputError, match="manifest.json is damaged .its checksum does not match.; delete it"):
            read()
    work = stage.open_stage("demo", config_at(folder, size=1, overwrite=True))
    assert not work.finished


def test_files_that_were_added_or_changed_are_other_inputs(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    inputs = [tmp_path / "a.txt", tmp_path / "b.txt"]
    stage.open_stage("demo", config_at(tmp_path / "before"))
    with pytest.raises(StaleError, match=r"its inputs have changed \(.*a.txt, .*b.txt\)"):
        stage.open_stage("demo", config_at(tmp_path / "before"), inputs=inputs)
    out = stage.open_stage("demo", config_at(tmp_path / "out"), inputs=inputs).finish()
    (tmp_path / "b.txt").write_text("changed")
    with pytest.raises(StaleError, match=r"its inputs have changed \([^ ]*b.txt\);"):
        stage.open_stage("demo", config_at(out), inputs=inputs)


def test_inputs_that_are_fewer_now_are_told(tmp_path):
    source = tmp_path / "in.txt"
    source.write_text("a")
    cfg = config_at(tmp_path / "out")
    stage.open_stage("demo", cfg, inputs=[source])
    with pytest.raises(StaleError, match=r"its inputs have changed \(fewer than before\)"):
        stage.open_stage("demo", cfg)
    moved = source.rename(tmp_path / "moved.txt")
    assert stage.open_stage("demo", cfg, inputs=[moved]).folder == tmp_path / "out"


def test_parts_of_one_folder_are_worked_on_by_several_processes(tmp_path):
    cfg = config_at(tmp_path / "out")
    one = stage.open_stage("demo", cfg, shared="0")
    two = stage.open_stage("demo", cfg, shared="1")
    assert {path.name for path in one.folder.glob(".lock*")} == {".lock-0", ".lock-1"}
    one.finish()
    assert {path.name for path in two.folder.glob(".lock*")} == {".lock-1"}


def test_half_written_files_of_others_are_left_where_several_work(tmp_path):
    cfg = config_at(tmp_path / "out")
    folder = stage.open_stage("demo", cfg, shared="0").folder
    journal.note(folder / "shard", temporary=".shard.1.tmp")
    (folder / ".shard.1.tmp").write_text("half")
    stage.open_stage("demo", cfg, shared="1")
    assert (folder / ".shard.1.tmp").exists()


def test_a_folder_that_is_not_overwritten_is_free_again(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="was not made by this toolkit"):
        stage.open_stage("demo", OmegaConf.merge(config_at(tmp_path), {"overwrite": True}))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_manifest_without_a_list_of_files_is_not_overwritten(tmp_path):
    folder = finished(tmp_path / "out")
    (folder / journal.JOURNAL).unlink()
    with pytest.raises(
        InputError, match="out is not overwritten: its manifest.json is not this toolkit's.* lists no files"
    ):
        stage.open_stage("demo", OmegaConf.merge(config_at(folder), {"overwrite": True}))
    assert (folder / "a.txt").exists()
    atomic.write_text(tmp_path / "mine" / "b.txt", "b")
    opened = stage.open_stage("demo", OmegaConf.merge(config_at(folder.parent / "new"), {"overwrite": True}))
    assert not opened.finished  # a folder that is new need not be cleared


def test_removed_subfolders_hold_what_others_wrote(tmp_path):
    opened = stage.open_stage("demo", config_at(tmp_path / "out"))
    atomic.write_text(opened.folder / "parts" / "a.txt", "a")
    atomic.write_text(opened.folder / "b.txt", "b")
    (opened.folder / "parts" / "mine.txt").write_text("mine")
    opened.remove("parts")
    assert {path.name for path in opened.folder.rglob("*.txt")} == {"b.txt", "mine.txt"}


def test_what_was_asked_is_known_by_its_keys_and_contents(tmp_path):
    cfg = OmegaConf.create({"size": 1, "name": "a", "track": "x"})
    hashed = stage.asked("demo", cfg, ["size"])
    assert hashed == stage.asked("demo", OmegaConf.create({"size": 1, "name": "b"}), ["size", "track"])
    others = [(["size", "name"], {}), (["size", "missing"], {}), (["size"], {"more": 1}), (["size"], {"more": 2})]
    assert len({hashed, *(stage.asked("demo", cfg, keys, **more) for keys, more in others)}) == 5
    named = []
    for name, text in (("one", "a"), ("two", "a"), ("three", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "prompts.jsonl").write_text(text)
        prompts = OmegaConf.create({"prompts": {"path": str(tmp_path / name / "prompts.jsonl")}})
        named.append(stage.asked("demo", prompts, ["prompts"]))
    assert named[0] == named[1] != named[2]


def test_a_run_whose_every_prompt_failed_is_an_error(tmp_path):
    stage.check_some_done(0, 0, None, tmp_path)
    stage.check_some_done(2, 3, "too long", tmp_path)
    with pytest.raises(InputError, match=f"every one of 3 prompts failed, first: too long; the rows are in {tmp_path}"):
        stage.check_some_done(3, 3, "too long", tmp_path)
    with pytest.raises(InputError, match="every one of 1 prompts"):
        stage.check_some_done(1, 1, "too long", tmp_path)


def test_folders_lie_below_the_root_unless_named():
    for paths in ({}, {"paths": None}, {"paths": {}}, {"paths": {"output_dir": None}}):
        assert stage.output_dir("demo", paths, "hash") == Path("outputs/demo-hash")
    assert stage.output_dir("demo", {"paths": {"root_dir": "here"}}, "hash") == Path("here/demo-hash")
    assert stage.output_dir("demo", {"paths": {"root_dir": "here", "output_dir": "mine"}}, "hash") == Path("mine")


def test_a_local_prompts_file_is_an_input(tmp_path):
    (tmp_path / "mine.jsonl").write_text("{}")
    for prompts, files in (
        ({"path": str(tmp_path / "mine.jsonl")}, [str(tmp_path / "mine.jsonl")]),
        ({"path": "org/on-the-hub"}, []),
        ({"path": str(tmp_path)}, []),
        ({"path": None}, []),
        ({"name": "x"}, []),
    ):
        assert stage.prompt_files(OmegaConf.create({"prompts": prompts})) == files


@pytest.mark.slow
def test_conf_is_found_from_an_installed_wheel_and_not_shadowed(tmp_path):
    """A wheel is a folder of packages with conf/ beside them; a user's own conf/ in the working folder is ignored."""
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(tmp_path), str(ROOT)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert (site / "toolkit" / "assets" / "toy" / "target" / "model.safetensors").exists()
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "conf").mkdir(parents=True)
    (elsewhere / "conf" / "decode.yaml").write_text("wrong: true\n")
    libraries = sysconfig.get_paths()["purelib"]
    result = subprocess.run(
        [sys.executable, "-S", "-m", "toolkit.decode", "--cfg", "job", "method=block"],
        capture_output=True, text=True, cwd=elsewhere, env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{libraries}"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "toolkit.verification.rules.block.Block" in result.stdout
    assert "wrong" not in result.stdout
