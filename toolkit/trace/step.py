"""A step of a trace, with the names of a DraftStep: what policies and heads see when nothing is computed anew."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.trace.trace import Rows, Trace


@dataclass
class RecordedStep:
    """A DraftStep read from a trace: same names, for the statistics a policy may ask for."""

    trace: Trace
    depth: int
    index: Tensor  # [B] steps of the trace
    drawn: bool = True
    live: Tensor | None = None  # [B] rows that are drafting, of a simulated batch
    device: torch.device | None = None  # where what is read goes; None: it stays on the CPU

    def _read(self, values: Tensor | Rows) -> Tensor:
        return values[self.index] if self.device is None else values[self.index].to(self.device)

    @property
    def tokens(self) -> Tensor | None:
        """y_k [B]."""
        return self._read(self.trace.tokens).long() if self.drawn else None

    @property
    def draft_prob(self) -> Tensor:
        """q_k(y_k), warped [B]."""
        return self._read(self.trace.draft_prob)

    @property
    def token_prob(self) -> Tensor:
        """Unwarped probability of y_k [B]."""
        return self._read(self.trace.token_prob)

    @property
    def entropy(self) -> Tensor:
        """Of the unwarped distribution [B], nats."""
        return self._read(self.trace.entropy)

    @property
    def top_probs(self) -> Tensor:
        """The two largest unwarped probabilities [B, 2]."""
        return self._read(self.trace.top_probs)

    @property
    def margin(self) -> Tensor:
        """Between them [B]."""
        return self.top_probs[:, 0] - self.top_probs[:, 1]

    @property
    def hidden(self) -> Tensor:
        """States [B, D] that produced q_k, in the draft's number format (float16 in recordings of older versions)."""
        if self.trace.hidden is None:
            raise InputError("this trace holds no hidden states: record it with hidden=true, or with the policy's head")
        return self._read(self.trace.hidden)

    def estimate(self, name: str) -> Tensor:
        """The recorded raw logits of a head [B], or [B, 2] of a pre-read one."""
        if name not in self.trace.estimates:
            held = ", ".join(self.trace.estimates) or "none"
            raise InputError(
                f"this trace holds no estimates of {name} (held: {held}); record it with heads={{{name}: FOLDER}}"
            )
        return self._read(self.trace.estimates[name])
