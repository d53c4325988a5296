"""Calibration by depth (`toolkit.acceptance.calibration.by_depth`), fitted to recordings: analysis.heads calibration=[TRACES].

heads=[A,B]            copies of the heads in the output folder, each with its calibration.json: head=FOLDER/NAME uses it
pair.draft=FOLDER      of a block draft with a confidence head, that head's: confidence_head/calibration.json, which
                       method.policy.estimator.calibration=FILE uses
statistics=[TRACES]    the calibration goes into statistics.json (`analysis.replay.fit_statistics`); counts=FILE, what an engine
                       counted of its drafts, takes the place of recordings: shifts alone

A part of the texts (dev_share) is held out, and scored before and after.

    calibration  AUC, ECE raw and calibrated, log loss likewise, by head, output and depth
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from analysis import keys
from analysis.loads.engine_counts import read_counts
from analysis.replay.fit_samples import Samples, samples, score, split
from analysis.replay.head_folders import CandidateHead, find_heads
from analysis.tables.files import read_table, save_table, show
from toolkit.acceptance.calibration.by_depth import FILE, ByDepth, Calibration
from toolkit.acceptance.folder import KINDS
from toolkit.config import instantiate, plain
from toolkit.drafts.block.estimator import ConfidenceHeadEstimator
from toolkit.errors import InputError, warn
from toolkit.files.atomic import read_json
from toolkit.models.fingerprint import Weights
from toolkit.runs.stage import open_stage
from toolkit.trace import Trace
from toolkit.trace.steps import Geometry, RecordedStep, logits_at, step_at
from toolkit.trace.store import SUMMARY, read_traces

CONFIDENCE = "confidence_head"
Labelled = tuple[Tensor, Tensor, Tensor]  # logits, labels and depths [n] each


def fitted_maps(labelled: Mapping[str, Labelled]) -> Calibration:
    """The maps of every output, fitted to its logits, labels and depths."""
    return Calibration({name: ByDepth.fitted(*values) for name, values in labelled.items()})


def maps_of_counts(path: Path | str, labelled: Mapping[str, Labelled]) -> Calibration:
    """Shifts with which the mean estimate of the drawn token at each depth is the rate that an engine counted there.

    Warns where the counts are lower bounds.
    """
    counts = read_counts(Path(path))
    if counts.bounded:
        warn(f"{path}: not every round drafted {counts.longest} tokens, so its rates of acceptance are lower bounds")
    reached, accepted = counts.reached.sum(0), counts.accepted.sum(0)
    rates = [float(some / all_) for some, all_ in zip(accepted, reached, strict=True) if all_ > 0]
    after = rates[1:] or rates
    return Calibration(
        {
            name: ByDepth.shifted(logits, depth, after if name == "following" else rates)
            for name, (logits, _, depth) in labelled.items()
        }
    )


def scored_maps(labelled: Mapping[str, Labelled], calibration: Calibration) -> list[dict[str, Any]]:
    """One line per output and depth: ECE and log loss, raw and calibrated; depth `all` first."""
    lines = []
    for output, (logits, labels, depth) in labelled.items():
        mapped = calibration.prob(output, logits.double(), depth).logit(eps=1e-9)
        for level in ("all", *sorted(depth.unique().tolist())):
            at_level = torch.ones_like(depth, dtype=torch.bool) if level == "all" else depth == level
            before, after = (
                score(logits[at_level].double(), labels[at_level]),
                score(mapped[at_level], labels[at_level]),
            )
            lines.append(
                {
                    "output": output, "depth": str(level), "positions": int(at_level.sum()),
                    "AUC": before["AUC"], "ECE": before["ECE"], "ECE_calibrated": after["ECE"],
                    "log_loss": before["log_loss"], "log_loss_calibrated": after["log_loss"],
                }
            )  # fmt: skip
    return lines


def calibrate_heads(cfg: keys.Heads) -> Path:
    """Fit, score and write a copy of every head with its calibration; returns the output folder."""
    folders = [Path(str(folder)) for folder in plain(cfg.calibration)]
    own = instantiate(cfg.draft)
    confidence = getattr(own, "confidence_head", None)
    named = plain(cfg.heads) if cfg.heads is not None else []
    candidates = find_heads(named, folders) if named or confidence is None else []
    if confidence is not None:
        _check_own(own, folders)
    files = [*(folder / SUMMARY for folder in folders), *(path for candidate in candidates for path in candidate.files)]
    stage = open_stage("heads", cfg, inputs=files, ignore=("track",))
    if not stage.finished:
        lines: list[dict[str, Any]] = []
        traces = [read_traces(folder) for folder in folders]
        maps: dict[Path, dict[str, ByDepth]] = {}
        for candidate in [*candidates, *([None] if confidence is not None else [])]:
            if candidate is None:
                name, folder = CONFIDENCE, Path(CONFIDENCE)
                parts = [_of_confidence(trace, confidence, cfg.max_drafted, cfg.seed) for trace in traces]
            else:
                name, folder = candidate.name, candidate.folder
                scored = (candidate.scored(trace, own) for trace in traces)
                parts = [_labelled(trace, candidate, cfg.max_drafted, cfg.seed) for trace in scored]
            held_out = [split(sequence, cfg.dev_share, cfg.seed) for _, sequence in parts]
            learned, others = (
                _joined([(labelled, out if part else ~out) for (labelled, _), out in zip(parts, held_out, strict=True)])
                for part in (False, True)
            )
            lines += [{"head": name, **line} for line in scored_maps(others, fitted_maps(learned))]
            maps.setdefault(folder, {}).update(fitted_maps(learned).outputs)
        for folder, outputs in maps.items():
            name = next((c.name.split(" ")[0] for c in candidates if c.folder == folder), CONFIDENCE)
            copied = stage.folder / name
            copied.mkdir(exist_ok=True)
            for kind in KINDS.values():
                for file in (kind.weights_file, kind.config_file) if kind.is_in(folder) else ():
                    shutil.copyfile(folder / file, copied / file)
            Calibration(outputs).save(copied)
        save_table(pd.DataFrame(lines), stage.folder, "calibration")
        stage.finish(heads={str(folder): len(outputs) for folder, outputs in maps.items()})
    table = read_table(stage.folder, "calibration")
    show(table[table.depth == "all"], "calibrated by depth, scored on other texts", stage.folder / "calibration.csv")
    if candidates:
        print(f"heads with their calibration: {stage.folder}/NAME (toolkit.decode head=FOLDER)")
    if confidence is not None:
        path = stage.folder / CONFIDENCE / FILE
        print(
            f"of the draft's own head: toolkit.decode method=block_draft_rate method.policy.estimator.calibration={path}"
        )
    return stage.folder


def _check_own(draft: Any, folders: Sequence[Path]) -> None:
    """Raises InputError for recordings of another draft."""
    for folder in folders:
        recorded = Weights.recorded(read_json(folder / SUMMARY))
        if recorded is not None and (reason := recorded.not_of(draft)):
            raise InputError(f"{folder} was recorded with another draft than pair.draft ({reason})")


def _of_confidence(trace: Trace, layer: Any, deepest: int, seed: int) -> tuple[dict[str, Labelled], Tensor]:
    """The same of a block draft's own confidence head, output `position`. Raises InputError for traces without states."""
    part, estimator = samples(trace, deepest, seed), ConfidenceHeadEstimator(layer)
    logits = estimator.logits(RecordedStep(trace, 1, part.steps))
    return {"position": (logits, part.labels["position"], part.depth)}, part.sequence


