"""Files: lines end at newlines alone, prompts files name their faults, damage is found on reading; tables on the console."""

from __future__ import annotations

import ast
import io
import json
import os
import random
import re
from pathlib import Path

import pandas as pd
import pytest
import torch

from analysis.tables.files import read_parquet, write_parquet
from data_gen.shards import read_shard, write_shard
from toolkit.acceptance.head import AcceptanceHead
from toolkit.errors import InputError
from toolkit.files import journal, terminal
from toolkit.files.atomic import read_json, write_json, write_text
from toolkit.files.tensors import load_tensors, save_tensors
from toolkit.files.text import first_line, lines_of
from toolkit.models.prompts import Prompt, read_jsonl
from toolkit.training.checkpoints import AtomicCheckpointIO, read_checkpoint

ROOT = Path(__file__).parents[2]
ODD = ["\u0085", "\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"]


# -- lines ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["toolkit", "data_gen", "analysis", "benchmarks"])
def test_nothing_splits_text_at_other_characters_nor_compares_fingerprints_as_texts(package):
    """str.splitlines would split a text that holds U+2028; a fingerprint refuses the same weights in another format."""
    places = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            splits = isinstance(node, ast.Attribute) and node.attr == "splitlines"
            compares = isinstance(node, ast.Compare) and "fingerprint" in ast.unparse(node)
            if splits or (compares and path != ROOT / "toolkit" / "models" / "fingerprint.py"):
                places.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not places


def test_lines_are_split_at_newlines_only():
    for odd in ODD:
        assert lines_of(f"a{odd}b\nc") == [f"a{odd}b", "c"]
        assert first_line(f"\n a{odd}b \nc") == f"a{odd}b"
    assert lines_of("a\nb\n") == ["a", "b"] == lines_of("a\nb")
    assert lines_of("a\n\n", keep_ends=True) == ["a\n", "\n"]
    assert lines_of("") == []
    assert first_line(ValueError()) == "ValueError"


# -- prompts ----------------------------------------------------------------------------------------------------------------


