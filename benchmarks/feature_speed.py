"""How fast heads train on cached features, and what many heads cost beside one and beside as many single trainings.

Ratios are of computing time (CPU seconds of one thread), which other programs disturb little; tokens per second are of
wall-clock time. All runs take turns, after a warm-up.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import pandas as pd
import torch

from analysis.tables.files import markdown
from benchmarks.head_training import DOMAINS, FOLDER, draft_of_width, run_stage
from data_gen import mix, responses
from toolkit import train, train_heads
from toolkit.config import compose
from toolkit.io import read_json
from toolkit.pair import load_draft
from toolkit.train_heads import modules_of
from toolkit.training import MixedData
from toolkit.training.batches import ExampleBatches
from toolkit.training.online import OnlineStates
from toolkit.training.together import Member, epoch_batches, learn_all

PROMPTS = 150  # per domain
WIDTH, DEPTH, ROUNDS, WARM_UP = 128, 3, 5, 1
RATE, TEXT = 0.002, 125
ALL, ONE = ("depths=[0,1,2,3,4]", "w_rejs=[1,3,6,12]"), ("depths=[3]", "w_rejs=[6]")
Spread = tuple[float, float, float]  # median, least, most


def many_heads() -> str:
    """Training heads on features: tokens per second, twenty heads beside one, float16, padding."""
    fast, heads = _tokens_per_second(), _many_against_one()
    told = (
        f"One head of depth {DEPTH} at d = {WIDTH} trains on {fast['rate']:,.0f} tokens per second from cached features "
        f"(wanted: 150,000). That is {fast['share']:.0%} of what its bare matrix products allow. Twenty heads take at most "
        f"{heads['most']:.2f} times their bound (wanted: 1.3)."
    )
    sections = {
        "Tokens per second": fast["text"],
        "Twenty heads": heads["text"],
        "Alone and together": _equality(),
        "float16": _float16(),
        "Padding": _padding(),
        "A draft of 4,096 dimensions on a GPU": arithmetic(),
    }
    parts = [_wrapped(told), *(f"## {title}\n\n{_wrapped(text)}" for title, text in sections.items())]
    return "\n\n".join(parts)


def _wrapped(text: str) -> str:
    """Lines of at most TEXT characters; tables as they are."""
    lines = [[line] if line.startswith("|") else textwrap.wrap(line, TEXT) or [""] for line in text.split("\n")]
    return "\n".join(line for group in lines for line in group)


# -- tokens per second ------------------------------------------------------------------------------------------------


def _tokens_per_second() -> dict[str, Any]:
    """Of one head, by the loop of `train_heads`, and of its bare products, on one and two threads."""
    data = _data(WIDTH, "cached")
    positions, examples = data.states["train"].num_positions, data.states["train"].num_examples
    per_batch = positions // -(-examples // data.batch_size)
    (member,) = _members(data, ONE)
    runs = {
        "training": lambda: learn_all([member], epoch_batches(data, 0)),
        "bare products": _bare(per_batch, WIDTH, DEPTH, -(-positions // per_batch)),
    }
    lines, rates = [], {}
    for threads, clock in ((1, process_time), (1, perf_counter), (2, perf_counter)):
        torch.set_num_threads(threads)
        for name, spread in _in_turns(runs, clock).items():
            median, slowest, fastest = (positions / seconds for seconds in (spread[0], spread[2], spread[1]))
            rates[threads, clock, name] = median
            lines.append({
                "threads": threads, "seconds": "of the processor" if clock is process_time else "of the clock",
                "what": name, "tokens/s": f"{median:,.0f}", "from": f"{slowest:,.0f}", "to": f"{fastest:,.0f}",
            })  # fmt: skip
    torch.set_num_threads(1)
    best = max((1, 2), key=lambda threads: rates[threads, perf_counter, "training"])
    rate, bare = (rates[best, perf_counter, name] for name in runs)
    text = (
        f"{positions:,} positions of {examples:,} examples, {data.batch_size} examples and about {per_batch:,} positions per "
        f"step; medians of {ROUNDS} epochs. Training reads float16 from the files, makes float32 of it, and runs the head, "
        f"its gradient and Adam. The bare products are the {3 * DEPTH - 1} of forward and backward, of the same shapes."
        f"\n\n{markdown(pd.DataFrame(lines))}"
    )
    return {"rate": rate, "share": rate / bare, "text": text}


def _bare(positions: int, width: int, depth: int, times: int) -> Callable[[], None]:
    """The matrix products of a head's forward and backward, so many times."""
    states, upstream = torch.randn(positions, width), torch.randn(positions, width)
    weights = [torch.randn(width, width) for _ in range(depth)]

    def products() -> None:
        for _ in range(times):
            for weight in weights:
                states @ weight.T
            for layer, weight in enumerate(weights):
                upstream.T @ states
                if layer:  # nothing is needed below the first
                    upstream @ weight

    return products


