"""Which setting to take at which load: chosen on one half of the prompts, reported on the other, with intervals.

The procedure is ours. The simulator serves every setting at every batch size. The setting that is fastest on the dev prompts
is advised if the interval of its speed-up over plain decoding lies above 1 there. Otherwise plain decoding is advised. The
best fixed length and the best setting of every method are chosen in the same way. Drafts are compared by their speed over
plain decoding with the same cost table: tables from files may have been measured at different times. All reported figures come
from the test prompts. Speed-ups are ratios of totals, with bootstrap intervals over prompts and the same draws for both sides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.loads.recorded import RecordedPair, per_request
from analysis.loads.simulator import Load, Served
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.grid import PLAIN, Setting
from toolkit.load_cost import LoadCost

FIXED = "speculative"
GREEDY = dict.fromkeys(("draft_temperature=0", "draft_temperature=0.0"), "with greedy drafts")
UNLIKE = 1.15  # ratio of plain decoding's speeds: if two cost tables differ by more, the machine changed its speed
DRAFTS = 0.1  # drafted tokens per round: a rule that drafts less is taken for plain decoding
Key = tuple[str, bool]  # method, greedy drafts
Best = dict[Key, tuple[Setting, Served]]  # its setting, and how it serves the dev prompts


@dataclass(frozen=True)
class Candidate:
    """One draft: its name, what was recorded with it on both halves of the prompts, and what its forwards cost."""

    draft: str
    dev: RecordedPair
    test: RecordedPair
    costs: LoadCost


def choose(
    candidates: Sequence[Candidate], batch_sizes: Sequence[int], drops: str, bootstrap: Bootstrap
) -> pd.DataFrame:
    """One line per batch size, draft and method: its best setting on dev, and its figures on test.

    Columns: batch, draft, method, setting, tokens_per_second, speedup, speedup_low, speedup_high, latency, latency_95,
    token_seconds, drafted_per_round, advised; and

    greedy           whether the draft proposes its likeliest tokens while the target samples
    parameters       the overrides, as JSON
    dev_times_plain  tokens per second over plain decoding's, on dev
    dev_speedup_low  where the interval on dev begins
    loses            whether the speed-up's interval lies below 1
    """
    from tqdm.auto import tqdm

    lines: list[pd.DataFrame] = []
    total = sum(len(one.dev.settings) for one in candidates) * len(batch_sizes)
    with tqdm(total=total, desc="simulating", unit="setting") as bar:
        for batch in batch_sizes:
            parts = []
            for one in candidates:
                best = _best(one, Load(batch, drops=drops), bar.update)
                parts.append(_report(one, best, Load(batch, drops=drops), bootstrap))
            table = pd.concat(parts, ignore_index=True)
            table.insert(0, "batch", batch)
            table["advised"] = table.index == _advised(table)
            lines.append(table)
    return pd.concat(lines, ignore_index=True)


def sentences(table: pd.DataFrame) -> list[str]:
    """The answer, one sentence per batch size."""
    said = []
    for batch, part in table.groupby("batch", sort=True):
        advised = part[part.advised].iloc[0]
        fixed = part[(part.method == FIXED) & ~part.greedy]
        fixed = fixed.loc[fixed.dev_times_plain.idxmax()] if len(fixed) else None
        if advised.method == PLAIN:
            best = part[part.drafted_per_round >= DRAFTS]
            best = best if len(best) else part[part.method != PLAIN]
            best = best.loc[best.dev_times_plain.idxmax()]
            said.append(
                f"batch {batch}: do not draft; the best that drafts ({_name(best)}) makes {_speed(best)} of plain decoding"
            )
            continue
        known = fixed is None or advised.method == FIXED
        beside = "" if known else f"; the best fixed length ({_name(fixed)}): {_speed(fixed)}"
        said.append(f"batch {batch}: {_name(advised)}: {_speed(advised)} times plain decoding{beside}")
    return said


def best_lengths(table: pd.DataFrame, draft: str, greedy: bool) -> dict[int, int]:
    """The best fixed draft length of one draft by batch size, chosen on the dev prompts; 0 where drafting does not pay.

    Drafting pays where the whole interval of the speed-up over plain decoding lies above 1 on the dev prompts.
    """
    lines = _fixed(table, draft, greedy)
    return {batch: 0 if line is None else _length(line) for batch, line in lines.items()}


def said_of_lengths(table: pd.DataFrame, draft: str, greedy: bool) -> str:
    """`best_lengths` in words, each with its speed-up on the test prompts."""
    lines = _fixed(table, draft, greedy).items()
    return ", ".join(
        f"no drafts at batch {batch}"
        if line is None
        else f"K={_length(line)} at batch {batch} ({_speed(line)} times plain)"
        for batch, line in lines
    )


def unlike_plain(table: pd.DataFrame) -> str | None:
    """A line on cost tables whose speeds of plain decoding differ by more than `UNLIKE`; None if they do not.

    The line names the batch size where they differ most.
    """
    lines = table[table.method == PLAIN]
    by_batch = lines.groupby("batch").tokens_per_second
    ratio = by_batch.max() / by_batch.min()
    if not ratio.max() > UNLIKE:
        return None
    batch = ratio.idxmax()
    here = lines[lines.batch == batch].itertuples()
    found = ", ".join(f"{line.tokens_per_second:.4g} tokens/s with {line.draft}'s" for line in here)
    return (
        f"the cost tables disagree on plain decoding (batch {batch}: {found}), as if of machines of different speed. "
        "Drafts are compared by their speed over plain decoding, each with its own table. "
        "To be sure, measure all drafts in one command, without costs=..."
    )


# -- inside -----------------------------------------------------------------------------------------------------------


def _fixed(table: pd.DataFrame, draft: str, greedy: bool) -> dict[int, pd.Series | None]:
    """The line of a draft's best fixed length by batch size; None where drafting does not pay."""
    found: dict[int, pd.Series | None] = {}
    for batch, part in table[table.draft == draft].groupby("batch", sort=True):
        lines = part[(part.method == FIXED) & (part.greedy == greedy)]
        pays = len(lines) and lines.dev_speedup_low.iloc[0] > 1
        found[int(str(batch))] = lines.iloc[0] if pays else None
    return found


