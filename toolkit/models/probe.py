"""A short text that two models are compared on, such as a draft of a target's layers with that target."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.engine.facts import vocab_size
from toolkit.errors import InputError

LENGTH = 24  # tokens of the text
TOKENS = 1000  # of which it is drawn, at most
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4}  # of logits, relative to the largest
COARSE = 1e-2  # in other formats


def probe_text(model: object) -> Tensor:
    """A text [1, T] of a model, on its device, without the special tokens that its config names."""
    config = model.config  # type: ignore[attr-defined]
    facts = [item for part in (config, config.get_text_config(decoder=True)) for item in vars(part).items()]
    special = {value for name, value in facts if name.endswith(("token_id", "token_index")) and type(value) is int}
    usual = [token for token in range(min(vocab_size(model), TOKENS)) if token not in special] or [0]
    chosen = torch.randint(len(usual), (1, LENGTH), generator=torch.Generator().manual_seed(0))
    return torch.tensor(usual)[chosen].to(model.device)  # type: ignore[attr-defined]


def check_same_logits(logits: Tensor, expected: Tensor) -> None:
    """Raises InputError unless two models' logits [1, T, V] along a text are equal, up to rounding."""
    if logits.shape != expected.shape:
        raise InputError(f"its logits have shape {list(logits.shape)} instead of {list(expected.shape)}")
    finite = expected.isfinite()
    if not torch.equal(logits.isfinite(), finite) or not finite.any():
        raise InputError("its logits are numbers for other tokens")
    error = float((logits - expected)[finite].abs().max() / expected[finite].abs().max())
    if not error <= TOLERANCES.get(expected.dtype, COARSE):
        raise InputError(f"its logits differ by {error:.1e}")
