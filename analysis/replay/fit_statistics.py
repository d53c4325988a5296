"""Acceptance from statistics of q, fitted to recordings: analysis.heads statistics=[TRACES]. No model runs.

Sequences are split under the seed. The numbers alone, or with their products: a fifth of the fitted sequences decides, then all
of them are fitted to. Scores are of sequences held out. calibration=[TRACES] or counts=FILE: `analysis.replay.calibrate`.

    statistics.json  the weights (`toolkit.acceptance.statistics`), what they were fitted to, and the scores by depth
    statistics.md    its card: what it was fitted to, which numbers matter, scores by recording and depth, how it is used
    scores           log loss (nats), AUC, ECE, mean estimate and mean label, by output, recording and depth
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis import keys
from analysis.replay.calibrate import fitted_maps, maps_of_counts
from analysis.replay.fit_samples import Samples, samples, score, split
from analysis.tables.files import markdown, read_table, save_table, show
from toolkit.acceptance.calibration.by_depth import Calibration
from toolkit.acceptance.calibration.scores import log_losses
from toolkit.acceptance.statistics import (
    NUMBERS,
    OUTPUTS,
    Logistic,
    input_names,
    inputs_of,
    read_statistics,
    write_statistics,
)
from toolkit.config import plain
from toolkit.errors import InputError, warn
from toolkit.files import generate_folder
from toolkit.files.atomic import read_json, write_text
from toolkit.runs.sources import prompts_behind
from toolkit.runs.stage import open_stage
from toolkit.trace.store import SUMMARY, read_traces

FILE = "statistics.json"
PULL = 10.0  # C of the penalty: weak
MEASURED = (
    "By recording and depth, on texts held out: `mean_label` is the mean acceptance (alpha), `ECE` the calibration."
)
USE = f"""Use it, with FOLDER this folder, TARGET and DRAFT a pair of this kind:

- Here: `python -m toolkit.decode method=rate statistics=FOLDER/statistics.json pair.target=TARGET pair.draft=DRAFT`
- Engines (vLLM, SGLang, TensorRT-LLM, llama.cpp) read no statistics. The lengths by batch size, as their settings:
  `python -m analysis.advise pair.target=TARGET pair.draft=DRAFT prompts.path=FILE.jsonl`
- Inside transformers, with `model` the target:

{generate_folder.function_line('draft="DRAFT", statistics="FOLDER/statistics.json"')}"""
INNER = 0.2  # share of the fitted sequences that chooses between the forms


def fitted(numbers: Tensor, depth: Tensor, labels: Tensor, names: Sequence[str]) -> Logistic:
    """The regression of labels [n] in [0, 1] on the named inputs and the depth, weakly penalised.

    The intercept of depth 1 is 0, and the bias stands for it. A depth that was never seen has the one before it.

    Raises InputError for fewer positions than weights, and for labels of one class alone.
    """
    from sklearn.linear_model import LogisticRegression

    every = input_names(NUMBERS[: numbers.shape[1]])
    inputs = inputs_of(numbers)[:, [every.index(name) for name in names]].numpy()
    num_weights = len(names) + (int(depth.max()) if len(depth) else 1)  # the bias stands for depth 1
    if len(inputs) <= num_weights:
        raise InputError(f"statistics: {len(inputs)} positions for {num_weights} weights: record more texts")
    if not 1 <= (accepted := float(labels.sum())) <= len(labels) - 1:
        raise InputError(
            f"statistics: expected an accepted token at least and one that is not, got {accepted:.3g} of {len(labels)}"
        )
    means, deviations = inputs.mean(0), inputs.std(0)
    deviations = np.where(deviations > 0, deviations, 1.0)
    at_depth = np.eye(int(depth.max()))[depth.numpy() - 1, 1:]
    columns = np.concatenate([(inputs - means) / deviations, at_depth], 1)
    classes = np.repeat([1, 0], len(columns))  # a label of .7 is .7 samples of one class and .3 of the other
    weight = np.concatenate([labels.numpy(), 1 - labels.numpy()])
    model = LogisticRegression(C=PULL, max_iter=2000).fit(np.concatenate([columns, columns]), classes, weight)
    values = model.coef_[0].tolist()
    weights = {
        name: (value, float(mean), float(deviation))
        for name, value, mean, deviation in zip(names, values, means, deviations, strict=False)
    }
    intercepts = [0.0]
    for number, value in enumerate(values[len(names) :], start=1):
        intercepts.append(value if at_depth[:, number - 1].any() else intercepts[-1])
    return Logistic(float(model.intercept_[0]), weights, tuple(intercepts))


def logits_of(output: str, logistic: Logistic, part: Samples) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and depths [n] each of an output's samples."""
    numbers, depth, labels = part.of(output)
    return logistic.logits(inputs_of(numbers), input_names(NUMBERS[: numbers.shape[1]]), depth), labels, depth


