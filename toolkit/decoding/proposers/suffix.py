"""Suffix proposer: copy what most often followed the longest suffix of the text that occurred before. No draft model.

SuffixDecoding (Oliaro et al., arXiv:2411.04975): longest match in the prompt, in what was generated and in earlier
responses, continuation by frequency. Theirs -> ours: pattern -> the text's last tokens, suffix tree node's count ->
`occurrences`, child's share -> `agreement`.
Deviation: a chain, where theirs may be a tree.
Deviation: no tree is kept, so that a copy is a function of the text alone. The positions where the suffix occurs are filtered
token by token: about half a millisecond for a text of a thousand tokens and a copy of twenty.
Deviation: earlier responses are a file that does not grow while texts are decoded, so that a row depends on no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from toolkit.config.notes import AtLeast, File
from toolkit.config.values import check_ranges
from toolkit.decoding.proposers.copying import NOTHING, Copy, CopyProposer, until_end
from toolkit.errors import InputError
from toolkit.files.text import first_line
from toolkit.models.prompts import check_token_ids, numbered_lines

BETWEEN = -1  # a token that no text holds, between responses
Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class SuffixProposer(CopyProposer):
    """Copy the most frequent continuation, token by token; of equally frequent ones the last that occurred.

    max_match  tokens that may agree, at most
    min_match  and at least
    responses  earlier responses: a folder of data_gen.responses, or JSON lines with `token_ids`; null: none
    """

    name = "suffix"
    max_match: Annotated[int, AtLeast(1)] = 16
    min_match: Annotated[int, AtLeast(1)] = 1
    responses: Annotated[str | None, File()] = None

    def __post_init__(self) -> None:
        check_ranges(self, "proposer.")
        if not self.min_match <= self.max_match:
            raise InputError(
                f"proposer: expected 1 <= min_match <= max_match, got min_match={self.min_match}, max_match={self.max_match}"
            )

    @cached_property
    def earlier(self) -> Tokens:
        """All earlier responses one after another. Raises InputError for a file that does not hold any."""
        if self.responses is None:
            return np.zeros(0, np.int64)
        return read_responses(Path(self.responses))

    def check(self, vocab_size: int) -> None:
        self.__dict__.pop("earlier", None)  # the file as it is now: a method is kept for the whole process
        if len(self.earlier) and (largest := int(self.earlier.max())) >= vocab_size:
            raise InputError(
                f"proposer.responses: expected token ids in [0, {vocab_size}), those of this pair's tokenizer, got {largest} "
                f"in {self.responses}"
            )

    def lookup(self, text: Sequence[int], most: int, end_ids: Sequence[int]) -> Copy:
        tokens = np.concatenate([self.earlier, np.asarray(text, np.int64)])
        after, length = _longest_match(tokens, min(self.max_match, len(text)))
        if length < self.min_match:
            return NOTHING
        copied: list[int] = []
        occurrences, agreement = list[int](), list[float]()
        while len(copied) < most:
            after = after[after < len(tokens)]
            after = after[tokens[after] != BETWEEN]
            if not len(after):
                break
            following = tokens[after]
            values, first, counts = np.unique(following[::-1], return_index=True, return_counts=True)
            best = np.lexsort((-first, counts))[-1]
            copied.append(int(values[best]))
            occurrences.append(len(after))
            agreement.append(float(counts[best] / len(after)))
            after = after[following == values[best]] + 1
        copied = until_end(copied, end_ids)
        return Copy(copied, length, occurrences[: len(copied)], agreement[: len(copied)])


def _longest_match(tokens: Tokens, most: int) -> tuple[Tokens, int]:
    """Positions after the longest suffix's earlier occurrences, ascending, and its length (0: there are none).

    most  tokens of the suffix, no more than the text itself has: before it are the ends of earlier responses
    """
    last = len(tokens) - 1
    after, length = np.arange(1, last + 1), 0  # where an occurrence may have ended
    while length < most:
        longer = after[after > length]
        longer = longer[tokens[longer - 1 - length] == tokens[last - length]]
        if not len(longer):
            break
        after, length = longer, length + 1
    return (after, length) if length else (after[:0], 0)


def read_responses(path: Path) -> Tokens:
    """Token ids of all rows of a JSON-lines file, or of those in a folder, BETWEEN after each. Raises InputError for others."""
    import json

    sequences: list[Tokens] = []
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        for number, line in numbered_lines(file, "responses (JSON lines with token_ids)"):
            where = f"proposer.responses: {file}, line {number}: "
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}expected a JSON object, got {first_line(error)}") from None
            if isinstance(row, dict) and "token_ids" in row:
                check_token_ids(row["token_ids"], where=where)
                sequences.append(np.asarray([*row["token_ids"], BETWEEN], np.int64))
    if not sequences:
        raise InputError(f"proposer.responses: expected JSON lines with token_ids in {path}, found none")
    return np.concatenate(sequences)
