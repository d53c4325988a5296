"""Which confinement is used here: every mechanism is tried, the strongest that work are taken, and what they stop is checked.

files      bubblewrap, else namespaces of our own; landlock besides
network    the same namespaces; seccomp besides
processes  the same namespaces; seccomp besides, which alone stops new processes of root's
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from functools import cache

from analysis.quality.confinement.files import python
from analysis.quality.confinement.launch import Confined, Confinement, pipe
from toolkit.errors import InputError

OUTER, INNER = ("bubblewrap", "namespaces"), ("landlock", "seccomp")
STOPPED = {"files", "writing", "network", "processes", "signals"}  # what `inside.attempt` tries
LIMITS = {"RLIMIT_CPU": 10, "RLIMIT_AS": 2**30, "RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0}
MEND = "install bubblewrap, or use a kernel (5.13 or newer) and a container that allow landlock and seccomp"


@cache
def chosen() -> Confinement:
    """The strongest confinement that works here. Raises InputError, in one line, if that is not enough to run code in."""
    if not sys.platform.startswith("linux"):
        raise InputError(f"running code that a model wrote needs Linux, this is {sys.platform}: use a container")
    scratch = os.path.realpath(tempfile.gettempdir())
    if tree := python().tree_of(scratch):
        raise InputError(
            f"expected a TMPDIR that confined code cannot read, got {scratch}, inside {tree}, which Python needs: "
            "set TMPDIR elsewhere"
        )
    problems = {name: problem(Confinement((name,))) for name in (*OUTER, *INNER)}
    outer = next((name for name in OUTER if not problems[name]), None)
    layers = (*([outer] if outer else []), *(name for name in INNER if not problems[name]))
    enough = ("seccomp" in layers and (outer or "landlock" in layers)) or (outer and os.geteuid() != 0)
    why = "" if enough else "; ".join(f"{name}: {said}" for name, said in problems.items() if said)
    why = why or problem(Confinement(layers), STOPPED)
    if why:
        raise InputError(f"no confinement works here to run code that a model wrote in ({why}): {MEND}")
    return Confinement(layers)


def problem(confinement: Confinement, stopped: frozenset[str] | set[str] = frozenset()) -> str:
    """Why a confinement does not work here: it cannot be entered, or does not stop all of these; "" if it works."""
    if "bubblewrap" in confinement.layers and shutil.which("bwrap") is None:
        return "not installed"
    with tempfile.NamedTemporaryFile(prefix="forbidden-") as forbidden, ExitStack() as stack:
        os.chmod(forbidden.name, 0o666)  # the rights of files should not be what stops it
        reader, writer = pipe(stack)
        process = stack.enter_context(Confined("attempt", forbidden.name, (writer,), LIMITS, confinement))
        if why := process.ready():
            return why
        found = reader.read(4096)
    missed = sorted(stopped - set(json.loads(found or b"[]")))
    return f"{confinement} does not stop {', '.join(missed)}" if missed else ""
