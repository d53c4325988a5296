"""Responses: accounting, resuming after a kill, and what is refused."""

import json
from pathlib import Path

import pytest

from data_gen import responses
from data_gen.texts import read_responses
from toolkit import config
from toolkit.errors import InputError
from toolkit.files.atomic import read_json
from toolkit.runs import stage


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": i, "prompt": "the cat " * (1 + i % 5) + str(i), "answer": str(i)} for i in range(23)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def overrides(checkpoints, prompts_file: Path, folder: Path, *more: str) -> list[str]:
    target, draft = checkpoints
    return [
        f"pair.target={target}", f"pair.draft={draft}", "prompts=jsonl", f"prompts.path={prompts_file}", "shard_size=5",
        "sampling.max_new_tokens=12", "batch_size=4", f"paths.output_dir={folder}", *more,
    ]  # fmt: skip


def make(*args: object) -> Path:
    return responses.run(config.compose("responses", overrides(*args)))


def test_every_prompt_is_accounted_for(checkpoints, prompts_file, tmp_path):
    folder = make(checkpoints, prompts_file, tmp_path / "out", "max_prompt_tokens=10")
    manifest = read_json(folder / stage.MANIFEST)
    rows = manifest["rows"]
    assert rows["input"] == 23 == rows["done"] + rows["failed"] + rows["skipped"]
    assert rows["skipped"] > 0
    done = list(responses.read_rows(folder))
    assert len(done) == rows["done"]
    assert all(row["token_ids"] and row["answer"] == row["id"] for row in done)
    everything = list(responses.read_rows(folder, ("done", "failed", "skipped")))
    assert [row["row"] for row in everything] == list(range(23))
    assert {"config", "versions", "revision", "argv"} <= manifest.keys()


def test_a_prompt_too_long_for_the_model_fails_alone(checkpoints, prompts_file, tmp_path):
    with prompts_file.open("a") as file:
        file.write(json.dumps({"id": "long", "prompt": "x " * 400}) + "\n")
    folder = make(checkpoints, prompts_file, tmp_path / "out")
    assert read_json(folder / stage.MANIFEST)["rows"] == {"input": 24, "done": 23, "failed": 1, "skipped": 0}
    (failed,) = responses.read_rows(folder, ("failed",))
    assert "exceed the target's context of 256" in failed["error"]


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))}


def test_responses_depend_neither_on_the_batch_nor_on_where_work_stopped(checkpoints, prompts_file, tmp_path):
    whole = make(checkpoints, prompts_file, tmp_path / "whole")
    pieces = make(checkpoints, prompts_file, tmp_path / "pieces", "batch_size=1")
    assert shards(whole) == shards(pieces)
    for name in ("shard-00001.jsonl", "shard-00004.jsonl"):
        (pieces / name).unlink()
    make(checkpoints, prompts_file, tmp_path / "pieces")
    assert shards(whole) == shards(pieces)


def test_rows_draw_from_streams_of_their_own_whatever_the_size_of_a_shard(checkpoints, tmp_path):
    """One prompt, many times over: its responses differ, within a shard and across shards."""
    path = tmp_path / "same.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": "the cat"}) + "\n" for i in range(12)))
    tokens_by_size = []
    for size in (3, 12):
        folder = make(checkpoints, path, tmp_path / f"by_{size}", f"shard_size={size}")
        tokens_by_size.append([row["token_ids"] for row in responses.read_rows(folder)])
    assert tokens_by_size[0] == tokens_by_size[1]
    assert len({tuple(tokens) for tokens in tokens_by_size[0]}) > 9


def test_foreign_files_in_an_unfinished_folder_are_named_and_left_alone(checkpoints, prompts_file, tmp_path, capsys):
    whole, folder = make(checkpoints, prompts_file, tmp_path / "whole"), tmp_path / "out"
    make(checkpoints, prompts_file, folder, "world_size=2", "rank=1")
    (folder / "shard-old.jsonl").write_text("notes")
    make(checkpoints, prompts_file, folder)
    assert f"{folder}: shard-old.jsonl: not written by this stage, left alone" in capsys.readouterr().err
    ours = {name: text for name, text in shards(folder).items() if name != "shard-old.jsonl"}
    assert ours == shards(whole) and (folder / "shard-old.jsonl").read_text() == "notes"
    assert [path.name for path in read_responses(folder).inputs] == sorted(ours)


