"""Contenders that decode one queue of prompts side by side: each for half a second, then the next one goes on.

So a machine whose speed changes within seconds slows all of them alike (`benchmarks.relay`). Shorter turns would slow down
plain decoding most. With small models it needs some 15 rounds until the processor's caches hold what it uses. Every turn has a
seed of its own, so that intervals over turns include the random variation of the texts. A turn without a clock comes first. In
it, every shape that recurs is captured, for all contenders and with room for all shapes. This is the state of a server that has
run for long. In timed turns nothing is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, TypeVar

import numpy as np
import torch
from scipy.stats import t

from analysis.tables.grid import Setting
from benchmarks.relay import Watch, relay
from toolkit import ModelPair, config
from toolkit.decoding import Method, Sampling, decode
from toolkit.types import Generation

T = TypeVar("T")
LEG = 0.5  # seconds until the next contender goes on


@dataclass(frozen=True)
class Contender:
    """A setting that decodes on one of the pairs."""

    setting: Setting
    pair: str = ""


@dataclass(frozen=True)
class Decoded:
    """What one contender did in one turn.

    speed  tokens per second;  latency, latency_95  seconds of a request, from its slot to its answer: median, 95th percentile
    """

    speed: float
    latency: float
    latency_95: float


def decoded(
    pairs: Mapping[str, ModelPair],
    contenders: Mapping[str, Contender],
    prompts: Sequence[str],
    sampling: Sampling,
    size: int,
    turns: int,
) -> dict[str, list[Decoded]]:
    """Every contender, turn by turn. Run it `apart`."""
    methods = {name: config.instantiate(config.plain(one.setting.method_config())) for name, one in contenders.items()}
    shared = {name: replace(pair, draft=None) for name, pair in pairs.items()}
    found: dict[str, list[Decoded]] = {name: [] for name in methods}
    names = list(methods)
    for turn in range(turns + 1):
        seeded, first = replace(sampling, seed=sampling.seed + turn), turn * 5 % len(names)
        jobs = {
            name: _job(shared[contenders[name].pair], prompts, methods[name], seeded, size)
            for name in [*names[first:], *names[:first]]
        }
        for name, (tokens, ends) in relay(jobs).items():
            if turn:
                found[name].append(Decoded(tokens / ends[-1][1], *latency(ends, size)))
    return found


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """The function's value, from a process of its own."""
    threads = (torch.get_num_threads(),)
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, threads) as pool:
        return pool.submit(function, *arguments).result()


def ratio(ours: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Ratio of speeds of the same turn: geometric mean, and its 95 % interval by Student's t."""
    logs = np.log(np.asarray(ours) / np.asarray(others))
    half = float(t.ppf(0.975, len(logs) - 1)) * logs.std(ddof=1) / np.sqrt(len(logs)) if len(logs) > 1 else np.inf
    return float(np.exp(logs.mean())), float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))


def latency(ends: Sequence[tuple[int, float]], size: int) -> tuple[float, float]:
    """Median and 95th percentile of a request's seconds, from the slot that it gets to its answer.

    ends  each request's position in the queue, and when it ended; in the order of the ends, which is not that of the queue

    The first `size` requests join at 0. Later, request k joins when a slot becomes free for the (k - size + 1)-th time.
    """
    joined = [0.0] * size + [seconds for _, seconds in ends]
    found = [seconds - joined[request] for request, seconds in ends]
    return float(np.median(found)), float(np.quantile(found, 0.95))


# -- inside -----------------------------------------------------------------------------------------------------------


def _job(
    pair: ModelPair, prompts: Sequence[str], method: Method, sampling: Sampling, size: int
) -> Callable[[Watch], tuple[int, list[tuple[int, float]]]]:
    """A job that decodes the queue. It gives the number of tokens, and which texts ended when, in the order of their ends."""

    def run(watch: Watch) -> tuple[int, list[tuple[int, float]]]:
        ends, passed = list[tuple[int, float]](), [0.0]

        def note(generation: Generation) -> None:
            ends.append((generation.index, watch.seconds))
            if ends[-1][1] - passed[-1] > LEG:
                watch.pass_on()
                passed.append(ends[-1][1])

        found = decode(pair, prompts, method, sampling, batch_size=size, on_finish=note)
        return sum(len(generation.token_ids) for generation in found), ends

    return run
