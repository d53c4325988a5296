"""What a stage may delete, who may work in its folder, and what is said where nothing can be written."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from toolkit.config import escaped
from toolkit.errors import InputError, StaleError
from toolkit.files import atomic, journal
from toolkit.runs import stage


def config_of(folder: Path, **values):
    return OmegaConf.create(
        {"paths": {"root_dir": None, "output_dir": escaped(str(folder))}, "overwrite": False, **values}
    )


def work(folder: Path, size: int = 1, overwrite: bool | str = False) -> stage.Stage:
    """A stage that writes a file, a file in a subfolder, and a folder."""
    opened = stage.open_stage("demo", config_of(folder, size=size, overwrite=overwrite))
    if not opened.finished:
        atomic.write_text(opened.folder / f"shard-{size}.txt", str(size))
        atomic.write_text(opened.folder / "parts" / "a.txt", "a")
        atomic.write_folder(opened.folder / "dataset", lambda place: (place.mkdir(), (place / "rows").write_text("r")))
        opened.finish()
    return opened


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


@pytest.mark.parametrize("manifest", ['{"name": "web app", "icons": []}', "[]", "no json"])
def test_a_foreign_manifest_protects_its_folder(tmp_path, manifest):
    (tmp_path / "manifest.json").write_text(manifest)
    (tmp_path / "app.js").write_text("code")
    for overwrite in (True, False):
        with pytest.raises(InputError, match="manifest.json|other work"):
            work(tmp_path, overwrite=overwrite)
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", "app.js"}


@pytest.mark.parametrize("word", ["no", "off", "false", "yes", "", 0, 1, None])
def test_only_a_boolean_says_whether_to_overwrite(tmp_path, word):
    folder = work(tmp_path / "out").folder
    with pytest.raises(InputError, match="overwrite: expected true or false"):
        work(folder, overwrite=word)
    assert (folder / "shard-1.txt").exists()


def test_a_file_that_is_not_the_stages_is_not_written_over(tmp_path):
    opened = stage.open_stage("demo", config_of(tmp_path / "out"))
    mine = opened.folder / "metrics.json"
    mine.write_text("mine")
    with pytest.raises(InputError, match="metrics.json was not made by this stage and is left alone"):
        atomic.write_json(mine, {})
    assert mine.read_text() == "mine"


def test_folders_of_other_programs_and_half_written_files_go_too(tmp_path):
    opened = stage.open_stage("demo", config_of(tmp_path / "out"))
    run = opened.folder / "wandb" / "run-1"
    run.mkdir(parents=True)
    (run / "log").write_text("x")
    journal.note(run, folder=True)
    journal.note(opened.folder / "shard", temporary=".shard.1.tmp")
    (opened.folder / ".shard.1.tmp").write_text("half")
    stage.open_stage("demo", config_of(tmp_path / "out"))
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


def test_missing_files_are_made_again_and_damaged_ones_named(tmp_path):
    opened = work(tmp_path / "out")
    (opened.folder / "shard-1.txt").unlink()
    work(tmp_path / "out")
    assert (opened.folder / "shard-1.txt").read_text() == "1"
    for content, words in (("2", "is damaged"), ("", "is empty")):
        (opened.folder / "shard-1.txt").write_text(content)
        with pytest.raises(InputError, match=f"shard-1.txt {words}.*delete it and run") as caught:
            work(tmp_path / "out")
        assert "\n" not in str(caught.value)
    (opened.folder / "shard-1.txt").unlink()
    assert work(tmp_path / "out").finished


def test_every_changed_bit_of_a_manifests_facts_is_found(tmp_path):
    path = work(tmp_path / "out").folder / "manifest.json"
    whole = path.read_bytes()
    place = whole.index(b'"size": 1') + len(b'"size": ')
    for bit in range(8):
        changed = bytearray(whole)
        changed[place] ^= 1 << bit
        path.write_bytes(changed)
        with pytest.raises(InputError):
            work(tmp_path / "out")


# -- one process at a time ------------------------------------------------------------------------------------------------


def _hold(folder: str, pipe) -> None:
    stage.open_stage("demo", config_of(Path(folder), size=1))
    pipe.send(os.getpid())
    pipe.recv()


def test_a_second_process_says_who_works_there_and_takes_over_when_that_one_has_died(tmp_path):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(str(tmp_path / "out"), theirs))
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


# -- where nothing can be written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("call", ["mkdir", "fsync", "replace", "open"])
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
    assert stage.open_stage("demo", config_of(tmp_path / "out", size=1)).finished
    with pytest.raises(StaleError):
        stage.open_stage("demo", config_of(tmp_path / "out", size=2))


NAMES = [
    *("a b", "a,b", "a=b", "it's", 'say "x"', "[1]", "{x}", "${y}", "ü\u2028é", "#1", "~x", "a:b", "a::b", "%s", "*"),
    *("\\", r"a\nb", "a\nb", "\udcff"),
]


@pytest.mark.parametrize("name", NAMES)
def test_any_folder_name_will_do(tmp_path, name):
    folder = tmp_path / name
    assert work(folder).folder == folder
    assert work(folder).finished
    assert (folder / "dataset" / "rows").read_text() == "r"


def test_the_root_of_the_file_system_and_home_are_no_output_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("/", "//", "/usr/..", str(tmp_path), f"{tmp_path}/below/.."):
        with pytest.raises(InputError, match="a folder of its own"):
            stage.output_dir("x", {"paths": {"output_dir": folder}}, "hash")
    assert stage.output_dir("x", {"paths": {"output_dir": f"{tmp_path}/mine"}}, "hash") == tmp_path / "mine"
