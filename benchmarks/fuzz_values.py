# ruff: noqa: E501
"""What the fuzzer puts instead of good values: for the command line and for Python, names with a letter wrong, files."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

HUGE = 10**18
# As they are written on the command line; {file}, {empty}, ... stand for paths (`scratch_paths`).
WORDS = (
    "nan", "inf", "-inf", "-1", "0", "1", "2", "1.5", "-0.0", "1e400", "1e-320", "0x10", "1_0", str(HUGE), f"-{HUGE}", "1e18", "true",
    "false", "null", "'null'", "'1'", "'nan'", "\"\"", "''", "", "hello", "ünï", "日本", "\"a b\"", "'é\u2028'", "[]", "[[]]", "[1,[2]]",
    "[1.5]", "[-1]", "[0]", "[nan]", "[null]", "[true]", "['']", "[a,a]", "[1,1]", "{}", "{a:1}", "{a:{b:1}}", "{_target_:os.getcwd}",
    "{_target_:os.nope}", "{_target_:1}", "???", "${nope}", "${oc.env:NOPE}", "${seed}", "${", "[1,2", "{a", "a:b", "1,2", "a=b", "\\",
    "$(ls)", "`ls`", "a\tb", "x" * 5000, ".", "~", "/dev/null", "{nowhere}", "{file}", "{empty}", "{other}", "{odd}",
    "range(1,3)", "choice(a,b)", "interval(0,1)", "glob(*)", "int('x')", "str(1)", "[[[[[[[[1]]]]]]]]", "val/typo", "toy/target", "gpt2x/y z",
)  # fmt: skip
LINES = (  # whole words
    "", " ", "=", "==", "a=", "=b", "a", "+", "~", "++", "~~a", "+=1", "+a", "+a=1", "++a=1", "~a=1", "~pair", "~sampling", "~paths", "[a]=1",
    "a.b.c=1", ".a=1", "a.=1", "a..b=1", "@a=1", "a@b=c", "pair@=toy", "/pair=toy", "pair/base=large", "ü=1", "日本=2", "a b=1", "--nope",
    "-x", "--", "---", "--help=3", "--cfg=nope", "--cfg", "--config-dir=/nowhere", "--config-dir", "--config-name=nope", "--config-name=",
    "--multirun=1", "--info=nope", "--package", "hydra.nope=1", "hydra=nope", "hydra/nope=x", "hydra.job.name=[", "+experimnt=toy_head",
    "experimnt=toy_head", "+experiment=toy_hed", "+debug=x", "debug=", "+hparams_search=nope", "method@rule=block", "rule@method.rule=blok",
    "override=1", "defaults=[]", "+defaults=[a]", "_target_=os.getcwd", "+_target_=os.nope", "_self_=1", "=nan", "\u202e=1", "-1", "nan",
)  # fmt: skip
PROMPTS: dict[str, bytes] = {
    "nothing": b"", "a newline": b"\n", "blanks": b"  \n\t\n", "no newline": b'{"id":1,"prompt":"Q: 1+1?"}', "not json": b"hello\n",
    "cut json": b'{"id":1,"prompt":"a"', "a list": b'[{"id":1,"prompt":"a"}]\n', "a number": b"3\n", "null": b"null\n",
    "no id": b'{"prompt":"a"}\n', "no prompt": b'{"id":1}\n', "null prompt": b'{"id":1,"prompt":null}\n',
    "number prompt": b'{"id":1,"prompt":3}\n', "list prompt": b'{"id":1,"prompt":["a"]}\n', "empty prompt": b'{"id":1,"prompt":""}\n',
    "list id": b'{"id":[1],"prompt":"a"}\n', "true id": b'{"id":true,"prompt":"a"}\n', "nan id": b'{"id":NaN,"prompt":"a"}\n',
    "same ids": b'{"id":1,"prompt":"a"}\n{"id":"1","prompt":"b"}\n', "BOM": b'\xef\xbb\xbf{"id":1,"prompt":"Q: 1+1?"}\n',
    "UTF-16": '{"id":1,"prompt":"a"}\n'.encode("utf-16"), "latin-1": b'{"id":1,"prompt":"\xe9"}\n', "zero byte": b'{"id":1,"prompt":"a\\u0000"}\n',
    "raw zero byte": b'{"id":1,"prompt":"a\x00"}\n', "surrogate": b'{"id":1,"prompt":"\\ud800"}\n', "surrogate id": b'{"id":"\\ud800","prompt":"a"}\n',
    "huge line": json.dumps({"id": 1, "prompt": "word " * 200_000}).encode(), "deep": b"[" * 100_000, "huge number": b'{"id":1' + b"0" * 5000 + b',"prompt":"a"}\n',
    "carriage returns": b'{"id":1,"prompt":"Q: 1+1?"}\r\n{"id":2,"prompt":"Q: 2+2?"}\r\n', "same key": b'{"id":1,"id":2,"prompt":"Q: 1?"}\n',
    "messages": b'{"id":1,"messages":[{"role":"user","content":"Hello"}]}\n', "no role": b'{"id":1,"messages":[{"content":"x"}]}\n',
    "both": b'{"id":1,"prompt":"a","messages":[]}\n', "no messages": b'{"id":1,"messages":[]}\n', "answer": b'{"id":1,"prompt":"Q: 1+1?","answer":{"a":[1]}}\n',
    "binary": bytes(range(256)),
}  # fmt: skip


def python_values() -> list[Any]:
    """Odd arguments, made anew."""
    return [
        None, True, False, 0, 1, -1, 2, 1.5, -0.5, math.nan, math.inf, -math.inf, HUGE, -HUGE, 10**30, 1e300, 5e-324, 1j, "", "hello",
        "nan", "1", "ü\x00", "\ud800", "x" * 5000, b"x", b"", [], [1], ["a"], ["a", 3], [""], [None], [[1]], [[]], [[-1]], [[True]],
        [[1.5]], [[[1]]], [[10**30]], [["a"]], [{}], [{"role": "user"}], [math.nan], [True], (), ("a",), {}, {"a": 1}, {1: 2},
        set(), {1}, object(), object, len, range(3), np.int64(3), np.float32(0.5), np.array([1, 2]), np.ones((2, 2)), torch.tensor(3),
        torch.tensor(0.5), torch.ones(2, 2), torch.float32, Path("/nowhere"), Path(), iter([1]), ValueError("x"), NotImplemented, ...,
    ]  # fmt: skip


def misspelt(name: str, chance: random.Random) -> str:
    """A name with a letter left out, doubled, swapped or replaced."""
    at = chance.randrange(max(len(name), 1))
    ways: list[Callable[[], str]] = [
        lambda: name[:at] + name[at + 1 :],
        lambda: name[:at] + name[at : at + 1] * 2 + name[at + 1 :],
        lambda: name[:at] + name[at + 1 : at + 2] + name[at : at + 1] + name[at + 2 :],
        lambda: name[:at] + chance.choice("abxyz_-ü.") + name[at + 1 :],
        lambda: name.upper(),
        lambda: name + chance.choice("s_1 ."),
    ]
    return chance.choice(ways)()


def scratch_paths(root: Path, finished: Sequence[Path] = ()) -> dict[str, str]:
    """Path names in WORDS -> paths: nowhere, a file, an empty folder, another stage's folder, one with odd files in it."""
    empty, odd = root / "empty", root / "odd"
    for folder in (empty, odd):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "file").write_text("hello\n")
    for name in ("manifest.json", "summary.json", "rows.parquet", "config.yaml", "data.json", "generations.jsonl"):
        (odd / name).write_text("{" if name.endswith("json") else "hello")
    other = str(finished[0]) if finished else str(empty)
    return {
        "nowhere": str(root / "nowhere"),
        "file": str(root / "file"),
        "empty": str(empty),
        "other": other,
        "odd": str(odd),
    }


def prompt_files(root: Path) -> list[Path]:
    """The odd prompts files, written."""
    (root / "prompts").mkdir(parents=True, exist_ok=True)
    for name, content in PROMPTS.items():
        (root / "prompts" / f"{name}.jsonl").write_bytes(content)
    return [root / "prompts" / f"{name}.jsonl" for name in PROMPTS]
