"""How many tokens have a chance at all, after truncation (top-p, top-k): what a rule's choice has to be made among.

Paper: Khisti et al. (arXiv:2410.18234), appendix F: histograms of the effective alphabet's size of target and draft.
Ours: at positions along target text, for any pair and sampling.

Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from analysis.multi_draft.target_texts import Walk

MODELS = ("target", "draft")


def alphabet_table(walk: Walk, folder: Path) -> pd.DataFrame:
    """One line per model and size that occurs: model, size (tokens with a chance), positions, share, share_up_to (cumulative).

    `folder`: where the walk's parts lie.
    """
    counted: dict[str, Counter[int]] = {model: Counter() for model in MODELS}
    for reading in walk.readings(folder):
        for model, probs in zip(
            MODELS, (reading.target_probs, reading.draft_probs(walk.draft_temperature)), strict=True
        ):
            counted[model].update(alphabet_sizes(probs).tolist())
    lines = [
        {"model": model, "size": size, "positions": sizes[size]}
        for model, sizes in counted.items()
        for size in sorted(sizes)
    ]
    table = pd.DataFrame(lines, columns=["model", "size", "positions"])
    table["share"] = table.positions / table.groupby("model").positions.transform("sum")
    return table.assign(share_up_to=table.groupby("model").share.cumsum())


def alphabet_sizes(probs: Tensor) -> Tensor:
    """Tokens with a chance [N] of probs [N, V]."""
    return torch.count_nonzero(probs, dim=-1)
