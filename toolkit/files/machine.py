"""The machine at hand: what its processor is called, and how much memory is free."""

from __future__ import annotations

import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # of version 2: what a container may use


@cache
def processor() -> str:
    """The processor's name; where the system tells it, with its family and model, as clouds give many the same name."""
    facts = _facts(Path("/proc/cpuinfo"))
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    return f"{facts['model name']} (family {facts.get('cpu family')}, model {facts.get('model')})"


def available_memory() -> int | None:
    """Bytes that this process may still take, by the system and by its container's limit; None: the system does not tell."""
    sizes = []
    with suppress(KeyError, ValueError, IndexError):
        sizes.append(1024 * int(_facts(Path("/proc/meminfo"))["MemAvailable"].split()[0]))
    with suppress(OSError, ValueError):  # "max": no limit
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        sizes.append(limit - used)
    return min(sizes, default=None)


def _facts(path: Path) -> dict[str, str]:
    """The first block of lines "name: value" of a file; empty if there is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].split("\n"))
    return {name.strip(): value.strip() for name, _, value in lines}
