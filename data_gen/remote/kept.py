"""Rows that have ended, here or at an endpoint, and whose shard is not whole yet: one line each, appended as they come.

A line holds its own hash. So a line that a kill or a full disk cut short is skipped, and its row is made again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.files import journal
from toolkit.files.atomic import content_hash, write_failure
from toolkit.files.text import lines_of

FOLDER = "rows"
Kept = dict[int, dict[str, Any]]  # row number -> {"row": ..., "how": ...}


def read_kept(folder: Path, number: int, job: str) -> Kept:
    """What is kept of a shard's rows; lines of another job, and damaged ones, are passed over."""
    path = _path(folder, number)
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
    path = _path(folder, number)
    line = json.dumps({"kept": entry, "sha256": content_hash([job, entry], 32)}) + "\n"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            journal.note(path, sha256="")  # listed, so that it is deleted with the stage's other files
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            data = (b"\n" if torn else b"") + line.encode()
            if os.write(handle, data) < len(data):
                raise OSError(28, "No space left on device")
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise InputError(f"could not write {path}: {write_failure(error)}; the rows before are kept") from error


def _path(folder: Path, number: int) -> Path:
    return folder / FOLDER / f"{number:05d}.jsonl"
