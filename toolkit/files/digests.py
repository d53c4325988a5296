"""What files hold, by SHA-256, read once: remembered in the user's cache by path, size, times and inode.

A model of the hub is known by its commit, and its files by the names of the cache's blobs. Nothing is read or downloaded.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from toolkit.errors import InputError
from toolkit.files import journal
from toolkit.files.atomic import content_hash, parse_json_file, write_json

# Of a model folder, what its outputs depend on: weights, configuration, tokenizer, code.
ENDINGS = (".safetensors", ".bin", ".json", ".model", ".txt", ".py", ".jinja", ".tiktoken", ".gguf", ".pt", ".yaml")
LARGE = 2**27  # bytes; from here on reading is shown
RECENT = 2.0  # seconds: a file may change once more within one tick of the file system's clock
BLOCK = 2**22  # bytes read at a time
COMMIT = re.compile(r"[0-9a-f]{40}")


def cache_folder() -> Path:
    """The toolkit's folder in the user's cache."""
    ensure_home()
    folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(folder).expanduser() / "acceptance-toolkit"


def ensure_home() -> None:
    """Give a user without a home (no HOME, no entry of passwd) one that lasts as long as the process, and say so."""
    if os.path.expanduser("~").startswith("~"):
        os.environ["HOME"] = home = mkdtemp(prefix="home-")
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        print(
            "this user has no home folder: caches last as long as this process; HOME=FOLDER keeps them", file=sys.stderr
        )


def digest(path: Path | str) -> str:
    """SHA-256 of a file. Raises InputError if it cannot be read."""
    return digests([Path(path)])[0]


def digests(paths: Sequence[Path]) -> list[str]:
    """SHA-256 of files; of those that have not changed since they were last read, as remembered."""
    from tqdm.auto import tqdm

    try:
        by_path = {path: _remembered(path) for path in paths}
        unread = [path for path, sha256 in by_path.items() if sha256 is None]
        size = sum(path.stat().st_size for path in unread)
        with tqdm(total=size, desc="checking files", unit="B", unit_scale=True, disable=size < LARGE) as bar:
            for path in unread:
                stamp = _stamp(path)
                by_path[path] = sha256 = _read(path, bar)
                _remember(path, stamp, sha256)
    except OSError as error:
        raise InputError(f"could not read {error.filename or paths[0]}: {error.strerror or error}") from None
    return [str(by_path[path]) for path in paths]


def model_files(folder: Path | str) -> list[Path]:
    """The files of a folder of weights that its outputs depend on; notes and hidden files do not count."""
    return sorted(p for p in Path(folder).iterdir() if p.is_file() and p.suffix in ENDINGS and p.name[0] != ".")


def folder_stamp(folder: Path | str) -> tuple[Any, ...]:
    """Names, sizes, times and inodes of a folder's model files: another one if a file was written again. Nothing is read."""
    return tuple((path.name, *_stamp(path)) for path in model_files(folder))


def folder_digest(folder: Path | str) -> str:
    """One digest of what a folder of weights holds: names and contents of its `model_files`."""
    paths = model_files(folder)
    return content_hash(list(zip([path.name for path in paths], digests(paths), strict=True)), 32)


def tree_digest(folder: Path | str) -> str:
    """One digest of all files below a folder, hidden ones apart: their names and contents."""
    paths = sorted(path for path in Path(folder).rglob("[!.]*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    return content_hash(list(zip(names, digests(paths), strict=True)), 32)


def hub_commit(name: str, revision: str | None = None, kind: str = "model") -> str | None:
    """The commit that a revision of a repository stands for, as the hub's cache knows it; None: it is not there."""
    from huggingface_hub.constants import HF_HUB_CACHE, REPO_ID_SEPARATOR

    revision = revision or "main"
    if COMMIT.fullmatch(revision):
        return revision
    folder = Path(HF_HUB_CACHE) / REPO_ID_SEPARATOR.join([f"{kind}s", *name.split("/")])
    try:
        return (folder / "refs" / revision).read_text().strip() or None
    except (OSError, ValueError):
        return None


def hub_files(name: str, commit: str, kind: str = "model") -> dict[str, str]:
    """The files of a commit in the hub's cache, with the digests that their blobs are named by. Nothing is read."""
    from huggingface_hub.constants import HF_HUB_CACHE, REPO_ID_SEPARATOR

    folder = Path(HF_HUB_CACHE) / REPO_ID_SEPARATOR.join([f"{kind}s", *name.split("/")]) / "snapshots" / commit
    links = sorted(path for path in folder.rglob("*") if path.is_symlink())
    return {path.relative_to(folder).as_posix(): Path(os.readlink(path)).name for path in links}


def commit_on_hub(name: str, revision: str | None = None, kind: str = "model") -> str | None:
    """The commit as the hub says it; None if the hub does not answer."""
    from huggingface_hub import HfApi

    try:
        return str(HfApi().repo_info(name, revision=revision, repo_type=kind, timeout=10).sha)
    except Exception:  # no network, no such name, no access: the code that loads it will say which
        return None


# -- memory -----------------------------------------------------------------------------------------------------------


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _note_of(path: Path) -> Path:
    return cache_folder() / "digests" / f"{content_hash(os.path.abspath(path), 32)}.json"


def _remembered(path: Path) -> str | None:
    stamp = _stamp(path)
    try:
        note: Any = parse_json_file(_note_of(path))
        return str(note["sha256"]) if note["stamp"] == stamp else None
    except (InputError, KeyError, TypeError):
        return None


def _remember(path: Path, stamp: list[int], sha256: str) -> None:
    """Note a digest, unless the file is so young that it could change unseen, or the cache cannot be written."""
    if time.time() - max(stamp[1], stamp[2]) / 1e9 < RECENT or _stamp(path) != stamp:
        return
    try:
        write_json(_note_of(path), {"path": os.path.abspath(path), "stamp": stamp, "sha256": sha256})
    except (InputError, OSError):
        return


def _read(path: Path, bar: Any) -> str:
    if path.stat().st_size < LARGE:
        return journal.digest(path)
    sha = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(BLOCK):
            sha.update(block)
            bar.update(len(block))
    return sha.hexdigest()
