"""The grammars of a batch along what is drafted in a round.

Shapes: B batch slots, N proposed nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from toolkit.engine.device import tensor_on
from toolkit.grammar.text import TextGrammar

FORCED = 16  # certain tokens beyond a method's own that a round sends at most


class Walk:
    """Where each row stands. Rows without a grammar, after an end of text or off their grammar allow everything.

    grammars  of the rows [B], after their texts
    """

    def __init__(self, grammars: Sequence[TextGrammar | None], vocab_size: int, device: torch.device):
        self.grammars, self.vocab_size, self._device = list(grammars), vocab_size, device

    def allowed(self) -> Tensor:
        """Which tokens may come next [B, V] bool."""
        return stacked(self.grammars, self.vocab_size).to(self._device)

    def forced(self) -> Tensor:
        """The only token that may come next [B]; -1 where there are others."""
        tokens = [None if grammar is None else grammar.forced for grammar in self.grammars]
        return tensor_on(self._device, [-1 if token is None else token for token in tokens])

    def take(self, tokens: Tensor) -> None:
        """Go on by a token [B] in every row."""
        pairs = zip(self.grammars, tokens.tolist(), strict=True)
        self.grammars = [None if grammar is None else grammar.after(token) for grammar, token in pairs]


def stacked(grammars: Sequence[TextGrammar | None], vocab_size: int) -> Tensor:
    """Which tokens each of these allows [.., V] bool, all where there is none; on the host."""
    everything = np.ones(vocab_size, dtype=bool)
    return torch.from_numpy(np.stack([everything if grammar is None else grammar.allowed for grammar in grammars]))


def masked(logits: Tensor, allowed: Tensor) -> Tensor:
    """A draft's logits [..., V] with minus infinity where a token may not come; alike for the others where it has none."""
    kept = logits.masked_fill(~allowed, -torch.inf)
    lost = (kept == -torch.inf).all(-1, keepdim=True)
    return torch.where(lost & allowed, 0.0, kept)


def certainty(grammars: Sequence[TextGrammar | None], tokens: Sequence[int]) -> dict[str, Tensor]:
    """Of drafted tokens [n], by the grammars before them [n]: whether each is certain, and how many certain ones follow it."""
    after = [None if grammar is None else grammar.after(token) for grammar, token in zip(grammars, tokens, strict=True)]
    certain = [grammar is not None and grammar.forced is not None for grammar in grammars]
    runs = [0 if grammar is None else len(grammar.run(FORCED)) for grammar in after]
    return {"certain": torch.tensor(certain), "certain_after": torch.tensor(runs, dtype=torch.int32)}


def along(grammar: TextGrammar | None, tokens: Sequence[int]) -> list[TextGrammar | None]:
    """The grammars after a text and after every token of a chain."""
    states = [grammar]
    for token in tokens:
        last = states[-1]
        states.append(None if last is None else last.after(token))
    return states
