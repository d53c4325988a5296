"""Does the wall clock rank stopping policies as replay predicts? On the toy pair with its target grown to 207 M parameters.

    python -m benchmarks.padded_ranks                   24 prompts, 64 new tokens: about 10 minutes on 2 quiet cores
    python -m benchmarks.padded_ranks --prompts 2       a glance

Predicted: replay counts every policy's forwards on recordings of the same prompts (`REPLICATES` responses of each). The
unpadded pair writes these, as it computes the same function. A cost model fitted to the padded pair's rounds on other
prompts turns the counts into seconds. Measured: all policies decode every prompt, one at a time, in an order that
rotates.

A predicted gap's interval is that of a run like the measured one. Prompts are resampled, and every policy draws one of
the recordings of each, since live it writes a response of its own.

Shapes: M policies, R recordings, n prompts, B resamples.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from tqdm import tqdm

from analysis.replay.policies import replay, replay_starts
from analysis.tables.bootstrap import Bootstrap, replicated_totals
from benchmarks.decoding import measure, ours, resampled_speeds
from benchmarks.recorded import reading, record
from data_gen.frozen import load_frozen
from toolkit import ModelPair, config
from toolkit.cost import CostModel, fit_rounds
from toolkit.decoding import Sampling, decode
from toolkit.padding import padded_pair
from toolkit.trace import Trace

Array = NDArray[np.float64]
DOMAINS = ("instruct", "math")
RATE = "rate"
POLICIES: dict[str, tuple[str, list[str]]] = {
    "plain decoding": ("autoregressive", []),
    "fixed K=2": ("speculative", ["policy.num_drafted=2"]),
    "fixed K=4": ("speculative", ["policy.num_drafted=4"]),
    "fixed K=8": ("speculative", ["policy.num_drafted=8"]),
    "confidence .4": ("confidence", ["policy.threshold=0.4"]),
    "tail product .2": ("tail", ["policy.threshold=0.2"]),
    "SpecDec++ h=.7": ("specdec_pp", ["policy.threshold=0.7"]),
    RATE: ("rate", []),  # told the measured cost of one more drafted token
}
TIMED = ("plain decoding", "fixed K=2", "fixed K=4", "fixed K=8")  # whose rounds the cost model is fitted to
TIMED_PROMPTS, WARM_UP = 8, 1
MAX_DRAFTED, REPLICATES = 20, 8
BOOTSTRAP = Bootstrap(4000)


@dataclass(frozen=True)
class RoundCost:
    """Seconds of a round: the forwards' cost model, and what a round takes outside of both models."""

    model: CostModel
    outside: float

    def of_texts(self, counts: dict[str, Any], prompt_lengths: Array) -> Array:
        """Seconds [n] of texts from their counts [n]. The context is taken as the prompt and half of the text.

        The first forward of each model reads the prompt, too; the cost per token is taken to hold there as well.
        """
        draft, target = self.model.draft, self.model.target
        rounds, calls = counts["num_target_calls"], counts["num_draft_calls"]
        context = prompt_lengths + counts["num_generated"] / 2
        read_by_target = counts["num_drafted"] + rounds + prompt_lengths - 1
        read_by_draft = calls + np.where(calls > 0, prompt_lengths - 1, 0)
        seconds: Array = (
            rounds * (target.base + self.outside + target.per_context * context)
            + target.per_token * read_by_target
            + calls * (draft.base + draft.per_context * context)
            + draft.per_token * read_by_draft
        )
        return seconds

    def of_one_more(self, context: float) -> float:
        """c as the rate rule means it: one more drafted token, over a round without any. The target reads it, too."""
        more = self.model.draft(1.0, context) + self.model.target.per_token
        return more / (self.model.target(1.0, context) + self.outside)


@dataclass(frozen=True)
class Speeds:
    """Tokens per second of every policy, by name, and of every resample [B]."""

    found: dict[str, float]
    resampled: dict[str, Array]

    def gap(self, one: str, other: str) -> tuple[float, float, float]:
        """one's speed over the other's, less 1, and its interval."""
        low, high = BOOTSTRAP.interval(self.resampled[one] / self.resampled[other] - 1)
        return self.found[one] / self.found[other] - 1, low, high

    def shown(self, name: str) -> str:
        """With interval, for people."""
        low, high = BOOTSTRAP.interval(self.resampled[name])
        return f"{self.found[name]:.1f} [{low:.1f}, {high:.1f}]"


def ranks(num_prompts: int = 24, max_new_tokens: int = 64) -> str:
    """Tokens per second of eight policies on a padded pair: predicted by replay, and by the wall clock."""
    pair, small = padded_pair(), ModelPair.toy()
    sampling = Sampling(max_new_tokens=max_new_tokens, seed=1)
    prompts = _prompts(pair, "test", num_prompts)
    cost = time_rounds(pair, _prompts(pair, "dev", TIMED_PROMPTS), sampling)
    context = float(np.mean([len(prompt) for prompt in prompts])) + max_new_tokens / 2
    c = cost.of_one_more(context)
    policies = {**POLICIES, RATE: (RATE, [f"policy.cost_ratio={c:.5f}"])}
    predicted = predict(small, prompts, policies, cost, sampling)
    contenders = [ours(name, method, *overrides) for name, (method, overrides) in policies.items()]
    measured = observed(measure(pair, prompts, contenders, 1, max_new_tokens))
    target, draft = cost.model.target, cost.model.draft
    about = (
        f"{num_prompts} prompts of {' and '.join(DOMAINS)}, at most {max_new_tokens} new tokens, T = 1, batch 1. A target "
        f"forward takes {1000 * target(1, context):.1f} ms, and {1000 * target.per_token:.2f} more for every drafted token it "
        f"checks. A draft forward takes {1000 * draft(1, context):.2f} ms, the rest of a round {1000 * cost.outside:.2f} ms. "
        f"One more drafted token costs c = {c:.3f} of a round without any. {BOOTSTRAP.resamples} resamples, 95 % intervals."
    )
    lines = [f"| {name} | {predicted.shown(name)} | {measured.shown(name)} |" for name in policies]
    head = "| policy | tokens/s, predicted | tokens/s, measured |\n|---|---:|---:|"
    return "\n\n".join([about, "\n".join([head, *lines]), *verdict(predicted, measured)])


