"""From a trained run to what others use: the head, its card, its scores and its reliability diagram."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.acceptance.calibration import CalibrationScores
from toolkit.acceptance.head import AcceptanceHead
from toolkit.io import write_atomic, write_json, write_text
from toolkit.training.module import named_scores

HEAD, CARD, SCORES = "head", "MODEL_CARD.md", "metrics.json"
RELIABILITY, DIAGRAM = "reliability.csv", "reliability.png"


def export(
    folder: Path, head: AcceptanceHead, about: Mapping[str, Any], raw: CalibrationScores, corrected: CalibrationScores
) -> dict[str, float]:
    """Write head/, MODEL_CARD.md, metrics.json, reliability.csv and .png; returns the scores.

    about  what the head was trained on and how (see `toolkit.train`); it travels in head/config.json
    """
    scores = {name: float(value) for name, value in named_scores(raw, corrected).items()}
    head.save(folder / HEAD, {**about, "metrics": scores})
    write_json(folder / SCORES, {**scores, "num_positions": int(raw.counts.sum())})
    tables = {"raw": raw.reliability(), "corrected": corrected.reliability()}
    write_text(folder / RELIABILITY, _as_csv(tables))
    write_atomic(folder / DIAGRAM, lambda path: _draw(tables, path))
    write_text(folder / CARD, _card(head, about, scores))
    return scores


def _as_csv(tables: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["scores", "from", "to", "count", "mean_prob", "mean_label"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"scores": name, **row} for name, rows in tables.items() for row in rows)
    return text.getvalue()


def _draw(tables: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    """Mean label over mean prediction per bin, above how many positions each bin holds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    top.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for name, rows in tables.items():
        top.plot([row["mean_prob"] for row in rows], [row["mean_label"] for row in rows], marker="o", label=name)
        widths = [row["to"] - row["from"] for row in rows]
        bottom.bar([row["from"] for row in rows], [row["count"] for row in rows], widths, align="edge", alpha=0.5)
    top.set_ylabel("mean chance of acceptance")
    top.legend()
    bottom.set_xlabel("predicted P(accepted)")
    bottom.set_ylabel("positions")
    figure.savefig(path, format="png", dpi=120)


def _card(head: AcceptanceHead, about: Mapping[str, Any], scores: Mapping[str, float]) -> str:
    sampling = ", ".join(f"{key}={value}" for key, value in about["sampling"].items())
    lines = [f"| {key} | {value:.4f} | {scores[key + '_corrected']:.4f} |" for key, value in scores.items()
             if not key.endswith("_corrected")]  # fmt: skip
    return f"""# Acceptance head

Predicts the chance that the target accepts a drafted token, from the draft's hidden state (SpecDec++,
arXiv:2405.19715). It fits one draft only: the one below, by fingerprint.

| | |
|---|---|
| target | `{about["target"]}` ({about["target_fingerprint"]}) |
| draft | `{about["draft"]}` ({about["draft_fingerprint"]}) |
| reads | {about["hidden_state"]} |
| head | depth {head.depth}, {"tied" if head.tied else "untied"} blocks, hidden size {head.hidden_size} |
| label | {about["label"]} |
| sampling of responses and labels | {sampling} |
| mixing ratio | {about["mixing_ratio"]} |
| data | `{about["data"]}`, {about["num_positions"]} training positions |
| class weights | accepted {about["w_acc"]}, rejected {about["w_rej"]} |
| code | {about["revision"]} |
| trained on | {about["machine"]} |

Validation. "Corrected" adds log(w_rej / w_acc) = {head.log_w_rej:.3f} to the logit: it undoes the class weights' shift.

| | raw | corrected |
|---|---|---|
{chr(10).join(lines)}

![Reliability]({DIAGRAM})

Use it: `python -m toolkit.decode method=specdec_pp head=FOLDER/{HEAD}`
"""
