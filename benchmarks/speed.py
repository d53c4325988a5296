"""`make bench`: decoding speed against transformers, on the toy pair and on the padded pair, into docs/benchmarks.md.

    python -m benchmarks.speed                all tables: about 40 minutes on 2 quiet cores
    python -m benchmarks.speed queue best     some of them, by name; the others stay as they are

Every table but the queue's is one run of `benchmarks.decoding` in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.decoding import CONTENDERS, prompts_of
from benchmarks.evidence import machine
from toolkit import ModelPair, generate
from toolkit.io import write_text
from toolkit.stage import provenance

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
FEW = [
    "transformers autoregressive", "transformers assisted K=4", "autoregressive", "speculative K=4", "confidence .4", "rate",
]  # fmt: skip
BEST = [
    "transformers assisted dynamic", "transformers assisted heuristic", "transformers assisted K=4",
    "transformers assisted dynamic, packed", "transformers assisted heuristic, packed", "speculative K=4", "tail .2",
    "confidence .4", "rate", "rate block", "rate, not packed",
]  # fmt: skip
SMALL = [name for name in CONTENDERS if "packed" not in name]  # the toy pair has no layer that is large enough
PADDED = ["--pair", "toy_padded", "--warm-up", "1"]


@dataclass(frozen=True)
class Run:
    """One table: its title, the threads it runs with, and what `benchmarks.decoding` is told."""

    title: str
    threads: int
    arguments: list[str]


RUNS = {
    "toy": Run("Toy pair (2.0 M / 0.2 M), batch 1, one thread", 1,
               ["--prompts", "24", "--warm-up", "8", "--contenders", *SMALL]),
    "batches": Run("Toy pair, batches, two threads", 2,
                   ["--prompts", "48", "--warm-up", "2", "--batch-sizes", "1", "4", "8", "16", "--contenders", *FEW]),
    "padded": Run("Padded pair (207 M / 0.2 M), batch 1, two threads", 2,
                  [*PADDED, "--prompts", "8", "--max-new-tokens", "64", "--contenders", *CONTENDERS]),
    "best": Run("Padded pair, batch 1, two threads: the best of both sides, more prompts", 2,
                [*PADDED, "--prompts", "32", "--max-new-tokens", "64", "--contenders", *BEST, "--reference", BEST[0]]),
    "padded_batches": Run("Padded pair, batches, two threads", 2,
                          [*PADDED, "--prompts", "16", "--max-new-tokens", "48", "--batch-sizes", "4", "16",
                           "--contenders", *FEW]),
}  # fmt: skip
QUEUE = ("Toy pair, 96 prompts in one call, slots refilled, two threads", 96, (1, 4, 8, 16))
NOTES = """Every contender samples at T = 1 from the same prompts (test prompts of `math` and `code`, alternating) to the same
length limit. Contenders take turns on every group of prompts, in an order that rotates. Speeds are new tokens over seconds,
with 95 % bootstrap intervals over groups, the same draws for all. transformers' assisted generation takes one prompt at a
time. *Outside forwards* is the share of the time that is not spent inside the models' forwards (replays of captured ones
included). *Not captured* is the same without replaying forwards of recurring shapes. Large float32 layers multiply by packed
weights (`pair.cpu_packing`). *Not packed* means by the model's own weights. *Packed* after one of transformers' contenders
means that its generate ran on this engine's packed weights, which transformers does not offer. None of it has run on a GPU
yet (`make gpu-check`)."""


def queued() -> str:
    """Tokens/s of one call of `decode` by batch size: a row that ends makes room for the next prompt. Three turns each."""
    _, count, sizes = QUEUE
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
    return "\n".join(lines)


def measured(run: Run) -> str:
    """The table of one run of `benchmarks.decoding`, and its command."""
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.decoding", *run.arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": str(run.threads)}
    result = subprocess.run(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print(result.stdout, flush=True)
    command = " ".join(f'"{word}"' if " " in word else word for word in run.arguments)
    said = f"\n\n`OMP_NUM_THREADS={run.threads} python -m benchmarks.decoding {command}`" if len(command) < 320 else ""
    return result.stdout.strip() + said


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    **{name: (run.title, partial(measured, run)) for name, run in RUNS.items()},
    "queue": (QUEUE[0], queued),
}


def sections(page: str) -> dict[str, str]:
    """What stands under each second-level heading of a page."""
    found = {}
    for part in f"\n{page}".split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        found[title] = text.strip()
    return found


def main() -> None:
    """Measure the chosen tables and put them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(TABLES)}; default: all")
    names = parser.parse_args().names or list(TABLES)
    if unknown := [name for name in names if name not in TABLES]:
        parser.error(f"expected names among {', '.join(TABLES)}, got {', '.join(unknown)}")
    for name in names:
        title, table = TABLES[name]
        print(f"== {title}", flush=True)
        started, about = perf_counter(), provenance()
        text = table()
        took = f"`python -m benchmarks.speed {name}`: revision {about['revision']}, {perf_counter() - started:.0f} s."
        known = {**sections(PAGE.read_text() if PAGE.exists() else ""), title: f"{text}\n\n{took}"}
        ordered = [f"## {title}\n\n{known[title]}\n" for title, _ in TABLES.values() if title in known]
        head = (
            f"# Decoding speed\n\n`make bench` on {machine()}; torch {about['versions']['torch']}, transformers "
            f"{about['versions']['transformers']}.\n\n{NOTES}\n\n"
        )
        write_text(PAGE, head + "\n".join(ordered))


if __name__ == "__main__":
    main()
