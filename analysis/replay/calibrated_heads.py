"""A head's calibration: analysis.heads heads=[FOLDER] fit={NAME: TRACES} traces={NAME: TRACES, ...}.

Fits a calibration to the traces in `fit` (prompts that the head was not trained on) and writes it beside a copy of the
head. Judges raw, corrected and calibrated probabilities on the traces in `traces`: those of single tokens, and products of
them, which policies look at. A data set that is named in `fit`, too, is in distribution, the others are out of it.

    head/            the head with its calibration: method.policy.estimator.calibrated=true uses it
    scores           one line per head, data set, version and scope: Brier, AUROC, log loss, ECE
    bins             the reliability diagrams as numbers
    reliability.png  the diagrams, with counts and ECE; one per kind of head
    calibration.md   the main scores
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.plots import diagrams
from analysis.replay.calibrating import Scored, fit_beside, judge
from analysis.replay.head_folders import Contender, find_contenders
from analysis.tables.files import markdown, read_table, save_table, show
from toolkit.config import commands, instantiate, plain
from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_text
from toolkit.runs.stage import open_stage
from toolkit.trace.folders import SUMMARY, read_traces
from toolkit.training.export import HEAD

SHOWN = ("position", "following", "product")


def calibrate(cfg: commands.Heads) -> Path:
    """Fit, judge and draw; returns the output folder."""
    for key, recordings in (("fit", cfg.fit), ("traces", cfg.traces)):
        if not isinstance(plain(recordings), dict):
            raise InputError(f"expected {key}={{NAME: FOLDER}} of data_gen.traces, got {recordings}")
    fitted, judged = ({name: Path(folder) for name, folder in plain(part).items()} for part in (cfg.fit, cfg.traces))
    if not fitted or not judged:
        raise InputError("expected fit={NAME: FOLDER} and traces={NAME: FOLDER} of data_gen.traces, got none")
    jobs, own = ({name: _job(traces) for name, traces in part.items()} for part in (judged, fitted))
    if shared := [name for name, job in jobs.items() if job in own.values()]:  # judged on what it was fitted to
        raise InputError(f"traces: expected other texts than in fit, got the same for {', '.join(shared)}")
    if len(cfg.heads or ()) != 1:
        raise InputError(f"fit: expected heads=[FOLDER], the one to be calibrated, got {cfg.heads or 'none'}")
    folders = list(dict.fromkeys([*fitted.values(), *judged.values()]))
    contenders = find_contenders(plain(cfg.heads), folders)
    files = [*(folder / SUMMARY for folder in folders), *(path for contender in contenders for path in contender.files)]
    stage = open_stage("calibration", cfg, inputs=files)
    if not stage.finished:
        draft = instantiate(cfg.draft) if any(contender.needs_draft for contender in contenders) else None
        scores, bins = [], []
        for contender in contenders:
            lines, rows = _study(contender, draft, fitted, judged, stage.folder / HEAD, cfg)
            scores.append(lines)
            bins.append(rows)
        save_table(pd.concat(scores, ignore_index=True), stage.folder, "scores")
        save_table(pd.concat(bins, ignore_index=True), stage.folder, "bins")
        _draw(stage.folder)
        stage.finish(heads=[contender.name for contender in contenders])
    first = ("head", "dataset", "scope", "version", "ECE", "log_loss")
    scores_found = readable(read_table(stage.folder, "scores"))
    show(scores_found, f"calibration, fitted to {', '.join(fitted)}", stage.folder / "scores.csv", first)
    print(f"the head with its calibration: {stage.folder / HEAD} (method.policy.estimator.calibrated=true)")
    return stage.folder


def readable(scores: pd.DataFrame) -> pd.DataFrame:
    """The main lines: single tokens and products at all depths."""
    main = scores[scores.scope.isin(SHOWN)]
    columns = ["head", "dataset", "in_distribution", "scope", "version", "samples", "auroc", "log_loss", "brier", "ece"]
    return main[columns].rename(columns={"in_distribution": "in distribution", "auroc": "AUROC", "ece": "ECE"})


def _study(
    contender: Contender,
    draft: Any,
    fitted: Mapping[str, Path],
    judged: Mapping[str, Path],
    folder: Path,
    cfg: commands.Heads,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Fit and save a head's calibration; its lines of scores and of bins."""
    shift = float(contender.head.config["log_w_rej"])
    samples = [Scored.of(contender, read_traces(traces), draft) for traces in fitted.values()]
    jobs = {name: _job(traces) for name, traces in fitted.items()}
    calibration = fit_beside(contender, samples, folder, cfg.kind, cfg.max_depth, jobs)
    parts: dict[str, list[pd.DataFrame]] = {"scores": [], "bins": []}
    for name, traces in judged.items():
        judgement = judge(Scored.of(contender, read_traces(traces), draft), calibration, shift, cfg.max_depth)
        labels = {"head": contender.kind, "dataset": name, "in_distribution": name in fitted}
        for key, lines in zip(parts, judgement, strict=True):
            frame = pd.DataFrame(lines)
            parts[key].append(pd.concat([pd.DataFrame([labels] * len(frame)), frame], axis=1))
    return pd.concat(parts["scores"]), pd.concat(parts["bins"])


def _draw(folder: Path) -> None:
    scores, bins = (read_table(folder, name) for name in ("scores", "bins"))
    figures = [
        diagrams(bins[bins["head"] == kind], scores[scores["head"] == kind], folder / f"reliability-{kind}.png", kind)
        for kind in scores["head"].unique()
    ]
    pictures = "\n\n".join(f"![{figure.stem}]({figure.name})" for figure in figures)
    write_text(folder / "calibration.md", f"# Calibration\n\n{markdown(readable(scores))}\n\n{pictures}\n")


def _job(traces: Path) -> str:
    return str(read_json(traces / SUMMARY)["job"])
