"""A command of this project in a process of its own, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(words: list[str], **environment: str) -> str:
    """Output of a Python command of this project; its errors end this program."""
    result = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if result.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{result.stderr[-3000:]}")
    return result.stdout
