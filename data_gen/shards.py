"""Shards of responses: a header that says which job it belongs to, a row per prompt, a footer with the hash of all lines.

And rows that have ended, here or at an endpoint, and whose shard is not whole yet: one line each, appended as they come. Such a
line holds its own hash. So a line that a kill or a full disk cut short is skipped, and its row is made again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.files import journal
from toolkit.files.atomic import content_hash, write_failure, write_text
from toolkit.files.text import lines_of
from toolkit.models.prompts import Prompt

KEPT_FOLDER = "rows"
Kept = dict[int, dict[str, Any]]  # row number -> {"row": ..., "how": ...}


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.jsonl"


def read_shard(path: Path, job: str) -> list[dict[str, Any]]:
    """Rows of one shard. Raises InputError if it is corrupt or belongs to another job."""
    return read_whole(path, job)[1]


def read_whole(path: Path, job: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and rows of one shard. Raises as `read_shard` does."""
    hint = "delete it and run data_gen.responses again"
    try:
        lines = lines_of(path.read_bytes().decode("utf-8"), keep_ends=True)
        header, footer = json.loads(lines[0]), json.loads(lines[-1])
        rows = [json.loads(line) for line in lines[1:-1]]
    except FileNotFoundError:
        raise InputError(f"expected a shard at {path}, found none; run data_gen.responses again") from None
    except (IndexError, ValueError):
        raise InputError(f"{path} is corrupt (not a whole shard); {hint}") from None
    if not isinstance(header, dict) or header.get("job") != job:
        raise InputError(f"{path} belongs to another job (other config, models or prompts); {hint}")
    if not isinstance(footer, dict) or footer.get("sha256") != _digest_of(lines[:-1]):
        raise InputError(f"{path} is corrupt (its hash does not match); {hint}")
    return header, rows


def row_of(prompt: Prompt, number: int, status: str, **facts: Any) -> dict[str, Any]:
    """A row: done, failed (with an error) or skipped (left out on purpose)."""
    empty: dict[str, Any] = {"prompt_ids": [], "token_ids": [], "finish_reason": "", "text": "", "error": None}
    own = {} if prompt.grammar is None else {"grammar": prompt.grammar}
    return {"id": prompt.id, "row": number, "status": status, "answer": prompt.answer, **own, **empty, **facts}


def write_shard(folder: Path, number: int, job: str, rows: list[dict[str, Any]], **facts: Any) -> None:
    """Write a shard whole; its header holds `facts`, too."""
    header = {"job": job, "shard": number, "rows": len(rows), **facts}
    sequences = (json.dumps(value, ensure_ascii=False) for value in (header, *rows))
    lines = [
        text.encode("utf-8", "backslashreplace").decode() + "\n" for text in sequences
    ]  # lone surrogates as escapes
    write_text(folder / shard_name(number), "".join([*lines, json.dumps({"sha256": _digest_of(lines)}) + "\n"]))


def _digest_of(lines: list[str]) -> str:
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_kept(folder: Path, number: int, job: str) -> Kept:
    """What is kept of a shard's rows; lines of another job, and damaged ones, are passed over."""
    path = folder / KEPT_FOLDER / f"{number:05d}.jsonl"
    rows: Kept = {}
    for line in lines_of(path.read_bytes().decode("utf-8", "replace")) if path.is_file() else ():
        try:
            entry = json.loads(line)
            whole = entry["sha256"] == content_hash([job, entry["kept"]], 32)
            row = int(entry["kept"]["row"]["row"])
        except (ValueError, LookupError, TypeError):
            continue
        if whole:
            rows[row] = entry["kept"]
    return rows


def keep(folder: Path, number: int, job: str, entry: dict[str, Any]) -> None:
    """Append a row, flushed to disk. Raises InputError if it cannot be written."""
    path = folder / KEPT_FOLDER / f"{number:05d}.jsonl"
    line = json.dumps({"kept": entry, "sha256": content_hash([job, entry], 32)})
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            journal.note(path, sha256="")  # listed, so that it is deleted with the stage's other files
        journal.append_line(path, line, flush=True)
    except OSError as error:
        raise InputError(f"could not write {path}: {write_failure(error)}; the rows before are kept") from error
