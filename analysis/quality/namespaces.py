"""python -I -S namespaces.py PATH ... -- COMMAND: run a command where these files and folders are, read-only, and nothing else.

Like bubblewrap, for where that is not installed: namespaces of its own for users, mounts, processes, network, IPC and names.
The command gets no capabilities. It is the first process of its namespace, so everything in there ends with it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

NOBODY = 65534
ROOT = "/proc"  # the new root is put together on top of it: no file of there is wanted
NEW = 0x7C020000  # namespaces of mounts, names, IPC, users, processes, network
BIND, RECURSIVE, SLAVE = 4096, 16384, 1 << 19  # flags of mount
SETATTR, HERE, ALL_BELOW = 442, -100, 0x8000  # the system call mount_setattr, AT_FDCWD, AT_RECURSIVE
SEALED = (ctypes.c_uint64 * 4)(1 | 2 | 4)  # read-only, no setuid programs, no devices
libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """A function of the C library. Raises OSError."""
    wide = [ctypes.c_ulong(value) if type(value) is int and value >= 0 else value for value in arguments]
    if getattr(libc, name)(*wide) < 0:
        raise OSError(f"{name} {arguments[:2]}: {os.strerror(ctypes.get_errno())}")


def main(paths: list[str], command: list[str]) -> None:
    """Go in and run the command; ends as it ends."""
    user, group = os.geteuid(), os.getegid()
    call("prctl", 1, 9, 0, 0, 0)  # killed with the parent
    call("unshare", NEW)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    call("mount", b"none", b"/", None, SLAVE | RECURSIVE, None)  # nothing done here is seen outside
    call("mount", b"tmpfs", ROOT.encode(), b"tmpfs", 0, b"size=1m,mode=755")
    for path in paths:
        target = ROOT + path
        os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            open(target, "x").close()
        call("mount", path.encode(), target.encode(), None, BIND | RECURSIVE, None)
        call("syscall", SETATTR, HERE, target.encode(), ALL_BELOW, ctypes.byref(SEALED), 32)
    call("syscall", SETATTR, HERE, ROOT.encode(), 0, ctypes.byref(SEALED), 32)
    os.chroot(ROOT)
    os.chdir("/")
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    os.execve(command[0], command, {"LANG": "C.UTF-8"})  # by a user that is not root: capabilities are gone after it


if __name__ == "__main__":
    words = sys.argv[1:]
    main(words[: words.index("--")], words[words.index("--") + 1 :])
