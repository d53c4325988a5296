"""How a row's beams are chosen, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.verification.layer import check_width
from toolkit.verification.width import check_threshold, layer_width

SELECTIONS = ("sample", "top")


@dataclass(frozen=True)
class Beams:
    """Several texts per row.

    num_beams       W: beams of a layer (W_L of DSBD with a fixed width)
    selection       "sample": i.i.d. draws from the joint law of beams and tokens; "top": the likeliest pairs (beam search)
    threshold       t of DSBD: a drafted layer asks for as many beams as it gets with a chance of at least t; None: for W
    min_width       W_min of DSBD: the fewest it asks for
    collapse_after  after so many layers one beam is kept: MTJD's gamma, or, with collapse_to=best and 1, after every round,
                    DSBD's variant with one cache. Not lossless: the law of the text is no longer that of plain beams
    collapse_to     "law": a draw from the beams' joint law since the last collapse, warped over the beams as one law (at
                    temperature 0 the likeliest); "best": the likeliest per token (lowest perplexity)
    Raises InputError for settings that contradict each other.
    """

    num_beams: int = 4
    selection: str = "sample"
    threshold: float | None = None
    min_width: int = 1
    collapse_after: int | None = None
    collapse_to: str = "law"

    def __post_init__(self) -> None:
        if self.num_beams < 1:
            raise InputError(f"beams.num_beams: expected at least 1, got {self.num_beams}")
        if self.selection not in SELECTIONS:
            raise InputError(f"beams.selection: expected one of {', '.join(SELECTIONS)}, got {self.selection!r}")
        if self.collapse_to not in ("law", "best"):
            raise InputError(f"beams.collapse_to: expected law or best, got {self.collapse_to!r}")
        if self.collapse_after is not None and self.collapse_after < 1:
            raise InputError(f"beams.collapse_after: expected at least 1 or null, got {self.collapse_after}")
        if self.threshold is not None:
            check_threshold(self.threshold)
            check_width("beams.min_width", self.min_width, self.num_beams)

    @property
    def lossless(self) -> bool:
        """Whether the beams' law is that of plain beams: without collapses."""
        return self.collapse_after is None

    def check_drafts(self, num_candidates: int) -> None:
        """Raises InputError unless a layer of so many draft beams can fill the widths asked for."""
        if self.selection != "sample":
            raise InputError("beams.selection: drafted beams are judged by chance, expected sample, got top")
        check_width("beams.num_beams" if self.threshold is None else "beams.min_width", self.fewest, num_candidates)

    @property
    def by_block(self) -> bool:
        """Whether beams are alternatives of one block, of which one is drawn at its end (MTJD)."""
        return self.collapse_after is not None and self.collapse_to == "law"

    @property
    def fewest(self) -> int:
        """The smallest width a drafted layer can be asked for."""
        return self.num_beams if self.threshold is None else self.min_width

    def width(self, target_probs: Tensor, draft_probs: Tensor, num_candidates: int, counts: Tensor) -> Tensor:
        """Beams a drafted layer asks for [B], from laws [B, M] and the number of candidates, never from the candidates."""
        if self.threshold is None:
            return torch.full(target_probs.shape[:1], self.num_beams, device=target_probs.device)
        widths = layer_width(target_probs, draft_probs, num_candidates, self.threshold, self.min_width, counts)
        return widths.clamp(max=self.num_beams)
