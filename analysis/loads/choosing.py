"""Which setting to take at which batch size: chosen on one half of the prompts, reported on the other, with intervals.

The setting that is fastest on the dev prompts is advised if the interval of its speed-up over autoregressive decoding lies
above 1 there; otherwise not to draft. All reported figures come from the test prompts. Speed-ups are ratios of totals. The
prompts are served again and again, until every slot has had QUEUE requests, so that a batch is as large as its size says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from analysis.loads.recorded import RecordedPair
from analysis.loads.simulator import Load, RequestResults
from analysis.tables.bootstrap import Array, Bootstrap, brackets
from analysis.tables.grid import PLAIN, Setting

FIXED, LOOKUP, P_MIN = "speculative", "prompt_lookup", "p_min"
NO_DRAFT = "no draft model"  # how tables call the candidate whose methods need none
GREEDY = dict.fromkeys(("draft_temperature=0", "draft_temperature=0.0"), "with greedy drafts")
QUEUE = 16  # requests per slot: slots that run empty in the end are few
DRAFTS = 0.1  # drafted tokens per round: a rule that drafts less is taken for autoregressive decoding
Key = tuple[str, bool]  # method, greedy drafts


@dataclass(frozen=True)
class Candidate:
    """One draft, recorded on all prompts; dev, test: numbers of the texts to choose on and to report."""

    draft: str
    recorded: RecordedPair
    dev: Sequence[int]
    test: Sequence[int]


def choose(
    candidates: Sequence[Candidate], batch_sizes: Sequence[int], drops: str, bootstrap: Bootstrap
) -> pd.DataFrame:
    """One line per batch size, draft and method: its best setting on dev, and its figures on test.

    greedy           whether the draft proposes its top tokens while the target samples
    dev_times_plain, dev_speedup_low  tokens per second over autoregressive decoding's on dev, and where its interval begins
    requests         of test; loses: whether the speed-up's interval (of few requests: their range) lies below 1
    """
    tables: list[pd.DataFrame] = []
    for batch in tqdm(batch_sizes, desc="simulating", unit="batch size"):
        load = Load(batch, drops=drops)
        table = pd.DataFrame([line for candidate in candidates for line in _lines(candidate, load, bootstrap)])
        table.insert(0, "batch", batch)
        table["advised"] = table.index == advised(table)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def _lines(candidate: Candidate, load: Load, bootstrap: Bootstrap) -> list[dict[str, object]]:
    """A draft's lines: each method's fastest setting on dev, and how it serves the test prompts."""
    best: dict[Key, tuple[Setting, RequestResults]] = {}
    for setting in candidate.recorded.settings:
        key = (setting.method, setting.parameters.get("draft_temperature") == 0)
        results = candidate.recorded.serve(setting, load, queue(candidate.dev, load.slots))
        if key not in best or results.tokens_per_second > best[key][1].tokens_per_second:
            best[key] = (setting, results)
    test = queue(candidate.test, load.slots)
    on_test = {key: candidate.recorded.serve(setting, load, test) for key, (setting, _) in best.items()}
    dev_results = {key: results for key, (_, results) in best.items()}
    on_dev = _speedups(dev_results, len(candidate.dev), bootstrap.interval)
    plain = best[PLAIN, False][1].tokens_per_second
    return [
        {
            "draft": candidate.draft, "method": key[0], "greedy": key[1], "setting": best[key][0].label,
            "parameters": json.dumps(dict(best[key][0].parameters)),
            "dev_times_plain": best[key][1].tokens_per_second / plain, "dev_speedup_low": on_dev[key]["speedup_low"],
            **figure, **on_test[key].figures(), "requests": len(candidate.test), "loses": figure["speedup_high"] < 1,
        }
        for key, figure in _speedups(on_test, len(candidate.test), bootstrap.spread).items()
    ]  # fmt: skip


def queue(texts: Sequence[int], slots: int) -> list[int]:
    """The texts in turn, each equally often: QUEUE requests per slot or more. One slot is never free: each text once."""
    return list(texts) * (math.ceil(QUEUE * slots / len(texts)) if slots > 1 else 1)


def _speedups(
    results: Mapping[Key, RequestResults], num_texts: int, ends_of: Callable[..., Sequence[Array]]
) -> dict[Key, dict[str, float]]:
    """Speed-ups over autoregressive decoding and their ends over texts, by `Bootstrap.interval` or `spread`."""
    requests = np.concatenate([np.stack([result.tokens, result.seconds], 1) for result in results.values()], axis=1)
    values = requests.reshape(-1, num_texts, requests.shape[1]).sum(0)  # a text's requests are one observation
    plain = list(results).index((PLAIN, False))

    def speedups(totals: Array) -> Array:
        speeds = totals[..., 0::2] / totals[..., 1::2]
        return speeds / speeds[..., [plain]]

    numbers = np.stack(ends_of(values, speedups), -1).tolist()
    names = ("speedup", "speedup_low", "speedup_high")
    return {key: dict(zip(names, line, strict=True)) for key, line in zip(results, numbers, strict=True)}


def advised(table: pd.DataFrame) -> int:
    """The line to advise at one batch size: the fastest on dev, or no drafts where its interval on dev reaches 1."""
    fastest = int(table.dev_times_plain.idxmax())
    return fastest if table.dev_speedup_low[fastest] > 1 else int(table.index[table.method == PLAIN][0])


def sentences(table: pd.DataFrame, notes: Mapping[int, str | None] | None = None) -> list[str]:
    """The answer for every batch size, with its note in brackets if there is one."""
    lines = []
    for batch, part in table.groupby("batch", sort=True):
        answer = part[part.advised].iloc[0]
        if answer.method == PLAIN:
            best = part[part.drafted_per_round >= DRAFTS]
            best = best if len(best) else part[part.method != PLAIN]
            best = best.loc[best.dev_times_plain.idxmax()]
            text = f"do not draft; the best that drafts ({_name(best)}) makes {speed(best)} of autoregressive decoding"
        else:
            text = f"{_name(answer)}: {speed(answer)} times autoregressive decoding"
            fixed = part[(part.method == FIXED) & ~part.greedy]
            if len(fixed) and answer.method != FIXED:
                best = fixed.loc[fixed.dev_times_plain.idxmax()]
                text += f"; the best fixed length ({_name(best)}): {speed(best)}"
        note = (notes or {}).get(int(str(batch)))
        lines.append(f"batch {batch}: {text}{f' ({note})' if note else ''}")
    return lines


def best_lengths(table: pd.DataFrame, draft: str, greedy: bool, method: str = FIXED) -> dict[int, int]:
    """The best fixed draft length of one draft by batch size; 0 where its interval on dev holds 1. method: of fixed lengths."""
    lengths = {}
    for batch, part in table[table.draft == draft].groupby("batch", sort=True):
        lines = part[(part.method == method) & (part.greedy == greedy)]
        pays = len(lines) and lines.dev_speedup_low.iloc[0] > 1
        lengths[int(str(batch))] = fixed_length(lines.setting.iloc[0]) if pays else 0
    return lengths


def best_p_min(table: pd.DataFrame, draft: str, greedy: bool) -> str | None:
    """The name of the setting of llama.cpp's threshold to serve a draft with, at the smallest batch size; None: a fixed length.

    greedy  of the fixed lengths that it is compared with
    """
    lines = table[(table.draft == draft) & (table.batch == table.batch.min())]
    fixed = lines.dev_times_plain[(lines.method == FIXED) & (lines.greedy == greedy)]
    better = lines[(lines.method == P_MIN) & (lines.dev_speedup_low > 1) & ~(lines.dev_times_plain <= fixed.max())]
    return f"{P_MIN} {better.setting.iloc[0]}" if len(better) else None


def fixed_length(label: str) -> int:
    """K of a fixed length's label, "K=4 ..."."""
    return int(label.split("K=")[1].split()[0])


def _name(line: pd.Series) -> str:
    method = "fixed" if line.method == FIXED else line.method
    words = [GREEDY.get(word, word) for word in f"{method} {line.setting}".split()]
    return f"{line.draft}, {' '.join(words)}"


def speed(line: Any) -> str:
    """A line's speed-up with its interval, or the range of few requests."""
    return f"{line.speedup:.2f} " + brackets(f"{line.speedup_low:.2f}", f"{line.speedup_high:.2f}", line.requests)
