"""`make bench`: decoding speed against transformers, on the toy pair and on the padded pair, into docs/benchmarks.md.

About 20 minutes on 2 quiet cores. Every table is one run of `benchmarks.decoding` in a process of its own.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.decoding import CONTENDERS, prompts_of
from benchmarks.evidence import machine
from toolkit import ModelPair, generate
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
QUEUE = ("Toy pair, 96 prompts in one call, places refilled, two threads", 96, (1, 4, 8, 16))
NOTES = """Everybody samples at T = 1 from the same prompts (test prompts of `math` and `code`, alternating) to the same length
limit; contenders take turns on every group of prompts, in an order that rotates. Speeds are new tokens over seconds, with 95 %
intervals: bootstrap over groups, the same draws for all. transformers' assisted generation takes one prompt at a time. *Outside
forwards*: share of the time that is not spent inside the models' forwards (replays of captured ones included). *Not captured*:
the same without replaying forwards of recurring shapes. Not yet run on a GPU (`make gpu-check`)."""


def queued() -> list[str]:
    """Tokens/s of one call of `decode` by batch size: a row that ends makes room for the next prompt. Three turns each."""
    title, count, sizes = QUEUE
    torch.set_num_threads(2)
    pair = ModelPair.toy()
    prompts = prompts_of(pair, count)
    speeds: dict[tuple[str, int], list[float]] = {}
    for turn in range(4):  # the first one warms up
        for name, method in (("autoregressive", "autoregressive"), ("speculative K=4", "speculative")):
            for size in sizes:
                started = perf_counter()
                found = generate(pair, prompts, method, max_new_tokens=96, batch_size=size, seed=turn)
                speed = sum(len(generation.token_ids) for generation in found) / (perf_counter() - started)
                speeds.setdefault((name, size), []).extend([speed] if turn else [])
    lines = ["| method | batch | tokens/s, median (lowest, highest of 3) | over batch 1 |", "|---|---:|---:|---:|"]
    for (name, size), found in speeds.items():
        middle, alone = statistics.median(found), statistics.median(speeds[name, 1])
        lines.append(f"| {name} | {size} | {middle:.0f} ({min(found):.0f}, {max(found):.0f}) | {middle / alone:.2f} |")
    print("\n".join(lines), flush=True)
    return [f"## {title}", "", *lines, ""]


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
    parts += queued()
    about = provenance()
    head = (
        f"# Decoding speed\n\n`make bench` on {machine()}; torch {about['versions']['torch']}, transformers "
        f"{about['versions']['transformers']}; revision {about['revision']}; {perf_counter() - started:.0f} s in all.\n\n"
        f"{NOTES}\n\n"
    )
    write_text(ROOT / "docs" / "benchmarks.md", head + "\n".join(parts))


if __name__ == "__main__":
    main()
