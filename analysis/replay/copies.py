"""The acceptance of copied tokens, fitted to responses: analysis.heads copies=RESPONSES. No model runs.

At every position of a response: what the suffix proposer would copy there, and whether the text goes on with it. The texts
are split under the seed, those of one prompt together. The estimator is fitted to one part, every number is of the other.

    match.json  the estimator: method.policy.estimator.path of lookup_rate, method.policy.copies.path of best_source
    scores      log loss (nats), ECE and AUROC of the estimator, of the weights that no text was fitted to, and of one rate
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis import keys
from analysis.tables.files import read_table, save_table, show
from data_gen.texts import read_responses
from toolkit.acceptance.calibration.scores import CalibrationScores
from toolkit.acceptance.match import MatchEstimator, examples, fit
from toolkit.config import plain
from toolkit.decoding import SuffixProposer
from toolkit.decoding.proposers.suffix import BETWEEN
from toolkit.errors import InputError
from toolkit.runs.stage import open_stage
from toolkit.trace.copies import Text

FILE = "match.json"
LONG = 8  # tokens of a response that no two prompts have in common


def fit_copies(cfg: keys.Heads) -> Path:
    """Fit, score and write; returns the output folder."""
    responses = read_responses(plain(cfg.copies), same_ends=True)
    stage = open_stage("heads", cfg, inputs=responses.inputs, ignore=("track",))
    if not stage.finished:
        started = perf_counter()
        fitted, held_out = split(responses.rows[: cfg.limit], cfg.dev_share, cfg.seed)
        proposer = SuffixProposer(responses=cfg.earlier)
        _check_apart(proposer, [*fitted, *held_out])
        ends = sorted({row["token_ids"][-1] for row in responses.rows if row.get("finish_reason") == "end"})
        parts = [examples(proposer, part, cfg.max_drafted, ends) for part in (fitted, held_out)]
        estimator = fit(*parts[0])
        estimator.save(stage.folder / FILE)
        save_table(scores(estimator, *parts[0], *parts[1]), stage.folder, "scores")
        stage.finish(
            texts=[len(fitted), len(held_out)],
            tokens=[sum(len(produced) for _, produced in part) for part in (fitted, held_out)],
            copied_tokens=[len(labels) for _, labels in parts],
            seconds=perf_counter() - started,
        )
    facts = stage.manifest
    title = (
        f"copied tokens: fitted to {facts['texts'][0]} texts ({facts['tokens'][0]} tokens), scored on {facts['texts'][1]} "
        f"others ({facts['tokens'][1]} tokens, {facts['copied_tokens'][1]} of them copied), {facts['seconds']:.1f} s"
    )
    show(read_table(stage.folder, "scores"), title, stage.folder / "scores.csv")
    print(f"the estimator: {stage.folder / FILE} (lookup_rate: policy.estimator.path, best_source: policy.copies.path)")
    return stage.folder


def split(rows: list[dict[str, Any]], share: float, seed: int) -> tuple[list[Text], list[Text]]:
    """Texts to fit to, and those that are held out; all texts of a prompt are on one side.

    Raises InputError where one part would be empty.
    """
    of_prompt: dict[tuple[int, ...], list[Text]] = {}
    for row in rows:
        of_prompt.setdefault(tuple(row["prompt_ids"]), []).append((row["prompt_ids"], row["token_ids"]))
    groups, count = list(of_prompt.values()), round(share * len(of_prompt))
    if not 0 < count < len(groups):
        raise InputError(
            f"copies: expected texts to fit to and some to hold out (dev_share={share:g}), got those of {len(groups)} prompts"
        )
    order = np.random.default_rng(seed).permutation(len(groups))
    held_out, fitted = ([text for number in part for text in groups[number]] for part in (order[:count], order[count:]))
    return fitted, held_out


def scores(estimator: MatchEstimator, inputs: Tensor, labels: Tensor, others: Tensor, truth: Tensor) -> pd.DataFrame:
    """Scores on held-out tokens: inputs `others` [n, F] and labels `truth` [n]; the one rate is that of `labels`."""
    rate = labels.double().mean().clamp(1e-6, 1 - 1e-6)
    logits = {
        "fitted": estimator.logits(others),
        "untrained": MatchEstimator().logits(others),
        "one rate": rate.logit().expand(len(truth)),
    }
    lines = []
    for name, values in logits.items():
        score = CalibrationScores()
        score.update(values, truth.double())
        computed = {key: float(value) for key, value in score.compute().items()}
        lines.append({
            "estimator": name, "log_loss": computed["log_loss"], "ECE": computed["ece"], "AUROC": computed["auroc"],
            "mean_estimate": float(torch.sigmoid(values).mean()), "accepted": float(truth.double().mean()),
        })  # fmt: skip
    return pd.DataFrame(lines)


def _check_apart(proposer: SuffixProposer, sequences: list[Text]) -> None:
    """Raises InputError if texts are among the earlier responses: they would be copied from themselves.

    Answers of a few tokens may be given twice.
    """
    earlier = ",".join(map(str, [BETWEEN, *proposer.earlier.tolist(), BETWEEN]))
    inside = sum(
        len(produced) >= LONG and f"{BETWEEN},{','.join(map(str, produced))},{BETWEEN}" in earlier
        for _, produced in sequences
    )
    if inside:
        raise InputError(
            f"earlier: {inside} of {len(sequences)} texts of `copies` are among them and would be copied from themselves; "
            "expected responses to other prompts"
        )
