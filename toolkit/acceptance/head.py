"""The acceptance head: P(accepted) of a token from the draft's final hidden state that has read it.

Paper: SpecDec++ (arXiv:2405.19715), section 3.1. theirs -> ours: e_i -> hidden, f -> AcceptanceHead, D -> depth.
Deviation: the paper's two-class read-out is one logit here (their difference), which is the same function.
Published code applies *one* residual block D times (weights tied by accident); the paper's blocks are untied, and so are
ours unless `tied=True`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from toolkit.errors import InputError
from toolkit.io import file_hash, read_json, write_atomic, write_json

WEIGHTS, CONFIG = "head.safetensors", "config.json"


class ResidualBlock(nn.Module):
    """x + SiLU(Linear(x))."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class AcceptanceHead(nn.Module):
    """A (D + 1)-layer ResNet from a hidden state [..., hidden_size] to a logit [...].

    depth     D, residual blocks before the read-out; 0 is a linear head
    tied      one block applied D times, as in the published code
    log_w_rej logarithm of the class weight w_rej the head was trained with: added to the logit by `corrected`, it
              undoes the shift that weighting rejections put there
    """

    def __init__(self, hidden_size: int, depth: int = 0, tied: bool = False, log_w_rej: float = 0.0):
        super().__init__()
        if depth < 0:
            raise InputError(f"head.depth: expected 0 or more residual blocks, got {depth}")
        self.hidden_size, self.depth, self.tied, self.log_w_rej = hidden_size, depth, tied, log_w_rej
        self.blocks = nn.ModuleList(ResidualBlock(hidden_size) for _ in range(min(depth, 1) if tied else depth))
        self.readout = nn.Linear(hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [...] as trained (raw) of hidden states [..., hidden_size]."""
        x = hidden
        for i in range(self.depth):
            x = self.blocks[0 if self.tied else i](x)
        return self.readout(x).squeeze(-1)

    def corrected(self, logits: Tensor) -> Tensor:
        """Raw logits with the class weight's shift undone."""
        return logits + self.log_w_rej

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

    @property
    def config(self) -> dict[str, Any]:
        """What `__init__` needs to build it again."""
        names = ("hidden_size", "depth", "tied", "log_w_rej")
        return {name: getattr(self, name) for name in names}

    def save(self, folder: Path | str, about: Mapping[str, Any] | None = None) -> Path:
        """Write weights and config; `about` records the draft's fingerprint, sampling, metrics and so on."""
        folder = Path(folder)
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        write_atomic(folder / WEIGHTS, lambda path: save_file(state, path))
        write_json(folder / CONFIG, {"head": self.config, **(about or {})})
        return folder

    @classmethod
    def load(cls, folder: Path | str) -> tuple[AcceptanceHead, dict[str, Any]]:
        """The head and what was recorded about it. Weights are loaded strictly. Raises InputError."""
        folder = Path(folder)
        if not (folder / CONFIG).exists() or not (folder / WEIGHTS).exists():
            raise InputError(f"expected an acceptance head ({CONFIG} and {WEIGHTS}) in {folder}, found none")
        about = read_json(folder / CONFIG)
        try:
            head = cls(**about["head"])
            head.load_state_dict({k: v.float() for k, v in load_file(folder / WEIGHTS).items()}, strict=True)
        except (KeyError, TypeError, RuntimeError) as error:
            raise InputError(f"{folder} does not hold a whole acceptance head: {str(error).splitlines()[0]}") from error
        return head.eval().requires_grad_(False), about


def check_draft(about: Mapping[str, Any], draft: Any, where: str) -> None:
    """Raises InputError unless the head was trained on this draft's hidden states."""
    from toolkit.pair import fingerprint

    hidden_size = about["head"]["hidden_size"]
    own = getattr(getattr(draft, "config", None), "hidden_size", hidden_size)
    if hidden_size != own:
        raise InputError(f"the head in {where} reads states of size {hidden_size}, this draft's have {own}")
    trained, here = about.get("draft_fingerprint"), fingerprint(draft)
    if trained is not None and trained != here:
        raise InputError(f"the head in {where} was trained for another draft (fingerprint {trained}, this one {here})")


def load_for(pair: Any, folder: Path | str) -> AcceptanceHead:
    """The head in `folder`, on the pair's device. Raises InputError unless it was trained on the pair's draft."""
    head, about = AcceptanceHead.load(folder)
    check_draft(about, pair.draft, str(folder))
    return head.to(pair.device)


def head_hash(folder: str | Path) -> str:
    """Hash of a head's weights. Raises InputError if the folder holds no head."""
    weights = Path(folder) / WEIGHTS
    if not weights.exists():
        raise InputError(f"expected an acceptance head ({WEIGHTS}) in {folder}, found none")
    return file_hash(weights)


def as_probs(head: AcceptanceHead, hidden: Tensor, corrected: bool) -> Tensor:
    """P(accepted) [...] of hidden states [..., D], raw or with the class weight undone."""
    logits = head(hidden.to(head.readout.weight.dtype))
    return torch.sigmoid(head.corrected(logits) if corrected else logits)