def prompts_file(folder: Path, *lines) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_prompts_are_read_in_order(tmp_path):
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"id": "x", "messages": messages, "answer": 42, "category": "chat"}
    first, second = read_jsonl(prompts_file(tmp_path, {"id": 7, "prompt": "a\u2028b"}, "", chat))
    assert first == Prompt("7", "a\u2028b")
    assert first.content == "a\u2028b"
    assert second == Prompt("x", None, "42", tuple(messages), {"category": "chat"})
    assert second.content == messages


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"id": 1, "prompt": "a"', "expected JSON"),
        ({"id": "0", "prompt": "a"}, "the id '0' was used before"),
        ({"id": 1, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "got both"),
        ({"id": 1, "messages": [{"role": "user"}]}, "expected messages as a list of"),
    ],
)
def test_a_mistake_names_its_line(tmp_path, line, words):
    path = prompts_file(tmp_path, {"id": 0, "prompt": "fine"}, line)
    with pytest.raises(InputError) as caught:
        read_jsonl(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 2: ") and words in message and "\n" not in message


# -- damage -----------------------------------------------------------------------------------------------------------------


def tensors(folder: Path) -> Path:
    held = {"a": torch.arange(5), "b": torch.ones(2, 3, dtype=torch.bfloat16), "c": torch.tensor([True, False])}
    return save_tensors(folder / "t.safetensors", held, {"about": "x"})


def head(folder: Path) -> Path:
    return AcceptanceHead(4).save(folder / "head", {"note": 1})


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
    "weights": (lambda f: head(f) / AcceptanceHead.weights_file, lambda path: AcceptanceHead.load(path.parent), False),
    "head config": (
        lambda f: head(f) / AcceptanceHead.config_file,
        lambda path: AcceptanceHead.load(path.parent),
        False,
    ),
    "shard": (shard, lambda path: read_shard(path, "job"), False),
    # These have a checksum in their output folder's journal, and are checked there.
    "checkpoint": (checkpoint, read_checkpoint, True),
    "table": (table, read_parquet, True),
    "json": (lambda folder: write_json(folder / "summary.json", {"a": 1.5}), read_json, True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_on_reading(tmp_path, kind):
    """Every changed bit, every cut, every empty and every missing file, in one line."""
    make, read, journaled = KINDS[kind]
    if journaled:
        journal.begin(tmp_path)
    path = make(tmp_path)
    whole, rng, before = path.read_bytes(), random.Random(0), repr(read(path))
    for damage in ["flip"] * 40 + ["cut"] * 40 + ["empty", "missing"]:
        index = rng.randrange(len(whole))
        changed = bytearray(whole)
        changed[index] ^= 1 << rng.randrange(8)
        path.write_bytes({"flip": bytes(changed), "cut": whole[:index]}.get(damage, b""))
        if damage == "missing":
            path.unlink()
        try:
            contents = repr(read(path))
        except InputError as error:
            message = str(error)
            assert "\n" not in message and (path.name in message or str(path.parent) in message)
        else:  # padding of a header, or the last newline; where a journal lists the file, that is found, too
            assert contents == before and damage in ("flip", "cut") and not journaled, (damage, index)


def test_a_changed_checkpoint_outside_of_a_folder_is_found(tmp_path):
    path = checkpoint(tmp_path)
    whole, refused = path.read_bytes(), 0
    data = whole.index(b"data/0") + 64  # the weights' bytes
    for at in range(data, data + 120):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            read_checkpoint(path)
        except InputError:
            refused += 1
    assert refused >= 80


def test_lone_surrogates_can_be_written(tmp_path):
    write_json(tmp_path / "a.json", {"text": "a\ud800b"})
    assert read_json(tmp_path / "a.json") == {"text": "a\ud800b"}
    write_text(tmp_path / "b.txt", "\udcff")


# -- tables on the console: what fits is shown, the first columns first, and no number is cut ------------------------------

NAMES = ["method", "setting", "throughput", "discarded_tokens_per_target_forward", "interval"]
ROWS = [
    ["speculative", "policy.num_drafted=3,policy.threshold=0.25", "1.543", "0.4583", "0.823 [0.790, 0.853]"],
    ["rate", "cost_ratio=0.2", "12,345", "1e-05", "-0.1 [-0.2, +0.1]"],
]
NUMERIC = [False, False, True, True, True]
NUMBER = re.compile(r"[+-]?\d[\d.,]*(?:e-?\d+)?")


@pytest.fixture
def printed(capsys, monkeypatch):
    def output(width, rest="summary.csv", rows=ROWS):
        monkeypatch.setenv("COLUMNS", str(width))
        terminal.print_table("title", NAMES, rows, NUMERIC, rest)
        return capsys.readouterr().out

    return output


def test_lines_fit_what_is_left_out_is_said_and_no_number_is_cut(printed):
    whole = {number for row in ROWS for text in row for number in NUMBER.findall(text)}
    for width in range(11, 140):
        *table, note = printed(width).strip("\n").split("\n")
        assert max(map(len, table)) <= max(width, 20), width
        assert set(NUMBER.findall("\n".join(table))) <= whole, width
        if width < 80:
            assert re.fullmatch(r"\d of 5 columns do not fit; all of them: summary.csv", note)
    said = printed(200)
    assert "do not fit" not in said and all(text in said for row in ROWS for text in row)


def test_the_first_columns_come_before_later_ones_and_one_that_is_too_wide_is_passed_over(printed):
    said = printed(60)
    assert "throughput" in said and "interval" not in said and "speculative" in said
    said = printed(80, rows=[[first, "x" * 90, *others] for first, _, *others in ROWS])
    assert "x" * 10 not in said and "throughput" in said and "1 of 5 columns do not fit" in said
    assert "y" * 50 in printed(30, rows=[["y" * 50, *others] for _, *others in ROWS]), "the first column is whole"
    assert "COLUMNS=200 shows more" in printed(40, rest=None), "without a file"


def test_headings_are_broken_between_words_and_wide_characters_take_two_cells(printed, capsys, monkeypatch):
    words = re.findall(r"[a-z_]+", printed(80))
    assert {"discarded_", "forward"} <= set(words) and "".join(words).count("discarded") == 1
    monkeypatch.setenv("COLUMNS", "12")
    terminal.print_table("", ["a", "b"], [["漢字漢", "12345"]], [False, True], "f.csv")
    assert "1 of 2 columns" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "60")
    terminal.print_table("a title that is wider than its table", ["a"], [["1"]])
    assert "a title that is wider than its table\n" in capsys.readouterr().out


def test_the_width_of_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        isatty = lambda self: True

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert terminal.width() == 120
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: os.terminal_size((91, 24)))
    assert terminal.width() == 91
