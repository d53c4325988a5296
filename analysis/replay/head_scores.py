"""How well a head predicts the acceptance of drafted tokens, on a trace.

The samples are the tokens that a draft draws after accepted text, one per position of a response, given the acceptance
draws. Where the draw accepts, the sample is the text's own token; elsewhere it is the token drafted instead. Each sample counts
with its true acceptance probability min(1, p/q). An acceptance head scores such a token at the step that has read it. That is
the next step on path, or the first of the roll-out. Tokens that were never read are left out, for pre-read heads, too: the
last of a text, and an end of text.

Shapes: T texts, P positions, S steps, n samples.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from analysis.tables.bootstrap import Bootstrap
from toolkit.acceptance import PrereadHead
from toolkit.acceptance.calibration.scores import CalibrationScores, label_entropies, log_losses
from toolkit.acceptance.saved import SavedHead
from toolkit.errors import InputError
from toolkit.trace import Trace
from toolkit.trace.steps import Geometry, logits_at, step_at


def drawn_samples(trace: Trace, logits: Tensor, preread: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Raw logits, labels and texts [n] each. logits: [S] of an acceptance head, [S, 2] of a pre-read one.

    Heads that read the depth in the round are asked about its first token: a round may start anywhere.
    """
    starts = torch.arange(trace.num_positions)
    reading, exists = step_at(trace, Geometry.of(trace), starts, 2)
    outputs = logits_at(trace, logits, starts, 1)[:, 0] if preread else logits_at(trace, logits, reading, 2)
    text = torch.repeat_interleave(torch.arange(trace.num_texts), trace.lengths())
    return outputs[exists], trace.accept_prob[starts][exists], text[exists]


def head_scores(trace: Trace, chosen: np.ndarray, head: SavedHead, bootstrap: Bootstrap) -> dict[str, float]:
    """Scores of a head, whose logits the trace holds, on the `chosen` texts [T]; KL with its interval.

    Raw, and with the class weight undone (`_corrected`); the AUROC is the same for both. Raises InputError without samples.
    """
    logits, labels, text = drawn_samples(trace, trace.head_logits(head.key), isinstance(head, PrereadHead))
    is_chosen = torch.from_numpy(chosen)[text]
    logits, labels, text = logits[is_chosen].double(), labels[is_chosen].double(), text[is_chosen]
    if not len(logits):
        raise InputError("no drafted token was read after its position: record traces with max_drafted of 2 or more")
    shift = float(head.config["log_w_rej"])
    figures: dict[str, float] = {"tokens": len(logits)}
    for suffix, values in (("", logits), ("_corrected", logits + shift)):
        scores = CalibrationScores(sync_on_compute=False)
        scores.update(values, labels)
        computed = {key: float(value) for key, value in scores.compute().items()}
        figures |= {f"{key}{suffix}": computed[key] for key in ("log_loss", "binary_kl", "ece")}
        figures["auroc"] = computed["auroc"]
    loss = log_losses(logits, labels) - label_entropies(labels)
    size = trace.num_texts
    sums = np.stack([torch.bincount(text, weights, size).numpy() for weights in (loss, torch.ones_like(loss))], 1)
    return figures | bootstrap.figures(sums[chosen], lambda totals: {"binary_kl": totals[..., 0] / totals[..., 1]})
