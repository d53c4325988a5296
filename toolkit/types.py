"""What travels through the decoding loop.

Shapes: B batch slots, N proposed nodes, V vocabulary, D hidden size, L distributions that candidates were drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from toolkit.errors import InputError

UNDRAWN = "a policy reads the probability of a token before it is drawn: expected that in `step`, not in `read`"
SMALLEST = 1e-6  # probabilities below count as this where their logarithms are taken
# A text, its token ids, chat messages, or a request: {"messages": [...], "tools": [...]}, see `chat.read_request`.
Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | Mapping[str, Any]


@dataclass(frozen=True)
class History:
    """What the draft showed at the H positions before one: a function of the text alone, wherever rounds start.

    Positions begin with a response's first token; those before are absent. The newest position is the last one.

    hidden [B, H, D]     the draft's final states there
    tokens [B, H]        the tokens that came there
    token_prob [B, H]    their unwarped probabilities
    entropy [B, H]       of the unwarped distributions, nats
    top_probs [B, H, 2]  their two largest probabilities
    present [B, H]       bool: whether there is such a position; where not, all else is 0
    likelihood [B]       sum of log token_prob over all positions before (each at least log SMALLEST)
    count [B]            how many these are
    """

    hidden: Tensor
    tokens: Tensor
    token_prob: Tensor
    entropy: Tensor
    top_probs: Tensor
    present: Tensor
    likelihood: Tensor
    count: Tensor

    def last(self, count: int) -> History:
        """The `count` newest of the positions."""
        first = self.tokens.shape[1] - count
        return replace(self, **{name: values[:, first:] for name, values in self.positions.items()})

    @property
    def positions(self) -> dict[str, Tensor]:
        """The fields that have an entry per position [B, H, ...]."""
        names = ("hidden", "tokens", "token_prob", "entropy", "top_probs", "present")
        return {name: getattr(self, name) for name in names}


class Step(Protocol):
    """What policies and heads may ask of a draft step [B]: of a live one (`DraftStep`) or of a recording's."""

    @property
    def depth(self) -> int:
        """The number of the step, k, from 1."""

    @property
    def tokens(self) -> Tensor | None:
        """y_k [B], or None while it has not been drawn."""

    @property
    def live(self) -> Tensor | None:
        """Which rows are drafting [B] bool, where the batch decides together; None: not given."""

    @property
    def hidden(self) -> Tensor:
        """The draft's final hidden state [B, D] that produced q_k; it has read y_{k-1} and not y_k."""

    @property
    def draft_prob(self) -> Tensor:
        """q_k(y_k), warped [B]."""

    @property
    def token_prob(self) -> Tensor:
        """Unwarped probability of y_k [B]."""

    @property
    def entropy(self) -> Tensor:
        """Entropy of the unwarped distribution [B], nats."""

    @property
    def top_probs(self) -> Tensor:
        """The two largest unwarped probabilities [B, 2]."""

    @property
    def margin(self) -> Tensor:
        """Distance between the two largest unwarped probabilities [B]."""

    @property
    def match(self) -> Match | None:
        """Where a copied token comes from; None: a draft model drew it."""

    def history(self, count: int) -> History | None:
        """The `count` positions before this one; None where nothing keeps them."""

    def head_logits(self, head: Callable[[Step], Tensor]) -> Tensor:
        """Raw logits [B] or [B, 2] of a head at work on the step: computed, or those that were recorded."""


STEP_NAMES = tuple(name for name in vars(Step) if not name.startswith("_"))


class Drafted(Protocol):
    """What policies may ask of a round's `Proposal`, live or replayed."""

    @property
    def num_drafted(self) -> Tensor:
        """Tokens that went to the target [B]."""

    @property
    def num_calls(self) -> Tensor:
        """Draft forward passes that the row paid for [B]."""

    @property
    def num_nodes(self) -> int:
        """The most tokens of a row."""


class Verified(Protocol):
    """What policies may ask of a round's `Verdict`, live or replayed."""

    @property
    def length(self) -> Tensor:
        """How many tokens were accepted [B]."""


@dataclass(frozen=True)
class RoundCounts:
    """What `observe` may ask of a round, where there is no proposal and no verdict but what they counted [B] each.

    sent_certain, kept_certain  nodes beside these that a grammar left alone: sent, and accepted; None: there were none
    """

    num_drafted: Tensor
    num_calls: Tensor
    length: Tensor
    sent_certain: Tensor | None = None
    kept_certain: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        return int(self.num_drafted.max())


