"""Rounds of llama.cpp, out of an answer that was streamed with `"stream": true, "timings_per_token": true`.

Every chunk then has `timings` with the sums so far: tokens (`predicted_n`), drafted ones (`draft_n`) and accepted ones
(`draft_n_accepted`). A round begins where `draft_n` grows; tokens between such rounds are of rounds that drafted nothing. No
chunk is sent for a token that ends within a character: if a round begins there, the rounds cannot be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.errors import InputError


def streamed_rounds(chunks: Sequence[Any], num_drafted: int = 0) -> tuple[int, list[int], list[int]] | str:
    """K (at least `num_drafted`), and the drafted and accepted tokens of the rounds; or why they cannot be told.

    Raises InputError for chunks without timings, and for sums that fall.
    """
    rounds, explained, before = list[tuple[int, int]](), 1, (0, 0, 0)  # the first token is of the prompt's reading
    for sums in _sums(chunks):
        size, drafted, accepted = sums
        if any(now < last for now, last in zip(sums, before, strict=True)):
            raise InputError(f"stream: expected sums that grow, got {sums} after {before}")
        if drafted > before[1]:
            undrafted = size - 1 - explained
            if undrafted < 0:
                raise InputError(f"stream: expected a round to begin after the tokens of the one before, got {sums}")
            if undrafted and size > before[0] + 1:
                return "a token without a chunk hides where a round begins"
            rounds += [(0, 0)] * undrafted + [(drafted - before[1], accepted - before[2])]
            explained = size + accepted - before[2]
        before = sums
    rounds += [(0, 0)] * (before[0] - explained)
    if not any(drafted for drafted, _ in rounds):
        return "no rounds"
    if any(drafted < accepted for drafted, accepted in rounds):
        raise InputError("stream: expected draft_n_accepted to grow by at most what draft_n grows by")
    lengths, kept = ([each[side] for each in rounds] for side in (0, 1))
    return max(num_drafted, *lengths), lengths, kept


def streamed_text(chunks: Sequence[Any]) -> str:
    """The answer's text: of /completion, /v1/completions or /v1/chat/completions."""
    parts = []
    for chunk in chunks:
        choice = (chunk.get("choices") or [{}])[0]
        parts.append(chunk.get("content") or choice.get("text") or (choice.get("delta") or {}).get("content") or "")
    return "".join(parts)


def streamed_tokens(chunks: Sequence[Any]) -> int:
    """How many tokens the answer has, as the engine counts them."""
    return _sums(chunks)[-1][0]


def _sums(chunks: Any) -> list[tuple[int, int, int]]:
    """Tokens, drafted and accepted ones so far, of every chunk that has them; a chat's first one, its role, has none."""
    try:
        every = [chunk["timings"] for chunk in chunks if "timings" in chunk]
        sums = [
            (int(each["predicted_n"]), int(each.get("draft_n", 0)), int(each.get("draft_n_accepted", 0)))
            for each in every
        ]
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        sums = []
    if not sums:
        raise InputError("stream: expected chunks with `timings`: ask llama.cpp with timings_per_token=true")
    return sums
