"""What a search has found: trials.csv and trials.md (a line per trial), best.json, and a figure."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

from toolkit.figure_style import MUTED, PALETTE, figure
from toolkit.io import write_json, write_text
from toolkit.search.study import ERROR, INSTEAD, JOB, Search


def write_results(search: Search) -> list[dict[str, str]]:
    """Write the tables and best.json anew; returns the lines."""
    best = {trial.number for trial in search.best()}
    lines = [_line(trial, search, trial.number in best) for trial in search.trials]
    if lines:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        write_text(search.folder / "trials.csv", text.getvalue())
        rows = [list(lines[0]), ["---"] * len(lines[0]), *(list(line.values()) for line in lines)]
        write_text(search.folder / "trials.md", "".join(f"| {' | '.join(row)} |\n" for row in rows))
    found = [
        {"trial": one.number, "params": one.params, "scores": dict(zip(search.settings.names, one.values, strict=True))}
        for one in search.best()
    ]
    write_json(search.folder / "best.json", found)
    return lines


def draw(search: Search) -> Path | None:
    """search.png: with two scores the undominated trials among all, else the best score by trial; None: nothing to show."""
    done = [one for one in search.trials if one.values is not None and all(map(math.isfinite, one.values))]
    if not done or len(search.settings.names) > 2:
        return None
    path = search.folder / "search.png"
    with figure(path, "column", aspect=0.8) as ((axes,),):
        if len(search.settings.names) == 2:
            best = sorted(one.values for one in search.best())
            axes.plot(*zip(*(one.values for one in done), strict=True), "o", color=MUTED, markersize=3)
            axes.plot(*zip(*best, strict=True), "o-", color=PALETTE[0], markersize=4)
            axes.set_xlabel(f"{search.settings.names[0]} ({search.settings.directions[0]})")
            axes.set_ylabel(f"{search.settings.names[1]} ({search.settings.directions[1]})")
            axes.set_title(f"{len(best)} undominated of {len(done)} trials")
        else:
            better = min if search.settings.directions[0] == "minimize" else max
            values = [one.values[0] for one in done]
            reached = [better(values[: n + 1]) for n in range(len(values))]
            axes.plot([one.number for one in done], values, "o", color=MUTED, markersize=3)
            axes.step([one.number for one in done], reached, where="post", color=PALETTE[0])
            axes.set_xlabel("trial")
            axes.set_ylabel(search.settings.names[0])
            axes.set_title(f"best of {len(done)} trials: {reached[-1]:.4g}")
    return path


def _line(trial: Any, search: Search, best: bool) -> dict[str, str]:
    """A trial as text."""
    again = {one.user_attrs.get(INSTEAD) for one in search.study.get_trials(deepcopy=False)}
    scores = trial.values or [None] * len(search.settings.names)
    error = trial.user_attrs.get(ERROR, "the process ended")
    failed = f"failed{', tried again' if trial.number in again else ''}: {error}".replace("|", "/")
    return {
        "trial": str(trial.number),
        "job": str(trial.user_attrs.get(JOB, "")),
        **{key: _shown(trial.params.get(key)) for key in search.space},
        **{name: _shown(score) for name, score in zip(search.settings.names, scores, strict=True)},
        "best": "yes" if best else "",
        "status": "done" if trial.values is not None else failed,
    }


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