def _length(line: pd.Series) -> int:
    return int(line.setting.split("K=")[1].split()[0])


def _advised(table: pd.DataFrame) -> int:
    """The line to advise at one batch size: the fastest on dev, or plain decoding where its interval on dev reaches 1."""
    fastest = int(table.dev_times_plain.idxmax())
    if table.dev_speedup_low[fastest] > 1:
        return fastest
    return int(table.index[table.method == PLAIN][0])


def _best(one: Candidate, load: Load, tick: Callable[[], object]) -> Best:
    """Each method's fastest setting on the dev prompts, and how it serves them."""
    best: Best = {}
    for setting in one.dev.settings:
        key = (setting.method, setting.parameters.get("draft_temperature") == 0)
        served = one.dev.serve(setting, one.costs, load)
        if key not in best or served.tokens_per_second > best[key][1].tokens_per_second:
            best[key] = (setting, served)
        tick()
    return best


def _report(one: Candidate, best: Best, load: Load, bootstrap: Bootstrap) -> pd.DataFrame:
    served = {key: one.test.serve(setting, one.costs, load) for key, (setting, _) in best.items()}
    tried = _speedups({key: found for key, (_, found) in best.items()}, bootstrap)
    plain = best[PLAIN, False][1].tokens_per_second
    lines = []
    for key, figure in _speedups(served, bootstrap).items():
        setting, dev = best[key]
        lines.append({
            "draft": one.draft, "method": setting.method, "greedy": key[1], "setting": setting.label,
            "parameters": json.dumps(dict(setting.parameters)), "dev_times_plain": dev.tokens_per_second / plain,
            "dev_speedup_low": tried[key]["speedup_low"], **figure, **served[key].figures(),
            "loses": figure["speedup_high"] < 1,
        })  # fmt: skip
    return pd.DataFrame(lines)


def _speedups(served: Mapping[Key, Served], bootstrap: Bootstrap) -> dict[Key, dict[str, float]]:
    """Speed-up over plain decoding, with its interval over the requests."""
    values = np.concatenate([per_request(found) for found in served.values()], axis=1)
    samples, totals = bootstrap.totals(values), values.sum(0)
    plain = 2 * list(served).index((PLAIN, False))
    figures = {}
    for number, key in enumerate(served):
        at = 2 * number
        ratio = (totals[at] / totals[at + 1]) / (totals[plain] / totals[plain + 1])
        spread = (samples[:, at] / samples[:, at + 1]) / (samples[:, plain] / samples[:, plain + 1])
        figures[key] = bootstrap.figure("speedup", ratio, spread)
    return figures


def _name(line: pd.Series) -> str:
    method = "fixed" if line.method == FIXED else line.method
    words = [GREEDY.get(word, word) for word in f"{method} {line.setting}".split()]
    return f"{line.draft}, {' '.join(words)}"


def _speed(line: pd.Series) -> str:
    return f"{line.speedup:.2f} [{line.speedup_low:.2f}, {line.speedup_high:.2f}]"
