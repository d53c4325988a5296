"""System calls that Python does not offer, through ctypes. Every one raises OSError where the kernel refuses."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import Any

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # their names in seccomp
PDEATHSIG, KEEP_CAPABILITIES, SECCOMP, NO_NEW_PRIVILEGES = 1, 8, 22, 38  # options of prctl
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR = 442
HERE = -100  # AT_FDCWD
RECURSIVE = 0x8000  # AT_RECURSIVE
READ_ONLY, NO_SETUID, NO_DEVICES = 1, 2, 4  # attributes of a mount
CAPABILITIES_VERSION = 0x20080522
READ_ANYTHING = 1 << 2  # CAP_DAC_READ_SEARCH

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def architecture() -> str:
    """The processor's name. Raises OSError for one whose system calls are not listed here."""
    name = platform.machine()
    if name not in ARCHITECTURES or struct.calcsize("P") != 8:
        raise OSError(f"system calls of {name} with {8 * struct.calcsize('P')} bits are not listed")
    return name


def call(number: int, *arguments: Any) -> int:
    """Any system call by its number; plain numbers are widened."""
    wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return _checked(libc.syscall(ctypes.c_long(number), *wide), f"system call {number}")


def prctl(option: int, value: Any = 0, other: Any = 0) -> None:
    """Change something of this process."""
    wide = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in (value, other)]
    _checked(libc.prctl(option, *wide, ctypes.c_ulong(0), ctypes.c_ulong(0)), f"prctl {option}")


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    _checked(libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2)."""
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    _checked(libc.mount(*words, ctypes.c_ulong(flags), None if data is None else data.encode()), f"mount {target}")


def unmount(target: str) -> None:
    """Detach a mount, as soon as no process is in it."""
    _checked(libc.umount2(target.encode(), 2), f"umount {target}")


def seal(target: str, recursive: bool = True) -> None:
    """Make a mount, and those inside it, read-only, without setuid programs and devices."""
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY | NO_SETUID | NO_DEVICES, 0, 0, 0)
    flags = RECURSIVE if recursive else 0
    call(MOUNT_SETATTR, HERE, ctypes.c_char_p(target.encode()), flags, ctypes.byref(attributes), 32)


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root; the root so far appears at `old` in it."""
    call(PIVOT_ROOT[architecture()], ctypes.c_char_p(new.encode()), ctypes.c_char_p(old.encode()))


def keep_capabilities(kept: int) -> None:
    """Give up all capabilities but these (a bit set of the first 32)."""
    header, sets = (ctypes.c_uint * 2)(CAPABILITIES_VERSION, 0), (ctypes.c_uint * 6)(kept, kept)
    _checked(libc.capset(header, sets), "capset")


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
