"""The pre-read head: probabilities of acceptance of y_k and of y_{k+1}, before the draft reads y_k.

The head is ours; no paper has it. Reading y_k *is* the draft's next forward pass, so a score that needs the state
after y_k comes one forward pass late (SpecDec++). This head reads only what is already computed: the state that produced
q_k, the embedding of y_k and the shape of q_k. It gives two probabilities,

    accepted   P(y_k accepted), given that all before it are
    following  P(y_{k+1} accepted), given that y_k is, too: the mean of sum_x min(p, q)(x) one position later

Its training needs no token mixing, since every position of a text of the target is a clean prefix. A token y drawn from q
there is a training example for `accepted`. If the acceptance draw accepts y, the next position is a training example for
`following` (`toolkit.training.recorded`).

With `earlier` positions the head also reads the draft's outputs one to eight tokens before (`toolkit.acceptance.inputs`). Live
decoding keeps these beside the draft's cache, for chains (`toolkit.decoding.context_window`). With `round_depth` the head
reads the depth in the round, too.

Shapes: D hidden size, E embedding size, F features: D + E + 5 without earlier positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from toolkit.acceptance.inputs import NUM_STATISTICS, Inputs
from toolkit.acceptance.saved import AtWork, SavedHead
from toolkit.acceptance.statistics import NUMBERS, SHIPPED, input_names, inputs_of, read_statistics
from toolkit.config.notes import AtLeast, Between, Internal
from toolkit.config.values import checked
from toolkit.errors import InputError
from toolkit.types import SMALLEST, Step

SCALE = 4.0  # of the numbers of statistics; of their products its square


class PrereadHead(SavedHead):
    """An MLP from the features of drawn tokens [..., F] to the logits (accepted, following) [..., 2].

    width         units of a hidden layer
    depth         number of hidden layers; 0 is a linear head
    earlier       how many positions before the newest one the head reads, too; chains alone keep them
    earlier_states  whether it reads the draft's states at the earlier positions
    earlier_tokens  whether it reads the tokens there
    earlier_statistics  whether it reads log q of the tokens, entropy and largest probabilities there
    likelihood    whether it reads the draft's mean log q of the text so far
    round_depth   the head reads the token's depth in the round, up to this number; 0: it does not
    products      adds a linear map of four numbers of q and their products to the logits, as
                  `toolkit.acceptance.statistics` has them; untrained the head is the regression that ships
    dropout       share of the hidden layers' outputs that training leaves out
    log_w_rej     logarithm of the class weight it was trained with: `corrected` adds it
    """

    weights_file, config_file, what = "preread.safetensors", "preread.json", "a pre-read head"
    arguments = ("hidden_size", "embedding_size", "width", "depth", "log_w_rej")
    method = "rate"
    summary = (
        "Predicts the probabilities that the target accepts a drafted token and the one after it, before the draft reads the "
        "token."
    )

    @checked
    def __init__(
        self,
        hidden_size: Annotated[int, AtLeast(1)],
        embedding_size: Annotated[int, AtLeast(1)],
        width: Annotated[int, AtLeast(1)] = 256,
        depth: Annotated[int, AtLeast(0)] = 2,
        log_w_rej: Annotated[float, Between(-20, 20), Internal()] = 0.0,
        earlier: Annotated[int, Between(0, 8)] = 0,
        earlier_states: bool = True,
        earlier_tokens: bool = True,
        earlier_statistics: bool = True,
        likelihood: bool = False,
        round_depth: Annotated[int, Between(0, 64)] = 0,
        dropout: Annotated[float, Between(0, 1, "[)")] = 0.0,
        products: bool = False,
    ):
        super().__init__()
        parts = (earlier_states, earlier_tokens, earlier_statistics)
        self.inputs = Inputs(earlier, *parts, likelihood, round_depth)
        self.dropout, self.products = dropout, products
        self.hidden_size, self.embedding_size = hidden_size, embedding_size
        self.width, self.depth, self.log_w_rej = width, depth, log_w_rej
        names = input_names(NUMBERS) if products else []
        sizes = [self.inputs.size(hidden_size, embedding_size) + len(names), *[width] * depth]
        hidden = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.SiLU())]
        last = nn.Linear(sizes[-1], 2)
        self.layers = nn.Sequential(*hidden, last)
        if products:
            self.regression = nn.Linear(len(names), 2)
            outputs, _ = read_statistics(SHIPPED)
            columns = [outputs[name].column(names) for name in ("drawn", "following")]
            scales = torch.tensor([SCALE] * len(NUMBERS) + [SCALE**2] * (len(names) - len(NUMBERS)))
            self.regression.weight.data = torch.tensor([weights for _, weights in columns]) * scales
            self.regression.bias.data = torch.tensor([bias for bias, _ in columns])
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Logits [..., 2] as trained (raw)."""
        values, more = features, None
        if self.products:
            more = self._products(features)
            values = torch.cat([features, more], -1)
        for layer in self.layers:
            values = layer(values)
            if self.dropout and isinstance(layer, nn.SiLU):
                values = nn.functional.dropout(values, self.dropout, self.training)
        return values if more is None else values + self.regression(more)

    def _products(self, features: Tensor) -> Tensor:
        """The numbers of statistics and their products, scaled [..., 14], from the five numbers about q among the features."""
        first = self.hidden_size + self.embedding_size
        _, log_q, entropy, largest, second = features[..., first : first + NUM_STATISTICS].unbind(-1)
        rest = (-torch.expm1(largest)).clamp(min=SMALLEST).log()
        return inputs_of(torch.stack([largest - rest, largest - second, entropy, log_q], -1) / SCALE)

    @property
    def config(self) -> dict[str, Any]:
        """What `__init__` needs to build it again; inputs that are not read, as in heads of older versions, are left out."""
        own: dict[str, Any] = {name: getattr(self, name) for name in ("dropout", "products") if getattr(self, name)}
        return {**super().config, **own, **self.inputs.read()}


def embedding_table(draft: Any) -> Tensor:
    """The draft's input embeddings [V, E], in its own number format. Raises InputError for models without embeddings."""
    layer = draft.get_input_embeddings() if hasattr(draft, "get_input_embeddings") else None
    if layer is None:
        raise InputError("this head reads the draft's input embeddings; this draft has none")
    table: Tensor = layer.weight.detach()
    return table


@dataclass(frozen=True)
class PrereadScorer(AtWork):
    """A pre-read head at work: raw logits [B, 2] of a step.

    table  the draft's embeddings [V, E]; None: its logits are recorded
    """

    module: PrereadHead
    table: Tensor | None = None

    def __call__(self, step: Step) -> Tensor:
        assert self.table is not None, "recorded logits belong to the steps of a recording"
        return self.module(self.module.inputs.features(step, self.table))
