"""The interface of every stopping policy: small, explicit state per row, two decisions.

A drawn token is always sent to the target. A policy only decides whether to draw the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from toolkit.engine.device import tensor_on
from toolkit.errors import InputError
from toolkit.types import Children, Drafted, Match, Nodes, Step, Verified

State = dict[str, Tensor]

# What a policy decides or learns by, and the attribute that says whether it does so at all (None: it always does).
HOOKS = {
    "begin": None,
    "read": "reads",
    "step": None,
    "sent": None,
    "plan": "plans_copies",
    "choose": "chooses_nodes",
    "observe": "uses_history",
}


class StoppingPolicy:
    """A policy decides between stop and go, per row.

    The state is a dict of tensors with a leading row dimension, fresh per prompt. Rows may be selected, replaced or
    repeated (for the nodes of a tree) by indexing every tensor alike. Quantities of one round are reset in `observe`.
    A row whose state is not a number ends with an error. So an estimate that decides belongs into the state.

    limit              the most tokens that the policy can ever ask for in a round; None: no limit of its own
    reads              True: it also decides after a forward pass, before its token is drawn (`read`)
    uses_history       False: a round's decisions do not depend on the rounds before, so that a replay may ask for all
                       rounds at once
    reads_states       True: it reads the draft's hidden states (trained heads do)
    needs_draft_model  False: it reads no distribution and no state of a draft, so that tokens may come from elsewhere
    reads_matches      True: it decides on copied tokens, by their match (`Step.match`)
    reads_context      True: its state holds `context`, the tokens of the row's prompt and text before the round [B] float,
                       which the loop writes there (`in_context`)
    plans_copies       True: it chooses how many copied tokens are sent, all of which are known (`plan`)
    chooses_nodes      True: it chooses among the draft's most probable tokens, which nobody has drawn (`judge`, `choose`)
    couples_rows       True: a row's decisions depend on its neighbours in the batch. Every row still follows the target's
                       distribution, independently of the others, but which text it gets depends on the batch
    passes_on          True: the hooks of this class (not of those derived from it) only pass on what the policies that it
                       holds decide. So a proposer need not obey them (`check_obeyed`)
    """

    limit: int | None = None
    reads: ClassVar[bool] = False
    needs_draft_model: ClassVar[bool] = True
    reads_states: ClassVar[bool] = False
    reads_matches: ClassVar[bool] = False
    reads_context: ClassVar[bool] = False
    plans_copies: ClassVar[bool] = False
    chooses_nodes: ClassVar[bool] = False
    uses_history: ClassVar[bool] = True
    couples_rows: ClassVar[bool] = False
    passes_on: ClassVar[bool] = False

    @property
    def num_history(self) -> int:
        """How many positions before a step the policy's head reads (`Step.history`), once bound."""
        return int(getattr(getattr(self, "estimator", None), "num_history", 0))

    def bind(self, pair: object) -> StoppingPolicy:
        """The policy for one pair; called once before decoding: estimators load and check their heads here."""
        return self

    def within(self, max_drafted: int) -> StoppingPolicy:
        """The policy for rounds of at most `max_drafted` tokens; policies that plan ahead plan no further."""
        return self

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state of rows that start a prompt."""
        return {}

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        """The new state before a round, and whether to draft at all [B]; False means autoregressive decoding.

        live  rows that may draft this round [B] bool: they hold a text, and it has room
        """
        return state, live

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        """The new state after y_k is drawn, and whether to pay another draft forward pass [B]."""
        assert step.tokens is not None
        return state, torch.ones_like(step.tokens, dtype=torch.bool)

    def foresee(self, step: Step) -> Tensor | None:
        """P(the token after y_k is accepted, if y_k is) [B]; None for policies that do not know this probability.

        The width of drafted forests depends on it.
        """
        return None

    def read(self, step: Step, state: State) -> tuple[State, Tensor]:
        """The new state after forward pass k has read y_{k-1}, and whether to draw y_k [B]. Called only if `reads`."""
        return state, torch.ones_like(step.entropy, dtype=torch.bool)

    def plan(self, match: Match, available: Tensor, live: Tensor, state: State) -> tuple[State, Tensor]:
        """The new state, and how many copied tokens are sent [B]. Called instead of `read` and `step` if `plans_copies`.

        match      of all tokens that may be copied, [B, K] each
        available  how many of them each row has [B]
        live       rows that may draft this round [B] bool, as in `begin`
        """
        return state, available

    def judge(self, children: Children) -> Tensor:
        """P(each candidate is accepted | its parent is, and no candidate before it was) [B, W, C]: only if `chooses_nodes`."""
        raise NotImplementedError

    def choose(self, nodes: Nodes, state: State) -> tuple[State, Tensor, Tensor]:
        """The new state once a level's candidates are among the nodes, how many of the best are sent if the tree ends here
        [B], and which the draft reads next [B, M]. Called instead of `read` and `step` if `chooses_nodes`.
        """
        raise NotImplementedError

    def sent(self, num_drafted: Tensor, state: State) -> Tensor:
        """How many of the drafted tokens [B] go to the target, once all rows have drafted: all, unless a policy ranks rows.

        Whether position k is among them may depend on nothing that was drawn at k or later in its row.
        """
        return num_drafted

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        """Learn from the target's verdict and be ready for the next round: the new state."""
        return state


