"""How a row's beams are chosen, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from toolkit.config.notes import AtLeast, Between, Probability
from toolkit.config.values import check_ranges
from toolkit.errors import InputError
from toolkit.verification.layer import check_width
from toolkit.verification.width import check_threshold, layer_width


@dataclass(frozen=True)
class Beams:
    """Several texts per row.

    num_beams       W: beams of a layer (W_L of DSBD with a fixed width)
    selection       "sample": i.i.d. draws from the joint distribution of beams and tokens; "top": the most probable pairs
                    (beam search)
    threshold       t of DSBD: a layer asks for the most beams that it gets with a probability of at least t; None: for W
    min_width       W_min of DSBD: the fewest beams that a layer asks for
    collapse_after  after this many layers one beam is kept. This is MTJD's gamma. With collapse_to=best and 1 it happens
                    after every round: DSBD's variant with one cache. It is not lossless: the distribution of the text is
                    no longer that of plain beams
    collapse_to     which beam is kept. "distribution": a draw from the beams' joint distribution since the last collapse,
                    warped over the beams as one distribution; at temperature 0 the most probable beam. "draw": one of the
                    sampled beams, each with the same probability (MTJD by beam sampling); after every layer this is plain
                    sampling. "best": the beam that is most probable per token, so of the lowest perplexity

    Raises InputError for settings that contradict each other.
    """

    num_beams: Annotated[int, Between(1, 4096)] = 4
    selection: Literal["sample", "top"] = "sample"
    threshold: Annotated[float, Probability] | None = None
    min_width: Annotated[int, AtLeast(1)] = 1
    collapse_after: Annotated[int, AtLeast(1)] | None = None
    collapse_to: Literal["distribution", "draw", "best"] = "distribution"

    def __post_init__(self) -> None:
        check_ranges(self, "beams.")
        if self.collapse_to == "draw" and self.selection != "sample":
            raise InputError("beams.collapse_to: draw needs sampled beams, expected beams.selection=sample, got top")
        if self.threshold is not None:
            check_threshold(self.threshold)
            check_width("beams.min_width", self.min_width, self.num_beams)

    @property
    def lossless(self) -> bool:
        """Whether the beams' distribution is that of plain beams (without collapses), or the text's that of plain sampling."""
        return self.collapse_after is None or (self.collapse_after == 1 and self.collapse_to == "draw")

    def greedy(self) -> Beams:
        """The settings at temperature 0, where sampled beams are all the same: the most probable of searched blocks."""
        return replace(self, selection="top", collapse_to="distribution") if self.collapse_to == "draw" else self

    def check_drafts(self, num_candidates: int) -> None:
        """Raises InputError unless a layer of `num_candidates` draft beams can fill the widths asked for."""
        if self.selection != "sample":
            raise InputError("beams.selection: drafted beams are accepted with a probability, expected sample, got top")
        check_width("beams.num_beams" if self.threshold is None else "beams.min_width", self.fewest, num_candidates)

    @property
    def by_block(self) -> bool:
        """Whether beams are alternatives of one block, of which one is drawn at its end (MTJD)."""
        return self.collapse_after is not None and self.collapse_to != "best"

    @property
    def fewest(self) -> int:
        """The smallest width a drafted layer can be asked for."""
        return self.num_beams if self.threshold is None else self.min_width

    def width(self, target_probs: Tensor, draft_probs: Tensor, num_candidates: int, counts: Tensor) -> Tensor:
        """Beams a drafted layer asks for [B], from distributions [B, M] and the number of candidates, never from
        the candidates.
        """
        if self.threshold is None:
            return torch.full(target_probs.shape[:1], self.num_beams, device=target_probs.device)
        widths = layer_width(target_probs, draft_probs, num_candidates, self.threshold, self.min_width, counts)
        return widths.clamp(max=self.num_beams)
