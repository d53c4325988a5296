"""From a trained run to what others use: the head, its card, its scores and its reliability diagram."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from toolkit.acceptance.card import facts_table, scores_table, title
from toolkit.acceptance.saved import SavedHead
from toolkit.files.atomic import write_json, write_text
from toolkit.files.text import as_csv
from toolkit.training.baselines import comparison, complaint
from toolkit.training.diagram import draw_reliability
from toolkit.training.module import HeadTraining
from toolkit.training.states import Positions

HEAD, CARD, SCORES = "head", "MODEL_CARD.md", "metrics.json"
RELIABILITY, DIAGRAM = "reliability.csv", "reliability.png"


def export(
    folder: Path,
    module: HeadTraining,
    facts: Mapping[str, Any],
    batches: Iterable[Positions],
    closing: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Write head/, MODEL_CARD.md, metrics.json, reliability.csv and .png; returns the scores on `batches`.

    facts    what the head was trained on and how (see `toolkit.train`); it travels in the head's config
    closing  other scores, which callbacks found at the end
    """
    head, parts = module.head, module.evaluate(batches)
    scores = {name: float(value) for name, value in module.named(parts).items()} | dict(closing or {})
    head.save(folder / HEAD, {**facts, "metrics": scores})
    first = parts[module.suffixes[0]]
    write_json(folder / SCORES, {**scores, "num_positions": int(first.counts.sum())})
    tables = {suffix.lstrip("_") or "raw": part.reliability() for suffix, part in parts.items()}
    bins = [{"scores": name, **row} for name, rows in tables.items() for row in rows]
    write_text(folder / RELIABILITY, as_csv(["scores", "from", "to", "count", "mean_prob", "mean_label"], bins))
    draw_reliability(bins, folder / DIAGRAM, "reliability on validation text")
    write_text(folder / CARD, _card(head, facts, scores, module))
    return scores


def _card(head: SavedHead, facts: Mapping[str, Any], scores: Mapping[str, float], module: HeadTraining) -> str:
    lines = [f"| {who} | {auroc:.4f} | {loss:.4f} |" for who, auroc, loss in comparison(scores, module.outputs)]
    warning = complaint(scores, module.outputs)
    return f"""# {title(type(head))}

{head.summary_of(head.config)} It fits one draft only: the one below, by fingerprint.

{facts_table({"head": head.config, **facts})}

Validation. Corrected scores add log(w_rej / w_acc) = {head.config["log_w_rej"]:.3f} to the logit: it undoes the class
weights' shift.

{scores_table(scores, module.suffixes)}

![Reliability]({DIAGRAM})

Use it: `python -m toolkit.decode {head.use_of(head.config)} head=FOLDER/{HEAD}`

Compared with simpler predictors on the same positions, each scaled and shifted to its least log loss:

| | AUROC | calibrated log loss |
|---|---|---|
{chr(10).join(lines)}
{"" if warning is None else f"{chr(10)}{warning.capitalize()}.{chr(10)}"}"""