@dataclass
class DraftStep:
    """What is available right after one draft forward pass, for every row; a `Step`.

    logits [B,V] unwarped
    probs  [B,V] q_k, the warped distribution y_k is drawn from
    hidden [B,D] has **read y_{k-1}** (at k = 1 the last token of the context) and not y_k: an estimate made from it alone is
                 about y_{k-1}
    tokens [B]   y_k, or None while it has not been drawn (`StoppingPolicy.read`)
    before       the positions before, the number that the policy asks for (`StoppingPolicy.num_history`); None: not kept

    Statistics are of the unwarped distribution where they say so: at temperature 0 warped ones are 1 and 0.
    """

    depth: int
    logits: Tensor
    probs: Tensor
    hidden: Tensor
    tokens: Tensor | None = None
    live: Tensor | None = None
    before: History | None = None
    match: Match | None = None

    def history(self, count: int) -> History | None:
        """The `count` positions before this one; None if the proposer keeps fewer."""
        if self.before is None or self.before.tokens.shape[1] < count:
            return None
        return self.before.last(count)

    def head_logits(self, head: Callable[[Step], Tensor]) -> Tensor:
        """What the head computes of this step."""
        return head(self)

    @cached_property
    def raw_probs(self) -> Tensor:
        """Unwarped distribution [B, V]."""
        logits = self.logits if self.logits.dtype == torch.float64 else self.logits.float()
        return logits.softmax(-1)

    @cached_property
    def entropy(self) -> Tensor:
        return torch.special.entr(self.raw_probs).sum(-1)

    @cached_property
    def top_probs(self) -> Tensor:
        return self.raw_probs.topk(2, dim=-1).values

    @cached_property
    def margin(self) -> Tensor:
        return self.top_probs[:, 0] - self.top_probs[:, 1]

    @cached_property
    def token_prob(self) -> Tensor:
        """Unwarped probability of the drawn token [B]."""
        if self.tokens is None:
            raise InputError(UNDRAWN)
        return self.raw_probs.gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)

    @cached_property
    def draft_prob(self) -> Tensor:
        """q_k(y_k), warped [B]."""
        if self.tokens is None:
            raise InputError(UNDRAWN)
        return self.probs.gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class Match:
    """What is known of a copied token y_k, for every row: the text's last tokens have occurred before.

    length       [B] how many of them
    occurrences  [B] how often, of those that agree with y_1 .. y_{k-1}
    agreement    [B] the share of these that go on with y_k
    """

    length: Tensor
    occurrences: Tensor
    agreement: Tensor


@dataclass(frozen=True)
class Children:
    """What a draft says of C candidates at W nodes of every row: its most probable tokens, in order.

    probs    [B, W, C] float64, of the distribution that the draft samples from; at temperature 0 of the unwarped one
    entropy  [B, W] of it, nats
    real     [B, W, C] bool: the vocabulary has so many tokens
    greedy   whether the temperature is 0
    depth    the level of the candidates
    draws    candidates are draws without replacement instead, and nothing above depends on them
    drawn    [B, W, C] float64, q of each draw; None: it has not been made
    """

    probs: Tensor
    entropy: Tensor
    real: Tensor
    greedy: bool
    depth: int = 1
    draws: bool = False
    drawn: Tensor | None = None


@dataclass(frozen=True)
class Nodes:
    """The M best nodes of a tree that grows, best first.

    depth     levels so far
    survival  [B, M] float64, the probability to enter the text; 0: not a node
    depths    [B, M] the level of each
    readable  [B, M] bool: it is of the last level and ends no text, so that the draft may read it next; of a level that
              is not drawn yet, by its candidates
    drawn     [B] the first nodes, which are drawn and sent in any case, whatever their survival; the rest are best first
    width     the most nodes that the draft reads next
    """

    depth: int
    survival: Tensor
    depths: Tensor
    readable: Tensor
    drawn: Tensor
    width: int

    def read(self, wanted: Tensor) -> Tensor:
        """Which of the nodes that are wanted [B, M] the draft reads next [B, M]: the best `width` of those that it may."""
        wanted = wanted & self.readable
        return wanted & (wanted.cumsum(1) <= self.width)


