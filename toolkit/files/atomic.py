"""Files that are whole or absent: write to a neighbour, flush to disk, rename. And the hashes that name folders."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.files import journal

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FOREIGN = "{} was not made by this stage and is left alone: move it, or choose another folder"
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
MAKE_ROOM = "make room and run again: what is finished is kept"
CHOOSE = "choose a folder that can be written, paths.root_dir=FOLDER or paths.output_dir=FOLDER"
CUT_SHORT = "the file could not be written to its end; is the disk full?"
# How libraries that do not raise OSError say that a file could not be written, and the reason as people read it.
REASONS = {
    "No space left": "No space left on device",
    **{text: text for text in ("Disk quota exceeded", "File too large", "Read-only file system", "Permission denied")},
    **dict.fromkeys(("file write failed", "failed writing", "unexpected pos"), CUT_SHORT),
    "I/O error": "Input/output error",
}


def write_atomic(path: Path | str, write: Callable[[Path], Any]) -> Path:
    """Call `write(temporary path)`, then put the file in place in one step. A failure leaves nothing.

    Files of an output folder are listed in its journal (`toolkit.files.journal`).
    """
    path, in_place = Path(path), False
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if journal.is_foreign(path):
            raise InputError(FOREIGN.format(path))
        journal.note(path, temporary=temporary.name)
        try:
            write(temporary)
            journal.to_disk(temporary)
            if journal.home_of(path) is not None:
                journal.note(path, sha256=journal.digest(temporary))
            os.replace(temporary, path)
            in_place = True
        finally:
            temporary.unlink(missing_ok=True)
        journal.to_disk(path.parent)
    except Exception as error:
        why = _why(error)
        if why is None:
            raise
        advice = why[1] and f"; {why[1]}"
        if in_place:
            raise InputError(f"{path} was written, but may be lost if the machine stops: {why[0]}{advice}") from error
        raise InputError(f"could not write {path}: {why[0]}; nothing was changed there{advice}") from error
    return path


def write_failure(error: BaseException) -> str | None:
    """Why writing failed and what to do, if the error or one that led to it says that writing did. Else None."""
    why = _why(error)
    return None if why is None else f"{why[0]}{why[1] and '; ' + why[1]}"


def _why(error: BaseException) -> tuple[str, str] | None:
    """Why writing failed, as reason and advice; None if the error is about something else."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, InputError):
        text = str(seen)
        explanation = next((reason for words, reason in REASONS.items() if words in text), None)
        if isinstance(seen, OSError):
            number = seen.errno
            advice = MAKE_ROOM if number in FULL else CHOOSE if number in CLOSED else ""
            return seen.strerror or explanation or text, advice
        if explanation is not None:
            return explanation, MAKE_ROOM if "write" in text else ""
        seen = seen.__cause__ or seen.__context__
    return None


def write_folder(path: Path | str, write: Callable[[Path], None]) -> Path:
    """Call `write(temporary folder)`, then put its files in place; those of ours that were there are replaced."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        journal.note(temporary, folder=True)
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            write(temporary)
            _move_in(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except Exception as error:
        reason = write_failure(error)
        if reason is None:
            raise
        raise InputError(f"could not write {path}: {reason}") from error
    return path


def _move_in(temporary: Path, path: Path) -> None:
    """All files of a folder into another, in one step where that is empty but for our own."""
    names = sorted(file.relative_to(temporary) for file in temporary.rglob("*") if file.is_file())
    home = journal.home_of(path)
    if home is not None and path.exists():
        journal.remove(home, journal.relative(home, path))
    if not path.exists():
        for name in names if home is not None else ():
            journal.note(path / name, sha256=journal.digest(temporary / name))
        os.replace(temporary, path)
        return
    if foreign := next((name for name in names if os.path.lexists(path / name)), None):
        raise InputError(FOREIGN.format(path / foreign))
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        if home is not None:
            journal.note(path / name, sha256=journal.digest(temporary / name))
        os.replace(temporary / name, path / name)


def write_text(path: Path | str, text: str) -> Path:
    """Write a text file atomically, as UTF-8; a lone surrogate (there is no UTF-8 of it) as its \\u escape."""
    return write_atomic(path, lambda temporary: temporary.write_bytes(text.encode("utf-8", "backslashreplace")))


def write_json(path: Path | str, value: Any) -> Path:
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path | str) -> Any:
    """Read JSON; InputError names the file if it is missing, not JSON, or not what was written."""
    journal.check(path)
    return parse_json_file(path)


def parse_json_file(path: Path | str) -> Any:
    """`read_json` of a file that may have been changed on purpose."""
    try:
        return json.loads(Path(path).read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise InputError(f"expected a JSON file at {path}, found none") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid JSON ({error}); remove it or make it again") from None
    except OSError as error:
        raise InputError(f"could not read {path}: {error.strerror or error}") from None


def content_hash(value: Any, length: int = 12) -> str:
    """A short hash of anything JSON can express, independent of key order."""
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:length]


def file_hash(path: Path | str, length: int = 16) -> str:
    """Hash of a file's bytes."""
    return journal.digest(path)[:length]
