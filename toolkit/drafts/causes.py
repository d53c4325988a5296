"""Mistakes of serving engines, each as one change to the replay of a draft (`analysis.diagnose`).

A kind names its causes by its part `causes`: a function from a `Case` to the causes that apply there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from toolkit.sampling import Sampling


class ReplayedRound(NamedTuple):
    """Tokens of the text before the round, what the draft drafts in the replay, and how many the engine accepted."""

    start: int
    drafted: list[int]
    accepted: int


@dataclass
class ReplayedText:
    """A text under replay: its rounds so far, and how many of its tokens precede the next one."""

    prompt_ids: list[int]
    token_ids: list[int]
    start: int = 0
    rounds: list[ReplayedRound] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """What causes are chosen for: the draft, the tokenizer, prompts as token ids, the longest text in tokens, its sampling.

    windows  contexts that the draft may have been cut to; None: 64, 128, 256, ...
    """

    draft: Any
    tokenizer: Any
    prompts: Sequence[list[int]]
    longest: int
    sampling: Sampling
    windows: Sequence[int] | None = None


def whole_context(text: ReplayedText) -> list[int]:
    """Return what a draft has to have read before a round."""
    return [*text.prompt_ids, *text.token_ids[: text.start]]


def unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Cause:
    """One change to a replay; without any it is the draft as it should be.

    meaning    what the engine does, as a clause
    setting    what to set in an engine; "": not known
    context    the tokens that the draft has read, in this order, when a round begins
    positions  (positions [b, T], lengths of the prompts [b, 1]) -> those that the draft computes with
    sampling   the texts' sampling -> the draft's
    draft      the draft -> the model that drafts
    rounding   whether it is another rounding, and no mistake
    """

    meaning: str
    setting: str = ""
    context: Callable[[ReplayedText], list[int]] = whole_context
    positions: Callable[[Tensor, Tensor], Tensor] | None = None
    sampling: Callable[[Sampling], Sampling] = unchanged
    draft: Callable[[Any], Any] = unchanged
    rounding: bool = False


AS_IT_SHOULD_BE = Cause("as it should be", rounding=True)