def test_a_shard_of_another_job_is_named(checkpoints, prompts_file, tmp_path):
    folder = make(checkpoints, prompts_file, tmp_path / "out")
    shard = folder / "shard-00002.jsonl"
    shard.write_text(shard.read_text().replace('"job": "', '"job": "0', 1))
    with pytest.raises(InputError, match=r"shard-00002.jsonl belongs to another job.*run data_gen.responses again$"):
        list(responses.read_rows(folder))


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(InputError, match="expected a responses folder"):
        list(responses.read_rows(tmp_path))
    stage.open_stage("mix", config.compose("mix", [f"paths.output_dir={tmp_path}", "responses=x"])).finish()
    with pytest.raises(InputError, match="got one of stage 'mix'"):
        list(responses.read_rows(tmp_path))


def test_texts_with_line_separators_finish_and_are_read_back(checkpoints, prompts_file, tmp_path, monkeypatch):
    """A response may hold U+2028 or U+0085, which str.splitlines takes for ends of lines."""
    prompts_file.write_text(
        json.dumps({"id": "a\u0085", "prompt": "the\u2028cat", "answer": "x\u2028y"}, ensure_ascii=False)
    )
    monkeypatch.setattr("toolkit.models.pair.ModelPair.text", lambda *_: "one\u2028two\u0085three\x0cfour")
    folder = make(checkpoints, prompts_file, tmp_path / "out")
    (row,) = responses.read_rows(folder)
    assert (row["text"], row["answer"], row["id"]) == ("one\u2028two\u0085three\x0cfour", "x\u2028y", "a\u0085")


def test_a_bad_prompt_fails_alone_and_all_bad_ones_are_an_error(checkpoints, prompts_file, tmp_path):
    bad = [{"id": "half", "prompt": "half \ud800"}, {"id": "chat", "messages": [{"role": "user", "content": "hi"}]}]
    prompts_file.write_text("".join(json.dumps(line) + "\n" for line in [*bad, {"id": "good", "prompt": "the cat"}]))
    folder = make(checkpoints, prompts_file, tmp_path / "out")
    rows = {row["id"]: row for row in responses.read_rows(folder, ("done", "failed"))}
    assert {name: row["status"] for name, row in rows.items()} == {"half": "failed", "chat": "failed", "good": "done"}
    assert "lone surrogate" in rows["half"]["error"] and "no chat template" in rows["chat"]["error"]
    prompts_file.write_text("".join(json.dumps(line) + "\n" for line in bad))
    for _ in range(2):  # at once, and when it is found finished
        with pytest.raises(InputError, match="every one of 2 prompts failed, first: the prompt holds a lone surrogate"):
            make(checkpoints, prompts_file, tmp_path / "none")


def test_rows_that_have_ended_are_kept_within_a_shard(checkpoints, prompts_file, tmp_path, monkeypatch):
    """Interrupted in the middle of a shard, the next call samples the other rows only, and all rows are as ever."""
    whole = list(responses.read_rows(make(checkpoints, prompts_file, tmp_path / "whole")))
    made, keep = [], responses.keep

    def interrupted(folder, number, job, entry):
        keep(folder, number, job, entry)
        made.append(entry["row"]["row"])
        if len(made) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(responses, "keep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(checkpoints, prompts_file, tmp_path / "cut")
    with pytest.raises(InputError, match="finished"):
        list(responses.read_rows(tmp_path / "cut"))
    assert not list(tmp_path.rglob("wandb*"))
    first = list(made)
    folder = make(checkpoints, prompts_file, tmp_path / "cut")
    assert sorted(made) == list(range(23)) and len(first) == 3, "no row was sampled twice"
    assert list(responses.read_rows(folder)) == whole
    assert not (folder / "rows").exists()


def test_a_full_disk_is_one_line(checkpoints, prompts_file, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    cfg = config.compose("responses", overrides(checkpoints, prompts_file, tmp_path / "out"))
    stage.open_stage("responses", cfg, inputs=stage.prompt_files(cfg), ignore=responses.IGNORED)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(InputError, match=r"could not write .*rows/00000.jsonl: No space left on device"):
            responses.run(cfg)
    assert not list((tmp_path / "out").glob("shard-*")) and responses.run(cfg) == tmp_path / "out"
