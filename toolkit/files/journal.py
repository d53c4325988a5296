"""What was written into an output folder: one line per file, with its SHA-256, in `.written.jsonl` beside the manifest.

A stage deletes what this file lists and nothing else, and a changed bit of a listed file is found when it is read. A line is
appended before the file is put in place, so that a process killed in between leaves nothing of its own unlisted. Lines that
are cut short (a full disk, a kill) are passed over.

    {"path": "shard-00000.jsonl", "temporary": ".shard-00000.jsonl.17.tmp"}    about to be written
    {"path": "shard-00000.jsonl", "sha256": "..."}                             written, about to be put in place
    {"path": "wandb/offline-run-1", "folder": true}                            another program's folder, made for this stage
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import InputError

JOURNAL = ".written.jsonl"
DEEPEST = 6  # folders between an output folder and a file of its own
KNOWN = 2  # a process may die between the line and the file, which then is still the one before
HINT = "delete it and run the command that made it again"
MANIFEST = "manifest.json"  # has a checksum of its own, for its status may change
# What file systems answer that cannot flush a folder, or open one.
LACKING = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EACCES, errno.ENOSYS, errno.EPERM)
_VERIFIED: dict[str, tuple[Any, ...]] = {}  # path -> (size, times, inode, digest) when this process last read it whole
_PARSED: dict[str, tuple[int | None, int, Written]] = {}  # path -> inode, bytes that were parsed, what they said


@dataclass
class Written:
    """What a journal lists: relative path -> digests, newest last; temporary files; folders of other programs."""

    files: dict[str, list[str]] = field(default_factory=dict)
    temporaries: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)


def begin(folder: Path) -> None:
    """Make a folder's journal, if it has none: from now on what is written there is listed."""
    (folder / JOURNAL).touch()
    _PARSED.pop(str(folder / JOURNAL), None)  # a journal that was made again may have the inode of the one before


def home_of(path: Path) -> Path | None:
    """The output folder that a file belongs to: the nearest one above that has a journal."""
    for folder in [*Path(os.path.abspath(path)).parents][:DEEPEST]:
        if (folder / JOURNAL).is_file():
            return folder
    return None


def note(path: Path, **facts: Any) -> None:
    """Append a line about a file or folder; nothing if it lies in no output folder."""
    home = home_of(path)
    if home is None or not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(home)):
        return
    append_line(home / JOURNAL, json.dumps({"path": relative(home, path), **facts}))


def append_line(path: Path, line: str, flush: bool = False) -> None:
    """Append a line to a file; after one that a kill or a full disk has cut short it begins anew. flush: to disk."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        data = (b"\n" if torn else b"") + line.encode() + b"\n"
        if os.write(handle, data) < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")
    finally:
        os.close(handle)
    if flush:
        to_disk(path)


def to_disk(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk where the file system can: network shares and FUSE may lack that."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in LACKING:
            raise


def relative(home: Path, path: Path) -> str:
    """The path within its output folder."""
    return Path(os.path.abspath(path)).relative_to(os.path.abspath(home)).as_posix()


def read(folder: Path) -> Written:
    """What the folder's journal lists; nothing if there is none. Lines read before are not read again: do not change it."""
    path = folder / JOURNAL
    try:
        with open(path, "rb") as handle:
            inode, size = os.fstat(handle.fileno()).st_ino, os.fstat(handle.fileno()).st_size
            seen, parsed, written = _PARSED.get(str(path), (None, 0, Written()))
            if seen != inode or size < parsed:
                parsed, written = 0, Written()
            handle.seek(parsed)
            fresh = handle.read(size - parsed)
    except OSError:
        return Written()
    whole = fresh.rfind(b"\n") + 1
    for line in fresh[:whole].split(b"\n"):
        _parse(line, written)
    _PARSED[str(path)] = (inode, parsed + whole, written)
    return written


def _parse(line: bytes, written: Written) -> None:
    try:
        entry = json.loads(line)
        path, temporary = str(entry["path"]), str(entry.get("temporary", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    if _leads_out(path) or _leads_out(temporary):
        return
    if entry.get("folder"):
        written.folders.add(path)
    elif temporary:
        written.temporaries.add(str(Path(path).parent / temporary))
    elif "sha256" in entry:
        written.files.setdefault(path, []).append(str(entry["sha256"]))


def is_foreign(path: Path) -> bool:
    """Whether a file that is there lies in an output folder whose journal does not list it."""
    home = home_of(path)
    return home is not None and os.path.lexists(path) and relative(home, path) not in read(home).files


def digest(path: Path | str) -> str:
    """SHA-256 of a file's bytes, read now."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def check(path: Path | str, hint: str = HINT) -> None:
    """Raises InputError, one line, if a file is listed and its bytes are not those that were written. Missing files pass."""
    path = Path(path)
    if path.name == MANIFEST or not path.is_file() or home_of(path) is None:
        return
    stat = path.stat()
    stamp = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    verified = _VERIFIED.get(str(path))
    if verified is None or verified[:-1] != stamp:  # read once by this process unless the file changes
        _VERIFIED[str(path)] = verified = (*stamp, digest(path))
    check_digest(path, str(verified[-1]), hint)


def check_digest(path: Path, sha256: str, hint: str = HINT, default: str | None = None) -> None:
    """`check` of a file whose digest is known. default: what it should be if no journal lists it."""
    home = home_of(path)
    listed = [] if home is None else read(home).files.get(relative(home, path), [])[-KNOWN:]
    expected = listed or ([default] if default is not None else [])
    if path.name != MANIFEST and expected and sha256 not in expected:
        what = "is empty" if path.stat().st_size == 0 else "is damaged: it is not what was written (SHA-256)"
        raise InputError(f"{path} {what}; {hint}")


def remove(folder: Path, below: str = "", keep: Iterable[str] = ()) -> list[Path]:
    """Delete what the journal lists (below a subfolder), and folders that are empty then; returns what is left there.

    keep  paths that are neither deleted nor reported
    """
    written, excluded = read(folder), {*keep}
    listed = (*written.files, *written.temporaries)
    for name in listed:
        if name not in excluded and _is_below(name, below):
            (folder / name).unlink(missing_ok=True)
    for name in written.folders:
        path = folder / name
        if _is_below(name, below) and (path.is_symlink() or path.is_file()):
            path.unlink(missing_ok=True)
        elif _is_below(name, below) and path.is_dir():
            shutil.rmtree(path)
    above = {parent.as_posix() for name in (*listed, *written.folders) for parent in Path(name).parents}
    for parent in sorted(above - {"."}, reverse=True):
        path = folder / parent
        if _is_below(parent, below) and path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()
    start = folder / below
    if not start.is_dir():
        return []
    return sorted(p for p in start.rglob("*") if not p.is_dir() and p.relative_to(folder).as_posix() not in excluded)


def clear_temporaries(folder: Path) -> None:
    for name in read(folder).temporaries:
        (folder / name).unlink(missing_ok=True)


def _leads_out(name: str) -> bool:
    return name.startswith("/") or ".." in Path(name).parts


def _is_below(name: str, below: str) -> bool:
    return not below or name == below or name.startswith(f"{below}/")
