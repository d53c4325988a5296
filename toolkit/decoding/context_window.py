"""The draft's outputs at the newest positions of every text, kept beside its cache for heads that read them.

A position's entry holds the state that its token was drawn from, the token at this position and the shape of q. The entry is
a function of the text alone. Within a round, the drafted tokens count as text. After the round only the accepted ones stay,
and the corrected token takes the place of the rejected one. The state before a bonus token has not been computed at this
moment. The next round's first forward pass gives it.

Shapes: B batch slots, H positions kept, n new positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from toolkit.engine.device import tensor_on
from toolkit.types import SMALLEST, DraftStep, History

Positions = dict[str, Tensor]  # the per-position fields of `History`


class HistoryWindow:
    """The newest `count` positions of every slot's text.

    pending  tokens per slot whose states the next round's first forward pass brings, beyond the newest token's: set by the
             batch before every round
    """

    def __init__(self, num_rows: int, count: int):
        self.num_rows, self.count = num_rows, count
        self.pending: list[int] = [0] * num_rows
        self.now: History | None = None  # before the next token
        self._start: History | None = None  # at the round's start
        self._steps: list[DraftStep] = []

    @property
    def most_pending(self) -> int:
        """The most states that a slot waits for."""
        return max(self.pending)

    def begin(self, logits: Tensor, hidden: Tensor, tokens: Tensor) -> None:
        """Take the outputs of the round's first forward pass at the n = `most_pending` tokens before the newest one.

        logits [B, n, V], hidden [B, n, D], and the tokens [B, n] at these positions. Of the n, a slot's own pending
        tokens are the last ones.
        """
        if self.now is None:
            self.now = _nothing(self.num_rows, self.count, hidden)
        self._steps = []
        width = tokens.shape[1]
        if width:
            probs = (logits if logits.dtype == torch.float64 else logits.float()).softmax(-1)
            token_prob = probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            entropy, top = torch.special.entr(probs).sum(-1), probs.topk(2, dim=-1).values
            new = _positions(hidden, tokens, token_prob, entropy, top)
            counts = tensor_on(tokens.device, self.pending)
            back = torch.arange(self.count, device=tokens.device).flip(0)  # how far each kept one is from the newest
            own = counts.unsqueeze(1)
            index = torch.where(back < own, self.count + width - 1 - back, self.count - 1 - back + own)
            is_own = torch.arange(width, device=tokens.device) >= width - own
            self.now = _moved(self.now, new, index, is_own)
        self._start = self.now

    def note(self, step: DraftStep) -> None:
        """Add a position of the round: a forward pass, and the token drawn from it if one was drawn."""
        assert self.now is not None, "a round begins with `begin`"
        self._steps.append(step)
        new = _entry(step)
        index = 1 + torch.arange(self.count, device=step.hidden.device).expand(self.num_rows, -1)
        self.now = _moved(self.now, new, index, torch.ones_like(new["present"]))

    def commit(self, length: Tensor, extra: Tensor) -> None:
        """Keep the `length` [B] accepted tokens, and the token `extra` [B] after them if its state was computed."""
        if not self._steps or self._start is None:
            return
        most, device = len(self._steps), length.device
        entries = [_entry(step) for step in self._steps]
        new = {name: torch.cat([entry[name] for entry in entries], 1) for name in entries[0]}
        rows, at = torch.arange(self.num_rows, device=device), length.clamp(max=most - 1)
        probs = torch.stack([step.raw_probs for step in self._steps], 1)[rows, at]
        prob = probs.gather(-1, extra.unsqueeze(-1)).squeeze(-1)
        for name, value in (("tokens", extra), ("token_prob", prob)):
            new[name][rows, at] = torch.where(length < most, value, new[name][rows, at])
        counts = (length + 1).clamp(max=most).unsqueeze(1)
        index = counts + torch.arange(self.count, device=device)
        self.now = _moved(self._start, new, index, torch.arange(most, device=device) < counts)
        self._steps = []

    def reset(self, slot: int) -> None:
        """Begin another text in a slot."""
        if self.now is None:
            return
        fields = {name: value.clone() for name, value in vars(self.now).items()}
        for value in fields.values():
            value[slot] = 0
        self.now = History(**fields)

    def select(self, slots: Sequence[int]) -> None:
        """Keep these slots only, in this order."""
        self.num_rows, self.pending = len(slots), [self.pending[slot] for slot in slots]
        if self.now is not None:
            self.now = History(**{name: value[list(slots)] for name, value in vars(self.now).items()})


def _nothing(num_rows: int, count: int, like: Tensor) -> History:
    """A window without any position."""
    zeros = torch.zeros(num_rows, count, dtype=torch.float32, device=like.device)
    hidden = torch.zeros(num_rows, count, like.shape[-1], dtype=like.dtype, device=like.device)
    sums = torch.zeros(num_rows, dtype=torch.float32, device=like.device)
    return History(hidden, zeros.long(), zeros, zeros, torch.stack([zeros, zeros], -1), zeros.bool(), sums, sums)


def _entry(step: DraftStep) -> Positions:
    """A step as one position [B, 1, ...]; where nothing was drawn yet, the token is 0."""
    drawn = step if step.tokens is not None else replace(step, tokens=torch.zeros_like(step.entropy, dtype=torch.long))
    assert drawn.tokens is not None
    values = (step.hidden, drawn.tokens, drawn.token_prob, step.entropy, step.top_probs)
    return _positions(*(value.unsqueeze(1) for value in values))


def _positions(hidden: Tensor, tokens: Tensor, token_prob: Tensor, entropy: Tensor, top_probs: Tensor) -> Positions:
    """Positions that are present, from their fields."""
    return {
        "hidden": hidden, "tokens": tokens, "token_prob": token_prob, "entropy": entropy, "top_probs": top_probs,
        "present": torch.ones_like(tokens, dtype=torch.bool),
    }  # fmt: skip


def _moved(old: History, new: Positions, index: Tensor, is_own: Tensor) -> History:
    """The positions at index [B, H] of old and new ones side by side. mine [B, n]: the new ones that each text has."""
    rows = torch.arange(len(index), device=index.device).unsqueeze(1)
    joined = {
        name: torch.cat([values, new[name].to(values.dtype)], 1)[rows, index] for name, values in old.positions.items()
    }
    log_probs = torch.where(is_own, new["token_prob"].double().clamp(min=SMALLEST).log(), 0.0)
    return History(**joined, likelihood=old.likelihood + log_probs.sum(1).float(), count=old.count + is_own.sum(1))
