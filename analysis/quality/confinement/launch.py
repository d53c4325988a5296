"""Starting a confined process: its sources go along, so nothing of this project needs to be readable in there.

Order of events: the process starts, by bubblewrap if that is asked for. It gives up its rights (`inside.enter`), says
that it is ready, and does its job. Whatever happens, `Confined.end` kills it with everything it may have started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

from analysis.quality.confinement.files import Readable, interpreter, python
from analysis.quality.confinement.inside import frames
from analysis.quality.confinement.inside.enter import READY
from toolkit.errors import InputError

NOBODY = 65534
PACKAGE = "analysis.quality.confinement.inside"
SOURCES = ("kernel", "landlock", "seccomp", "namespaces", "frames", "values", "crossed", "asking",
           "program", "judge", "queries", "attempt", "enter")  # fmt: skip
STARTING = 30.0  # seconds a process may take to be ready
BOOT = """
import json, sys
from types import ModuleType
given = json.load(sys.stdin.buffer)
for name, code in given.pop("sources").items():
    module = sys.modules[name] = ModuleType(name)
    if code is None:
        module.__path__ = []
    else:
        exec(compile(code, name, "exec"), module.__dict__)
sys.modules[given.pop("main")].main(given)
"""


@dataclass(frozen=True)
class Confinement:
    """The layers a process is put behind: bubblewrap or namespaces or neither, landlock, seccomp."""

    layers: tuple[str, ...]

    def __str__(self) -> str:
        return " + ".join(self.layers)


class Confined:
    """A process behind a confinement, as a context that ends it.

    job          module of `inside`; payload: its literal argument
    descriptors  ends of pipes that it gets, and nothing else; they are closed here, whether it could be started or not
    limits       {"RLIMIT_...": value}
    more         files and folders that it may read besides Python
    """

    def __init__(
        self,
        job: str,
        payload: Any,
        descriptors: Sequence[FileIO],
        limits: Mapping[str, int],
        confinement: Confinement,
        more: Sequence[str] = (),
    ):
        readable = python()
        readable = Readable((*readable.trees, *more), readable.links, readable.hidden)
        trees, listed = readable.rules()
        self.bubblewrap = "bubblewrap" in confinement.layers
        given: dict[str, Any] = {
            "sources": sources(), "main": f"{PACKAGE}.enter", "job": job, "payload": payload,
            "descriptors": [end.fileno() for end in descriptors], "limits": dict(limits),
            "layers": confinement.layers, "nobody": NOBODY,
            "trees": readable.trees, "links": readable.links, "hidden": readable.hidden, "rules": trees,
            "listed": listed, "private": bool(more),
        }  # fmt: skip
        command = [interpreter(), "-I", "-S", "-B", "-c", BOOT]
        if self.bubblewrap:
            command = [*bubblewrap(readable), *command]
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/",
                env={"LANG": "C.UTF-8"}, pass_fds=given["descriptors"], start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise InputError(f"could not start {command[0]} to run code: {error}") from None
        finally:
            for end in descriptors:
                end.close()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(given).encode("ascii"))
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def ready(self) -> str:
        """Wait until it is confined; "" then, else why it could not be."""
        assert self.process.stderr is not None
        found, deadline = b"", monotonic() + STARTING
        while not found.endswith(READY):
            if not frames.readable(self.process.stderr.fileno(), deadline - monotonic()):
                return f"not ready after {STARTING:g} s"
            some = os.read(self.process.stderr.fileno(), 4096)
            if not some:
                return found.decode("utf-8", "replace").strip().replace("\n", "; ") or f"ended {self.how()}"
            found += some
        return ""

    def how(self, seconds: float = 1.0) -> str:
        """How it ended, in words; it is given this long to do so."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        code = self.process.returncode
        if code is None:
            return "without ending its process"
        if self.bubblewrap and code > 128:
            code = 128 - code
        if code >= 0:
            return f"with exit code {code}"
        return f"by {signal.Signals(-code).name}" + (" (out of CPU time or memory)" if code == -signal.SIGKILL else "")

    def end(self) -> None:
        """Kill it and its whole group. In a namespace, everything else in there goes with it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def __enter__(self) -> Confined:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def pipe(stack: ExitStack) -> tuple[FileIO, FileIO]:
    """Reading and writing end of a new pipe; the stack closes what is then still open."""
    reader, writer = os.pipe()
    return stack.enter_context(FileIO(reader, "r")), stack.enter_context(FileIO(writer, "w"))


@cache
def sources() -> dict[str, str | None]:
    """The modules that run inside, in the order of their imports; packages have no source."""
    folder, parts = Path(__file__).with_name("inside"), PACKAGE.split(".")
    packages = {".".join(parts[:count]): None for count in range(1, len(parts) + 1)}
    return {**packages, **{f"{PACKAGE}.{name}": (folder / f"{name}.py").read_text("utf-8") for name in SOURCES}}


def bubblewrap(readable: Readable) -> list[str]:
    """bwrap(1) up to the command: all namespaces anew, nothing to be seen but what is readable, gone with its starter."""
    words = [
        "bwrap",
        "--unshare-user",
        "--unshare-all",
        "--die-with-parent",
        "--uid",
        str(NOBODY),
        "--gid",
        str(NOBODY),
    ]
    for path in readable.trees:
        words += ["--ro-bind", path, path]
    for path in readable.hidden:
        words += ["--tmpfs", path, "--remount-ro", path]
    for path, target in readable.links:
        words += ["--symlink", target, path]
    return [*words, "--remount-ro", "/", "--chdir", "/", "--cap-drop", "ALL", "--as-pid-1", "--"]