def time_rounds(pair: ModelPair, prompts: Sequence[list[int]], sampling: Sampling) -> RoundCost:
    """Fit the cost model to fixed K's rounds, prompt by prompt; the first prompts warm up and are left out."""
    methods = [config.method(*POLICIES[name]) for name in TIMED]
    generations, outside, rounds = [], 0.0, 0
    for number, prompt in enumerate(tqdm(prompts, desc="cost model", unit="prompt")):
        for method in methods:
            started = perf_counter()
            (generation,) = decode(pair, [prompt], method, sampling, batch_size=1, row_ids=[number])
            seconds = perf_counter() - started
            if number >= WARM_UP:
                generations.append(generation)
                outside += seconds - sum(r.draft_seconds + r.target_seconds for r in generation.rounds)
                rounds += len(generation.rounds)
    return RoundCost(fit_rounds(generations), outside / rounds)


def predict(
    pair: ModelPair,
    prompts: Sequence[list[int]],
    policies: dict[str, tuple[str, list[str]]],
    cost: RoundCost,
    sampling: Sampling,
    replicates: int = REPLICATES,
) -> Speeds:
    """Replay every policy on `replicates` recorded responses of each prompt; tokens over predicted seconds."""
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.float64)
    tokens, seconds = (np.empty((len(policies), replicates, len(prompts))) for _ in range(2))
    for number in tqdm(range(replicates), desc="recordings", unit="replicate"):
        trace = _record(pair, prompts, sampling, number)
        for row, (name, overrides) in enumerate(policies.values()):
            policy = reading(pair, config.method(name, overrides).bind(pair).policy)
            replayed = replay(trace, policy) if policy.uses_history else replay_starts(trace, policy)
            tokens[row, number] = replayed.counts["num_generated"]
            seconds[row, number] = cost.of_texts(replayed.counts, lengths)
    found = {name: float(tokens[row].sum() / seconds[row].sum()) for row, name in enumerate(policies)}
    totals = replicated_totals(np.stack([tokens, seconds], -1), BOOTSTRAP.resamples, BOOTSTRAP.seed)
    return Speeds(found, dict(zip(policies, totals[:, :, 0] / totals[:, :, 1], strict=True)))


def observed(lines: pd.DataFrame) -> Speeds:
    """Tokens per second of what `benchmarks.decoding.measure` found; all policies by the same resampled prompts."""
    tokens, seconds = (lines.pivot(index="group", columns="contender", values=name) for name in ("tokens", "seconds"))
    found = {str(name): float(tokens[name].sum() / seconds[name].sum()) for name in tokens}
    return Speeds(found, resampled_speeds(tokens, seconds, BOOTSTRAP))


def verdict(predicted: Speeds, measured: Speeds) -> list[str]:
    """The pairs of policies whose predicted gap exceeds its interval, as a table; and whether the clock agrees on all."""
    lines, agree, total = [], 0, 0
    order = sorted(predicted.found, key=lambda name: -predicted.found[name])
    for one, other in combinations(order, 2):
        gap, low, high = predicted.gap(one, other)
        if low <= 0 <= high:
            continue
        seen, seen_low, seen_high = measured.gap(one, other)
        same = (seen > 0) == (gap > 0)
        agree, total = agree + same, total + 1
        word = "same" if same else "**other**" if seen_low > 0 or seen_high < 0 else "other, within its interval"
        lines.append(
            f"| {one} over {other} | {gap:+.1%} [{low:+.1%}, {high:+.1%}] | {seen:+.1%} [{seen_low:+.1%}, {seen_high:+.1%}] "
            f"| {word} |"
        )
    pairs = len(order) * (len(order) - 1) // 2
    head = "| pair | predicted | measured | ranking |\n|---|---:|---:|---|"
    line = (
        f"Verdict: of {pairs} pairs of policies {total} have a predicted gap beyond its interval; the wall clock ranks {agree} "
        f"of these {total} the same way."
    )
    return ["\n".join([head, *lines]), line]


def _prompts(pair: ModelPair, split: str, count: int) -> list[list[int]]:
    """Token ids of `count` frozen prompts, alternating between the domains."""
    both = zip(*(load_frozen(domain, split) for domain in DOMAINS), strict=False)
    return [pair.encode(example.prompt) for examples in both for example in examples][:count]


def _record(pair: ModelPair, prompts: Sequence[list[int]], sampling: Sampling, number: int) -> Trace:
    """A recording of one plain response to each prompt; every number has texts and acceptance draws of its own."""
    rows = range(1000 * (number + 1), 1000 * (number + 1) + len(prompts))
    plain = decode(pair, list(prompts), config.method("autoregressive"), sampling, batch_size=32, row_ids=rows)
    return record(pair, plain, sampling, MAX_DRAFTED, rows)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    print(ranks(arguments.prompts, arguments.max_new_tokens))


if __name__ == "__main__":
    main()
