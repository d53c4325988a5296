"""Seconds of draft and target forwards by batch size, tokens per row and context, measured in the decoding loop itself.

The method is ours. Every batch size decodes with every fixed draft length. The lengths are interleaved, and texts are kept
from ending. A first pass captures forwards, as a long-running decoder has captured them, and is discarded. Rounds in which all
batch slots hold a text are timed. The seconds of a draft forward are what one more drafted token adds to the draft's seconds
in a round. The rest of the round counts for the target forward: checking, and the loop's own work. So does what a round's
first draft forward takes beyond the others, as it reads up to two tokens. (With a single draft length this part is not known,
and stays with the draft.) So the table holds the cost of a round, Python included, and not that of a bare forward. The clock
is read when the device has finished, at both boundaries between drafting and checking.

The reading of prompts is timed in first rounds behind prompts cut to one length. These readings are spread over the settings,
because the speed of a shared machine changes within seconds. Their forwards are not captured, as prompts differ in length. A
batch of one is always timed: prompts that join a running batch are often read alone.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from sklearn.isotonic import IsotonicRegression

from toolkit.decoding import ChainProposer, Method, Sampling
from toolkit.decoding.decode import decode_measured
from toolkit.engine import engine_of
from toolkit.errors import InputError
from toolkit.load_cost import LoadCost, grid_of
from toolkit.pair import ModelPair
from toolkit.session.capture import PROOFS
from toolkit.stopping import Fixed
from toolkit.types import Generation
from toolkit.verification import get

WARM_UP = 3  # rounds of a batch that are left out: the first one reads the prompts
# Uses before a shape is captured while costs are measured. All shapes of a setting recur, but the pass that finds out how
# long a round takes must not capture.
EAGER = WARM_UP + 1
# Rounds until a CPU's forwards are captured, with texts that grow over three windows of context (64 tokens each).
SETTLED = 3 * (EAGER + PROOFS)
READS = 16  # timed readings of prompts per batch size
FARTHEST = 512  # tokens of a response: for contexts behind longer ones the line of costs is continued
APART = 16  # tokens: closer contexts do not show what a token of context costs
# Layers of the traces that are kept per batch size: enough for all shapes of small models (1.5 GB at most). It is the
# same in use: a decoder with one method has room for its shapes.
ROOM = 512
BRIEF = 0.02  # seconds: longer rounds gain nothing from captured forwards
LONG, FEW = 0.2, 5  # seconds; how many longer rounds are timed per pass, as their times hardly vary
NEAR, FAR, PROMPT = "near", "far", "prompt"  # the texts behind which forwards are timed
Reader = Callable[[int], list[dict[str, Any]]]  # times this many readings of prompts
WIDEST_INTERVAL = 0.4  # of an entry's median: wider intervals are refused


def measured_costs(
    pair: ModelPair,
    prompts: Sequence[Any],
    sampling: Sampling,
    batch_sizes: Sequence[int],
    drafted: Sequence[int],
    num_rounds: int = 24,
    about: dict[str, Any] | None = None,
    passes: int = 4,
) -> tuple[LoadCost, pd.DataFrame]:
    """A cost table and its entries. Batch sizes whose times vary too much are measured again, in up to `passes` passes.

    Raises InputError if they still vary too much.
    """
    pairs: dict[int, ModelPair] = {}
    found = pd.DataFrame()
    noisy = sorted({1, *batch_sizes})
    for number in range(passes):
        if number:
            sizes = f"batch size{'s' * (len(noisy) > 1)} {', '.join(map(str, noisy))}"
            print(f"the times of {sizes} vary too much: measuring again (pass {number + 1} of at most {passes})")
        found = pd.concat([found, measure_loads(pair, prompts, sampling, noisy, drafted, num_rounds, pairs=pairs)])
        noisy = sorted({int(entry.batch) for entry in _noisy(_entries(found)).itertuples()})
        if not noisy:
            break
    return cost_table(found, about or {})


def measure_loads(
    pair: ModelPair,
    prompts: Sequence[Any],
    sampling: Sampling,
    batch_sizes: Sequence[int],
    drafted: Sequence[int],
    num_rounds: int = 24,
    repeats: int = 2,
    pairs: dict[int, ModelPair] | None = None,
) -> pd.DataFrame:
    """One line per timed round and model.

    prompts     token ids or texts; taken in turn until a batch is full
    drafted     draft lengths; 0 is added: plain decoding
    num_rounds  timed rounds per batch size, draft length, texts and repeat; more where they are brief, fewer where long
    pairs       from an earlier call, by batch size: captured forwards are replayed, and new ones added for the next call

    Columns: model, batch, width, repeat, and

    context  of the longest row
    drafted  the round's draft length
    seconds  of all draft forwards of the round (draft), or of the rest of the round (target)
    texts    "near": behind the prompts; "far": where the longest responses end; "prompt": readings of prompts of the median
             length, at context 0
    """
    from tqdm.auto import tqdm

    pairs = {} if pairs is None else pairs
    sizes, lengths = sorted(set(batch_sizes)), sorted({0, *drafted})
    prompts = [pair.encode(prompt) for prompt in prompts]
    usual = max(int(np.median([len(prompt) for prompt in prompts])), max(lengths) + 2)
    room = max((WARM_UP + _timed_rounds(num_rounds, length, 0.0, 2 * num_rounds)) * (length + 1) for length in lengths)
    texts = _texts(pair, prompts, sampling, room + 1)
    lines: list[dict[str, Any]] = []
    bar = tqdm(
        total=len(sizes) * (1 + (repeats + 1) * len(texts) * len(lengths)), desc=f"timing, {pair.name}", unit="setting"
    )
    for batch in sizes:
        # The pair keeps this batch size's captured forwards: if they were made again, the memory of the old ones would stay.
        endless = pairs.setdefault(batch, replace(pair, draft=None, end_ids=()))
        read = _reader(endless, _filled(batch, [_of_length(prompt, usual) for prompt in prompts]), sampling)
        bar.update()
        filled = {where: _filled(batch, chosen) for where, chosen in texts.items()}
        lines += _rounds(endless, filled, sampling, lengths, num_rounds, repeats, read, bar)
    bar.close()
    return pd.DataFrame(lines)


def cost_table(forwards: pd.DataFrame, about: dict[str, Any]) -> tuple[LoadCost, pd.DataFrame]:
    """The table, at up to two contexts, and its entries: median seconds with a 95 % interval.

    In the table neither more tokens per row nor a longer context takes less time. Medians that say otherwise are noise and
    get a common value. For widths it comes from isotonic regression, for contexts it is the mean.

    Raises InputError if an entry's interval is wider than 40 % of its median: the machine is not quiet enough.
    """
    table = _entries(forwards)
    noisy = _noisy(table)
    if len(noisy):
        one = noisy.iloc[0]
        raise InputError(
            f"the times of {len(noisy)} of {len(table)} settings vary too much for a cost table (first: {one.model}, batch "
            f"{one.batch}, {one.width} tokens per row: {one.low:.2g} to {one.high:.2g} s); expected intervals below "
            f"{WIDEST_INTERVAL:.0%} of the median: use a quieter machine or raise num_rounds"
        )
    rounds = forwards[forwards.texts != PROMPT]
    contexts = sorted({round(context) for context in rounds.groupby("texts").context.mean()})
    draft, target = (grid_of(_points(table[table.model == name], contexts), name) for name in ("draft", "target"))
    return LoadCost(draft, target, "measured", about), table


def capture_soon(pair: ModelPair, after: int = EAGER) -> None:
    """Let a pair that has decoded capture shapes after `after` uses, as if it had run for longer than a few prompts."""
    for captures in engine_of(pair).captures:
        if captures is not None:
            captures.after = min(captures.after, after)


# -- inside -----------------------------------------------------------------------------------------------------------


def _rounds(
    pair: ModelPair,
    texts: Mapping[str, Sequence[list[int]]],
    sampling: Sampling,
    lengths: Sequence[int],
    num_rounds: int,
    repeats: int,
    read: Reader,
    bar: Any,
) -> list[dict[str, Any]]:
    """Timed rounds of all draft lengths behind each kind of texts, interleaved, and readings of prompts spread over them.

    The first pass is not timed: it captures the forwards.
    """
    lines: list[dict[str, Any]] = []
    done, of = 0, repeats * len(texts) * len(lengths)  # timed settings
    taken: dict[tuple[str, int], float] = {}  # seconds of the shortest target forward
    # assumes that responses have half of the tokens that they may have
    between = sampling.max_new_tokens // 2 // len(next(iter(texts.values())))
    for repeat, where, length in itertools.product(range(repeats + 1), texts, lengths):
        if repeat:
            rounds = WARM_UP + _timed_rounds(num_rounds, length, taken[where, length], between)
            timed = _decoded(pair, texts[where], sampling, length, rounds)
            lines += [{**line, "repeat": repeat, "texts": where} for line in _forwards(timed, length)]
            readings = READS * (done + 1) // of - READS * done // of
            lines += [{**line, "repeat": repeat} for line in read(readings)]
            done += 1
        else:
            first = _decoded(pair, texts[where], sampling, length, WARM_UP)
            capture_soon(pair)
            taken[where, length] = min((one.target_seconds for one in first[0].rounds), default=BRIEF)
            if taken[where, length] < BRIEF:
                _settle(pair, texts[where], sampling, length, _timed_rounds(num_rounds, length, 0.0, between))
        bar.update()
    return lines


def _timed_rounds(num_rounds: int, length: int, seconds: float, between: int) -> int:
    """How many rounds of this draft length are timed, if one of them takes this many seconds.

    between  rounds of plain decoding between two prompts that join a batch of this size

    With small models, plain decoding needs some 15 rounds behind a prompt until its speed is steady, because no draft uses the
    processor's caches then. It is timed for as many rounds as it goes on undisturbed, at most twice the others.
    """
    if seconds > LONG:
        return min(num_rounds, FEW)
    return min(max(between, num_rounds), 2 * num_rounds) if length == 0 and seconds < BRIEF else num_rounds


def _settle(pair: ModelPair, prompts: Sequence[Any], sampling: Sampling, length: int, num_rounds: int) -> None:
    """Capture the shapes that this many timed rounds meet, with room for all of them."""
    for captures in engine_of(pair).captures:
        if captures is not None:
            captures.most = max(captures.most, ROOM // captures.num_layers)
    for _ in range(SETTLED // (WARM_UP + num_rounds) + 1):
        _decoded(pair, prompts, sampling, length, WARM_UP + num_rounds)


def _fixed(length: int) -> Method:
    return Method(
        f"K={length}", Fixed(max(length, 1)), get("rejection"), ChainProposer(), min_drafted=0, max_drafted=length
    )


def _decoded(pair: ModelPair, prompts: Sequence[Any], sampling: Sampling, length: int, rounds: int) -> list[Generation]:
    """At least this many timed rounds of every prompt, all side by side."""
    limit = replace(sampling, max_new_tokens=rounds * (length + 1) + 1, max_length=None, stop=())
    return decode_measured(pair, prompts, _fixed(length), limit, batch_size=len(prompts), timed=True).generations


def _forwards(generations: Sequence[Generation], length: int) -> list[dict[str, Any]]:
    """The timed rounds that all rows took part in, with full drafts."""
    _refuse_failed(generations)
    lines: list[dict[str, Any]] = []
    texts = [len(g.prompt_ids) for g in generations]
    for number in range(min(len(g.rounds) for g in generations) - 1):
        rounds = [g.rounds[number] for g in generations]
        if number >= WARM_UP and min(r.num_drafted for r in rounds) == length:
            shared = {"batch": len(generations), "context": float(max(texts)), "drafted": length}
            first = rounds[0]
            own = first.target_seconds if length else first.draft_seconds + first.target_seconds
            lines.append({"model": "target", "width": length + 1, **shared, "seconds": own})
            if length:
                lines.append({"model": "draft", "width": 1, **shared, "seconds": first.draft_seconds})
        texts = [text + r.num_produced for text, r in zip(texts, rounds, strict=True)]
    return lines


def _texts(
    pair: ModelPair, prompts: Sequence[Sequence[int]], sampling: Sampling, room: int
) -> dict[str, list[list[int]]]:
    """Prompts of rounds near and far: these, and ones as long as with the longest response if `room` more tokens fit behind."""
    longest = max(len(prompt) for prompt in prompts)
    more = min(sampling.max_new_tokens, FARTHEST, pair.max_length - longest - room)
    near = [list(prompt) for prompt in prompts]
    return {NEAR: near} | ({FAR: [_of_length(prompt, len(prompt) + more) for prompt in near]} if more >= APART else {})


def _filled(batch: int, prompts: Sequence[list[int]]) -> list[list[int]]:
    return [prompts[i % len(prompts)] for i in range(batch)]


def _reader(pair: ModelPair, prompts: Sequence[list[int]], sampling: Sampling) -> Reader:
    """Times readings of prompts by forwards that are never captured. The first one is not counted."""
    uncaptured = replace(pair, draft=None)
    _readings(uncaptured, prompts, sampling, 1)
    for captures in engine_of(uncaptured).captures:
        if captures is not None:
            captures.after = sys.maxsize
    return partial(_readings, uncaptured, prompts, sampling)


def _readings(pair: ModelPair, prompts: Sequence[list[int]], sampling: Sampling, count: int) -> list[dict[str, Any]]:
    """Timed first rounds: the draft reads the prompts, all of one length, and the target reads them and a drafted token."""
    lines: list[dict[str, Any]] = []
    for _ in range(count):
        generations = _decoded(pair, prompts, sampling, 1, rounds=1)
        _refuse_failed(generations)
        first, width = generations[0].rounds[0], len(prompts[0])
        shared = {"batch": len(prompts), "context": 0.0, "drafted": 1, "texts": PROMPT}
        lines += [
            {"model": "draft", "width": width, **shared, "seconds": first.draft_seconds},
            {"model": "target", "width": width + 1, **shared, "seconds": first.target_seconds},
        ]
    return lines


def _entries(rounds: pd.DataFrame) -> pd.DataFrame:
    """Median seconds of every model, batch size, width and kind of texts, with intervals."""
    cells: list[dict[str, Any]] = []
    for (model, batch, width, where), part in _of_forwards(rounds).groupby(["model", "batch", "width", "texts"]):
        middle, low, high = _median(part.seconds.to_numpy())
        cells.append({
            "model": model, "batch": batch, "width": width, "texts": where, "context": part.context.mean(),
            "seconds": middle, "low": low, "high": high, "forwards": len(part),
        })  # fmt: skip
    return pd.DataFrame(cells)


def _noisy(entries: pd.DataFrame) -> pd.DataFrame:
    """The entries whose interval is too wide. Readings of prompts may vary more: they are few and happen once per text."""
    return entries[(entries.high - entries.low > WIDEST_INTERVAL * entries.seconds) & (entries.texts != PROMPT)]


def _of_forwards(rounds: pd.DataFrame) -> pd.DataFrame:
    """Seconds of a round's draft forwards as those of one; what its first one takes beyond the others goes to the target."""
    found = rounds.reset_index(drop=True)
    for (batch, texts), part in found[found.texts != PROMPT].groupby(["batch", "texts"]):
        of_lengths = part[part.model == "draft"].groupby("drafted").seconds.median()
        first = _first(of_lengths.index.to_numpy(dtype=np.float64), of_lengths.to_numpy())
        here = (found.batch == batch) & (found.texts == texts) & (found.drafted > 0)
        draft, target = here & (found.model == "draft"), here & (found.model == "target")
        found.loc[draft, "seconds"] = (found.seconds - first) / found.drafted
        found.loc[target, "seconds"] += first
    return found


