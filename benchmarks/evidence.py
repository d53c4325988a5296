"""`make evidence`: the results that the documentation shows, measured again and written to outputs/evidence/.

    python -m benchmarks.evidence                 all of them: hours
    python -m benchmarks.evidence rules greedy    some of them, by name
    python -m benchmarks.evidence --small         all of them on a few prompts: does it run at all?

Each page names its command, the code's revision, the machine and the seconds it took. The decoding speed is `make bench`, the
papers' tables are `make papers`.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

from benchmarks import exactness
from toolkit.errors import answer_signals
from toolkit.files.atomic import write_text
from toolkit.files.machine import processor
from toolkit.files.text import lines_of
from toolkit.runs.stage import provenance

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "outputs" / "evidence"


def quickstart(small: bool = False) -> str:
    """`make quickstart` from an empty output folder: seconds, and what it prints. Its figures are copied. Small: its plan."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [
            "toolkit.train",
            "+experiment=quickstart",
            f"paths.root_dir={scratch}",
            *(["dry_run=true"] if small else []),
        ]
        started = perf_counter()
        printed = run(words).replace(scratch, "outputs")
        seconds = perf_counter() - started
        for figure in sorted(Path(scratch).glob("frontier-*/figures/*.png")):
            (FOLDER / "figures").mkdir(parents=True, exist_ok=True)
            shutil.copy(figure, FOLDER / "figures" / figure.name)
        started = perf_counter()
        run(words)
    lines = [line for line in lines_of(printed) if line.strip()][-90:]
    again = f"{seconds:.0f} s; run again, with everything finished: {perf_counter() - started:.0f} s."
    return "\n".join([again, "", "```", *lines, "```"])


def run(words: list[str]) -> str:
    """Output of `python -m WORDS` in a process of its own; its errors end this program."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"python -m {' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


FIGURES: dict[str, Callable[[bool], str]] = {
    **exactness.TABLES,
    "quickstart": quickstart,
}


def made_by(command: str, started: float) -> str:
    """One line below a result: its command, the machine, versions, the revision and the seconds since `started`."""
    facts = provenance()
    return (
        f"`python -m {command}` on {machine()}; torch {facts['versions']['torch']}, transformers "
        f"{facts['versions']['transformers']}; revision {facts['revision']}; {perf_counter() - started:.0f} s."
    )


def machine() -> str:
    """Processor and cores, without names of hosts."""
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"{processor()}, {threads}, {platform.system()}, Python {platform.python_version()}"


def main(argv: list[str] | None = None) -> None:
    """Measure the chosen results and write their pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(FIGURES)}; default: all")
    parser.add_argument("--small", action="store_true", help="a few prompts and runs only")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in FIGURES]:
        parser.error(f"expected names among {', '.join(FIGURES)}, got {', '.join(unknown)}")
    for name in options.names or FIGURES:
        print(f"== {name}", flush=True)
        started = perf_counter()
        text = FIGURES[name](options.small)
        description = " ".join((FIGURES[name].__doc__ or "").split())
        small = " --small" if options.small else ""
        origin = made_by(f"benchmarks.evidence {name}{small}", started)
        write_text(FOLDER / f"{name}.md", f"# {name}\n\n{description}\n\n{origin}\n\n{text}\n")
        print(text, flush=True)


if __name__ == "__main__":
    answer_signals()
    main()
