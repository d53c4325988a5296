"""The answer in one sentence, and all of it as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from analysis.diagnosis.answers import Answer
from analysis.diagnosis.compare import EXPLAINS, PENALTY, Explanation, best_of
from analysis.loads.engine_counts import PositionCounts, counts_of
from analysis.tables.bootstrap import Array, Bootstrap, brackets


def of_rounds(rounds: pd.DataFrame, several: Sequence[Explanation], bootstrap: Bootstrap) -> dict[str, Any]:
    """What `diagnosis.json` holds of counts by round; the first explanation is the draft as it should be."""
    right, best = several[0], best_of(rounds, several)
    named = [] if best is None or best is right else best.causes
    sampled, columns = right.sampled, ["accepted", "expected"]
    rounds = rounds.assign(expected=right.accepted)
    if not sampled:
        rounds, columns = rounds.assign(equal=rounds.accepted == right.accepted), [*columns, "equal"]
    others = sorted(several[1:], key=lambda each: -each.likelihood.sum())
    positions = by_position(rounds, right.tested, bootstrap)
    groups = {name: rounds.groupby(name)[columns] for name in ("third", "category")}
    tables = {name: group.mean().assign(rounds=group.size()).reset_index() for name, group in groups.items()}
    causes = [
        {
            "names": [cause.meaning for cause in each.causes],
            "equal": each.equal,
            "log_likelihood_ratio": float((each.likelihood - right.likelihood).sum()),
        }
        for each in others
    ]
    return {
        "sentence": (sampled_sentence if sampled else sentence)(
            rounds, right, best, others, gap(positions, rounds.text.nunique())
        ),
        "explained": best is not None,
        "explained_by": [cause.meaning for cause in named],
        "set": [cause.setting for cause in named if cause.setting],
        "rounds": len(rounds),
        "equal": right.equal,
        "positions": positions,
        **{name: table.to_dict("records") for name, table in tables.items()},
        "causes": causes,
        "different": [] if sampled else rounds[~rounds.equal].drop(columns="equal").to_dict("records"),
    }


def sentence(
    rounds: pd.DataFrame, right: Explanation, best: Explanation | None, others: Sequence[Explanation], position: str
) -> str:
    size, equal = len(rounds), f"{right.equal} of {len(rounds)} rounds"
    if best is right:
        about = "; the others differ as rounding makes them" if right.equal < size else ""
        if others and not others[0].rounding and (others[0].likelihood - right.likelihood).sum() > PENALTY:
            texts = rounds.text.nunique()
            about = f"; {others[0].name}: {others[0].equal}, which is not certain over {texts} texts"
        return f"as it should be: {equal}{about}"
    if best is not None and best.rounding and right.equal >= EXPLAINS * size:
        return f"as it should be, but for rounding: {equal}; {best.name}: {best.equal}"
    if best is not None:
        next_best = max(each.equal for each in (right, *others) if each is not best)
        return f"{position}; explained by: {best.name} ({best.equal} of {size} rounds; next best {next_best})"
    count = sum(len(each.causes) for each in others)
    closest = f"; {others[0].name}: {others[0].equal}" if others else ""
    if others and right.equal < EXPLAINS * size <= others[0].equal:  # it is better, but not certainly over texts
        texts = rounds.text.nunique()
        return f"different, and {texts} texts are too few to name a cause ({equal} are as they should be{closest}); {position}"
    first = [
        f"answer {row.text + 1} after {row.start} tokens, {row.accepted} of {row.drafted} accepted, expected {row.expected}"
        for row in rounds[~rounds.equal].head(3).itertuples()
    ]
    return (
        f"different, and none of the {count} causes explains it ({equal} are as they should be{closest}); {position}; first "
        f"rounds that differ: {'; '.join(first)}"
    )


def sampled_sentence(
    rounds: pd.DataFrame, right: Explanation, best: Explanation | None, others: Sequence[Explanation], position: str
) -> str:
    """The same above temperature 0: likelihood ratios in the place of equal rounds."""

    def ratio(each: Explanation) -> str:
        return f"{(each.likelihood - right.likelihood).sum():.1f}"

    counts = f"{len(rounds)} rounds, {rounds.accepted.sum()} accepted tokens, expected {right.accepted.sum():.0f}"
    if best is right or (best is not None and best.rounding):
        return f"as it should be: {counts}"
    if best is not None:
        next_best = ratio(
            max((right, *(each for each in others if each is not best)), key=lambda each: each.likelihood.sum())
        )
        return f"{position}; explained by: {best.name} (log-likelihood ratio {ratio(best)}; next best {next_best})"
    closest = f"; {others[0].name}: log-likelihood ratio {ratio(others[0])}" if others else ""
    count = sum(len(each.causes) for each in others)
    return f"different, and none of the {count} causes explains it ({counts}{closest}); {position}"


def by_position(rounds: pd.DataFrame, tested: Array | None, bootstrap: Bootstrap) -> list[dict[str, Any]]:
    """P(accepted | all before it), counted and expected of the same rounds; low, high: of expected, paired with counted.

    tested  of the expected explanation
    """
    longest = int(rounds.drafted.max())

    def counted_in(name: str) -> PositionCounts:
        parts = [(part.drafted.tolist(), part[name].tolist()) for _, part in rounds.groupby("text")]
        return counts_of(parts, longest)

    theirs = counted_in("accepted")
    if tested is None:
        ours = counted_in("expected")
    else:
        sums = np.stack([tested[part.index].sum(0) for _, part in rounds.groupby("text")])
        ours = replace(theirs, accepted=sums)

    def shares(sums: Array) -> Array:
        counted, share = sums[..., 0] / sums[..., 1], sums[..., 2] / sums[..., 3]
        return np.stack([counted, share, share - counted], -1)

    lines = []
    for j in range(longest):
        columns = np.stack([each[:, j] for each in (theirs.accepted, theirs.reached, ours.accepted, ours.reached)], 1)
        (counted, share, _), low, high = bootstrap.spread(columns, shares)
        numbers = {"accepted": counted, "expected": share, "low": counted + low[2], "high": counted + high[2]}
        finite = {name: float(number) if np.isfinite(number) else None for name, number in numbers.items()}
        lines.append({"position": j + 1, "rounds": int(columns[:, 1].sum()), **finite})
    return lines


def gap(positions: Sequence[dict[str, Any]], num_texts: int) -> str:
    """The draft position where most acceptances are missing, or too many, if any is beyond its interval."""
    beyond = [at for at in positions if None not in at.values() and not at["low"] <= at["accepted"] <= at["high"]]
    if not beyond:
        return "no position's acceptance differs beyond its interval"
    at = max(beyond, key=lambda at: abs(at["accepted"] - at["expected"]) * at["rounds"])
    counted, share, *ends = (f"{at[name]:.2f}".removeprefix("0") for name in ("accepted", "expected", "low", "high"))
    draft = f"this draft should have {share} {brackets(ends[0], ends[1], num_texts)}"
    return f"position {at['position']} is accepted {counted} of the time where {draft}"


def of_sums(answers: Sequence[Answer], accepted: Sequence[Sequence[int]], bootstrap: Bootstrap) -> dict[str, Any]:
    """What `diagnosis.json` holds of sums. accepted: what the draft would accept from every start in a text."""
    totals = []
    for answer, after in zip(answers, accepted, strict=True):
        drafted, kept, start = 0, 0, 0
        while start < len(after):
            drafted, kept, start = drafted + answer.rounds[start][1], kept + after[start], start + after[start] + 1
        totals.append((*(answer.sums or ()), drafted, kept))

    def shares(sums: Array) -> Array:
        counted, share = sums[..., 1] / sums[..., 0], sums[..., 3] / sums[..., 2]
        return np.stack([counted, share, counted - share], -1)

    shown, low, high = bootstrap.spread(np.array(totals, dtype=float), shares)
    about = "as it should be, as far as sums tell" if low[2] <= 0 <= high[2] else "different"
    ends = brackets(f"{low[2]:+.3f}", f"{high[2]:+.3f}", len(answers))
    return {
        "sentence": f"{about}: {shown[0]:.3f} of the drafted tokens are accepted, expected {shown[1]:.3f}, difference {ends}; "
        "sums name no cause, counts by round do",
        "set": [],
        "totals": totals,
    }
