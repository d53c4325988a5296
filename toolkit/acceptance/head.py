"""The acceptance head: P(accepted) of a token from the draft's final hidden state that has read it.

Paper: SpecDec++ (arXiv:2405.19715), section 3.1. theirs -> ours: e_i -> hidden, f -> AcceptanceHead, D -> depth.
Deviation: the paper's two-class read-out is one logit here (their difference), which is the same function.
The published code applies *one* residual block D times (weights tied by accident). The paper's blocks are untied, and so are
ours unless `tied=True`. The further inputs x are ours: earlier positions, the likelihood so far and the depth in the round
(`toolkit.acceptance.inputs`). With them, e_i + W x takes the place of e_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from torch import Tensor, nn

from toolkit.acceptance.inputs import Inputs
from toolkit.acceptance.saved import SavedHead
from toolkit.config.notes import AtLeast, Between, Internal
from toolkit.config.values import checked


class ResidualBlock(nn.Module):
    """x + SiLU(Linear(x))."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class AcceptanceHead(SavedHead):
    """A (D + 1)-layer ResNet from a hidden state [..., hidden_size] to a logit [...].

    depth      D, residual blocks before the read-out; 0 is a linear head
    tied       one block applied D times, as in the published code
    log_w_rej  logarithm of the class weight w_rej the head was trained with. Added to the logit by `corrected`, it
               undoes the shift from weighting rejections
    earlier    how many earlier positions the head reads, too, the token's own first; chains alone keep them
    earlier_states  whether it reads the draft's states at the earlier positions
    earlier_tokens  whether it reads the tokens there
    earlier_statistics  whether it reads log q of the tokens, entropy and largest probabilities there
    likelihood  whether it reads the draft's mean log q of the text so far
    embedding_size  of the draft; needed with earlier positions alone
    round_depth  the head reads the token's depth in the round, up to this number; 0: it does not, as published
    """

    weights_file, config_file, what = "head.safetensors", "config.json", "an acceptance head"
    arguments = ("hidden_size", "depth", "tied", "log_w_rej")
    method = "specdec_pp"
    summary = (
        "Predicts the probability that the target accepts a drafted token, from the draft's hidden state that has read it "
        "(SpecDec++, arXiv:2405.19715)."
    )

    @checked
    def __init__(
        self,
        hidden_size: Annotated[int, AtLeast(1)],
        depth: Annotated[int, AtLeast(0)] = 0,
        tied: bool = False,
        log_w_rej: Annotated[float, Between(-20, 20), Internal()] = 0.0,
        round_depth: Annotated[int, Between(0, 64)] = 0,
        earlier: Annotated[int, Between(0, 8)] = 0,
        earlier_states: bool = True,
        earlier_tokens: bool = True,
        earlier_statistics: bool = True,
        likelihood: bool = False,
        embedding_size: Annotated[int, AtLeast(0), Internal()] = 0,
    ):
        super().__init__()
        parts = (earlier_states, earlier_tokens, earlier_statistics)
        self.inputs = Inputs(earlier, *parts, likelihood, round_depth)
        self.embedding_size = embedding_size
        self.hidden_size, self.depth, self.tied, self.log_w_rej = hidden_size, depth, tied, log_w_rej
        self.blocks = nn.ModuleList(ResidualBlock(hidden_size) for _ in range(min(depth, 1) if tied else depth))
        self.readout = nn.Linear(hidden_size, 1)
        if self.num_more:
            self.more = nn.Linear(self.num_more, hidden_size, bias=False)

    @property
    def num_more(self) -> int:
        """Features that it reads after the state."""
        return self.inputs.size_of_more(self.hidden_size, self.embedding_size)

    @property
    def config(self) -> dict[str, Any]:
        """What `__init__` needs to build it again; inputs that are not read, as in heads of older versions, are left out."""
        own = {"embedding_size": self.embedding_size} if self.inputs.earlier else {}
        return {**super().config, **own, **self.inputs.read()}

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [...] as trained (raw) of hidden states [..., hidden_size], followed by the other features."""
        x = hidden
        if self.num_more:
            x = hidden[..., : self.hidden_size] + self.more(hidden[..., self.hidden_size :])
        for i in range(self.depth):
            x = self.blocks[0 if self.tied else i](x)
        return self.readout(x).squeeze(-1)

    @classmethod
    def from_published(cls, state: Mapping[str, Tensor], depth: int) -> AcceptanceHead:
        """A released SpecDec++ head: one tied block and a two-class read-out (class 1 accepts)."""
        block = {k.split("linear.")[-1]: v for k, v in state.items() if "linear." in k}
        readout = {k.split(".")[-1]: v for k, v in state.items() if "linear." not in k}
        hidden_size = readout["weight"].shape[1]
        head = cls(hidden_size, depth, tied=True)
        if depth:
            head.blocks[0].linear.load_state_dict({k: block[k] for k in ("weight", "bias")})  # type: ignore[union-attr]
        head.readout.weight.data = (readout["weight"][1] - readout["weight"][0]).unsqueeze(0)
        head.readout.bias.data = (readout["bias"][1] - readout["bias"][0]).reshape(1)
        return head
