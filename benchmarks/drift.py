"""python -m benchmarks.drift: how soon a watch sees that a target is trained under its draft.

The toy target learns its own greedy answers to training prompts in ten small steps; the draft stays. After each step 400
test texts are decoded at T = 1 with K = 4. Streams draw texts from these: 20 pages of the target as it was, then five after
each step, 166 rounds a page; the recording has 100 other texts. Prints acceptance of position 1 by
step, and pages until the alarm.

    --streams 100      --rate 3e-3     the optimizer's, for texts of one epoch each
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from analysis.diagnosis.watch import watch
from analysis.loads.engine_counts import PositionCounts, counts_of
from benchmarks.evidence import machine
from data_gen.prompts import ToyPrompts
from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.errors import answer_signals
from toolkit.models.teacher import pad_right

STEPS, TEXTS, RECORDED, BEFORE, PAGES, ROUNDS, MOST = 10, 400, 100, 20, 5, 166, 4
Text = tuple[list[int], list[int]]  # drafted and accepted tokens of its rounds


def prompts(split: Literal["train", "test"], count: int) -> list[str]:
    """Toy prompts of three domains in turn."""
    domains = [ToyPrompts(name, split, count // 3 + 1).load() for name in ("instruct", "math", "code")]
    return [each.prompt for several in zip(*domains, strict=True) for each in several][:count]


def served(pair: ModelPair, count: int, seed: int) -> list[Text]:
    """Counts of texts that are decoded at T = 1."""
    sampling, method = (
        Sampling(1.0, max_new_tokens=64, seed=seed),
        config.method("speculative", [f"policy.num_drafted={MOST}"]),
    )
    texts = decode(pair, prompts("test", count), method, sampling, batch_size=64)
    return [([r.num_drafted for r in text.rounds], [r.num_accepted for r in text.rounds]) for text in texts]


def learn(target: torch.nn.Module, texts: Sequence[tuple[Sequence[int], Sequence[int]]], rate: float) -> None:
    """One epoch of cross-entropy on what follows prompts."""
    optimizer = torch.optim.AdamW(target.requires_grad_(True).parameters(), rate)
    for first in range(0, len(texts), 16):
        batch = texts[first : first + 16]
        ids = pad_right([[*prompt, *produced] for prompt, produced in batch])
        labels = torch.full_like(ids, -100)
        for row, (prompt, produced) in enumerate(batch):
            labels[row, len(prompt) : len(prompt) + len(produced)] = torch.tensor(produced)
        logits = target(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def page_of(texts: Sequence[Text], generator: np.random.Generator) -> list[Text]:
    """Texts, drawn with replacement, of a page's rounds at least."""
    drawn: list[Text] = []
    while sum(len(drafted) for drafted, _ in drawn) < ROUNDS:
        drawn.append(texts[int(generator.integers(len(texts)))])
    return drawn


def pages_until_alarm(pools: Sequence[Sequence[Text]], seed: int) -> int | None:
    """Pages after the first step until the alarm; negative: a false one; None: none."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(pools[0]))
    recorded = counts_of([pools[0][n] for n in order[:RECORDED]], MOST)
    pools = [[pools[0][n] for n in order[RECORDED:]], *pools[1:]]
    stream = [page_of(pools[0], generator) for _ in range(BEFORE + 1)]
    stream += [page_of(pool, generator) for pool in pools[1:] for _ in range(PAGES)]
    sums, totals = np.zeros((3, MOST)), list[PositionCounts]()
    for texts in stream:
        more = counts_of(texts, MOST)
        sums += np.stack([more.reached.sum(0), more.accepted.sum(0), np.full(MOST, more.rounds)])
        rounds = int(sums[2, 0])
        page = PositionCounts(sums[:1].copy(), sums[1:2].copy(), rounds, MOST * rounds, whole_server=True)
        totals.append(page)
    alarm = watch(recorded, totals, [str(number) for number in range(len(totals))])["alarm"]
    return None if alarm is None else int(alarm) - BEFORE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--rate", type=float, default=3e-3)
    options = parser.parse_args()
    pair = ModelPair.toy()
    target = copy.deepcopy(pair.target)
    greedy = decode(pair, prompts("train", 160), config.method("autoregressive"), Sampling(0.0), batch_size=64)
    learnt = [(text.prompt_ids, text.token_ids) for text in greedy]
    pools, shares = [served(pair, TEXTS, 1)], list[float]()
    for step in range(STEPS + 1):
        if step:
            learn(target, learnt, options.rate)
            moved = ModelPair(copy.deepcopy(target), pair.draft, tokenizer=pair.tokenizer, end_ids=pair.end_ids)
            pools.append(served(moved, TEXTS, 1 + step))
        counts = counts_of(pools[-1], MOST)
        shares.append(float(counts.accepted[:, 0].sum() / counts.reached[:, 0].sum()))
        print(f"step {step}: position 1 accepts {shares[-1]:.3f}", flush=True)
    delays = [pages_until_alarm(pools, seed) for seed in range(options.streams)]
    early = sum(delay is not None and delay < 0 for delay in delays)
    seen: NDArray[np.float64] = np.array([delay for delay in delays if delay is not None and delay >= 0])
    low, middle, high = np.quantile(seen, [0.1, 0.5, 0.9]) if len(seen) else (np.nan,) * 3
    after = f"after {middle:.0f} ({low:.0f} to {high:.0f}) pages"
    print(f"{machine()}\n{len(seen)} of {len(delays)} streams alarm {after}; {early} before")


if __name__ == "__main__":
    answer_signals()
    main()
