"""From a trained run to what others use: the head, its card, its scores and its reliability diagram."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.acceptance.card import facts_table, scores_table, title
from toolkit.acceptance.saved import SavedHead
from toolkit.files.atomic import write_json, write_text
from toolkit.files.text import as_csv
from toolkit.runs.figure_style import MUTED, PALETTE, Width, figure
from toolkit.training.baselines import comparison, complaint
from toolkit.training.examples import Positions
from toolkit.training.module import HeadTraining

HEAD, CARD, SCORES = "head", "MODEL_CARD.md", "metrics.json"
RELIABILITY, DIAGRAM = "reliability.csv", "reliability.png"
MARKERS = ("o", "s", "D", "^")


def export(
    folder: Path,
    module: HeadTraining,
    facts: Mapping[str, Any],
    batches: Iterable[Positions],
    closing: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Write head/, MODEL_CARD.md, metrics.json, reliability.csv and .png; returns the scores on `batches`.

    facts    what the head was trained on and how, for its config; closing: other scores, found at the end
    """
    head, parts = module.head, module.evaluate(batches)
    scores = {name: float(value) for name, value in module.named(parts).items()} | dict(closing or {})
    first = parts[module.suffixes[0]]
    facts = {**facts, "alpha": mean_label(first.reliability())}
    head.save(folder / HEAD, {**facts, "metrics": scores})
    write_json(folder / SCORES, {**scores, "num_positions": int(first.counts.sum())})
    tables = {suffix.lstrip("_") or "raw": part.reliability() for suffix, part in parts.items()}
    bins = [{"scores": name, **row} for name, rows in tables.items() for row in rows]
    write_text(folder / RELIABILITY, as_csv(["scores", "from", "to", "count", "mean_prob", "mean_label"], bins))
    draw_reliability(bins, folder / DIAGRAM, "reliability on validation text")
    write_text(folder / CARD, _card(head, facts, scores, module))
    return scores


def mean_label(bins: Sequence[Mapping[str, Any]]) -> float:
    """The mean label of all positions, from the bins of a reliability diagram."""
    count = sum(row["count"] for row in bins)
    return sum(row["count"] * row["mean_label"] for row in bins if row["count"]) / max(count, 1)


def _card(head: SavedHead, facts: Mapping[str, Any], scores: Mapping[str, float], module: HeadTraining) -> str:
    lines = [f"| {who} | {auroc:.4f} | {loss:.4f} |" for who, auroc, loss in comparison(scores, module.outputs)]
    warning = complaint(scores, module.outputs)
    return f"""# {title(type(head))}

{head.summary} It fits one draft only: the one below, by fingerprint.

{facts_table({"head": head.config, **facts})}

Validation. Corrected scores add log(w_rej / w_acc) = {head.config["log_w_rej"]:.3f} to the logit: it undoes the class
weights' shift.

{scores_table(scores, module.suffixes)}

![Reliability]({DIAGRAM})

How it is used: {HEAD}/README.md.

Compared with simpler predictors on the same positions, each scaled and shifted to its least log loss:

| | AUROC | calibrated log loss |
|---|---|---|
{chr(10).join(lines)}
{"" if warning is None else f"{chr(10)}{warning.capitalize()}.{chr(10)}"}"""


def draw_reliability(bins: Sequence[Mapping[str, Any]], path: Path, title: str = "", width: Width = "column") -> Path:
    """Share accepted over mean prediction per bin, above how many positions each bin holds.

    bins  scores (whose: one line of the figure each), from, to, count, mean_prob, mean_label; a band where there are
          mean_label_low and mean_label_high
    """
    names = list(dict.fromkeys(str(row["scores"]) for row in bins))
    with figure(path, width, 1.15, rows=2, sharex=True, height_ratios=(3, 1)) as ((top,), (bottom,)):
        top.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle="--")
        for number, name in enumerate(names):
            rows = [row for row in bins if str(row["scores"]) == name and row["count"] > 0]
            color, x = PALETTE[number % len(PALETTE)], [row["mean_prob"] for row in rows]
            style = {"marker": MARKERS[number % len(MARKERS)], "markersize": 3.5, "linewidth": 1.2}
            top.plot(x, [row["mean_label"] for row in rows], color=color, label=name, **style)
            if all("mean_label_low" in row for row in rows):
                ends = ([row[f"mean_label_{end}"] for row in rows] for end in ("low", "high"))
                top.fill_between(x, *ends, color=color, alpha=0.15, linewidth=0)
            if rows:
                edges = sorted({row[end] for row in rows for end in ("from", "to")})  # empty bins have no row
                counts = {row["from"]: row["count"] for row in rows}
                bottom.stairs([counts.get(edge, 0) for edge in edges[:-1]], edges, color=color, linewidth=1.2)
        top.set(xlim=(0, 1), ylim=(0, 1), ylabel="share accepted", title=title)
        top.legend(loc="upper left")
        bottom.set(xlabel="predicted P(accepted)", ylabel="positions")
    return path
