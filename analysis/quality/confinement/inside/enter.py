"""The start of a confined process: give up everything but some descriptors and the reading of Python, then do one job.

`launch` sends one JSON object to its standard input: the sources of these modules, and what `main` takes.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
from importlib import import_module
from typing import Any

from analysis.quality.confinement.inside import kernel, landlock, namespaces, seccomp

READY = b"\0ready"  # follows on standard error; what came before it says what went wrong


def main(given: dict[str, Any]) -> None:
    """Confine this process and run its job; never returns.

    layers       which of namespaces, landlock, seccomp to go through
    trees        files and folders that can be read; links, hidden: see `namespaces`; rules, listed: see `landlock`
    limits       {"RLIMIT_...": value}
    descriptors  those that stay open; job: module of this folder whose `run(payload, *descriptors)` is the job
    private      whether some of `trees` may be readable by root only
    """
    try:
        job = import_module(f"{__package__ or __name__.rpartition('.')[0]}.{given['job']}")
        _confine(given)
    except Exception as error:
        os.write(2, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
        os._exit(1)
    os.write(2, READY)
    os.dup2(1, 2)
    gc.collect()
    try:
        job.run(given["payload"], *given["descriptors"])
    finally:
        os._exit(0)


def _confine(given: dict[str, Any]) -> None:
    layers, nobody = given["layers"], given["nobody"]
    kernel.prctl(kernel.PDEATHSIG, signal.SIGKILL)  # the process that wants the result is gone
    if "namespaces" in layers:
        namespaces.enter(given["trees"], given["links"], given["hidden"], nobody)
    _close_all_but({0, 1, 2, *given["descriptors"]})
    os.chdir("/")
    kernel.prctl(kernel.NO_NEW_PRIVILEGES, 1)
    if "landlock" in layers:
        landlock.restrict(given["rules"], given["listed"])
    kept = _become(nobody, given["private"]) if os.geteuid() == 0 else 0
    kernel.keep_capabilities(kept)
    kernel.prctl(kernel.PDEATHSIG, signal.SIGKILL)  # becoming somebody else has cleared it
    for name, value in given["limits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    if "seccomp" in layers:
        seccomp.restrict()


def _become(nobody: int, private: bool) -> int:
    """Stop being root. The capabilities to keep: reading anything, where Python lies in a folder that only root can read."""
    kernel.prctl(kernel.KEEP_CAPABILITIES, 1)
    os.setgroups([])
    os.setresgid(nobody, nobody, nobody)
    os.setresuid(nobody, nobody, nobody)
    if private or not _can_read(os.__file__):
        return kernel.READ_ANYTHING
    return 0


def _can_read(path: str) -> bool:
    try:
        open(path, "rb").close()
    except OSError:
        return False
    return True


def _close_all_but(kept: set[int]) -> None:
    start = 0
    for number in sorted({*kept, 2**16}):
        if number > start:  # closerange(n, n) would close everything
            os.closerange(start, number)
        start = number + 1
