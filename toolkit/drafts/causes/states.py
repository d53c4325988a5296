"""Causes of drafts that read the target's states: which layers' states, and which token an output row is of."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toolkit.drafts.causes import Case, Cause, altered
from toolkit.models.reduced import ReducedOutput


def other_layers(case: Case) -> Iterator[Cause]:
    """Layers counted by their outputs where inputs are meant, or the reverse; and the last state for all of them."""
    layers, last = case.draft.target_layers, case.target.config.get_text_config().num_hidden_layers
    setting = "the numbers of the target's layers in the draft's config.json, which engines count from another end"
    for which, read in (
        ("read one layer early", [max(layer - 1, 0) for layer in layers]),
        ("read one layer late", [min(layer + 1, last) for layer in layers]),
        (f"the last one, {len(layers)} times", [last] * len(layers)),
    ):
        yield Cause(f"the target's states are {which}", setting, draft=partial(altered, target_layers=tuple(read)))


def vocabulary_maps(case: Case) -> Iterator[Cause]:
    """Output rows that are taken for another token."""
    kept, setting = case.draft.lm_head.kept, "d2t in the draft's weights: an offset, token = row + d2t[row]"
    for which, tokens in (
        ("that of the row after it", kept.roll(-1)),
        ("that of the row before it", kept.roll(1)),
        ("the row's number", torch.arange(len(kept), device=kept.device)),
    ):
        if not torch.equal(tokens, kept):
            yield Cause(f"the token of an output row is {which}", setting, draft=partial(with_rows_of, tokens=tokens))


def with_rows_of(draft: Any, tokens: Tensor) -> Any:
    """The draft with output rows that are of other tokens [V']."""
    return altered(draft, lm_head=ReducedOutput(draft.lm_head.rows, tokens, draft.lm_head.size))
