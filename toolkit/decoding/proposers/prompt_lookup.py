"""Prompt lookup: the draft is what followed the text's last tokens when they occurred before. No draft model.

Known as prompt lookup decoding (transformers' `prompt_lookup_num_tokens`) and n-gram speculation (vLLM's `ngram`).
Deviation: of several earlier occurrences the last one counts (transformers: the first).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from toolkit.config.notes import AtLeast
from toolkit.config.values import check_ranges
from toolkit.decoding.proposers.copying import NOTHING, Copy, CopyProposer, until_end
from toolkit.errors import InputError


@dataclass(frozen=True)
class PromptLookupProposer(CopyProposer):
    """Copy what followed the longest n-gram that the text ends with and that it holds before.

    max_ngram  tokens that must agree, at most; shorter n-grams are tried if a longer one does not occur
    min_ngram  and at least
    """

    name = "prompt_lookup"
    max_ngram: Annotated[int, AtLeast(1)] = 3
    min_ngram: Annotated[int, AtLeast(1)] = 1

    def __post_init__(self) -> None:
        check_ranges(self, "proposer.")
        if not self.min_ngram <= self.max_ngram:
            raise InputError(
                f"proposer: expected 1 <= min_ngram <= max_ngram, got min_ngram={self.min_ngram}, max_ngram={self.max_ngram}"
            )

    def lookup(self, text: Sequence[int], most: int, end_ids: Sequence[int]) -> Copy:
        for size in range(min(self.max_ngram, len(text) - 1), self.min_ngram - 1, -1):
            last = text[len(text) - size :]
            for start in range(len(text) - size - 1, -1, -1):
                if text[start : start + size] == last:
                    return Copy.of(until_end(text[start + size : start + size + most], end_ids), size)
        return NOTHING
