"""A language model that is a table: next-token distribution by the last few tokens. For tests, proofs and hand-checked
examples.

It ships with the library because a new rule or policy needs one for its tests. It is small enough that the distribution
of whole outputs can be enumerated, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from toolkit.engine.base import Reading, Session
from toolkit.engine.tree import Placement
from toolkit.errors import InputError


@dataclass
class TabularModel:
    """Next-token probabilities by the last `order` tokens (fewer at the start of a text count as token 0).

    probs [V ** order, V]  row index: the last tokens as digits in base V, the newest one last
    """

    probs: Tensor
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.vocab_size = self.probs.shape[1]
        self.order = 0
        while self.vocab_size**self.order < self.probs.shape[0]:
            self.order += 1
        if self.vocab_size**self.order != self.probs.shape[0]:
            raise InputError(f"a table over {self.vocab_size} tokens needs a power of that many rows, "
                             f"got {self.probs.shape[0]}")  # fmt: skip
        self.dtype = self.probs.dtype

    @classmethod
    def random(cls, vocab_size: int, order: int, generator: torch.Generator, sharpness: float = 1.0) -> TabularModel:
        """A random table in float64: softmax of normal draws times `sharpness`."""
        noise = torch.randn(vocab_size**order, vocab_size, generator=generator, dtype=torch.float64)
        return cls((noise * sharpness).softmax(-1))

    def get_input_embeddings(self) -> torch.nn.Embedding:
        """One-hot, so that pre-read heads work on tables, too."""
        return torch.nn.Embedding.from_pretrained(torch.eye(self.vocab_size, dtype=self.dtype, device=self.device))

    def state(self, tokens: list[int]) -> int:
        """The table row after these tokens."""
        row = 0
        for token in tokens:
            row = (row * self.vocab_size + token) % self.probs.shape[0]
        return row

    def sequence_distribution(
        self, prompt: list[int], length: int, end: int | None = None
    ) -> dict[tuple[int, ...], float]:
        """Probability of every output of at most `length` tokens, stopping after the token `end`."""
        distribution: dict[tuple[int, ...], float] = {}
        for output in product(range(self.vocab_size), repeat=length):
            cut = output[: output.index(end) + 1] if end in output else output
            prob, row = 1.0, self.state(prompt)
            for token in cut:
                prob *= float(self.probs[row, token])
                row = (row * self.vocab_size + token) % self.probs.shape[0]
            distribution[tuple(cut)] = prob
        return distribution

    def open_session(self, num_rows: int, capacity: int) -> Session:
        """The cache of a table: one state per slot."""
        return TabularSession(self, num_rows, capacity)


class TabularSession(Session):
    """Walks the table along each node's own path; hidden states are the one-hot table row."""

    def __init__(self, model: TabularModel, num_rows: int, capacity: int):
        super().__init__(num_rows, capacity, model.device)
        self.model = model
        self.states = torch.zeros(num_rows, capacity + 1, dtype=torch.long, device=model.device)

    def _forward(
        self, tokens: Tensor, rows: list[int], placement: Placement, parents: Tensor | None, last: int
    ) -> Reading:
        width, num_tree = tokens.shape[1], 0 if parents is None else parents.shape[1]
        states = torch.zeros_like(tokens)
        row_index = torch.tensor(rows, device=tokens.device)
        context = torch.tensor([self.index.context_lengths[row] for row in rows], device=tokens.device)
        for t in range(width):
            slots = placement.slots[:, t]
            tree = t - (width - num_tree)
            before = slots - 1 if tree < 0 else context + parents[:, tree]  # type: ignore[index]
            old = torch.where(before >= 0, self.states[row_index, before.clamp(min=0)], 0)
            states[:, t] = (old * self.model.vocab_size + tokens[:, t]) % self.model.probs.shape[0]
            self.states[row_index, slots] = states[:, t]
        states = states[:, -last:]
        hidden = torch.nn.functional.one_hot(states, self.model.probs.shape[0]).to(self.model.dtype)
        return Reading(self.model.probs[states].log(), hidden)

    def _move(self, contexts: list[int], nodes: list[list[int]]) -> None:
        for row, (context, old_nodes) in enumerate(zip(contexts, nodes, strict=True)):
            if old_nodes:
                slots = [context + node for node in old_nodes]
                self.states[row, context : context + len(slots)] = self.states[row, slots]

    def _grow(self, capacity: int) -> None:
        self.states = torch.nn.functional.pad(self.states, (0, capacity - self.index.capacity))
        super()._grow(capacity)

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self.states = self.states[rows]

    @property
    def cache_bytes(self) -> int:
        return self.states.numel() * self.states.element_size()