# -- many heads -------------------------------------------------------------------------------------------------------


def _many_against_one() -> dict[str, Any]:
    """Computing time of an epoch: twenty heads together, one, and twenty runs; online and cached, beside the bound."""
    lines, shares = zip(*map(_one_way, ("online", "cached")), strict=True)
    text = (
        "One epoch over the toy draft's states (d = 96), depths 0 to 4 with w_rej of 1, 3, 6 and 12, beside the head of "
        f"depth {DEPTH} and w_rej = 6. CPU seconds of one thread, medians of {ROUNDS} [least, most]. Bound: (draft + all "
        "heads) / (draft + one head). *Of the parts*: from the seconds of the features alone and of each head's steps "
        "alone, on batches in memory. *Of the products*: from the operations of the draft's and the heads' matrix products; "
        f"what steps cost beside products is no part of it.\n\n{markdown(pd.DataFrame(lines))}"
    )
    return {"most": max(share for pair in shares for share in pair), "text": text}


def _one_way(features: str) -> tuple[dict[str, str], tuple[float, float]]:
    """A line of the table, and how far the ratio lies over both bounds."""
    data = _data(96, features)
    every, (one,) = _members(data, ALL), _members(data, ONE)
    batches = [one.module.moved(batch) for batch in epoch_batches(data, 0)]
    parts = _in_turns(
        {
            "features": lambda: _drain(epoch_batches(data, 0)),
            "all heads": lambda: [learn_all([member], batches) for member in every],
            "one head": lambda: learn_all([one], batches),
            "together": lambda: learn_all(every, epoch_batches(data, 0)),
            "alone": lambda: learn_all([one], epoch_batches(data, 0)),
        },
        process_time,
    )
    runs = _timed(lambda: [learn_all([member], epoch_batches(data, 0)) for member in every], process_time)
    read, heads, head, together, alone = (spread[0] for spread in parts.values())
    ratio, bound, products = together / alone, (read + heads) / (read + head), _products_bound(data, features)
    line = {
        "features": features, "one head, s": _said(parts["alone"]), "20 together, s": _said(parts["together"]),
        "20 runs, s": f"{runs:.2f}", "20 together / one": f"{ratio:.2f}", "bound of the parts": f"{bound:.2f}",
        "over it": f"{ratio / bound:.2f}", "bound of the products": f"{products:.2f}",
        "over that": f"{ratio / products:.2f}", "20 runs / 20 together": f"{runs / together:.2f}",
    }  # fmt: skip
    return line, (ratio / bound, ratio / products)


def _products_bound(data: MixedData, features: str) -> float:
    """(draft + all heads) / (draft + one head) in operations of matrix products."""
    texts = data._computed()["train"].texts
    weights = sum(one.weight.numel() for one in data.draft.modules() if isinstance(one, torch.nn.Linear))
    draft = 2.0 * weights * int(texts.lengths.sum()) if features == "online" else 0.0
    heads = [head_operations(96, depth) * texts.num_positions for depth in range(5) for _ in range(4)]
    return (draft + sum(heads)) / (draft + head_operations(96, DEPTH) * texts.num_positions)


def head_operations(width: int, depth: int) -> float:
    """Operations of a head's matrix products per token, forward and backward."""
    return 2.0 * max(3 * depth - 1, 0) * width**2 + 2.0 * (3 if depth else 2) * width


# -- what must not change ---------------------------------------------------------------------------------------------


