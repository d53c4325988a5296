"""Record traces of EAGLE-3 drafts: the chains of all starts of a text are read side by side, a depth per forward pass.

Shapes: N tokens of a text, D width of the draft's states, n starts that still draft, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.drafts.eagle3.model import AllSteps
from toolkit.trace.record_by_start import Chains, StartRecorder


class Eagle3Chains(Chains):
    """Chains whose every token is read beside the state before it: the target's of the text, then the draft's own."""

    def first(self) -> Tensor:
        """Read all of the text beside the target's states; returns final states [N, D] at every start."""
        self.cache = AllSteps(self.draft)
        tokens = torch.tensor([[*self.text.prompt, *self.text.produced][:-1]], device=self.draft.device)
        before = torch.nn.functional.pad(self.draft.projected(self.states[:, :-1]), (0, 0, 1, 0))
        position = torch.arange(tokens.shape[1], device=tokens.device)
        self.visible = position <= position.unsqueeze(1)
        self.visible[1:, 0] = False
        states, final = self._read(tokens, position, before)
        count = len(self.starts)
        self.states, self.visible = states[:, -count:], self.visible[-count:]
        self.visible[:, 0] = False  # a text's first token saw itself, and no other token sees it
        return final[0, -count:]

    def deeper(self, depth: int) -> Tensor:
        """Read every chain's newest token beside the draft's own state before it; returns final states [N, D]."""
        itself = torch.eye(len(self.starts), dtype=torch.bool, device=self.visible.device)
        self.visible = torch.cat([self.visible, itself], 1)
        position = len(self.text.prompt) - 2 + depth + self.starts.to(self.draft.device)
        self.states, final = self._read(self.newest.unsqueeze(0).to(self.draft.device), position, self.states)
        return final[0]

    def _read(self, tokens: Tensor, position: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.cache.mask(self.visible, position)
        states, final = self.draft.read(tokens, position.unsqueeze(0), mask, self.cache, before)
        return states, final

    def outputs(self, starts: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, V] of the final states [n, D] of some starts [n], and what heads read of them."""
        return self.draft.logits(final), final


class Eagle3Recorder(StartRecorder):
    """The recorder of EAGLE-3 drafts."""

    chains = Eagle3Chains
