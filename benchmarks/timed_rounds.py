"""Are the seconds of a cost table those of live decoding? Rounds of both, timed in turns every few seconds.

Some processes time rounds as `analysis.loads.measured` does, and others decode prompts one by one. They take turns, as a shared
machine changes its speed within seconds. There are several of each kind: a process keeps the memory that it was given, and with
it a speed of its own. Compared are rounds behind prompts of about the median length, until a response has 48 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count, takewhile
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import geometric_mean, median
from time import perf_counter

import numpy as np
import torch

from analysis.loads.measured import prepared
from analysis.loads.tabulated import NEAR, capped
from analysis.tables.grid import PLAIN, Setting
from benchmarks.batches import DOMAINS, PROMPTS, TOKENS
from benchmarks.side_by_side import LEG, ratio
from data_gen.frozen import load_frozen
from toolkit import ModelPair, config
from toolkit.decoding import Method, Sampling
from toolkit.decoding.decode import decode_measured
from toolkit.types import Generation

Seconds = dict[int, float]  # of a round, by draft length
SIZES, DRAFTED = (1, 4, 16), (1, 2, 3, 4, 5, 8)  # what the command times; the rounds of batch 1 are compared
SHOWN = (0, 1, 4)  # draft lengths that are decoded live; 0 is plain decoding
BETWEEN = {4: 4, 16: 8}  # after so many turns of batch 1, a turn of this batch size
EACH, TURNS = 3, 30  # processes of each kind; turns of each process
COMPARED = 48  # tokens of a response whose rounds are compared
NEARBY = 12  # prompts on either side of the one of the median length
WARM_UP = 15.0  # seconds of live decoding per draft length, before its rounds count


def timed_rounds() -> str:
    """Seconds of rounds at batch 1: as the cost table times them, and decoded live, by several processes in turns."""
    found = in_turns({"timed": _timed, "decoded": _decoded}, EACH, TURNS)
    text = [
        f"Toy pair, T = 1, 1 thread. {EACH} processes time rounds as `analysis.advise` does (batch sizes "
        f"{', '.join(map(str, SIZES))}; draft lengths 0, {', '.join(map(str, DRAFTED))}). {EACH} others decode prompts one by "
        f"one, {LEG} s per draft length and turn. All take turns, in random order, {TURNS} times. Rounds count until a "
        f"response has {COMPARED} tokens. Intervals are over turns (Student's t). The last two columns have the rounds of "
        "single processes over the mean of all.",
        "",
        "| draft length | timed, ms | decoded, ms | decoded over timed | timed, by process | decoded, by process |",
        "|---:|---:|---:|---:|---|---|",
    ]
    for length in SHOWN:
        of_kind = {kind: _of_length(processes, length) for kind, processes in found.items()}
        means = {kind: _means(seconds) for kind, seconds in of_kind.items()}
        every = geometric_mean([one for seconds in of_kind.values() for process in seconds for one in process])
        middle, low, high = ratio(means["decoded"], means["timed"])
        cells = [f"{1000 * median(means[kind]):.2f}" for kind in means]
        cells.append(f"{middle:.3f} [{low:.3f}, {high:.3f}]")
        cells += [", ".join(f"{geometric_mean(one) / every:.2f}" for one in seconds) for seconds in of_kind.values()]
        text.append(f"| {length} | {' | '.join(cells)} |")
    return "\n".join(text)


def in_turns(
    kinds: Mapping[str, Callable[[], Iterator[Seconds]]], each: int, turns: int
) -> dict[str, list[list[Seconds]]]:
    """By kind, process and turn: what its iterator gives next. Only one process goes on at a time.

    The first value of every iterator is left out: making it is the time to warm up.
    """
    spawn, order = get_context("spawn"), random.Random(0)
    with ExitStack() as stack:
        workers = []
        for kind in [kind for _ in range(each) for kind in kinds]:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_work, args=(theirs, kinds[kind]), daemon=True)
            process.start()
            stack.callback(process.terminate)
            theirs.close()  # so that waiting for a process that has failed ends
            ours.recv()
            workers.append((kind, ours, list[Seconds]()))
        for _ in range(turns):
            for _, connection, found in order.sample(workers, len(workers)):
                connection.send(None)
                found.append(connection.recv())
    return {kind: [found for one, _, found in workers if one == kind] for kind in kinds}


# -- inside -----------------------------------------------------------------------------------------------------------


def _work(connection: Connection, kind: Callable[[], Iterator[Seconds]]) -> None:
    """One value of the iterator per message."""
    torch.set_num_threads(1)
    for found in kind():
        connection.send(found)
        connection.recv()


def _timed() -> Iterator[Seconds]:
    """Repeats of the timing at batch 1, now and then behind one of another batch size, as the command interleaves them."""
    from tqdm.auto import tqdm

    pair, sampling = ModelPair.toy(), Sampling(temperature=1.0, max_new_tokens=TOKENS)
    prompts = [prompt for prompt, _ in _prompts(pair)]
    timings = dict(
        zip(SIZES, prepared(pair, prompts, sampling, SIZES, DRAFTED, 24, {}, tqdm(total=0, disable=True)), strict=True)
    )
    for turn in count():
        for size, turns in BETWEEN.items():
            if turn % turns == 0:
                timings[size].repeat(turn)
        lines = [line for line in timings[1].repeat(turn) if line["texts"] == NEAR]
        yield {
            length: sum(
                _mean([line["seconds"] for line in lines if (line["drafted"], line["model"]) == (length, model)])
                for model in (("draft", "target") if length else ("target",))
            )
            for length in SHOWN
        }


def _decoded() -> Iterator[Seconds]:
    """Rounds of prompts that are decoded one by one."""
    pair = ModelPair.toy()
    ordered = sorted(_prompts(pair), key=lambda one: one[1])
    middle = len(ordered) // 2
    prompts = [prompt for prompt, _ in ordered[middle - NEARBY : middle + NEARBY]]
    methods = {length: _method(length) for length in SHOWN}
    numbers = count()
    for turn in count():
        seconds = LEG if turn else WARM_UP
        yield {length: _leg(pair, prompts, methods[length], length, seconds, numbers) for length in SHOWN}


def _leg(
    pair: ModelPair, prompts: Sequence[str], method: Method, length: int, seconds: float, numbers: Iterator[int]
) -> float:
    """Mean seconds of a round with a full draft, over texts that are decoded for some seconds.

    The first text is not counted: the processor's caches still hold what another process used.
    """
    found, started = list[list[float]](), perf_counter()
    while perf_counter() - started < seconds or len(found) < 2:
        number = next(numbers)
        sampling = Sampling(temperature=1.0, max_new_tokens=TOKENS, seed=number)
        chosen = [prompts[number % len(prompts)]]
        (generation,) = decode_measured(pair, chosen, method, sampling, batch_size=1, timed=True).generations
        found.append(_rounds(generation, length))
    return _mean([one for text in found[1:] for one in text])


def _rounds(generation: Generation, length: int) -> list[float]:
    """Seconds of the rounds with a full draft, without the first one, which reads the prompt."""
    made = np.cumsum([one.num_produced for one in generation.rounds])
    counted = list(takewhile(lambda one: one[1] <= COMPARED, zip(generation.rounds, made, strict=True)))[1:]
    return [one.draft_seconds + one.target_seconds for one, _ in counted if one.num_drafted == length]


def _method(length: int) -> Method:
    setting = Setting("speculative", {"policy.num_drafted": length}) if length else Setting(PLAIN)
    method: Method = config.instantiate(config.plain(setting.method_config()))
    return method


def _prompts(pair: ModelPair) -> list[tuple[str, int]]:
    """Prompts of two domains, and how many tokens they have."""
    prompts = [example.prompt for domain in DOMAINS for example in load_frozen(domain, "test")[: PROMPTS // 2]]
    return [(prompt, len(pair.encode(prompt))) for prompt in prompts]


def _mean(seconds: Sequence[float]) -> float:
    """As a cost table takes it."""
    return float(capped(np.array(seconds)).mean())


def _of_length(processes: Sequence[Sequence[Mapping[int, float]]], length: int) -> list[list[float]]:
    return [[turn[length] for turn in process] for process in processes]


def _means(processes: Sequence[Sequence[float]]) -> list[float]:
    """Of every turn, the geometric mean over processes."""
    return [geometric_mean(turn) for turn in zip(*processes, strict=True)]
