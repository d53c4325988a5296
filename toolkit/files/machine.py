"""The machine at hand: what its processor is called, and how much memory is free."""

from __future__ import annotations

import platform
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

from toolkit.errors import InputError
from toolkit.files.text import lines_of

CGROUP = Path("/sys/fs/cgroup")  # of version 2: what a container may use
MAPS = Path("/proc/self/maps")


@cache
def processor() -> str:
    """The processor's name; where the system tells it, with its family and model, as clouds give many the same name."""
    facts = _facts(Path("/proc/cpuinfo"))
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    return f"{facts['model name']} (family {facts.get('cpu family')}, model {facts.get('model')})"


def available_memory() -> int | None:
    """Bytes that this process may still take, by the system and by its container's limit; None: the system does not tell.

    The system counts pages of files as free. Those of checkpoints that this process has mapped are read again and again.
    """
    sizes = []
    with suppress(KeyError, ValueError, IndexError):
        sizes.append(
            max(0, 1024 * int(_facts(Path("/proc/meminfo"))["MemAvailable"].split()[0]) - _mapped_checkpoints())
        )
    with suppress(OSError, ValueError):  # "max": no limit
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        sizes.append(limit - used)
    return min(sizes, default=None)


def _mapped_checkpoints() -> int:
    """Bytes of the checkpoints that this process has mapped."""
    with suppress(OSError):
        fields = [line.split(maxsplit=5) for line in lines_of(MAPS.read_text()) if line.endswith(".safetensors")]
        ends = [[int(end, 16) for end in addresses.split("-")] for addresses, *_ in fields]
        return sum(last - first for first, last in ends)
    return 0


def check_memory(needed: int, what: str, instead: str) -> None:
    """Raises InputError if `needed` bytes are more than this process may still take.

    what  takes them;  instead  what to do
    """
    available = available_memory()
    if available is not None and needed > available:
        raise InputError(f"{what} takes {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} are free: {instead}")


def check_disk(needed: int, folder: Path, what: str) -> None:
    """Raises InputError if `needed` bytes are more than a folder's file system has left; the folder may not be there yet."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if needed > (free := shutil.disk_usage(existing).free):
        raise InputError(
            f"{what} takes {needed / 1e9:.1f} GB in {folder}, which has {free / 1e9:.1f} left: expected more space"
        )


def _facts(path: Path) -> dict[str, str]:
    """The first block of lines "name: value" of a file; empty if there is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].split("\n"))
    return {name.strip(): value.strip() for name, _, value in lines}
