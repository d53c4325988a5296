"""Running code that a model wrote, behind walls: `chosen()` says which there are here, `Confined` is a process behind them."""

from __future__ import annotations

from analysis.quality.confinement.launch import Confined, Confinement, pipe
from analysis.quality.confinement.mechanisms import chosen

__all__ = ["Confined", "Confinement", "chosen", "pipe"]
