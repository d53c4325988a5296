"""python -m benchmarks.rules [--out docs/evidence]: milliseconds per tree node of every multi-draft rule, on one core.

A node is one pair of distributions with K candidates: what the tree walk computes there, less the draw of the
outcome. Wall time is what a user waits; CPU time leaves out what other programs took. The softmax of one row is timed
among the rules as a reference for the machine and its load. The rule importance_lp is for small vocabularies and timed
on 40 tokens only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time

import pandas as pd
import torch

from analysis.figures.plots import rule_cost
from toolkit.io import write_text
from toolkit.verification import SelectionRule, get, names, schemes

VOCAB_SIZES = (1_000, 8_000, 32_000, 128_000)
NUM_CANDIDATES = (1, 2, 4, 8)
BASE = (32_000, 4)  # where the other one is varied
YARDSTICK = "softmax"


def measure(repeats: int = 200, dtype: torch.dtype = torch.float64) -> pd.DataFrame:
    """One line per rule, V and K: median, 10th and 90th percentile of wall and CPU milliseconds."""
    sizes = [(v, BASE[1]) for v in VOCAB_SIZES] + [(BASE[0], k) for k in NUM_CANDIDATES if k != BASE[1]]
    lines = []
    for vocab_size, count in sizes:
        for name in [n for n in names() if isinstance(get(n), SelectionRule)]:
            if name == "importance_lp" and (vocab_size, count) != (VOCAB_SIZES[0], BASE[1]):
                continue
            size = 40 if name == "importance_lp" else vocab_size
            nodes = [Node(get(name), size, 2 if name == "importance_lp" else count, dtype, seed) for seed in range(8)]
            lines.append(
                {"rule": name, "vocab_size": size, "num_candidates": nodes[0].count, **timed(list(nodes), repeats)}
            )
        logits = torch.randn(vocab_size, dtype=dtype)
        yardstick = timed([partial(torch.softmax, logits, -1)], repeats)
        lines.append({"rule": YARDSTICK, "vocab_size": vocab_size, "num_candidates": count, **yardstick})
    return pd.DataFrame(lines)


class Node:
    """One node, ready to be judged: peaked distributions as language models have them, candidates drawn as the rule
    declares.
    """

    def __init__(self, rule: SelectionRule, vocab_size: int, count: int, dtype: torch.dtype, seed: int):
        generator = torch.Generator().manual_seed(seed)
        logits, noise = torch.randn(2, vocab_size, generator=generator, dtype=dtype)
        p, q = (3 * logits).softmax(-1), (3 * logits + noise).softmax(-1)
        drawn, real = schemes.candidates(rule.schemes[0], q, torch.rand(count, generator=generator))
        self.count, self.rule = count, rule
        self.given = (p[None], q.expand(1, count, -1).contiguous(), drawn[None], real[None])

    def __call__(self) -> object:
        return self.rule._distribution_or_target(*self.given)


def timed(calls: list[Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median and spread of one call's milliseconds, the calls in turn, after a warm-up."""
    wall, cpu = [], []
    for n in range(repeats + 10):
        call = calls[n % len(calls)]
        clock, work = perf_counter(), thread_time()
        call()
        if n >= 10:
            wall.append(1e3 * (perf_counter() - clock))
            cpu.append(1e3 * (thread_time() - work))
    found: dict[str, float] = {}
    for kind, values in (("wall", pd.Series(wall)), ("cpu", pd.Series(cpu))):
        found |= {
            f"{kind}_ms": values.median(),
            f"{kind}_p10": values.quantile(0.1),
            f"{kind}_p90": values.quantile(0.9),
        }
    return found


def draw_figure(table: pd.DataFrame, path: Path) -> Path:
    """CPU milliseconds over V and over K, one line per rule."""
    return rule_cost(table[~table.rule.isin([YARDSTICK, "importance_lp"])], BASE, path)


def main() -> None:
    """Print the table; with --out write rules.csv and rules.png there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for rules.csv and rules.png")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        table = measure(arguments.repeats, getattr(torch, arguments.dtype))
    print(table.to_string(index=False, float_format="{:.3f}".format))
    if arguments.out:
        write_text(arguments.out / "rules.csv", table.to_csv(index=False, float_format="%.4f"))
        print(draw_figure(table, arguments.out / "rules.png"))


if __name__ == "__main__":
    main()
