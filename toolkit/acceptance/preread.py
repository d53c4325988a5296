"""The pre-read head: what the forward that produced q_k, and the token y_k drawn from it, say before y_k is read.

Ours; no paper has it. Reading y_k *is* the next draft forward, so a score that needs the state after y_k comes one
forward late (SpecDec++). This head takes what is paid for already: the state that produced q_k, the embedding of y_k
and the shape of q_k. It gives two chances,

    accepted   P(y_k accepted), given that all before it are
    following  P(y_{k+1} accepted), given that y_k is, too: the mean of sum_x min(p, q)(x) one position later

It needs no token mixing, since every position of a text of the target is a clean prefix. There a y drawn from q is a
sample for `accepted`. If the acceptance draw accepts it, the next position is a sample for `following`
(`toolkit.training.recorded_positions`).

Shapes: D hidden size, E embedding size, F = D + E + 5 features.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from toolkit.acceptance.saved import SavedHead
from toolkit.errors import InputError
from toolkit.schema.arguments import checked
from toolkit.schema.ranges import AtLeast, Between
from toolkit.types import Step

NUM_STATISTICS = 5
SMALLEST = 1e-6  # probabilities below count as this


class PrereadHead(SavedHead):
    """An MLP from the features of drawn tokens [..., F] to the logits (accepted, following) [..., 2].

    width, depth  of the hidden layers; depth 0 is linear
    log_w_rej     logarithm of the class weight it was trained with: `corrected` adds it
    """

    weights_file, config_file, what = "preread.safetensors", "preread.json", "a pre-read head"
    arguments = ("hidden_size", "embedding_size", "width", "depth", "log_w_rej")
    method = "rate"
    summary = (
        "Predicts the chances that the target accepts a drafted token and the one after it, before the draft reads the "
        "token."
    )

    @checked
    def __init__(
        self,
        hidden_size: Annotated[int, AtLeast(1)],
        embedding_size: Annotated[int, AtLeast(1)],
        width: Annotated[int, AtLeast(1)] = 256,
        depth: Annotated[int, AtLeast(0)] = 2,
        log_w_rej: Annotated[float, Between(-20, 20)] = 0.0,
    ):
        super().__init__()
        self.hidden_size, self.embedding_size = hidden_size, embedding_size
        self.width, self.depth, self.log_w_rej = width, depth, log_w_rej
        sizes = [hidden_size + embedding_size + NUM_STATISTICS, *[width] * depth]
        layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.SiLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], 2))

    def forward(self, features: Tensor) -> Tensor:
        """Logits [..., 2] as trained (raw)."""
        logits: Tensor = self.layers(features)
        return logits

    def corrected(self, logits: Tensor) -> Tensor:
        """Raw logits with the class weight's shift undone."""
        return logits + self.log_w_rej


def features(step: Step, table: Tensor) -> Tensor:
    """What is known of drawn tokens [B, F]: of a step whose token is there. `table` [V, E] embeds tokens.

    States and embeddings are scaled to unit mean square; of q: log q(y) warped and not, entropy, the two largest.
    """
    assert step.tokens is not None
    hidden, embedded = step.hidden.float(), table[step.tokens].float()
    statistics = torch.cat([
        torch.stack([step.draft_prob, step.token_prob], -1).float().clamp(min=SMALLEST).log(),
        step.entropy.float().unsqueeze(-1),
        step.top_probs.float().clamp(min=SMALLEST).log(),
    ], -1)  # fmt: skip
    return torch.cat([rms_norm(hidden, hidden.shape[-1:]), rms_norm(embedded, embedded.shape[-1:]), statistics], -1)


def embedding_table(draft: Any) -> Tensor:
    """The draft's input embeddings [V, E], in its own number format. Raises InputError for models without any."""
    layer = draft.get_input_embeddings() if hasattr(draft, "get_input_embeddings") else None
    if layer is None:
        raise InputError("a pre-read head needs the draft's input embeddings; this draft has none")
    table: Tensor = layer.weight.detach()
    return table


@dataclass(frozen=True)
class PrereadScorer:
    """A pre-read head at work: raw logits [B, 2] of a step."""

    module: PrereadHead
    table: Tensor

    def __call__(self, step: Step) -> Tensor:
        return self.module(features(step, self.table))
