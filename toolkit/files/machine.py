"""The machine at hand: what its processor is called, and how much memory is free."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Of a control group of version 2 and 1: the file of its limit, that of its use, and what of that use is file cache that can go.
VERSIONS = {
    "": (".", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@cache
def processor() -> str:
    """The processor's name; where the system tells it, with its family and model, as clouds give many the same name."""
    facts = _facts(PROC / "cpuinfo")
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    return f"{facts['model name']} (family {facts.get('cpu family')}, model {facts.get('model')})"


def available_memory() -> int | None:
    """Bytes that this process may still take, by the system and by its containers' limits; None: the system does not tell."""
    sizes = [*_left_in_groups()]
    with suppress(KeyError, ValueError, IndexError):
        sizes.append(1024 * int(_facts(PROC / "meminfo")["MemAvailable"].split()[0]))
    return min(sizes, default=None)


def _left_in_groups() -> Iterator[int]:
    """Bytes below the limit of every control group that this process is in, up to the root; file cache counts as free."""
    lines = _text(PROC / "self" / "cgroup") or "0::/\n0:memory:/"
    for controllers, group in re.findall(r"^\d+:([^:]*):(.*)$", lines, re.MULTILINE):
        for version in VERSIONS.keys() & {*controllers.split(",")}:
            mount, *names, cached = VERSIONS[version]
            root = CGROUPS / mount
            folder = root / group.strip(
                "/"
            )  # as the host calls it, it may not be there: then the root is the container's
            for path in (folder, *folder.parents[: len(folder.parts) - len(root.parts)]):
                with suppress(ValueError):  # "max": no limit
                    limit, used = (int(_text(path / name)) for name in names)
                    match = re.search(rf"^{cached} (\d+)$", _text(path / "memory.stat"), re.MULTILINE)
                    yield max(0, limit - used + (int(match[1]) if match else 0))


def _facts(path: Path) -> dict[str, str]:
    """The first block of lines "name: value" of a file; empty if there is none."""
    lines = (line.partition(":") for line in _text(path).split("\n\n")[0].split("\n"))
    return {name.strip(): value.strip() for name, _, value in lines}


def _text(path: Path) -> str:
    """A file's content; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
