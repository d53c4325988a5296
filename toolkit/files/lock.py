"""One process at a time in an output folder: filelock holds `.lock` while the process lives.

The file names its owner. The operating system releases a lock when its process ends, so a file that is left is harmless.
"""

from __future__ import annotations

import atexit
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout, UnixFileLock

from toolkit.errors import InputError

_HELD: dict[tuple[int, str], FileLock] = {}  # process and path -> lock
_THREADS = threading.RLock()


def take(folder: Path, name: str = ".lock", wait: bool = False) -> None:
    """Hold the folder's lock until `release` or the end of the process; nothing happens if this process holds it already.

    Raises InputError, one line with the owner, if another process holds it; with `wait`, waits for that process instead.
    """
    path = Path(os.path.abspath(folder / name))
    held = (os.getpid(), str(path))
    if held in _HELD and path.exists():
        return
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        raise InputError(
            f"{folder} is in use by {_owner(path)}: wait until it has ended, or choose another paths.output_dir"
        ) from None
    _HELD[held] = lock
    if isinstance(lock, UnixFileLock):  # elsewhere the content belongs to filelock
        since = datetime.now(UTC).isoformat(timespec="seconds")
        path.write_text(f"process {os.getpid()} on {platform.node()} (since {since})")


def release(folder: Path, name: str = ".lock") -> None:
    """Release the lock and delete its file, if this process holds it."""
    path = Path(os.path.abspath(folder / name))
    if lock := _HELD.pop((os.getpid(), str(path)), None):
        path.unlink(missing_ok=True)
        lock.release()


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """While it lasts, no other process or thread is in it; a folder that cannot be written to keeps other processes not out."""
    with _THREADS:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            take(folder, name, wait=True)
        except OSError:
            yield
            return
        try:
            yield
        finally:
            release(folder, name)


def _owner(path: Path) -> str:
    try:
        text = path.read_text()
    except (OSError, ValueError):
        text = ""
    return text if text.startswith("process ") and text.isprintable() else "another process"


@atexit.register
def _release_all() -> None:
    for process, path in list(_HELD):
        if process == os.getpid():
            release(Path(path).parent, Path(path).name)
