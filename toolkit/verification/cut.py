"""What lossy rules without acceptance draws share: how much of a chain is kept is a function of p, q and the tokens.

The extra token is drawn from p itself: there is no residual, and nothing makes up for what was kept or cut.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from toolkit.verification.base import PathRule


class CutRule(PathRule):
    """Keep a prefix whose length is certain, then draw one token from p."""

    lossless = False

    @abstractmethod
    def length(self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, num_drafted: Tensor) -> Tensor:
        """Tokens kept [...], from distributions [..., K + 1, V] and [..., K, V], tokens [..., K]; at most num_drafted [...]."""

    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, num_drafted: Tensor
    ) -> tuple[Tensor, Tensor]:
        length = self.length(target_probs, draft_probs, tokens, num_drafted)
        steps = torch.arange(tokens.shape[-1] + 1, device=tokens.device)
        return (steps == length.unsqueeze(-1)).to(target_probs.dtype), target_probs

    def accept(
        self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, num_drafted: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        if tokens.shape[1] == 0:
            return num_drafted, target_probs[:, 0]
        length = self.length(target_probs, draft_probs, tokens, num_drafted)
        return length, target_probs[torch.arange(len(length), device=length.device), length]


def token_probs(distributions: Tensor, tokens: Tensor) -> Tensor:
    """The probability of each token in its distribution: [..., K] from distributions [..., K, V], tokens [..., K]."""
    return distributions.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
