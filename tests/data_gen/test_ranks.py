"""Stages shared by several processes: what is joined equals what one process makes, whichever ends last."""

import json
from pathlib import Path

import pytest

from data_gen import mix, responses, traces
from toolkit.config import compose
from toolkit.errors import InputError
from toolkit.files import lock
from toolkit.runs.stage import MANIFEST, read_manifest

STAGES = {"responses": responses, "mix": mix, "traces": traces}


@pytest.fixture
def words(checkpoints, tmp_path, tiny_responses):
    """Overrides of a stage that writes at least five parts."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": f"the cat {i}"}) + "\n" for i in range(11)))
    pair = [f"pair.target={checkpoints[0]}", f"pair.draft={checkpoints[1]}"]
    return {
        "responses": [*pair, "prompts=jsonl", f"prompts.path={path}", "shard_size=2", "sampling.max_new_tokens=5"],
        "mix": [*pair, f"responses={tiny_responses}"],
        "traces": [*pair, f"responses={tiny_responses}", "shard_size=8", "limit=20", "replicates=2", "max_drafted=2"],
    }


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(mix, "PART_ROWS", 12)


def make(stage: str, words, folder: Path, *more: str) -> Path:
    return STAGES[stage].run(compose(stage, [*words[stage], f"paths.output_dir={folder}", *more]))


def content(folder: Path) -> dict[str, str]:
    """Digests of all files that a finished stage lists; caches of data sets, which hold times, apart."""
    files = read_manifest(folder)["files"]
    return {name: digest for name, digest in files.items() if not name.endswith(("state.json", "dataset_info.json"))}


@pytest.mark.parametrize("stage", STAGES)
def test_the_parts_of_three_processes_are_those_of_one(words, tmp_path, stage, capsys):
    """One process then makes what others have not, and finds finished work."""
    whole = make(stage, words, tmp_path / "whole")
    for rank in (2, 0, 1):
        folder = make(stage, words, tmp_path / "shared", "world_size=3", f"rank={rank}")
        assert (read_manifest(folder)["status"] == "finished") == (rank == 1)
    assert "parts are not there yet" in capsys.readouterr().out
    assert content(tmp_path / "shared") == content(whole) and len(content(whole)) > 1
    assert not list((tmp_path / "shared").glob(".lock*"))
    told = {"argv", "time", "checksum", "files"}
    facts = [{k: v for k, v in read_manifest(one).items() if k not in told} for one in (whole, tmp_path / "shared")]
    assert facts[0] == facts[1]
    make(stage, words, tmp_path / "begun", "world_size=2", "rank=1")
    folder = make(stage, words, tmp_path / "begun")
    assert content(folder) == content(whole)
    written = (folder / MANIFEST).stat().st_mtime_ns
    make(stage, words, tmp_path / "begun", "world_size=2", "rank=0")
    assert (folder / MANIFEST).stat().st_mtime_ns == written


def test_while_another_process_joins_a_process_only_ends(words, tmp_path, monkeypatch, capsys):
    make("mix", words, tmp_path / "shared", "world_size=2", "rank=1")
    take = lock.take

    def held(folder, name=".lock"):
        if name == ".lock-join":
            raise InputError("in use")
        take(folder, name)

    with monkeypatch.context() as patch:
        patch.setattr(lock, "take", held)
        folder = make("mix", words, tmp_path / "shared", "world_size=2", "rank=0")
    assert read_manifest(folder)["status"] == "running" and "another process joins" in capsys.readouterr().out
    assert read_manifest(make("mix", words, folder, "world_size=2", "rank=0"))["status"] == "finished"
    with pytest.raises(InputError, match=r"rank: expected 0 to 1 \(world_size - 1\), got 2"):
        make("mix", words, tmp_path / "other", "world_size=2", "rank=2")
