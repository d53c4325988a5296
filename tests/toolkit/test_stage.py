"""Stages: folders named by content, what is found finished, what is refused, and what a stage may delete."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import platform
import signal
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
from toolkit.config import CONF, escaped
from toolkit.errors import InputError, StaleError
from toolkit.files import atomic, digests, journal
from toolkit.runs import stage

ROOT = CONF.parent
NAMES = [
    *("a b", "a,b", "a=b", "it's", 'say "x"', "[1]", "{x}", "${y}", "ü\u2028é", "#1", "~x", "a:b", "a::b", "%s", "*"),
    *("\\", r"a\nb", "a\nb", "\udcff"),
]


def config_at(folder: Path, **values):
    paths = {"root_dir": None, "output_dir": escaped(str(folder))}
    return OmegaConf.create({"paths": paths, "overwrite": False, **values})


def finished(folder: Path, name: str = "demo", files: tuple[str, ...] = ("a.txt",), **values) -> Path:
    opened = stage.open_stage(name, config_at(folder, **values))
    for file in files:
        atomic.write_text(folder / file, file)
    return opened.finish()


def work(folder: Path, size: int = 1, overwrite: bool | str = False) -> stage.Stage:
    """A stage that writes a file, a file in a subfolder, and a folder."""
    opened = stage.open_stage("demo", config_at(folder, size=size, overwrite=overwrite))
    if not opened.finished:
        atomic.write_text(opened.folder / f"shard-{size}.txt", str(size))
        atomic.write_text(opened.folder / "parts" / "a.txt", "a")
        atomic.write_folder(opened.folder / "dataset", lambda place: (place.mkdir(), (place / "rows").write_text("r")))
        opened.finish()
    return opened


# -- where a stage works, and what its manifest says -----------------------------------------------------------------------


def test_folders_are_named_by_whatever_is_not_declared_free(tmp_path):
    """A seed above all: two seeds are two results. Folders of free keys alone are one."""

    def opened(ignore=(), **values):
        paths = {"root_dir": str(tmp_path), "output_dir": None}
        return stage.open_stage("demo", OmegaConf.create({"overwrite": False, "paths": paths, **values}), ignore=ignore)

    values = {"seed": 0, "limit": 3, "sampling": {"seed": 0, "top_k": 1}, "name": "a"}
    changed = [{"seed": 1}, {"limit": 4}, {"sampling": {"seed": 1, "top_k": 1}}, {"sampling": {"seed": 0, "top_k": 2}},
               {"name": "b"}, {"new": None}]  # fmt: skip
    folders = [opened(**{**values, **change}).folder for change in ({}, *changed)]
    assert len(set(folders)) == len(folders)
    free = {key: 5 for key in stage.FREE_KEYS if key not in ("paths", "overwrite")}
    again = opened(**values, **free)
    assert again.folder == folders[0] and not again.finished
    assert "seed" not in stage.FREE_KEYS and "batch_size" in free
    assert opened(ignore=["name"], **{**values, "name": "c"}).folder not in folders
    again.finish(rows=3)
    assert opened(**values).manifest["rows"] == 3


def test_folders_lie_below_the_root_unless_named_and_are_no_folders_of_others(tmp_path, monkeypatch):
    for paths in ({}, {"paths": None}, {"paths": {}}, {"paths": {"output_dir": None}}):
        assert stage.output_dir("demo", paths, "hash") == Path("outputs/demo-hash")
    assert stage.output_dir("demo", {"paths": {"root_dir": "here"}}, "hash") == Path("here/demo-hash")
    assert stage.output_dir("demo", {"paths": {"root_dir": "here", "output_dir": "mine"}}, "hash") == Path("mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("/", "//", "/usr/..", str(tmp_path), f"{tmp_path}/below/.."):
        with pytest.raises(InputError, match="a folder of its own"):
            stage.output_dir("x", {"paths": {"output_dir": folder}}, "hash")
    assert stage.output_dir("x", {"paths": {"output_dir": f"{tmp_path}/mine"}}, "hash") == tmp_path / "mine"


def test_any_folder_name_will_do(tmp_path):
    for name in NAMES:
        folder = tmp_path / name
        assert work(folder).folder == folder
        assert work(folder).finished
        assert (folder / "dataset" / "rows").read_text() == "r"


def test_the_manifest_says_what_was_done_with_what(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "PACKAGES", (*stage.PACKAGES, "no_such_package"))
    source = tmp_path / "in.txt"
    source.write_text("a")
    opened = stage.open_stage("demo", config_at(tmp_path / "out", size=1, batch_size=4), inputs=[source])
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
    assert running["versions"]["no_such_package"] == "not installed"
    assert running["revision"] == stage.revision()
    assert running["checksum"] == stage.checksum(running) and len(running["checksum"]) == 32
    atomic.write_text(opened.folder / "b.txt", "b")
    atomic.write_text(opened.folder / "a.txt", "a")
    assert opened.finish(rows=3) == tmp_path / "out"
    done = opened.manifest
    assert (done["status"], done["rows"], list(done["files"])) == ("finished", 3, ["a.txt", "b.txt"])
    assert done["files"]["a.txt"] == digests.digest(opened.folder / "a.txt")


@pytest.fixture
def another_process():
    """Forgets the revision, which is read once per process."""
    stage.revision.cache_clear()
    yield stage.revision.cache_clear
    stage.revision.cache_clear()


def test_the_revision_says_whether_the_tree_has_changes(tmp_path, monkeypatch, another_process):
    def git(*words):
        about = ["-c", "user.name=x", "-c", "user.email=x@y"]
        return subprocess.run(["git", *about, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    monkeypatch.setattr(stage, "__file__", str(tmp_path / "toolkit" / "stage.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "toolkit").mkdir()
    assert stage.revision() == "unknown"
    git("init", "--quiet")
    another_process()
    assert stage.revision() == "unknown", "a repository without commits"
    git("commit", "--quiet", "--allow-empty", "--message", "x")
    another_process()
    head = git("rev-parse", "--short", "HEAD").strip()
    assert stage.revision() == head
    (tmp_path / "new.txt").write_text("x")
    assert stage.revision() == head
    another_process()
    assert stage.revision() == head + "+"


def test_a_changed_or_foreign_manifest_is_refused_wherever_it_is_read(tmp_path):
    """By its own stage, by others, by a report: every changed bit of its facts is found."""
    folder = finished(tmp_path / "out", size=1)
    path, about = folder / stage.MANIFEST, stage.read_manifest(str(folder))
    for key, value in (("status", "running"), ("time", "later"), ("argv", [])):  # these may change
        path.write_text(json.dumps({**about, key: value}))
        assert stage.read_manifest(folder)[key] == value
    sequences = [json.dumps({**about, **change}) for change in ({"config": [1]}, {"inputs": 3, "files": []})]
    sequences.append(json.dumps({key: value for key, value in about.items() if key != "checksum"}))
    whole = json.dumps(about).encode()
    at = whole.index(b'"size": 1') + len(b'"size": ')
    sequences += [bytes([*whole[:at], whole[at] ^ 1 << bit, *whole[at + 1 :]]).decode("latin") for bit in range(8)]
    for text in sequences:
        path.write_text(text, encoding="latin")
        for read in (lambda: stage.open_stage("demo", config_at(folder, size=1)), lambda: read_folder(folder)):
            with pytest.raises(InputError, match=r"manifest.json"):
                read()
    path.write_text(sequences[0])
    with pytest.raises(InputError, match="manifest.json is damaged .*; delete it"):
        stage.read_manifest(folder)
    assert not stage.open_stage("demo", config_at(folder, size=1, overwrite=True)).finished
    path.write_text("[]")
    with pytest.raises(InputError, match="manifest.json is not a manifest of this toolkit; move it"):
        stage.read_manifest(folder)


# -- what is found again, and what is refused ------------------------------------------------------------------------------


def test_finished_work_is_found_without_writing(tmp_path):
    folder = tmp_path / "out"
    assert stage.finished_stage("demo", config_at(folder, size=1)) is None
    assert not folder.exists()
    stage.open_stage("demo", config_at(folder, size=1))
    assert stage.finished_stage("demo", config_at(folder, size=1)) is None  # under way
    finished(folder, size=1)
    reopened = stage.finished_stage("demo", config_at(folder, size=1, batch_size=7, kind="x"), ignore=["kind"])
    assert reopened is not None and reopened.folder == folder and reopened.finished and reopened.name == "demo"
    assert stage.finished_stage("demo", config_at(folder, size=2)) is None
    assert stage.finished_stage("other", config_at(folder, size=1)) is None
    assert stage.finished_stage("demo", config_at(folder, size=1), inputs=[folder / "a.txt"]) is None
    overwriting = OmegaConf.merge(config_at(folder, size=1), {"overwrite": True})
    assert stage.finished_stage("demo", overwriting) is None


def test_inputs_count_by_their_content(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    inputs, cfg = [tmp_path / "a.txt", tmp_path / "b.txt"], config_at(tmp_path / "out")
    stage.open_stage("demo", config_at(tmp_path / "before"))
    with pytest.raises(StaleError, match=r"its inputs have changed \(.*a.txt, .*b.txt\)"):
        stage.open_stage("demo", config_at(tmp_path / "before"), inputs=inputs)
    stage.open_stage("demo", cfg, inputs=inputs).finish()
    moved = [path.rename(tmp_path / f"moved-{path.name}") for path in inputs]
    assert stage.open_stage("demo", cfg, inputs=moved).finished
    with pytest.raises(StaleError, match=r"its inputs have changed \(fewer than before\)"):
        stage.open_stage("demo", cfg, inputs=moved[:1])
    moved[1].write_text("changed")
    with pytest.raises(StaleError, match=r"its inputs have changed \([^ ]*b.txt\);"):
        stage.open_stage("demo", cfg, inputs=moved)
    cfg.overwrite = True
    assert not stage.open_stage("demo", cfg, inputs=moved).finished


def test_other_work_is_refused_with_the_first_difference(tmp_path):
    folder = finished(tmp_path / "out", size=1, kind="a")
    for values, reason in (
        ({"size": 2, "kind": "b"}, "kind was 'a', is 'b'"),
        ({"size": 1}, "kind was 'a', is None"),
        ({"size": 1, "kind": "a", "more": {"x": 0}}, "more.x was None, is 0"),
    ):
        with pytest.raises(StaleError, match=f"{reason}; choose another paths.output_dir or overwrite=true$"):
            stage.open_stage("demo", config_at(folder, **values))
    with pytest.raises(StaleError, match="it was made by demo, not other"):
        stage.open_stage("other", config_at(folder, size=1, kind="a"))


@pytest.mark.parametrize("journaled", [True, False])
def test_damaged_files_stop_a_stage_unless_it_repairs_them_itself(tmp_path, capsys, journaled):
    folder = finished(tmp_path / "out", files=("a.txt", "b.txt"))
    if not journaled:  # then the manifest says what was there
        (folder / journal.JOURNAL).unlink()
    assert stage.finished_stage("demo", config_at(folder)) is not None
    for content in ("changed", ""):
        (folder / "a.txt").write_text(content)
        for find in (stage.finished_stage, stage.open_stage):
            with pytest.raises(InputError, match="^[^\n]*a.txt is (damaged|empty)[^\n]*delete it and run[^\n]*$"):
                find("demo", config_at(folder))
    if not journaled:
        return
    (folder / "a.txt").write_text("changed")
    assert stage.finished_stage("demo", config_at(folder), repairs=True) is None
    assert "a.txt is damaged, made again\n" in capsys.readouterr().out
    opened = stage.open_stage("demo", config_at(folder), repairs=True)
    assert not opened.finished and opened.manifest["status"] == "running"


def test_missing_files_are_named_and_checkpoints_may_go(tmp_path, capsys):
    names = tuple(f"{i:02d}.txt" for i in range(11))
    folder = finished(tmp_path / "out", files=(*names, "checkpoints/last", "figures/one"))
    for gone, said in (
        (("checkpoints/last", "figures/one"), ""),
        (names[:8], f"{folder}: {', '.join(names[:8])} missing, made again\n"),
        (names[8:9], f"{folder}: {', '.join(names[:8])} and 1 more missing, made again\n"),
    ):
        for name in gone:
            (folder / name).unlink()
        assert (stage.finished_stage("demo", config_at(folder)) is None) == bool(said)
        assert capsys.readouterr().out == said
    assert not stage.open_stage("demo", config_at(folder)).finished


def test_what_was_asked_is_known_by_its_keys_and_contents(tmp_path):
    cfg = OmegaConf.create({"size": 1, "name": "a", "track": "x"})
    hashed = stage.settings_hash("demo", cfg, ["size"])
    assert hashed == stage.settings_hash("demo", OmegaConf.create({"size": 1, "name": "b"}), ["size", "track"])
    others = [(["size", "name"], {}), (["size", "missing"], {}), (["size"], {"more": 1}), (["size"], {"more": 2})]
    assert len({hashed, *(stage.settings_hash("demo", cfg, keys, **more) for keys, more in others)}) == 5
    named = []
    for name, text in (("one", "a"), ("two", "a"), ("three", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "prompts.jsonl").write_text(text)
        prompts = OmegaConf.create({"prompts": {"path": str(tmp_path / name / "prompts.jsonl")}})
        named.append(stage.settings_hash("demo", prompts, ["prompts"]))
    assert named[0] == named[1] != named[2]


def test_a_local_prompts_file_is_an_input(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("{}")
    for path, files in ((str(file), [str(file)]), ("org/on-the-hub", []), (str(tmp_path), []), (None, [])):
        assert stage.prompt_files(OmegaConf.create({"prompts": {"path": path}})) == files
    assert stage.prompt_files(OmegaConf.create({"prompts": {"name": "x"}})) == []
    grammar = tmp_path / "answer.lark"
    grammar.write_text('start: "a"')
    rows = [{"grammar": str(grammar)}, {"grammar": {}}, {"grammar": "a|b"}, ["grammar"], {"grammar": str(grammar)}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"grammar"')
    assert stage.prompt_files(OmegaConf.create({"prompts": {"path": str(file)}})) == [str(file), str(grammar)]


def test_a_run_whose_every_prompt_failed_is_an_error(tmp_path):
    stage.check_some_done(0, 0, None, tmp_path)
    stage.check_some_done(2, 3, "too long", tmp_path)
    with pytest.raises(InputError, match=f"every one of 3 prompts failed, first: too long; the rows are in {tmp_path}"):
        stage.check_some_done(3, 3, "too long", tmp_path)


# -- what a stage may write over and delete ---------------------------------------------------------------------------------


def test_overwriting_deletes_the_stages_own_files_and_names_the_others(tmp_path, capsys):
    folder = work(tmp_path / "out").folder
    foreign = [folder / "thesis.txt", folder / "parts" / "mine.txt", folder / "dataset" / "notes", folder / ".hidden"]
    for path in foreign:
        path.write_text("years of work")
    work(folder, size=2, overwrite=True)
    assert all(path.read_text() == "years of work" for path in foreign)
    assert not (folder / "shard-1.txt").exists() and (folder / "shard-2.txt").exists()
    said = capsys.readouterr().err
    assert all(path.relative_to(folder).as_posix() in said for path in foreign)
    assert ".lock" not in said and journal.JOURNAL not in said and "manifest.json" not in said and said.count("\n") == 1
    assert set(stage.read_manifest(folder)["files"]) == {"shard-2.txt", "parts/a.txt", "dataset/rows"}


@pytest.mark.parametrize("manifest", ['{"name": "web app", "icons": []}', "[]", "no json", None])
def test_a_foreign_folder_is_left_as_it_is(tmp_path, manifest):
    names = {"app.js"} if manifest is None else {"manifest.json", "app.js"}
    for name in names:
        (tmp_path / name).write_text("code" if name == "app.js" else manifest)
    for overwrite in (True, *([False] if manifest else [])):
        with pytest.raises(InputError, match="manifest.json|other work|was not made by this toolkit"):
            work(tmp_path, overwrite=overwrite)
    assert {path.name for path in tmp_path.iterdir()} == names and (tmp_path / "app.js").read_text() == "code"


def test_a_manifest_without_a_list_of_files_is_not_overwritten(tmp_path):
    folder = finished(tmp_path / "out")
    (folder / journal.JOURNAL).unlink()
    with pytest.raises(InputError, match="out is not overwritten: .* lists no files"):
        stage.open_stage("demo", config_at(folder, overwrite=True))
    assert (folder / "a.txt").exists()
    assert not stage.open_stage("demo", config_at(tmp_path / "new", overwrite=True)).finished


def test_nothing_but_true_overwrites(tmp_path):
    folder = work(tmp_path / "out").folder
    for word in ("no", "true", 1, None):
        with pytest.raises(StaleError):
            work(folder, size=2, overwrite=word)
    assert (folder / "shard-1.txt").exists()


def test_a_file_that_is_not_the_stages_is_not_written_over(tmp_path):
    opened = stage.open_stage("demo", config_at(tmp_path / "out"))
    path = opened.folder / "metrics.json"
    path.write_text("mine")
    with pytest.raises(InputError, match="metrics.json was not made by this stage and is left alone"):
        atomic.write_json(path, {})
    assert path.read_text() == "mine"


def test_folders_of_other_programs_and_half_written_files_go_too(tmp_path):
    opened = stage.open_stage("demo", config_at(tmp_path / "out"))
    run = opened.folder / "wandb" / "run-1"
    run.mkdir(parents=True)
    (run / "log").write_text("x")
    journal.note(run, folder=True)
    journal.note(opened.folder / "shard", temporary=".shard.1.tmp")
    (opened.folder / ".shard.1.tmp").write_text("half")
    stage.open_stage("demo", config_at(tmp_path / "out"))
    assert not (opened.folder / ".shard.1.tmp").exists()
    work(tmp_path / "out", overwrite=True)
    assert not (opened.folder / "wandb").exists()


def test_a_journal_cannot_lead_out_of_its_folder(tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("x")
    folder = work(tmp_path / "out").folder
    with open(folder / journal.JOURNAL, "a") as file:
        for path in ("../precious.txt", str(precious)):
            file.write(
                json.dumps({"path": path, "sha256": "0"}) + "\n" + json.dumps({"path": path, "folder": True}) + "\n"
            )
    work(folder, size=2, overwrite=True)
    assert precious.exists()


def test_removed_subfolders_hold_what_others_wrote(tmp_path):
    opened = stage.open_stage("demo", config_at(tmp_path / "out"))
    atomic.write_text(opened.folder / "parts" / "a.txt", "a")
    atomic.write_text(opened.folder / "b.txt", "b")
    (opened.folder / "parts" / "mine.txt").write_text("mine")
    opened.remove("parts")
    assert {path.name for path in opened.folder.rglob("*.txt")} == {"b.txt", "mine.txt"}


def test_files_are_whole_or_absent(tmp_path):
    def half(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    atomic.write_text(tmp_path / "a.txt", "old")
    with pytest.raises(InputError, match="could not write .*a.txt: No space left on device; nothing was changed there"):
        atomic.write_atomic(tmp_path / "a.txt", half)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_journal_that_was_made_again_under_the_same_inode_is_read_from_its_beginning(tmp_path):
    for names in ("ab", "cdefgh"):
        (tmp_path / journal.JOURNAL).write_text("")
        journal.begin(tmp_path)
        for name in names:
            journal.note(tmp_path / name, sha256="0")
        assert set(journal.read(tmp_path).files) == set(names)


def folders_fail(monkeypatch, name, number):
    """Let `os.fsync` or `os.open` of a folder end in an error, as file systems do that lack it."""
    function = getattr(os, name)

    def failing(file, *args, **options):
        if os.path.isdir(file):  # a path, or an open one
            raise OSError(number, os.strerror(number))
        return function(file, *args, **options)

    monkeypatch.setattr(os, name, failing)


@pytest.mark.parametrize(
    ("name", "number"), [("fsync", errno.EINVAL), ("fsync", errno.ENOTSUP), ("open", errno.EACCES)]
)
def test_where_folders_cannot_be_flushed_a_stage_ends_well(tmp_path, monkeypatch, name, number):
    folders_fail(monkeypatch, name, number)
    assert work(tmp_path / "out").finished
    assert atomic.read_json(atomic.write_json(tmp_path / "a.json", [1])) == [1]


def test_what_fails_after_a_file_is_in_place_says_so(tmp_path, monkeypatch):
    atomic.write_text(tmp_path / "a.txt", "old")
    folders_fail(monkeypatch, "fsync", errno.EIO)
    with pytest.raises(InputError, match="a.txt was written, but may be lost .*: Input/output error") as caught:
        atomic.write_text(tmp_path / "a.txt", "new")
    assert "nothing was changed" not in str(caught.value) and (tmp_path / "a.txt").read_text() == "new"


# -- who works in a folder, and where nothing can be written ------------------------------------------------------------------


def hold(folder: str, pipe) -> None:
    stage.open_stage("demo", config_at(Path(folder), size=1))
    pipe.send(os.getpid())
    pipe.recv()


def test_a_second_process_says_who_works_there_and_takes_over_when_that_one_has_died(tmp_path):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(str(tmp_path / "out"), theirs))
    process.start()
    number = ours.recv()
    with pytest.raises(InputError, match=f"out is in use by process {number} on .*: wait until it has ended") as caught:
        work(tmp_path / "out")
    assert "\n" not in str(caught.value)
    os.kill(number, signal.SIGKILL)
    process.join()
    assert (tmp_path / "out" / ".lock").exists()  # it is still there
    assert work(tmp_path / "out").finished
    assert not (tmp_path / "out" / ".lock").exists()


def test_parts_of_one_folder_are_worked_on_by_several_processes(tmp_path):
    cfg = config_at(tmp_path / "out")
    one = stage.open_stage("demo", cfg, shared="0")
    journal.note(one.folder / "shard", temporary=".shard.1.tmp")
    (one.folder / ".shard.1.tmp").write_text("half")
    two = stage.open_stage("demo", cfg, shared="1")
    assert (one.folder / ".shard.1.tmp").exists()
    assert {path.name for path in one.folder.glob(".lock*")} == {".lock-0", ".lock-1"}
    one.finish()
    assert {path.name for path in two.folder.glob(".lock*")} == {".lock-1"}


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("mkdir", errno.EACCES),
        ("fsync", errno.EIO),
        ("replace", errno.ENOSPC),
        ("open", errno.EROFS),
        ("open", errno.EDQUOT),
    ],
)
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, number, call):
    def fails(*args, **options):
        raise OSError(number, os.strerror(number))

    if call == "mkdir":
        monkeypatch.setattr(Path, "mkdir", fails)
    else:
        monkeypatch.setattr(os, call, fails)
    with pytest.raises(InputError, match=os.strerror(number)) as caught:
        work(tmp_path / "out")
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert work(tmp_path / "out").finished


def test_finished_work_is_found_in_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    work(tmp_path / "out")

    def fails(*args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for module, name in ((os, "fsync"), (os, "replace"), (Path, "mkdir"), (Path, "touch")):
        monkeypatch.setattr(module, name, fails)
    assert stage.open_stage("demo", config_at(tmp_path / "out", size=1)).finished
    with pytest.raises(StaleError):
        stage.open_stage("demo", config_at(tmp_path / "out", size=2))


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
