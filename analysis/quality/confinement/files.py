"""What a confined Python may read: its standard library and the system's shared libraries, and what a job adds."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
ADDED = ("site-packages", "dist-packages")  # installed packages are not the standard library


@dataclass(frozen=True)
class Readable:
    """trees: files and folders, by their real paths; links: symbolic links beside them; hidden: folders in trees, left out."""

    trees: tuple[str, ...]
    links: tuple[tuple[str, str], ...] = ()
    hidden: tuple[str, ...] = ()

    def tree_of(self, path: str) -> str | None:
        """The tree that a path lies in and can be read with, if there is one."""
        if any(_inside(path, folder) for folder in self.hidden):
            return None
        return next((tree for tree in self.trees if _inside(path, tree)), None)

    def rules(self) -> tuple[list[str], list[str]]:
        """The same for Landlock, which cannot take back: trees without what is hidden, and folders whose names can be read."""
        trees: list[str] = []
        listed: list[str] = []
        for tree in self.trees:
            inside = [path for path in self.hidden if path.startswith(f"{tree}/")]
            _without(tree, inside, trees, listed)
        return trees, listed


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _without(tree: str, hidden: list[str], trees: list[str], listed: list[str]) -> None:
    if not hidden:
        trees.append(tree)
        return
    listed.append(tree)
    for entry in sorted(os.scandir(tree), key=lambda entry: entry.name):
        if entry.path not in hidden and not entry.is_symlink():
            _without(entry.path, [path for path in hidden if path.startswith(f"{entry.path}/")], trees, listed)


def interpreter() -> str:
    """The Python that runs, outside of any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def python() -> Readable:
    """What this Python and its extension modules need."""
    library = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
    shared = [os.path.join(*library)] if all(library) and str(library[1]).count(".so") else []
    base = {"base": sys.base_prefix, "installed_base": sys.base_prefix}
    base |= {"platbase": sys.base_exec_prefix, "installed_platbase": sys.base_exec_prefix}
    known = {
        os.path.realpath(path)
        for path in (
            interpreter(),
            *(sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")),
            *shared,
            *(path for path in LIBRARIES if not os.path.islink(path)),
        )
        if path and os.path.exists(path)
    }  # fmt: skip
    trees = tuple(sorted(path for path in known if not any(path.startswith(f"{other}/") for other in known)))
    links = tuple((path, os.readlink(path)) for path in LIBRARIES if os.path.islink(path))
    return Readable(trees, links, tuple(_packages(known)))


def _packages(known: set[str]) -> list[str]:
    """Folders of installed packages where Python and Debian have them."""
    places = {Path(path) for path in known if os.path.isdir(path)}
    places |= {path for place in places for path in place.glob("python3*") if path.is_dir()}
    return sorted({str(place / name) for place in places for name in ADDED if (place / name).is_dir()})