def _first(drafted: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any]) -> float:
    """The intercept of a round's draft seconds [n] over the draft length [n]: at least 0, at most 90 % of the least seconds."""
    if len(drafted) < 2:
        return 0.0
    start = float(np.polynomial.polynomial.polyfit(drafted, seconds, 1)[0])
    return min(max(start, 0.0), 0.9 * float(seconds.min()))


def _of_length(tokens: Sequence[int], count: int) -> list[int]:
    """A prompt of `count` tokens: the last ones of this prompt, which is repeated if it has fewer."""
    return (list(tokens) * -(-count // len(tokens)))[-count:]


def _refuse_failed(generations: Sequence[Generation]) -> None:
    failed = next((g.error for g in generations if g.error), None)
    if failed is not None:
        raise InputError(f"a prompt cannot be timed: {failed}")


def _points(entries: pd.DataFrame, contexts: Sequence[float]) -> dict[tuple[float, float, float], float]:
    """Seconds at (batch, width, context), falling neither in the width nor in the context."""
    points: dict[tuple[float, float, float], float] = {}
    for batch, part in entries.groupby("batch"):
        widths = sorted(set(part.width))
        lines = {width: _line(part[part.width == width]) for width in widths}
        for context in contexts:
            seconds = [max(start + slope * (context - at), start / 2) for start, slope, at in lines.values()]
            rising = IsotonicRegression().fit_transform(widths, seconds)
            for width, value in zip(widths, rising, strict=True):
                points[float(batch), float(width), float(context)] = float(value)
    return points


def _line(entries: pd.DataFrame) -> tuple[float, float, float]:
    """Seconds of one width at a context, seconds that a further token of context adds (never below 0), and that context."""
    near, far = entries.iloc[entries.context.argmin()], entries.iloc[entries.context.argmax()]
    further = far.context - near.context
    slope = max((far.seconds - near.seconds) / further, 0.0) if further >= APART else 0.0
    return float(near.seconds if slope else entries.seconds.mean()), float(slope), float(near.context)


def _median(values: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float, float]:
    """The median and its 95 % interval by order statistics (binomial, normal approximation)."""
    ordered = np.sort(values)
    count = len(ordered)
    reach = 0.98 * math.sqrt(count)
    low = ordered[max(0, math.floor(count / 2 - reach))]
    high = ordered[min(count - 1, math.ceil(count / 2 + reach))]
    return float(np.median(ordered)), float(low), float(high)
