"""What a search reads of a finished job, and writes: trials.csv (a line per trial), best.json and search.png."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_json, write_text
from toolkit.files.text import lines_of
from toolkit.runs.stage import OUTPUT
from toolkit.search.study import Search

NO_CHOICE = ("oracle", "upper_bound", "autoregressive")  # methods that are not searched for


def scores_of(job: Any, folder: Path, names: Sequence[str]) -> list[float] | Exception:
    """The scores of a job of Hydra's, the number that it returns if there are no names; or why it has none."""
    try:
        value = job.return_value  # raises what the job has raised
        home = folder / job.hydra_cfg.hydra.sweep.subdir
        return read_scores(Path(read_json(home / OUTPUT)["folder"]), names) if names else [float(value)]
    except Exception as error:  # whatever it is, the search goes on
        return error


def read_scores(folder: Path, names: Sequence[str]) -> list[float]:
    """These scores of an output folder. Raises InputError if one is missing, or there are several settings."""
    files = [folder / name for name in ("metrics.json", "summary.json")]  # of trainings and of decoding
    values = {key: value for file in files if file.is_file() for key, value in read_json(file).items()}
    if not values and (path := folder / "summary.csv").is_file():  # of a sweep: a line per setting
        table = pd.read_csv(path)
        rows = table[~table.method.isin(NO_CHOICE)]
        if len(rows) != 1:
            raise InputError(f"{path}: expected one setting to score (a grid of one), got {len(rows)}")
        values = rows.select_dtypes("number").iloc[0].to_dict()
    scores = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    for name in names:
        if name not in scores:
            raise InputError(
                f"hydra.sweeper.metrics: expected of {sorted(scores)} (the scores in {folder}), got {name}"
            )
    return [scores[name] for name in names]


def write_results(search: Search) -> list[dict[str, str]]:
    """Write what is known so far; returns the lines of the table."""
    names, best, errors = search.settings.names, search.study.best_trials, search.study.user_attrs
    lines = []
    for trial in search.in_state("COMPLETE", "FAIL"):
        scores = dict(zip(names, trial.values or [None] * len(names), strict=True))
        failed = f"failed: {errors.get(f'error {trial.number}', 'its score is not a number')}"
        marks = {"best": "yes" if trial in best else "", "status": failed if trial.values is None else "done"}
        lines.append({"trial": trial.number, **trial.params, **scores, **marks})
    text = pd.DataFrame(lines).to_csv(index=False, float_format="%.6g")
    write_text(search.folder / "trials.csv", text)
    scored = [(trial, dict(zip(names, trial.values, strict=True))) for trial in best]
    facts = [{"trial": trial.number, "params": trial.params, "scores": scores} for trial, scores in scored]
    write_json(search.folder / "best.json", facts)
    if best and len(names) <= 2 and not search.left:
        from optuna.visualization import matplotlib as plots

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # names of scores and these figures count as experimental
            search.study.set_metric_names(names)
            plot: Any = plots.plot_pareto_front if len(names) == 2 else plots.plot_optimization_history
            plot(search.study).figure.savefig(search.folder / "search.png")
    return list(csv.DictReader(lines_of(text)))