def check_obeyed(policy: StoppingPolicy, obeys: tuple[str, ...], caller: str) -> None:
    """Raises InputError if a policy, or one that it holds, overrides a hook that is not among those the caller `obeys`."""
    for part in vars(policy).values():
        if isinstance(part, StoppingPolicy):
            check_obeyed(part, obeys, caller)
    kind: Any = type(policy)
    for hook in _overridden(kind):
        flag = HOOKS[hook]
        if hook not in obeys and (flag is None or getattr(policy, flag)):
            raise InputError(
                f"{caller} does not obey `{hook}`, which {kind.__name__} overrides; expected a policy without it, or a "
                "method whose proposer obeys it (docs/extending.md lists them)"
            )


@cache
def _overridden(kind: Any) -> list[str]:
    """The hooks of a class that do more than the default, or than to pass on."""
    neutral = [vars(part) for part in kind.__mro__ if part is StoppingPolicy or vars(part).get("passes_on")]
    return [hook for hook in HOOKS if getattr(kind, hook) not in [names.get(hook) for names in neutral]]


def in_context(policy: StoppingPolicy, state: State, context: Tensor | None) -> State:
    """The state before a round of rows after this many tokens [B], as policies that read it need it; None: not known."""
    return {**state, "context": context.float()} if policy.reads_context and context is not None else state


def with_fresh(policy: StoppingPolicy, state: State, row: int) -> State:
    """The state with one row as a prompt starts it. The tensors are new: those of a policy may share memory between rows."""
    if not state:
        return state
    device = next(iter(state.values())).device
    fresh, at = policy.init(1, device), tensor_on(device, [row])
    return {key: value.index_copy(0, at, fresh[key].to(value.dtype)) for key, value in state.items() if key in fresh}


class ReadEstimator(Protocol):
    """Gives the probability that the token which a state has read is accepted."""

    def bind(self, pair: Any) -> ReadEstimator:
        """Load and check what the estimator needs of a pair."""

    def read_prob(self, step: Step) -> Tensor:
        """P(y_{k-1} accepted) [B], given that the ones before it are."""


class DrawnEstimator(Protocol):
    """Gives the probabilities that the token just drawn, and the one after it, are accepted."""

    def bind(self, pair: Any) -> DrawnEstimator:
        """Load and check what the estimator needs of a pair."""

    def drawn_probs(self, step: Step) -> tuple[Tensor, Tensor]:
        """P(y_k accepted) and P(y_{k+1} accepted) [B] each, given that the ones before are."""


class LearningEstimator(Protocol):
    """A `DrawnEstimator` whose weights are in the policy's state, and learn from verdicts."""

    def bind(self, pair: Any) -> LearningEstimator:
        """Load and check what the estimator needs of a pair."""

    def init(self, num_rows: int, deepest: int, device: torch.device) -> State:
        """The weights of rows that start a prompt; rounds have at most `deepest` tokens."""

    def at(self, state: State) -> DrawnEstimator:
        """The estimator with the weights of a state."""

    def read(self, step: Step, state: State) -> State:
        """The entries of a state that change when a step's token has been drawn: what is learned from later."""

    def learn(self, num_drafted: Tensor, num_accepted: Tensor, state: State) -> State:
        """The entries of a state that change with a verdict, tokens of each row [B]."""


class CopyEstimator(Protocol):
    """Gives the probability that a copied token is accepted, given that the ones before it are."""

    def bind(self, pair: Any) -> CopyEstimator:
        """Read what the estimator needs."""

    def prob(self, match: Match, depth: Tensor) -> Tensor:
        """P(y_k accepted) of a match's shape, k = depth, which broadcasts to it; 0 where nothing is copied."""


def entry_probs(estimator: DrawnEstimator, step: Step, survival: Tensor | None) -> tuple[Tensor, Tensor]:
    """P(y_k enters the text) and P(y_{k+1} does, too) [B] each: products of `survival`, that of y_{k-1}, and estimates.

    survival  [B]; None: 1, as at a round's first token
    """
    accepted, following = estimator.drawn_probs(step)
    if survival is not None:
        accepted, following = accepted.to(survival.dtype), following.to(survival.dtype)
    entered = accepted if survival is None else survival * accepted
    next_entered = entered * following
    # The first is what policies keep: so what is not a number shows in the state, and ends the row.
    return torch.where(next_entered.isnan(), next_entered, entered), next_entered


class Thresholded(StoppingPolicy, ABC):
    """Goes on while a score stays at or above a level. A replay needs the scores only once for any number of levels."""

    uses_history: ClassVar[bool] = False

    @property
    @abstractmethod
    def level(self) -> float:
        """What the score must reach."""

    @abstractmethod
    def score(self, step: Step, state: State) -> tuple[State, Tensor]:
        """The new state and the score [B] after y_k is drawn."""

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        state, score = self.score(step, state)
        return state, score >= self.level