def _equality() -> str:
    """Heads alone and side by side: weights in float64, by one loop; scores in float32, by the two commands."""
    data, chosen = _data(96, "cached", "float64"), ("depths=[0,3]", "w_rejs=[1,12]")
    together, alone = _members(data, chosen), _members(data, chosen)
    for epoch in range(2):
        learn_all(together, epoch_batches(data, epoch))
        for member in alone:
            learn_all([member], epoch_batches(data, epoch))
    weights = max(
        float((a - b).detach().abs().max())
        for one, other in zip(together, alone, strict=True)
        for a, b in zip(one.module.head.parameters(), other.module.head.parameters(), strict=True)
    )
    words = [f"data.path={_mixed(96)}", f"optimizer.lr={RATE}"]
    folder = run_stage(train_heads, "train_heads", [*words, *chosen, "max_epochs=2"])
    apart = 0.0
    for depth, w_rej in ((0, 1), (0, 12), (3, 1), (3, 12)):
        own = [f"head.depth={depth}", f"loss.w_rej={w_rej}", "trainer.max_epochs=2", "logger=none"]
        solo = read_json(run_stage(train, "train", [*words, *own]) / "metrics.json")
        side_by_side = read_json(folder / f"depth-{depth}_w_rej-{w_rej}" / "metrics.json")
        apart = max(apart, *(abs(solo[name] - side_by_side[name]) for name in solo if name.startswith("val/")))
    return (
        f"Four heads, two epochs. In float64, by the loop of `train_heads`: weights differ by at most {weights:.1e} "
        "(wanted: 1e-8). In float32, `toolkit.train` against `toolkit.train_heads`: scores differ by at most "
        f"{apart:.1e} (wanted: .001)."
    )


def _float16() -> str:
    """Validation scores after the same training on float32 and on float16 states, three seeds."""
    found: dict[str, list[dict[str, float]]] = {}
    for features in ("online", "cached"):
        for seed in range(3):
            data = _data(96, features)
            (member,) = _members(data, ONE, seed, epochs=4)
            for epoch in range(4):
                learn_all([member], epoch_batches(data, epoch))
            found.setdefault(features, []).append(_scores(member, data))
    names = ("val/log_loss", "val/log_loss_calibrated", "val/auroc")
    lines = [
        {
            "score": name.removeprefix("val/"),
            **{features: f"{statistics.mean(one[name] for one in found[features]):.5f}" for features in found},
            "cached less online, per seed": ", ".join(
                f"{b[name] - a[name]:+.5f}" for a, b in zip(found["online"], found["cached"], strict=True)
            ),
            "range over seeds": f"{_range([one[name] for one in found['online']]):.5f}",
        }
        for name in names
    ]
    return (
        "Depth 3, w_rej = 6, four epochs at the same rate on the toy draft's float32 states; means of three seeds. Online "
        f"reads float32, cached what float16 keeps of it.\n\n{markdown(pd.DataFrame(lines))}"
    )


def _padding() -> str:
    """Share of a forward's tokens that is padding: examples as they come, and as they are read now."""
    states = _data(96, "online").states["train"]
    if not isinstance(states, OnlineStates):
        raise TypeError(f"expected online states, got {states}")
    whole = states.texts.lengths.tolist()
    order = ExampleBatches(states, 32, shuffle=True).order(0)
    came = [[whole[example] for example in order[first : first + 16]] for first in range(0, len(order), 16)]
    before = sum(max(one) * len(one) for one in came)
    states.tokens_read = states.tokens_computed = 0
    _drain(ExampleBatches(states, 32, shuffle=True))
    now = 1 - states.tokens_read / states.tokens_computed
    return (
        f"An epoch of {states.num_examples:,} examples, at most 16 in a forward of the draft. Of examples as they come, "
        f"{1 - sum(whole) / before:.1%} of {before:,} tokens are padding. Sorted by length over the batches that are read "
        f"together, {now:.1%} of {states.tokens_computed:,} are. The head sees positions one after another, without any "
        "padding."
    )


