"""`make bench`: decoding speed against transformers, on the toy pair and on the padded pair, into docs/benchmarks.md.

About 20 minutes on 2 quiet cores. Every table is one run of `benchmarks.decoding` in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter

from benchmarks.decoding import CONTENDERS
from benchmarks.evidence import machine
from toolkit.io import write_text
from toolkit.stage import provenance

ROOT = Path(__file__).resolve().parent.parent
FEW = [
    "transformers autoregressive", "transformers assisted K=4", "autoregressive", "speculative K=4", "confidence .4", "rate",
]  # fmt: skip
# title, threads, arguments
RUNS: list[tuple[str, int, list[str]]] = [
    ("Toy pair (2.0 M / 0.2 M), batch 1, one thread", 1,
     ["--prompts", "24", "--warm-up", "8", "--contenders", *CONTENDERS]),
    ("Toy pair, batches, two threads", 2,
     ["--prompts", "48", "--warm-up", "2", "--batch-sizes", "1", "4", "8", "16", "--contenders", *FEW]),
    ("Padded pair (207 M / 0.2 M), batch 1, two threads", 2,
     ["--pair", "toy_padded", "--prompts", "8", "--warm-up", "1", "--max-new-tokens", "64", "--contenders", *CONTENDERS]),
    ("Padded pair, batches, two threads", 2,
     ["--pair", "toy_padded", "--prompts", "16", "--warm-up", "1", "--max-new-tokens", "48", "--batch-sizes", "4", "16",
      "--contenders", *FEW]),
]  # fmt: skip
NOTES = """Everybody samples at T = 1 from the same prompts (test prompts of `math` and `code`, alternating) to the same length
limit; contenders take turns on every group of prompts, in an order that rotates. Speeds are new tokens over seconds, with 95 %
intervals: bootstrap over groups, the same draws for all. transformers' assisted generation takes one prompt at a time. *Outside
forwards*: share of the time that is not spent inside the models' forwards (replays of captured ones included). *Not captured*:
the same without replaying forwards of recurring shapes. Not yet run on a GPU (`make gpu-check`)."""


def main() -> None:
    """Measure all tables and write them."""
    started, parts = perf_counter(), []
    for title, threads, arguments in RUNS:
        print(f"== {title}", flush=True)
        words = [sys.executable, "-W", "ignore", "-m", "benchmarks.decoding", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        result = subprocess.run(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        print(result.stdout, flush=True)
        command = " ".join(f'"{word}"' if " " in word else word for word in arguments)
        parts += [f"## {title}", "", result.stdout.strip(), ""]
        if len(command) < 200:
            parts += [f"`OMP_NUM_THREADS={threads} python -m benchmarks.decoding {command}`", ""]
    about = provenance()
    head = (
        f"# Decoding speed\n\n`make bench` on {machine()}; torch {about['versions']['torch']}, transformers "
        f"{about['versions']['transformers']}; revision {about['revision']}; {perf_counter() - started:.0f} s in all.\n\n"
        f"{NOTES}\n\n"
    )
    write_text(ROOT / "docs" / "benchmarks.md", head + "\n".join(parts))


if __name__ == "__main__":
    main()