def _labelled(trace: Trace, candidate: CandidateHead, deepest: int, seed: int) -> tuple[dict[str, Labelled], Tensor]:
    """A head's logits, class weight undone, with labels and depths, by output; not a number where there is no label.

    Returns them and the sequence [n] of each position. Raises InputError for acceptance heads on recordings by start.
    """
    part: Samples = samples(trace, deepest, seed)
    logits, shift = trace.head_logits(candidate.head.key), float(candidate.head.config["log_w_rej"])
    columns = torch.full((len(part.depth), 2), torch.nan)
    if candidate.kind == "survival" and trace.run is not None:
        raise InputError(f"{candidate.folder}: expected a pre-read head on recordings by start, got an acceptance head")
    geometry = Geometry.of(trace)
    for depth in part.depth.unique().tolist():
        at_depth = part.depth == depth
        if candidate.kind == "preread":
            columns[at_depth] = logits_at(trace, logits, part.steps[at_depth], depth).float()
            continue
        reading, exists = step_at(trace, geometry, part.steps[at_depth], 2)  # the step that has read the token
        values = logits_at(trace, logits, reading, depth + 1).float()
        columns[at_depth, 0] = values.where(exists, torch.nan)
    labels = part.labels
    names = (
        {"read": (0, "drawn")}
        if candidate.kind == "survival"
        else {"drawn": (0, "drawn"), "following": (1, "following")}
    )
    labelled = {
        name: (columns[:, at] + shift, labels[label].where(~columns[:, at].isnan(), torch.nan), part.depth)
        for name, (at, label) in names.items()
    }
    return labelled, part.sequence


def _joined(parts: Sequence[tuple[Mapping[str, Labelled], Tensor]]) -> dict[str, Labelled]:
    """The chosen [n] positions of several recordings that have a label, by output."""
    joined = {}
    for name in parts[0][0]:
        columns = zip(*([values[chosen] for values in labelled[name]] for labelled, chosen in parts), strict=True)
        logits, labels, depth = (torch.cat(values) for values in columns)
        joined[name] = (logits[~labels.isnan()], labels[~labels.isnan()], depth[~labels.isnan()])
    return joined
