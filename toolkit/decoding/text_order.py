"""Copies of one text among the beams of a layer, and the order of texts that decides between equals.

Sampled beams coincide. Their pairs (beam, token) then have equal probabilities, so a cut often falls between copies. Two
things keep a method's rounding and its slots out of the distribution. Copies share one row of logits, and thus their
log-likelihoods. And pairs are cut in the order (probability, token ids of the text, copy).

Shapes: B rows, n beams of a layer, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.sampling import Sampling, largest, warp


@dataclass(frozen=True)
class TextOrder:
    """How the texts of a layer's beams compare, which all have the same length.

    first [B, n]   the first beam with the same text
    rank [B, n]    beams with a smaller text, by token ids
    copy [B, n]    earlier beams with the same text
    copies [B, n]  all beams with the same text
    """

    first: Tensor
    rank: Tensor
    copy: Tensor
    copies: Tensor

    @classmethod
    def of(cls, codes: Tensor) -> TextOrder:
        """The order of texts that compare as these whole numbers [B, n] do."""
        own, other = codes.unsqueeze(2), codes.unsqueeze(1)
        equal = own == other
        return cls(
            first=equal.to(torch.uint8).argmax(2),
            rank=(other < own).sum(2),
            copy=equal.tril(-1).sum(2),
            copies=equal.sum(2),
        )

    def after(self, pairs: Tensor, vocab_size: int) -> TextOrder:
        """The order of the next layer's texts, whose beams are these pairs [B, m] of a beam and a token."""
        return TextOrder.of(self.rank.gather(1, pairs // vocab_size) * vocab_size + pairs % vocab_size)

    def shared(self, logits: Tensor) -> Tensor:
        """Logits [B, n, V] of which copies have one row: the first copy's."""
        return logits.gather(1, self.first.unsqueeze(2).expand_as(logits))

    def warp(self, pairs: Tensor, sampling: Sampling) -> Tensor:
        """The distribution [B, n V] over pairs, from their logits [B, n, V]: warped as one distribution, cut in order."""
        positions = self._positions(pairs)
        ordered = torch.empty_like(pairs.flatten(1)).scatter_(1, positions, pairs.flatten(1))
        return warp(ordered, sampling, exactly=True).gather(1, positions)

    def largest(self, pairs: Tensor, count: int) -> Tensor:
        """The pairs [B, count] of the largest values [B, n, V], in order."""
        positions = self._positions(pairs)
        index = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        at_position = torch.empty_like(positions).scatter_(1, positions, index)
        return at_position.gather(1, largest(pairs.flatten(1).gather(1, at_position), count))

    def _positions(self, pairs: Tensor) -> Tensor:
        """The position of each pair [B, n V] among all pairs: by text, then by copy."""
        vocab_size = pairs.shape[2]
        tokens = torch.arange(vocab_size, device=pairs.device)
        position = (self.rank * vocab_size + self.copy).unsqueeze(2) + self.copies.unsqueeze(2) * tokens
        return position.flatten(1)
