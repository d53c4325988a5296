"""What the steps share: the folder, the public commands run below it, and what they made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.evidence import ROOT
from benchmarks.real.pair import PAIR, SMALL, models_of
from toolkit import ModelPair
from toolkit.drafts.folders import kind_in
from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_json, write_text
from toolkit.files.text import lines_of
from toolkit.runs.stage import read_manifest

DEVICE, DTYPE = os.environ.get("DEVICE", "cpu"), os.environ.get("DTYPE", "float32")
NAMES = (
    "real",
    PAIR and Path(PAIR).resolve().name,
    DEVICE.replace("cpu", ""),
    DTYPE.replace("float32", ""),
    SMALL and "small",
)
FOLDER = ROOT / "outputs" / os.environ.get("OUT", "_".join(filter(None, NAMES)))
REPORTED = "test.jsonl" if PAIR else "spec_bench.jsonl"
SHIPPED = Path(__file__).parent / "draft"


def stage(*words: str, line: str = "output: ", folder: Path = FOLDER) -> Path:
    """Run a public command below a folder, its output shown; returns what its last line of this beginning names."""
    command = [sys.executable, "-m", words[0], f"paths.root_dir={folder}", *words[1:]]
    print(f"\n$ python -m {' '.join(words)}", flush=True)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = ""
        try:
            for text in process.stdout:
                print(text, end="", flush=True)
                last = text.removeprefix(line).strip() if text.startswith(line) else last
        except KeyboardInterrupt:  # SIGTERM comes to this process alone
            process.terminate()
            raise
    if process.returncode:
        sys.exit(f"python -m {' '.join(words)} failed")
    return Path(last)


def inputs_of(folder: Path) -> dict[str, str]:
    """The folders and files that a stage was given, by key: "responses.0"."""
    paths: dict[str, str] = read_manifest(folder)["given"]
    return paths


def note(key: str, value: str) -> None:
    path = FOLDER / "folders.json"
    write_json(path, {**(read_json(path) if path.exists() else {}), key: value})


def has(key: str) -> bool:
    """Whether an earlier step made it."""
    path = FOLDER / "folders.json"
    return path.exists() and key in read_json(path)


def noted(key: str) -> str:
    """A folder or file that an earlier step made. Raises InputError where that step has not run."""
    if not has(key):
        raise InputError(f"make real: expected `{key}` of an earlier step in {FOLDER}, found none: run that step first")
    return str(read_json(FOLDER / "folders.json")[key])


def rows_of(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise InputError(
            f"expected questions at {path}, found none: make real DATA=FOLDER, with the files that its help names"
        )
    return [json.loads(line) for line in lines_of(path.read_text("utf-8")) if line.strip()]


def write_prompts(name: str, rows: Sequence[dict[str, Any]]) -> None:
    keys = ("id", "category", "messages", "prompt")
    records = [{key: row[key] for key in keys if isinstance(row.get(key), str | list | int)} for row in rows]
    write_text(FOLDER / name, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def weights() -> Path:
    """The target: a file, or of a PAIR a file or folder."""
    if PAIR:
        return models_of(Path(PAIR).resolve())[0]
    (path,) = FOLDER.glob("*.gguf")
    return path


def target_words() -> list[str]:
    """The overrides that name target, device and dtype."""
    return [f"pair.target={weights()}", f"pair.device={DEVICE}", f"pair.dtype={DTYPE}"]


def pair_words() -> list[str]:
    """The overrides that name target, device, dtype and draft."""
    return [*target_words(), f"pair.draft={noted('draft')}"]


def reads_target() -> bool:
    """Whether the draft reads the target's states."""
    return kind_in(noted("draft")).reads_target


@cache
def loaded() -> ModelPair:
    """The target, and its draft once that was made."""
    draft = noted("draft") if has("draft") else None
    return ModelPair.from_pretrained(str(weights()), draft, device=DEVICE, dtype=DTYPE, writable=False)


def encoded(name: str) -> list[list[int]]:
    """Token ids of a file's prompts."""
    return [loaded().encode(row.get("messages") or row["prompt"]) for row in rows_of(FOLDER / name)]
