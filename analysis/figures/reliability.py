"""Reliability: how often tokens were accepted, over what was predicted for them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from toolkit.figure_style import Width
from toolkit.training.diagram import draw_reliability


def reliability(bins: pd.DataFrame, path: Path, title: str = "", width: Width = "column") -> Path:
    """Share accepted over mean prediction per bin, above how many positions each bin holds.

    bins  scores (one line of the figure each), from, to, count, mean_prob, mean_label; mean_label_low and mean_label_high
          if there are intervals
    """
    return draw_reliability(bins.to_dict("records"), path, title, width)
