"""What rules for layers of beams share.

A layer holds M beam-token pairs, p and q are distributions over them, and W_S pairs were drafted, each an i.i.d. draw from q. A
layer rule keeps at most `width` of them and says what one further beam is drawn from. The layer's output beams begin
with the kept ones as they were walked. If they are fewer than `width`, one from the residual follows, and then the rest
from p. A lossless rule makes that list `width` i.i.d. draws from p. Equal pairs are different beams: beams are a
multiset.

p must be 0 on pairs whose parent was rejected. There q may keep its mass. Or it is restricted to the other pairs and
renormalised, with the dead candidates marked as not real. Never one for p's test and the other for the residual.

Shapes: B rows; leading dimensions `...` of `distribution` are free; M pairs, W_S candidates.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.verification.base import Rule, check_distribution, check_support


class Outcome(NamedTuple):
    """One way a layer can end.

    kept        [W_S] bool: which candidates are output beams
    probability [...] of this way
    residual    [..., M] the distribution of one further beam, if fewer than the width were kept
    """

    kept: Tensor
    probability: Tensor
    residual: Tensor


class LayerRule(Rule):
    """A rule for one layer of beams."""

    schemes: ClassVar[tuple[str, ...]] = ("iid",)

    def distribution(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        candidates: Tensor,
        width: int | Tensor,
        real: Tensor | None = None,
    ) -> list[Outcome]:
        """Every outcome that can happen; their probabilities sum to 1.

        target_probs [..., M], draft_probs [..., M], candidates [..., W_S] (indices into M), width an int or [...],
        real [..., W_S] bool (None: all). Number of outcomes: at most 2^W_S. float64 in, float64 out.
        Raises InputError if these are not distributions, a candidate could not have been drawn, or width is outside 1..W_S.
        """
        shape = candidates.shape
        real = torch.ones_like(candidates, dtype=torch.bool) if real is None else real
        check_distribution("target_probs", target_probs, shape[:-1])
        check_distribution("draft_probs", draft_probs, shape[:-1], target_probs.shape[-1])
        check_support(draft_probs.unsqueeze(-2).expand(*shape, -1), candidates, real)
        width = torch.as_tensor(width, device=candidates.device)
        for end in (width.min(), width.max()):
            check_width("width", int(end), shape[-1])
        return self._distribution(target_probs, draft_probs, candidates.masked_fill(~real, 0), width, real)

    @abstractmethod
    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, width: Tensor, real: Tensor
    ) -> list[Outcome]: ...

    @abstractmethod
    def walk(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        candidates: Tensor,
        real: Tensor,
        width: Tensor,
        uniforms: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Draw one outcome per row: kept [B, W_S] bool and the residual [B, M]. No checks, no waiting for a device.

        target_probs, draft_probs [B, M], candidates, real, uniforms [B, W_S], width [B] (0: the row's layer is over).
        Candidate k is tested with uniform k, and with no other.
        """


def check_width(name: str, width: int, num_candidates: int) -> None:
    """Raises InputError unless 1 <= width <= W_S."""
    if not 1 <= width <= num_candidates:
        raise InputError(f"{name}: expected 1 to {num_candidates}, the number of draft beams, got {width}")
