"""Files that are whole or absent: write to a neighbour, flush to disk, rename. And the hashes that name folders."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.errors import InputError


def write_atomic(path: Path | str, write: Callable[[Path], None]) -> Path:
    """Call `write(temporary path)`, then put the file in place in one step. Nothing is left behind on failure."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"could not write {path}: {error.strerror or error}; nothing was changed there") from error
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return path


def write_folder(path: Path | str, write: Callable[[Path], None]) -> Path:
    """Call `write(temporary folder)`, then put the folder in place; one that is there is replaced."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        write(temporary)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"could not write {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def write_text(path: Path | str, text: str) -> Path:
    """Write a text file atomically."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    return write_atomic(path, write)


def write_json(path: Path | str, value: Any) -> Path:
    """Write indented JSON atomically."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path | str) -> Any:
    """Read JSON; InputError names the file if it is missing or not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"expected a JSON file at {path}, found none") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid JSON ({error}); remove it or make it again") from None


def content_hash(value: Any, length: int = 12) -> str:
    """A short hash of anything JSON can express, independent of key order."""
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def file_hash(path: Path | str, length: int = 16) -> str:
    """Hash of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()[:length]
