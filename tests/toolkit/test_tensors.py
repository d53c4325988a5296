"""Files with checksums: every changed bit, every cut and every empty file is found on reading, in one line."""

from __future__ import annotations

import random
from pathlib import Path

import pandas as pd
import pytest
import torch

from analysis.tables.files import read_parquet, write_parquet
from data_gen.shards import read_shard, write_shard
from toolkit.acceptance.head import AcceptanceHead
from toolkit.errors import InputError
from toolkit.files import journal
from toolkit.files.atomic import read_json, write_json, write_text
from toolkit.files.tensors import load_tensors, save_tensors
from toolkit.training.checkpoints import AtomicCheckpointIO, read_checkpoint

FLIPS = 60


def tensors(folder: Path) -> Path:
    held = {"a": torch.arange(5), "b": torch.ones(2, 3, dtype=torch.bfloat16), "c": torch.tensor([True, False])}
    return save_tensors(folder / "t.safetensors", held, {"about": "x"})


def weights(folder: Path) -> Path:
    return AcceptanceHead(4).save(folder / "head", {"note": 1}) / AcceptanceHead.weights_file


def head_config(folder: Path) -> Path:
    return AcceptanceHead(4).save(folder / "head", {"note": 1}) / AcceptanceHead.config_file


def shard(folder: Path) -> Path:
    row = {"row": 0, "text": "a\u2028b\u0085c\ud800d"}
    write_shard(folder, 0, "job", [row])
    assert read_shard(folder / "shard-00000.jsonl", "job") == [row]
    return folder / "shard-00000.jsonl"


def checkpoint(folder: Path) -> Path:
    about = {"about": {}, "state_dict": {"weight": torch.randn(40)}}
    AtomicCheckpointIO().save_checkpoint(about, folder / "last.ckpt")
    return folder / "last.ckpt"


def table(folder: Path) -> Path:
    return write_parquet(pd.DataFrame({"a": range(20), "b": ["x"] * 20}), folder / "rows.parquet")


KINDS = {
    "tensors": (tensors, load_tensors, False),
    "weights": (weights, lambda path: AcceptanceHead.load(path.parent), False),
    "head config": (head_config, lambda path: AcceptanceHead.load(path.parent), False),
    "shard": (shard, lambda path: read_shard(path, "job"), False),
    # These have a checksum in their output folder's journal, and are checked there.
    "checkpoint": (checkpoint, read_checkpoint, True),
    "table": (table, read_parquet, True),
    "json": (lambda folder: write_json(folder / "summary.json", {"a": 1.5}), read_json, True),
}


def same(left, right) -> bool:
    return str(left) == str(right) if not isinstance(left, torch.Tensor) else torch.equal(left, right)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing"])
def test_damage_is_found_on_reading(tmp_path, kind, damage):
    make, read, journaled = KINDS[kind]
    if journaled:
        journal.begin(tmp_path)
    path = make(tmp_path)
    whole, rng, before = path.read_bytes(), random.Random(0), repr(read(path))
    for number in range(FLIPS if damage in ("flip", "cut") else 1):
        index = rng.randrange(len(whole))
        changed = bytearray(whole)
        changed[index] ^= 1 << rng.randrange(8)
        path.write_bytes({"flip": bytes(changed), "cut": whole[:index]}.get(damage, b""))
        if damage == "missing":
            path.unlink()
        try:
            found = repr(read(path))
        except InputError as error:
            message = str(error)
        else:  # padding of a header, or the last newline; where a journal lists the file, that is found, too
            assert found == before and damage in ("flip", "cut") and not journaled, (number, index)
            continue
        assert "\n" not in message and (path.name in message or str(path.parent) in message)


def test_a_truncated_file_of_a_checkpoint_outside_of_a_folder_is_found(tmp_path):
    path = checkpoint(tmp_path)
    whole, found = path.read_bytes(), 0
    data = whole.index(b"data/0") + 64  # the weights' bytes
    for place in range(data, data + 120):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        try:
            read_checkpoint(path)
        except InputError:
            found += 1
    assert found >= 80


def test_lone_surrogates_can_be_written(tmp_path):
    write_json(tmp_path / "a.json", {"text": "a\ud800b"})
    assert read_json(tmp_path / "a.json") == {"text": "a\ud800b"}
    write_text(tmp_path / "b.txt", "\udcff")
