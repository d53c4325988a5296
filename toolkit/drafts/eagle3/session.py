"""The session of a draft that reads the target's states: each token beside the state of the token before it.

For a committed token this is the target's state, out of the target's own cache; for a drafted one, whose predecessor the target
has not read, it is the draft's. So the draft's guesses never stay: `truncate` and `keep` drop whatever was read with them, and
the next round reads the accepted tokens again, with the target's states. A text's first token has no predecessor. It is read
beside whatever its slot holds, and no other token sees it.

Paper: EAGLE (arXiv:2401.15077), section 4.1; EAGLE-3 (arXiv:2503.01840), section 3.1.

Shapes: b rows, T tokens of a block, W width of the target's states, D width of the draft's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from toolkit.drafts.target_states import session_with_states
from toolkit.engine.base import Session
from toolkit.engine.capture import Captures
from toolkit.engine.device import tensor_on
from toolkit.engine.hf import HFSession
from toolkit.engine.tree import Placement
from toolkit.errors import InputError


class StateReader(HFSession):
    """A draft beside the session of its target, whose cache keeps the states that the draft reads.

    certain  leading tokens of each row that were read with the target's states
    """

    reads_states = True

    def __init__(self, model: Any, num_rows: int, capacity: int, captures: Captures | None, target: Session | None):
        super().__init__(model, num_rows, capacity, captures, kept_layers=(0,))
        self.target = session_with_states(model, target)
        self.certain = [0] * num_rows

    def _more_inputs(self, placement: Placement, rows: list[int], parents: Tensor | None) -> tuple[Tensor, ...]:
        """States before each token: the draft's own [b, T, D]; and where some token follows one that the target has read,
        the target's [b, T, W], and which tokens these are [b, T].
        """
        before = placement.slots - 1
        contexts = tensor_on(self.index.device, [self.index.context_lengths[row] for row in rows]).unsqueeze(1)
        if parents is not None:
            chain = before.shape[1] - parents.shape[1]
            before = torch.cat([before[:, :chain], contexts + parents], 1)
        read = [self.target.lengths[row] for row in rows]
        fresh = [self.certain[row] for row in rows]
        for row, length in zip(rows, read, strict=True):
            self.certain[row] = max(self.certain[row], min(self.index.context_lengths[row], length + 1))
        index, slots = tensor_on(self.index.device, rows).unsqueeze(1), before.clamp(min=0)
        own = self._states(self.states, index, slots, placement, self.model.config.hidden_size)
        if all(self.certain[row] == count for row, count in zip(rows, fresh, strict=True)):
            return (own,)
        theirs = self._states(self.target.states, index, slots, placement, self.model.target_width)
        from_target = before < tensor_on(self.index.device, read).unsqueeze(1)
        return own, theirs, from_target & (before >= 0)

    def _states(self, states: Tensor | None, index: Tensor, slots: Tensor, placement: Placement, width: int) -> Tensor:
        if states is None:
            shape = (*placement.slots.shape, width)
            return torch.zeros(shape, dtype=self.dtype, device=self.index.device)
        return states[index.to(states.device), slots.to(states.device), 0].to(self.index.device, self.dtype)

    def _arguments(self, more: Sequence[Tensor]) -> dict[str, Any]:
        return dict(zip(("own_states", "target_states", "from_target"), more, strict=False))

    def _visible(self, placement: Placement) -> Tensor:
        columns = torch.arange(placement.visible, device=placement.mask.device)
        return placement.mask & ((columns > 0) | (placement.slots.unsqueeze(-1) == 0))

    def truncate(self, lengths: list[int]) -> None:
        super().truncate([min(length, count) for length, count in zip(lengths, self.certain, strict=True)])
        self.certain = list(map(min, self.certain, self.lengths))

    def keep(self, nodes: Tensor) -> Tensor:
        """Forget all nodes; their text is read again. Raises InputError for several nodes of a row (beams)."""
        if nodes.shape[1] != 1:
            raise InputError("a draft that reads the target's states follows one text per row: expected no beams")
        dropped = super().keep(torch.full_like(nodes, -1))
        self.truncate(list(self.lengths))
        return dropped

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self.certain = [self.certain[row] for row in rows]

    def reset(self, row: int) -> None:
        super().reset(row)
        self.certain[row] = 0