@dataclass(frozen=True)
class Proposal:
    """What goes to the target: a tree of drafted tokens per row, as flat arrays.

    tokens  [B, N]     parents [B, N]  index of the parent node, -1 for the context; None: a chain
    candidates  [B, M]     the node that each drawn token is, in the order they are tried; -1 after the last. Equal draws
                           after one prefix are one node. None: candidate n is node n
    draft_probs [B, L, V]  the distributions candidates were drawn from (without replacement: before removals)
    drawn_from  [B, M]     which of them candidate m was drawn from; None: candidate m from distribution m
    num_drafted [B]    nodes that count: the first ones of each row; the rest fills the batch
    num_calls   [B]    draft forward passes the row paid for
    cache_ids   [B, D, N] of what was drafted as a tree: each node's id in the cache of each draft; -1: not read there
    certain     [B, N] bool of a chain: nodes that a grammar left alone, whose acceptance says nothing; None: there are none
    valid       [B] False where the draft or the policy worked with what is not a number; None: it is for the rule to find
    """

    tokens: Tensor
    draft_probs: Tensor
    num_drafted: Tensor
    num_calls: Tensor
    parents: Tensor | None = None
    drawn_from: Tensor | None = None
    candidates: Tensor | None = None
    cache_ids: Tensor | None = None
    certain: Tensor | None = None
    valid: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """N, the width of the batch's arrays."""
        return self.tokens.shape[1]


@dataclass(frozen=True)
class Verdict:
    """What the rule decided.

    path   [B, M]  accepted node ids from the root on, -1 after the end
    length [B]     how many were accepted
    extra  [B]     the token after them
    bonus  [B]     True: every node down the path was accepted and extra comes from p; False: extra is `corrected`
    valid  [B]     False where a distribution was not a distribution (not a number): the row's verdict means nothing
    """

    path: Tensor
    length: Tensor
    extra: Tensor
    bonus: Tensor
    valid: Tensor


@dataclass(frozen=True)
class Round:
    """One proposal and its verdict, as counts and seconds. Never distributions.

    num_produced counts the tokens that entered the text: accepted ones and the extra one. Seconds are those of the whole
    batch, read on the host. The draft's are those of the proposal; all else since the round before counts for the target. In
    methods with several beams, accepted and produced tokens are layers, and `widths` are the beams each layer kept.
    """

    num_drafted: int
    num_draft_calls: int
    num_accepted: int
    num_produced: int
    bonus: bool
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    widths: tuple[int, ...] = ()

    @property
    def num_discarded(self) -> int:
        """Drafted and extra tokens that did not enter the text: K + 1 - produced."""
        return self.num_drafted + 1 - self.num_produced

    @property
    def source(self) -> str:
        """What drafted: "draft" (a draft model was read for the row), "copy" or "nothing"."""
        return "draft" if self.num_draft_calls else "copy" if self.num_drafted else "nothing"


@dataclass(frozen=True)
class Counts:
    """Totals over rounds; `+` adds them. num_drafted + num_target_calls = num_generated + num_discarded, always."""

    num_drafted: int = 0
    num_draft_calls: int = 0
    num_target_calls: int = 0
    num_generated: int = 0
    num_discarded: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @classmethod
    def of(cls, rounds: list[Round]) -> Counts:
        drafted, draft_calls = sum(r.num_drafted for r in rounds), sum(r.num_draft_calls for r in rounds)
        generated, discarded = sum(r.num_produced for r in rounds), sum(r.num_discarded for r in rounds)
        return cls(drafted, draft_calls, len(rounds), generated, discarded)


@dataclass
class Generation:
    """The response to one prompt.

    token_ids      new tokens, the end of text included
    text           decoded without special tokens, cut before a stop string
    rounds         in order; `counts` sums them
    finish_reason  "end" (of text), "stop" (string), "length" or "error"
    error          what went wrong with this row, if anything; its tokens up to there are kept
    beams, scores  of methods with several beams, else None
    """

    index: int
    prompt_ids: list[int]
    token_ids: list[int]
    text: str = ""
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = ""
    error: str | None = None
    beams: list[list[int]] | None = None
    scores: list[float] | None = None

    @property
    def counts(self) -> Counts:
        return Counts.of(self.rounds)
