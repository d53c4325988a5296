"""Acceptance of the j-th candidate, fitted along responses that both models read once: analysis.heads candidates=[RESPONSES].

At every position of a response the draft's 8 most probable tokens are candidates, tried in turn as point masses. The label of
candidate j is p(x_j) / (1 - the p of those before it), and its weight what those before it leave. Texts are split by prompt.

    candidates.json  the regressions (`toolkit.acceptance.candidates`) and what they were fitted to
    scores           mean estimate, label and log loss (nats) on texts held out, by output and rank; `of_q`: the log loss of the
                     draft's own probabilities
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, pad

from analysis import keys
from analysis.replay.copies import split
from analysis.tables.files import read_table, save_table, show
from data_gen.texts import TargetResponses, read_responses
from toolkit.acceptance.candidates import NUMBERS, OUTPUTS, numbers_of
from toolkit.acceptance.statistics import Logistic, input_names, inputs_of
from toolkit.config import instantiate, plain
from toolkit.errors import InputError
from toolkit.files.atomic import write_json
from toolkit.models.fingerprint import fingerprint
from toolkit.models.pair import ModelPair
from toolkit.models.teacher import Text, readings_along
from toolkit.runs.stage import open_stage
from toolkit.sampling import Sampling, warp
from toolkit.verification.schemes import most_probable

FILE = "candidates.json"
RANKS = 8  # candidates of a position
PULL = 10.0  # C of the penalty: weak
TOGETHER = 8  # texts that are read at once
LEFT = 1e-3  # of p, below which a candidate counts as never reached

Examples = tuple[Tensor, Tensor, Tensor]  # numbers [n, C, 4], labels [n, C], weights [n, C], float64


def fit_candidates(cfg: keys.Heads) -> Path:
    """Fit, score and write; returns the output folder."""
    sources = [read_responses(folder, same_ends=True) for folder in plain(cfg.candidates)]
    regimes = {
        name: [each for each in sources if (each.sampling.temperature == 0) == (name == "greedy")] for name in OUTPUTS
    }
    if not all(regimes.values()):
        raise InputError(
            "candidates: expected folders of data_gen.responses at temperature 0 and above 0, got temperatures "
            f"{', '.join(f'{each.sampling.temperature:g}' for each in sources)}"
        )
    stage = open_stage("heads", cfg, inputs=[path for each in sources for path in each.inputs], ignore=("track",))
    if not stage.finished:
        started, pair = perf_counter(), instantiate(cfg.pair)
        outputs, lines, positions = {}, [], 0
        for name, responses in regimes.items():
            parts = [examples(pair, each, cfg) for each in responses]
            fitted, held_out = (tuple(map(torch.cat, zip(*part, strict=True))) for part in zip(*parts, strict=True))
            outputs[name] = regression(*fitted)
            positions += len(fitted[0])
            lines += scores(name, outputs[name], *held_out)
        record = {"drafts": [fingerprint(pair.draft)], "targets": [fingerprint(pair.target)], "positions": positions}
        write_json(stage.folder / FILE, {"outputs": {name: each.facts() for name, each in outputs.items()}, **record})
        save_table(pd.DataFrame(lines), stage.folder, "scores")
        stage.finish(positions=positions, seconds=perf_counter() - started)
    title = f"candidates: fitted to {stage.manifest['positions']} positions, {stage.manifest['seconds']:.1f} s"
    show(read_table(stage.folder, "scores"), title, stage.folder / "scores.csv")
    print(f"the estimator: {stage.folder / FILE} (tree_rate: policy.estimator.path)")
    return stage.folder


def examples(pair: ModelPair, responses: TargetResponses, cfg: keys.Heads) -> tuple[Examples, Examples]:
    """Examples of a folder's texts to fit to, and of those that are held out."""
    fitted, held_out = split(responses.rows[: cfg.limit], cfg.dev_share, cfg.seed)
    return along(pair, fitted, responses.sampling), along(pair, held_out, responses.sampling)


def along(pair: ModelPair, texts: Sequence[Text], sampling: Sampling) -> Examples:
    """Examples of every position of the texts."""
    shown = sampling.at(sampling.temperature or 1.0)  # at temperature 0 the unwarped q says more
    parts = []
    for first in range(0, len(texts), TOGETHER):
        for reading in readings_along(pair, texts[first : first + TOGETHER], sampling):
            logits, p = reading.draft_logits[0], reading.target_probs.double()
            candidates, _ = most_probable(logits, RANKS)
            q = warp(logits, shown).double()
            numbers = numbers_of(q.gather(-1, candidates), torch.special.entr(q).sum(-1))
            accepted = p.gather(-1, candidates)
            left = (1 - pad(accepted.cumsum(-1)[..., :-1], (1, 0))).clamp(min=0)
            labels = (accepted / left.clamp(min=LEFT)).clamp(max=1)
            parts.append((numbers, labels, torch.where(left > LEFT, left, 0.0)))
    numbers, labels, weights = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return numbers, labels, weights


def regression(numbers: Tensor, labels: Tensor, weights: Tensor) -> Logistic:
    """The weighted regression of labels in [0, 1] on the numbers and their products, weakly penalised."""
    from sklearn.linear_model import LogisticRegression

    names, inputs = input_names(NUMBERS), inputs_of(numbers.flatten(0, 1)).numpy()
    label, weight = labels.flatten().numpy(), weights.flatten().numpy()
    means, deviations = inputs.mean(0), inputs.std(0)
    deviations = np.where(deviations > 0, deviations, 1.0)
    columns = (inputs - means) / deviations
    classes = np.repeat([1, 0], len(columns))  # a label of .7 is .7 samples of one class and .3 of the other
    sample_weight = np.concatenate([label * weight, (1 - label) * weight])
    model = LogisticRegression(C=PULL, max_iter=2000).fit(np.concatenate([columns, columns]), classes, sample_weight)
    values = zip(model.coef_[0].tolist(), means.tolist(), deviations.tolist(), strict=True)
    return Logistic(float(model.intercept_[0]), dict(zip(names, values, strict=True)))


def scores(
    output: str, logistic: Logistic, numbers: Tensor, labels: Tensor, weights: Tensor
) -> list[dict[str, object]]:
    """One line per rank, of what none before was accepted of."""
    bias, columns = logistic.column(input_names(NUMBERS))
    estimates = (inputs_of(numbers) @ numbers.new_tensor(columns) + bias).sigmoid()
    lines = []
    for rank in range(numbers.shape[1]):
        share = weights[:, rank] / weights[:, rank].sum()

        def mean(values: Tensor, share: Tensor = share) -> float:
            return float((values * share).sum())

        label, of_q = labels[:, rank], numbers[:, rank, 0].sigmoid()
        losses = {
            name: mean(binary_cross_entropy(probs, label, reduction="none"))
            for name, probs in (("log_loss", estimates[:, rank]), ("of_q", of_q))
        }
        means = {"mean_estimate": mean(estimates[:, rank]), "mean_label": mean(label)}
        lines.append({"output": output, "rank": rank + 1, **means, **losses})
    return lines
