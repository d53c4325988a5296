"""What `sandbox` starts, in a process of its own: give up rights, run program.py, write the verdict into a pipe.

    python -I -S -B confined.py PIPE LIMITS USER        file descriptor, {"RLIMIT_...": value} as JSON, id of `nobody`

A program that leaves by exit() has not passed: nothing behind that line ran. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys

PASSED = "passed"
MOST = 500  # characters of a verdict
KEEP_CAPABILITIES, NO_NEW_PRIVILEGES = 8, 38  # options of prctl
CAPABILITIES_VERSION, READ_ANYTHING = 0x20080522, 4  # of capset


def confine(limits: dict[str, int], nobody: int) -> None:
    """Set limits that cannot be raised again, and stop being root."""
    libc = ctypes.CDLL(None, use_errno=True)
    _succeed(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if os.geteuid() == 0:  # root may start as many processes as it likes, whatever the limit
        _succeed(libc.prctl(KEEP_CAPABILITIES, 1, 0, 0, 0))
        os.setgroups([])
        os.setresgid(nobody, nobody, nobody)
        os.setresuid(nobody, nobody, nobody)
        kept = 0 if _can_read(os.__file__) else READ_ANYTHING  # the standard library may lie in a folder of root's
        _succeed(libc.capset((ctypes.c_uint * 2)(CAPABILITIES_VERSION, 0), (ctypes.c_uint * 6)(kept, kept)))


def judge() -> str:
    """Run the program; PASSED, or what it raised."""
    try:
        with open("program.py", encoding="utf-8") as file:
            program = compile(file.read(), "program.py", "exec")
        exec(program, {"__name__": "program"})
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:MOST]
    return PASSED


def _can_read(path: str) -> bool:
    try:
        open(path, "rb").close()
    except OSError:
        return False
    return True


def _succeed(code: int) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), "could not give up rights")


def main() -> None:
    """Never returns: nothing that the program left behind runs at exit."""
    pipe, limits, nobody = int(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    del sys.argv[1:]
    confine(limits, nobody)
    os.write(pipe, judge().encode("utf-8", "replace"))
    os._exit(0)


if __name__ == "__main__":
    main()
