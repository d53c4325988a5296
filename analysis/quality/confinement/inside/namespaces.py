"""Namespaces: a root folder that holds Python and nothing else, and neither network nor processes nor IPC of others.

`enter` returns in a new process, the first of its process namespace: when it ends, everything in there ends. The process that
called it waits outside and ends as the inner one did. Where root may not make namespaces directly, and for ordinary users,
a user namespace comes with them.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Sequence

from analysis.quality.confinement.inside import kernel

MOUNTS, CGROUPS, HOSTNAME, IPC, USERS, PROCESSES, NETWORK = (
    0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
ALL = MOUNTS | CGROUPS | HOSTNAME | IPC | PROCESSES | NETWORK
BIND, RECURSIVE, SLAVE, NO_SETUID, NO_DEVICES = 4096, 16384, 1 << 19, 2, 4  # flags of mount
WORKPLACE = "/tmp"  # any folder that is there: the new root is put together on top of it
SIZE = "size=1m,mode=755"


def enter(trees: Sequence[str], links: Sequence[tuple[str, str]], hidden: Sequence[str], nobody: int) -> None:
    """Go in. trees: files and folders to be seen there, read-only; links: symbolic links; hidden: folders shown empty."""
    _unshare(nobody)
    _new_root(trees, links, hidden)
    _fork()


def _unshare(nobody: int) -> None:
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        try:
            return kernel.unshare(ALL)
        except OSError:
            pass  # not allowed here, where user namespaces may be
    kernel.unshare(ALL | USERS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{nobody} {user} 1"), ("gid_map", f"{nobody} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _new_root(trees: Sequence[str], links: Sequence[tuple[str, str]], hidden: Sequence[str]) -> None:
    kernel.mount("none", "/", None, SLAVE | RECURSIVE)  # nothing done here is seen outside
    kernel.mount("tmpfs", WORKPLACE, "tmpfs", NO_SETUID | NO_DEVICES, SIZE)
    os.chdir(WORKPLACE)
    os.mkdir("old")
    kernel.pivot_root(".", "old")
    os.chdir("/")
    for path in trees:
        _make(path, os.path.isdir("/old" + path))
        kernel.mount("/old" + path, path, None, BIND | RECURSIVE)
        kernel.seal(path)
    for path, target in links:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not os.path.lexists(path):
            os.symlink(target, path)
    for path in hidden:
        kernel.mount("tmpfs", path, "tmpfs", NO_SETUID | NO_DEVICES, SIZE)
        kernel.seal(path)
    kernel.unmount("/old")
    os.rmdir("/old")
    kernel.seal("/", recursive=False)


def _make(path: str, folder: bool) -> None:
    """An empty file or folder to put a mount on."""
    if folder:
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "x"):
            pass


def _fork() -> None:
    """Go on as the first process of the new namespace."""
    child = os.fork()
    if child == 0:
        return
    os.closerange(0, 2**16)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    os._exit(status)
