"""Never stop. This serves trees and beams, whose shape is the whole decision, and autoregressive decoding (max_drafted: 0)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from toolkit.stopping.base import StoppingPolicy


@dataclass(frozen=True)
class Always(StoppingPolicy):
    """Draft as many tokens as the proposer and the method's bounds allow."""

    name = "always"
    uses_history: ClassVar[bool] = False
    needs_draft_model: ClassVar[bool] = False
