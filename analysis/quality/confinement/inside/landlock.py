"""Landlock: a process gives up all access to files but the reading of some, TCP, and signals to others, for good.

Kernel: Documentation/userspace-api/landlock.rst. What an older kernel does not know is left out of the ruleset. Reading
and writing of files is known since the first version (Linux 5.13). Existence and size of files are not hidden by it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from analysis.quality.confinement.inside import kernel

CREATE, ADD, RESTRICT = 444, 445, 446
READ_FILE, READ_FOLDER = 1 << 2, 1 << 3
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # version -> how many rights concern files
VERSION_WITH_TCP, VERSION_WITH_SCOPES = 4, 6


def version() -> int:
    """The kernel's version of Landlock. Raises OSError if there is none."""
    return kernel.call(CREATE, None, 0, 1)


def restrict(trees: Sequence[str], listed: Sequence[str]) -> None:
    """From now on read only what lies in these files and folders, and the names in `listed` ones; needs no_new_privs."""
    known = version()
    rights = (1 << FILE_RIGHTS[min(known, max(FILE_RIGHTS))]) - 1
    tcp, scopes = 3 * (known >= VERSION_WITH_TCP), 3 * (known >= VERSION_WITH_SCOPES)
    attributes = (ctypes.c_uint64 * 3)(rights, tcp, scopes)
    size = 8 * (1 + (known >= VERSION_WITH_TCP) + (known >= VERSION_WITH_SCOPES))
    ruleset = kernel.call(CREATE, ctypes.byref(attributes), size, 0)
    try:
        for path in trees:
            _allow(ruleset, path, READ_FILE | (READ_FOLDER if os.path.isdir(path) else 0))
        for path in listed:
            _allow(ruleset, path, READ_FOLDER)
        kernel.call(RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = rights.to_bytes(8, "little") + place.to_bytes(4, "little")  # a packed structure
        kernel.call(ADD, ruleset, 1, ctypes.c_char_p(rule), 0)
    finally:
        os.close(place)