def forms(output: str, form: str) -> list[list[str]]:
    """The sets of inputs that are tried: those of a form; of `best` the numbers, and with their products."""
    numbers = NUMBERS[:-1] if output == "position" else NUMBERS
    sets = {
        "log_odds": [numbers[0]],
        "ratio": list(numbers[:2]),
        "numbers": list(numbers),
        "products": input_names(numbers),
    }
    return [sets["numbers"], sets["products"]] if form == "best" else [sets[form]]


def chosen_fit(output: str, part: Samples, form: str, seed: int) -> Logistic:
    """The regression on the inputs of the least log loss on sequences that it was not fitted to, then fitted to all."""
    if len(tried := forms(output, form)) == 1:
        return fitted(*part.of(output), tried[0])
    kept = ~split(part.sequence, INNER, seed)
    inner, outer = part.where(kept), part.where(~kept)
    losses = []
    for names in tried:
        logits, labels, _ = logits_of(output, fitted(*inner.of(output), names), outer)
        losses.append(float(log_losses(logits, labels).mean()))
    return fitted(*part.of(output), tried[int(np.argmin(losses))])


def fit_statistics(cfg: keys.Heads) -> Path:
    """Fit, score and write; returns the output folder."""
    folders, others = ([Path(str(folder)) for folder in plain(key) or ()] for key in (cfg.statistics, cfg.calibration))
    if not folders or (others and cfg.counts is not None):
        raise InputError(
            "statistics: expected folders of data_gen.traces, statistics=[FOLDER,...], and calibration= or counts=, not both; "
            f"got {len(folders)}, {len(others)} and {cfg.counts}"
        )
    stage = open_stage("heads", cfg, inputs=[folder / SUMMARY for folder in (*folders, *others)], ignore=("track",))
    if not stage.finished:
        started = perf_counter()
        summaries = [read_json(folder / SUMMARY) for folder in folders]
        parts = [samples(read_traces(folder, None, grammars=True), cfg.max_drafted, cfg.seed) for folder in folders]
        held_out = [split(part.sequence, cfg.dev_share, cfg.seed) for part in parts]
        learned_of = {
            folder.resolve(): part.where(~out) for folder, part, out in zip(folders, parts, held_out, strict=True)
        }
        learned = Samples.join(list(learned_of.values()))
        outputs = {name: chosen_fit(name, learned, cfg.form, cfg.seed) for name in OUTPUTS}
        names = [folder.name for folder in folders]
        names = names if len({*names}) == len(names) else [*map(str, folders)]
        tests = {name: part.where(out) for name, part, out in zip(names, parts, held_out, strict=True)}
        calibration = Calibration()
        if cfg.counts is not None:
            calibration = maps_of_counts(cfg.counts, labelled_by(outputs, learned))
        elif others:
            dev = Samples.join(
                [  # without the sequences that are scored
                    learned_of[folder.resolve()]
                    if folder.resolve() in learned_of
                    else samples(read_traces(folder, grammars=True), cfg.max_drafted, cfg.seed)
                    for folder in others
                ]
            )
            calibration = fitted_maps(labelled_by(outputs, dev))
        table = scores(outputs, tests, calibration)
        _warn_of_others(folders, names, summaries, table)
        record = {
            "drafts": sorted({summary["draft_fingerprint"] for summary in summaries}),
            "draft_weights": {s["draft_fingerprint"]: s.get("draft_weights") for s in summaries},
            "targets": sorted({summary["target_fingerprint"] for summary in summaries}),
            "temperatures": sorted({summary["sampling"]["temperature"] for summary in summaries}),
            "positions": len(learned.depth),
            "calibration": calibration.facts(),
            "held_out": table.to_dict("records"),
        }
        write_statistics(stage.folder / FILE, outputs, record)
        save_table(table, stage.folder, "scores")
        stage.finish(positions=[len(learned.depth), sum(len(p.depth) for p in tests.values())],
                     seconds=perf_counter() - started)  # fmt: skip
    outputs, _ = read_statistics(stage.folder / FILE)
    facts, table = stage.manifest, read_table(stage.folder, "scores")
    title = (
        f"statistics of q: fitted to {facts['positions'][0]} positions, scored on {facts['positions'][1]} of other "
        f"sequences, {facts['seconds']:.1f} s"
    )
    lines = [meaning(name, logistic) for name, logistic in outputs.items()]
    facts_of = facts_table(read_json(stage.folder / FILE), prompts_behind(folders))
    page = "\n\n".join(["# Acceptance from statistics of q", title, facts_of, *lines, MEASURED, markdown(table), USE])
    write_text(stage.folder / "statistics.md", page + "\n")
    show(table[table.depth == "all"], title, stage.folder / "statistics.md")
    print("\n".join(lines))
    print(f"the estimator: {stage.folder / FILE} (toolkit.decode method=rate statistics=FILE)")
    return stage.folder


