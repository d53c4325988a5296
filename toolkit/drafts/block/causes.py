"""What engines get wrong with a block draft (DFlash, DSpark)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from toolkit.drafts.block.model import Context
from toolkit.drafts.causes import Case, Cause, altered
from toolkit.drafts.causes.shared import cut_contexts, other_format, penalty_of_target_alone
from toolkit.drafts.causes.states import other_layers, vocabulary_maps

WHOLE = 2**30  # a window that no text fills


def causes(case: Case) -> list[Cause]:
    """The causes that apply to a case."""
    parts = (
        causal_blocks,
        short_blocks,
        shifted_blocks,
        other_layers,
        vocabulary_maps,
        cut_contexts,
        penalty_of_target_alone,
        other_format,
    )
    return [cause for part in parts for cause in part(case)]


def causal_blocks(case: Case) -> Iterator[Cause]:
    """Blocks whose tokens do not see those after them, and the opposite, by the draft's `sliding_window_non_causal`."""
    windows = getattr(case.draft.config, "sliding_window", None) is not None
    opposite = windows and not case.draft.settings.sliding_window_non_causal
    meaning = "see all of it" if opposite else "do not see those after them"
    setting = f"sliding_window_non_causal={str(not opposite).lower()} in the draft's config.json"
    yield Cause(f"the tokens of a block {meaning}", setting, draft=other_setting if windows else causal)


def other_setting(draft: Any) -> Any:
    """The draft with the opposite `sliding_window_non_causal`."""
    settings = draft.settings
    return altered(draft, settings=replace(settings, sliding_window_non_causal=not settings.sliding_window_non_causal))


def causal(draft: Any) -> Any:
    """A draft without windows whose every layer is causal inside a block: all have a window, of any text."""
    config = copy.deepcopy(draft.config)
    config.layer_types, config.sliding_window = ["sliding_attention"] * config.num_hidden_layers, WHOLE
    return altered(draft, config=config)


def short_blocks(case: Case) -> Iterator[Cause]:
    """Blocks that are as long as what is drafted, where the draft was trained with longer ones: so vLLM 0.32.0 makes them."""
    settings = case.draft.settings
    size = settings.block_size if case.most_drafted is None else case.most_drafted + settings.first
    if size < settings.block_size:
        meaning = f"blocks of {size} tokens, not {settings.block_size}: no masks stand after the drafted ones"
        setting = f"num_speculative_tokens={settings.block_size - settings.first}"
        yield Cause(meaning, setting, draft=partial(with_blocks_of, size=size))


def with_blocks_of(draft: Any, size: int) -> Any:
    settings = replace(draft.settings, block_size=size)
    return altered(draft, settings=settings, block_length=size - settings.first)


def shifted_blocks(_: Case) -> Iterator[Cause]:
    meaning = "the positions of a block's tokens are one too"
    yield Cause(f"{meaning} high", draft=partial(with_blocks_moved, by=1))
    yield Cause(f"{meaning} low", draft=partial(with_blocks_moved, by=-1))


def with_blocks_moved(draft: Any, by: int) -> Any:
    """The draft with positions of blocks that are moved against those of the text: the text's are, the other way."""

    def context(target_states: Tensor, positions: Tensor) -> Context:
        moved: Context = draft.context(target_states, positions - by)
        return moved

    return altered(draft, context=context)
