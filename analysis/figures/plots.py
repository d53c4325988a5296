"""Every figure in one module. Each takes a table (pandas) and a path, and writes PNG, PDF and SVG: usable from a notebook.

One look for all: a method has the same colour and marker in every figure. Undominated settings are filled, intervals
are bands, few methods are in colour and the rest grey. `width` is "column" or "page": one or two columns of a paper.
"""

from __future__ import annotations

from analysis.figures.calibration import reliability
from analysis.figures.costs import costs
from analysis.figures.method_styles import LABELS, METHODS, label, look
from analysis.figures.pareto import pareto
from analysis.figures.positions import acceptance, acceptance_by_position, lengths
from analysis.figures.scatter import explained, scatter
from toolkit.runs.figure_style import INK, MUTED, PALETTE

__all__ = [
    "INK", "LABELS", "METHODS", "MUTED", "PALETTE", "acceptance", "acceptance_by_position", "costs", "explained", "label",
    "lengths", "look", "pareto", "reliability", "scatter",
]  # fmt: skip
