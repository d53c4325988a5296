"""Record traces of block drafts: one forward pass over the blocks of all starts of a text.

Shapes: N tokens of a text, K of a block, D width of the draft's states, n starts that still draft, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.trace.record_by_start import Chains, StartRecorder

BLOCKS = 64  # that a forward pass drafts


class BlockChains(Chains):
    """Chains of a block draft: the states of all depths come from one forward pass, `blocks` [N, K, D]."""

    def first(self) -> Tensor:
        device = self.draft.device
        context = self.draft.context(self.states, torch.arange(self.states.shape[1], device=device).unsqueeze(0))
        tokens, anchors = self.newest.to(device), len(self.text.prompt) - 1 + self.starts.to(device)
        parts = zip(tokens.split(BLOCKS), anchors.split(BLOCKS), strict=True)
        self.blocks = torch.cat([self.draft(*(part.unsqueeze(0) for part in pair), context)[0] for pair in parts])
        return self.blocks[:, 0]

    def deeper(self, depth: int) -> Tensor:
        return self.blocks[:, depth - 1]

    def outputs(self, starts: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        before = self.newest[starts].to(final.device)
        logits, hidden = self.draft.outputs(final, self.draft.lm_head(final), before)
        return self.draft.lm_head.whole(logits), hidden


class BlockRecorder(StartRecorder):
    """The recorder of block drafts."""

    chains = BlockChains
