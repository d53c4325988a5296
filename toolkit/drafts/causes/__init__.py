"""Mistakes of serving engines, each as one change to the replay of a draft (`analysis.diagnose`).

A kind names its causes by its part `causes`: a function from a `Case` to the causes that apply there. `shared` has those of
several kinds, `states` those of drafts that read the target's states, `sampled` those above temperature 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from toolkit.engine import Session
from toolkit.sampling import Sampling


class ReplayedRound(NamedTuple):
    """Tokens of the text before the round, what the draft drafts in the replay, and how many the engine accepted."""

    start: int
    drafted: list[int]
    accepted: int


@dataclass
class ReplayedText:
    """A text under replay: its rounds so far, how many of its tokens precede the next one, and its number."""

    prompt_ids: list[int]
    token_ids: list[int]
    start: int = 0
    rounds: list[ReplayedRound] = field(default_factory=list)
    number: int = 0


@dataclass(frozen=True)
class Case:
    """What causes are chosen for: the draft, the tokenizer, prompts as token ids, the longest text in tokens, its sampling.

    windows  contexts that the draft may have been cut to; None: 64, 128, 256, ...
    target   the loaded target, where the draft reads its states; else None
    most_drafted  tokens of the longest round; None: not known
    """

    draft: Any
    tokenizer: Any
    prompts: Sequence[list[int]]
    longest: int
    sampling: Sampling
    windows: Sequence[int] | None = None
    target: Any = None
    most_drafted: int | None = None


def whole_context(text: ReplayedText) -> list[int]:
    """Return what a draft has to have read before a round."""
    return [*text.prompt_ids, *text.token_ids[: text.start]]


def unchanged(value: Any) -> Any:
    return value


def nothing(session: Session, row: int, last: ReplayedRound) -> None:
    """Leave the draft's cache as it is after a round."""


def by_ratio(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """P(drafted, accepted) and P(emitted after a rejection) [b] of tokens [b], from p and q [b, V]: min(p, q) and (p - q)+.

    Speculative sampling (arXiv:2211.17192, theorem 1): a drafted token is accepted with probability min(1, p / q).
    """
    index = tokens.unsqueeze(-1)
    p, q = (probs.gather(-1, index).squeeze(-1) for probs in (p, q))
    return p.minimum(q), (p - q).clamp(min=0)


def altered(model: Any, **attributes: Any) -> Any:
    """A model that shares another's weights, with some attributes of its own."""
    changed = copy.copy(model)
    changed._modules = dict(model._modules)
    for name, value in attributes.items():
        setattr(changed, name, value)
    return changed


@dataclass(frozen=True)
class Cause:
    """One change to a replay; without any it is the draft as it should be.

    meaning    what the engine does, as a clause
    setting    what to set in an engine; "": not known
    context    the tokens that the draft has read, in this order, when a round begins
    positions  (positions [b, T], lengths of the prompts [b, 1]) -> those that the draft computes with
    sampling   the texts' sampling -> the draft's
    draft      the draft -> the model that drafts
    keeps      (the draft's session, a row of it, the row's last round): what stays in its cache
    texts      the texts' sampling -> that which they were drawn with
    scheme     (p, q, tokens) -> P(accepted), P(emitted after a rejection), above temperature 0, as of `by_ratio`
    rounding   whether it is another rounding, and no mistake
    """

    meaning: str
    setting: str = ""
    context: Callable[[ReplayedText], list[int]] = whole_context
    positions: Callable[[Tensor, Tensor], Tensor] | None = None
    sampling: Callable[[Sampling], Sampling] = unchanged
    draft: Callable[[Any], Any] = unchanged
    keeps: Callable[[Session, int, ReplayedRound], None] = nothing
    texts: Callable[[Sampling], Sampling] = unchanged
    scheme: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = by_ratio
    rounding: bool = False

    @property
    def passes(self) -> tuple[Any, ...]:
        """What decides the draft's forward passes along a text: causes that share it share them above temperature 0."""
        return self.context, self.positions, self.draft, self.keeps


AS_IT_SHOULD_BE = Cause("as it should be", rounding=True)