def arithmetic() -> str:
    """What the shapes of SpecDec++'s pair need, from peak figures; nothing here was run on a GPU."""
    width, draft, peak, used, disk, memory = 4096, 7e9, 989e12, 0.5, 7e9, 3.35e12
    head, every = head_operations(width, 3), sum(4 * head_operations(width, depth) for depth in range(5))
    size, weights, step = 2 * width + 8, 3 * width**2, 4096
    lines = [
        "This has not run on a GPU yet: it is arithmetic. Assumed is an H100 with "
        f"{peak / 1e12:.0f} TFLOP/s in bfloat16 (dense, the maker's figure), of which half is reached. "
        f"Its memory gives {memory / 1e12:.2f} TB/s, its disk {disk / 1e9:.0f} GB/s.",
        "",
        f"- A head of depth 3 has {weights / 1e6:.0f} million weights. A token takes 2 x 8 x 4,096^2 = "
        f"{head / 1e6:.0f} million operations, forward and backward: {used * peak / head / 1e6:.1f} million tokens/s.",
        f"- A token's states take {size:,} bytes in the files. The disk gives {disk / size / 1e6:.2f} million tokens/s, so "
        f"reading is the limit unless the files lie in memory. Ten million tokens take {size * 1e7 / 1e9:.0f} GB.",
        f"- Adam moves {weights * 28 / 1e9:.1f} GB per step in {weights * 28 / memory * 1e3:.2f} ms; a step of {step:,} "
        f"tokens computes for {step * head / used / peak * 1e3:.1f} ms.",
        f"- A draft of {draft / 1e9:.0f} billion weights takes 2 x {draft / 1e9:.0f} billion operations per token: "
        f"{used * peak / 2 / draft:,.0f} tokens/s online. That is {2 * draft / head:.0f} times what one head takes.",
        f"- Twenty heads cost {(2 * draft + every) / (2 * draft + head):.2f} times as much as one online, "
        f"{every / head:.1f} times cached.",
    ]
    return "\n".join(lines)


# -- the same data, and time ------------------------------------------------------------------------------------------


@cache
def _mixed(width: int) -> Path:
    """Mixed responses of all three domains for a draft of this width."""
    texts = [
        run_stage(responses, "responses", [f"prompts=toy_{domain}", "prompts.split=train", f"prompts.limit={PROMPTS}"])
        for domain in DOMAINS
    ]
    words = [f"responses=[{','.join(map(str, texts))}]", "batch_size=32", f"pair.draft={draft_of_width(width)}"]
    return run_stage(mix, "mix", words)


def _data(width: int, features: str, dtype: str = "float32") -> MixedData:
    folder = _mixed(width)
    name = draft_of_width(width)
    data = MixedData(folder, load_draft(name, dtype=dtype), features=features)  # type: ignore[arg-type]
    data.prepare_data()
    data.setup()
    return data


def _members(data: MixedData, chosen: Sequence[str], seed: int = 0, epochs: int = ROUNDS + WARM_UP + 1) -> list[Member]:
    """Heads at a fixed rate, in the states' number format."""
    words = [f"data.path={data.path}", *chosen, f"optimizer.lr={RATE}", f"seed={seed}", f"paths.root_dir={FOLDER}"]
    dtype = data.draft.dtype
    modules = {name: one.to(dtype) for name, one in modules_of(compose("train_heads", words), data).items()}
    steps = len(epoch_batches(data, 0)) * epochs
    return [Member(name, one, *one.build_optimizer(data, steps)) for name, one in modules.items()]


def _scores(member: Member, data: MixedData) -> dict[str, float]:
    module = member.module
    return {name: float(value) for name, value in module.named(module.evaluate(data.whole_validation())).items()}


def _in_turns(runs: dict[str, Callable[[], Any]], clock: Callable[[], float]) -> dict[str, Spread]:
    """Median, least and most seconds of each, interleaved, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(WARM_UP + ROUNDS):
        for name, run in runs.items():
            seconds = _timed(run, clock)
            if turn >= WARM_UP:
                times[name].append(seconds)
    return {name: (statistics.median(one), min(one), max(one)) for name, one in times.items()}


def _timed(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    started = clock()
    run()
    return clock() - started


def _drain(batches: ExampleBatches) -> None:
    for _ in batches:
        pass


def _said(spread: Spread) -> str:
    return f"{spread[0]:.2f} [{spread[1]:.2f}, {spread[2]:.2f}]"


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)
