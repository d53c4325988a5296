"""One process at a time in an output folder: `.lock` is held by the operating system as long as the process lives.

The file says who holds it (machine, process, since when). A lock ends with its process: the system releases it, and the
next process takes it over, whatever the file says. Where a file system knows no locks, the owner's process number
decides.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.errors import InputError

try:
    import fcntl
except ImportError:  # not on this system: the owner's process number decides
    fcntl = None  # type: ignore[assignment]

_HELD: dict[str, tuple[int, int]] = {}  # path -> (descriptor, process that took it)
RANKS = (
    "RANK",
    "LOCAL_RANK",
    "SLURM_PROCID",
)  # of a training in several processes: the first one holds the lock for all


def take(folder: Path, name: str = ".lock", every_rank: bool = False) -> None:
    """Hold the folder's lock until `release` or the end of the process; again if this process holds it already.

    every_rank  also in processes of a training, where else the first one holds the lock for all
    Raises InputError, one line with the owner, if another process holds it.
    """
    if not every_rank and any(os.environ.get(rank, "0") not in ("", "0") for rank in RANKS):
        return
    path = Path(os.path.abspath(folder / name))
    if _HELD.get(str(path), (0, 0))[1] == os.getpid() and path.exists():
        return
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if not _lock(handle, path):
            os.close(handle)
            owner = describe(read(path))
            raise InputError(
                f"{folder} is in use by {owner}: wait until it has ended, or choose another paths.output_dir"
            )
        if path.exists() and os.fstat(handle).st_ino == path.stat().st_ino:
            break
        os.close(handle)  # its owner has ended and removed it in the meantime
    _HELD[str(path)] = (handle, os.getpid())
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(_owner()).encode(), 0)


def release(folder: Path, name: str = ".lock") -> None:
    """Let go of the lock, if this process holds it."""
    path = Path(os.path.abspath(folder / name))
    handle, process = _HELD.pop(str(path), (0, 0))
    if process == os.getpid():
        path.unlink(missing_ok=True)
        os.close(handle)


def read(path: Path) -> dict[str, Any]:
    """Who wrote a lock file; nothing if it does not say."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def describe(owner: dict[str, Any]) -> str:
    """An owner in words."""
    if not owner:
        return "another process"
    return f"process {owner.get('pid')} on {owner.get('host')} (since {owner.get('since')})"


def _lock(handle: int, path: Path) -> bool:
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    return not _alive(read(path))


def _alive(owner: dict[str, Any]) -> bool:
    """Whether a lock file's owner still runs: on another machine that cannot be known, and it is believed."""
    if not owner:
        return False
    if owner.get("host") != socket.gethostname():
        return True
    try:
        os.kill(int(owner["pid"]), 0)
    except (ProcessLookupError, ValueError, KeyError, TypeError):
        return False
    except OSError:
        return True
    return int(owner["pid"]) != os.getpid() and owner.get("started") == _started(int(owner["pid"]))


def _owner() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": _started(os.getpid()),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": platform.system(),
    }


def _started(process: int) -> str | None:
    """When a process began, in the system's own count: numbers of processes are used again. None: not known here."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


@atexit.register
def _release_all() -> None:
    for name in list(_HELD):
        path = Path(name)
        try:
            release(path.parent, path.name)
        except OSError:
            continue