def facts_table(record: Mapping[str, Any], prompts: Sequence[str]) -> str:
    """What statistics were fitted to; of models the fingerprints."""
    rows = {
        "targets": ", ".join(record["targets"]),
        "drafts": ", ".join(record["drafts"]),
        "temperatures": ", ".join(f"{temperature:g}" for temperature in record["temperatures"]),
        "positions": f"{record['positions']:,}",
        "prompts": "; ".join(prompts) or "not recorded",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def labelled_by(outputs: Mapping[str, Logistic], part: Samples) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Logits, labels and depths [n] each, by output."""
    return {name: logits_of(name, logistic, part) for name, logistic in outputs.items()}


def scores(
    outputs: Mapping[str, Logistic], recordings: Mapping[str, Samples], calibration: Calibration
) -> pd.DataFrame:
    """One line per output, recording and depth; depth `all` first. With a calibration its ECE, too."""
    lines = []
    for output, logistic in outputs.items():
        for name, part in recordings.items():
            logits, labels, depth = logits_of(output, logistic, part)
            mapped = calibration.prob(output, logits, depth).logit(eps=1e-9)
            for level in ("all", *sorted(depth.unique().tolist())):
                chosen = torch.ones_like(depth, dtype=torch.bool) if level == "all" else depth == level
                line = {"output": output, "recording": name, "depth": str(level), "positions": int(chosen.sum())}
                line |= score(logits[chosen], labels[chosen])
                if calibration.outputs:
                    line["ECE_calibrated"] = score(mapped[chosen], labels[chosen])["ECE"]
                lines.append(line)
    return pd.DataFrame(lines)


def meaning(output: str, logistic: Logistic) -> str:
    """Which numbers matter, in one line: the weights per standard deviation, the largest first."""
    weights = sorted(logistic.weights.items(), key=lambda entry: -abs(entry[1][0]))
    shown = ", ".join(f"{name} {weight:+.2f}" for name, (weight, _, _) in weights[:6])
    depths = f"; by depth {', '.join(f'{value:+.2f}' for value in logistic.intercepts)}" if logistic.intercepts else ""
    return f"`{output}`: change of the log odds per standard deviation: {shown}{depths}"


def _warn_of_others(
    folders: Sequence[Path], names: Sequence[str], summaries: Sequence[Mapping[str, Any]], table: pd.DataFrame
) -> None:
    """Warn of recordings of another draft or temperature than the first one, with how far the fit is off there."""
    drawn = table[(table.output == "drawn") & (table.depth == "all")].set_index("recording")
    for folder, recording, summary in zip(folders[1:], names[1:], summaries[1:], strict=True):
        for name, values in (
            ("draft", [other["draft_fingerprint"] for other in (summaries[0], summary)]),
            ("temperature", [other["sampling"]["temperature"] for other in (summaries[0], summary)]),
        ):
            if values[0] != values[1]:
                line = drawn.loc[recording]
                warn(
                    f"statistics: {folder} was recorded with another {name} than {folders[0]} ({values[1]}, {values[0]}): "
                    f"on its texts held out the mean estimate is {line.mean_estimate:.3f}, the mean acceptance "
                    f"{line.mean_label:.3f}, ECE {line.ECE:.3f}"
                )
