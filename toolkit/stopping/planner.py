"""The planner of every rule that weighs costs: gains of tokens in an order, their prices, one lambda, what rounds add to it.

A token's gain is its probability to enter the text. lambda is the rate that a text has reached, or that the live rows of a
batch reach together, in tokens per unit of cost. The first n tokens of an order are worth

    sum over k = 1..n of  gain(k) - lambda * price(k)

A token that costs more than it brings may lead to others that pay for it. So the largest of these sums decides. An order is
that of the depths of a chain or block, of copied tokens, or of candidates from anywhere, such as the nodes of a tree.

lambda is the text's `tokens` over its `cost`, both in the state. The unit of cost is a target forward pass over one token per
row. Costs come from a table, never from a clock.

Shapes: B rows, N tokens in order, D deepest round, K tokens of the longest copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.config.notes import AtLeast, Between, File, Internal
from toolkit.config.values import check_ranges
from toolkit.costs.load import LoadCost
from toolkit.costs.table import CostTable
from toolkit.engine.device import floats_on
from toolkit.errors import warn
from toolkit.stopping.base import CopyEstimator, State, StoppingPolicy, entry_probs
from toolkit.stopping.prices import COLUMN, RATIO, Prices, PriceTable
from toolkit.types import Drafted, Match, RoundCounts, Step, Verified

KEPT = 0.9  # of a text's evidence, by every round that drafts nothing


def ahead(next_prob: Tensor, acceptance: Tensor, count: int) -> Tensor:
    """Gains [..., count] of tokens to be drafted: the next one, and later ones, accepted with `acceptance` each."""
    return next_prob.unsqueeze(-1) * acceptance.unsqueeze(-1) ** (depths(count, acceptance.device) - 1)


def copied(copies: CopyEstimator, match: Match, available: Tensor, deepest: int) -> Tensor:
    """Gains [B, K] of copied tokens: P(all up to k are accepted), 0 beyond the `available` ones; K is at most `deepest`."""
    count = min(match.length.shape[1], deepest)
    numbers = depths(count, available.device)
    columns = (match.length, match.occurrences, match.agreement)
    probs = copies.prob(Match(*(column[:, :count] for column in columns)), numbers)
    return torch.where(numbers <= available.unsqueeze(1), probs.cumprod(1), 0.0)


def depths(count: int, device: torch.device) -> Tensor:
    """1 .. count, as floats."""
    return floats_on(device, [float(depth) for depth in range(1, count + 1)])


def net(gains: Tensor, prices: Tensor, rate: Tensor) -> Tensor:
    """What the first 1 .. N tokens are worth [..., N]: gains less prices [..., N] at a lambda [...].

    Sums are of float64, so that equal prices decide token by token, as in float32.
    """
    return (gains - rate.unsqueeze(-1) * prices).double().cumsum(-1)


def worth(gains: Tensor, prices: Tensor, rate: Tensor) -> Tensor:
    """What the best number of tokens, at least 1, is worth [...]: above 0 iff some number pays. Arguments as of `net`."""
    return (gains.cumsum(-1) - rate.unsqueeze(-1) * prices.cumsum(-1)).amax(-1)


def after(prices: Tensor, depth: int) -> Tensor:
    """Prices [..., N] of the tokens after the first `depth`, at least of the last one, by those of depths 1 .. D [..., D]."""
    return prices[..., min(depth, prices.shape[-1] - 1) :]


def best_fixed(acceptance: float, prices: Tensor) -> Tensor:
    """The tokens per cost of the best fixed depth [], by prices of depths 1 .. D [D]."""
    numbers = depths(len(prices) + 1, prices.device) - 1
    tokens, cost = (acceptance**numbers).cumsum(0), pad(prices, (1, 0)).cumsum(0) + 1
    return (tokens / cost).amax()


def with_longest(state: State, live: Tensor) -> State:
    """The state with the longest live row's context in every row, where it has contexts."""
    if "context" not in state:
        return state
    return {**state, "context": torch.where(live, state["context"], 0.0).amax().expand(len(live))}


def together(state: State, live: Tensor) -> Tensor:
    """lambda: tokens that the live rows reach together per unit of cost, []; 0 without one."""
    weight = live.to(state["cost"].dtype)
    return weight.sum() * torch.dot(weight, state["tokens"]) / torch.dot(weight, state["cost"]).clamp(min=1e-9)


def pays_together(next_prob: Tensor, acceptance: Tensor, prices: Tensor, rate: Tensor, step: Step) -> Tensor:
    """Whether some number of tokens after a step's is worth more to all drafting rows than its price [B] bool.

    next_prob, acceptance  as in `ahead`, of every row [B];  prices of depths 1 .. D [D] and rate []: of the batch
    """
    assert step.live is not None, "the proposer says which rows are live"
    drafting = torch.where(step.live, next_prob, 0.0).nan_to_num(0.0)  # a row that is broken adds nothing
    prices = after(prices, step.depth)
    gains = ahead(drafting, acceptance, len(prices)).sum(0)
    return (worth(gains, prices, rate) > 0).expand_as(step.live)


@dataclass(frozen=True, kw_only=True)
class Planner(StoppingPolicy):
    """A rule that weighs gains against prices. Rules say what they gain, what they decide, and what they count.

    costs        a cost table, a JSON or CSV file of `analysis.timing`; None: the rule's own figures, or what is measured
    deepest      the deepest round that is planned for: set by `within`
    table, blocks  the costs, and whether a round's tokens come from one draft forward pass: set by `bind`

    counts       names of the state that add up over a text [B], from 0 on; `verified` and `accepted`: of a draft model's tokens
    round_values  names and values that every round begins with [B]; `survival`: P(what was drawn so far enters the text)
    by_depth     those of both that are [B, D]
    furthest     a draft is priced for this many tokens of a text that it has not read
    """

    counts: ClassVar[tuple[str, ...]] = ("tokens", "cost", "verified", "accepted")
    round_values: ClassVar[Mapping[str, float]] = {"survival": 1.0}
    by_depth: ClassVar[tuple[str, ...]] = ()
    furthest: ClassVar[int] = 0
    estimator: Any
    costs: Annotated[str | CostTable | None, File()] = None
    deepest: Annotated[int, Internal()] = 20
    table: Annotated[LoadCost | None, Internal()] = None
    blocks: Annotated[bool, Internal()] = False
    _planned: dict[tuple[int, torch.device], PriceTable] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    @property
    def reads_context(self) -> bool:  # type: ignore[override]
        return self.table is not None and len(self.table.contexts) > 1

    def within(self, max_drafted: int) -> Self:
        return replace(self, deepest=max_drafted)

    def read_table(self, ratio: float | None, column: float | None) -> LoadCost:
        """The table of `costs`, of these figures if that is None. Warns of what rounds of this depth ask beyond it."""
        if self.costs is None:
            return LoadCost.ratio(RATIO if ratio is None else ratio, COLUMN if column is None else column)
        if isinstance(self.costs, CostTable):
            return LoadCost.of([self.costs])
        table = LoadCost.load(self.costs)
        table.warn(self.costs, self.batches(), self.deepest + 1)
        if (
            table.fall is not None and "processor" not in table.about
        ):  # medians of passes in turns are taken as measured
            warn(f"policy.costs={self.costs}: {table.fall}")
        return table

    def bound(self, pair: object, table: LoadCost, blocks: bool = False) -> Self:
        """The rule at the prices of a table, its estimator bound to a pair."""
        table = table.apart("drafts that give blocks") if blocks else table
        return replace(self, estimator=self.estimator.bind(pair), table=table, blocks=blocks)

    def batches(self) -> list[int]:
        """Batch sizes that rounds are priced for, as far as they are known before any round."""
        return []

    def batch(self, state: State) -> int:
        """The rows of the batch that a round is priced for: those that are known, or of the state."""
        return self.batches()[0] if self.batches() else len(state["cost"])

    def prices_at(self, state: State) -> Prices:
        """The prices of rows at their contexts."""
        assert self.table is not None, "bind the policy to a pair first"
        batch, device = self.batch(state), state["cost"].device
        if (batch, device) not in self._planned:
            self.table.warn(self.costs, [] if self.batches() else [batch])
            table = PriceTable.of(self.table, batch, self.deepest, self.furthest, self.blocks, device)
            self._planned[batch, device] = table
        return self._planned[batch, device].at(state.get("context"))

    def init(self, num_rows: int, device: torch.device) -> State:
        values = {**dict.fromkeys(self.counts, 0.0), **self.round_values}
        shapes = {name: (num_rows, self.deepest) if name in self.by_depth else (num_rows,) for name in values}
        return {
            name: torch.full(shapes[name], value, dtype=torch.float32, device=device) for name, value in values.items()
        }

    def score(self, step: Step, state: State) -> tuple[State, Tensor]:
        """The new state, and P(y_{k+1} enters the text) [B], after y_k is drawn. In the state: `survival`, that y_k does."""
        survival, following = entry_probs(self.estimator, step, state["survival"])
        return {**state, "survival": survival}, following

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        counts = {name: state[name] + more for name, more in self.counted(proposal, verdict, state).items()}
        fresh = Planner.init(self, len(state["cost"]), state["cost"].device)
        return {**state, **counts, **{name: fresh[name] for name in self.round_values}}

    def counted(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        """What a round adds to the counts of its rows; a copy's tokens are no drafted ones."""
        verified = torch.minimum(verdict.length + 1, proposal.num_drafted)
        drafted = {"verified": verified, "accepted": verdict.length}
        drafted = {name: torch.where(proposal.num_calls > 0, number, 0) for name, number in drafted.items()}
        certain = verdict.kept_certain if isinstance(verdict, RoundCounts) else None
        tokens = verdict.length + 1 if certain is None else verdict.length + 1 + certain
        return {"tokens": tokens, "cost": self.spent(proposal, state), **drafted}

    def spent(self, proposal: Drafted, state: State) -> Tensor:
        """The cost of a round [B]. Rows that decide together pay for the one that drafts most."""
        calls, sent = proposal.num_calls, proposal.num_drafted
        if isinstance(proposal, RoundCounts) and proposal.sent_certain is not None:
            sent = sent + proposal.sent_certain
        if self.couples_rows:
            calls, sent = (number.amax().expand_as(number) for number in (calls, sent))
        prices = self.prices_at(state)
        return 1 + calls * prices.forward + prices.read(sent)


@dataclass(frozen=True, kw_only=True)
class Priced(Planner):
    """A planner whose rows start with a lambda of their own, priced in a batch of a size that is set.

    batch_size   rows that are decoded together: the table is read at this size
    initial_rate  lambda of a text that begins; None: `first_rate` says
    memory       target forward passes that `initial_rate` counts for
    """

    batch_size: Annotated[int, AtLeast(1)] = 1
    initial_rate: Annotated[float, Between(0, 1e6, "(]")] | None = None
    memory: Annotated[float, Between(0, 1e6, "(]")] = 20.0

    def batches(self) -> list[int]:
        return [self.batch_size]

    def init(self, num_rows: int, device: torch.device) -> State:
        state = super().init(num_rows, device)
        ones = torch.ones_like(state["cost"])
        rate = self.first_rate(state) if self.initial_rate is None else self.initial_rate
        return {**state, "tokens": rate * self.memory * ones, "cost": self.memory * ones}

    def first_rate(self, state: State) -> Tensor | float:
        """lambda of a text that begins, where none is given: a little above plain decoding's."""
        return 1.2

    def reached(self, state: State) -> Tensor:
        """lambda of every text [B]."""
        return state["tokens"] / state["cost"]


@dataclass(frozen=True, kw_only=True)
class PricedDraft(Priced):
    """A rule that weighs the tokens of a draft model, by what the text has accepted of its drafted tokens.

    acceptance   probability that a drafted token is accepted, before any round
    evidence     drafted tokens that `acceptance` counts for

    fading       counts that a round without drafted tokens makes less: it shows nothing, and what a text has shown is less
                 sure of what comes. Else a text that has rejected some tokens would never be drafted for again
    """

    fading: ClassVar[tuple[str, ...]] = ("verified", "accepted")

    acceptance: Annotated[float, Between(0, 1, "()")] = 0.75
    evidence: Annotated[float, Between(0, 1e6, "(]")] = 5.0

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        state = super().observe(proposal, verdict, state)
        kept = torch.where(proposal.num_calls > 0, 1.0, KEPT).to(state["cost"].dtype)
        return {**state, **{name: state[name] * kept for name in self.fading}}

    def posterior(self, state: State) -> Tensor:
        """The mean acceptance of the text's drafted tokens [B]: of a Beta distribution, after `acceptance` and `evidence`."""
        return (state["accepted"] + self.evidence * self.acceptance) / (state["verified"] + self.evidence)

    def further(self, next_prob: Tensor, prices: Tensor, state: State, depth: int) -> Tensor:
        """What the best number of tokens after the first `depth` is worth [B], the later ones by the text's acceptance.

        next_prob  that the next one enters the text [B];  prices  of depths 1 .. D [B, D], or [1, D] of all rows
        """
        prices = after(prices, depth)
        return worth(ahead(next_prob, self.posterior(state), prices.shape[1]), prices, self.reached(state))

    def best_fixed(self, state: State) -> Tensor:
        """What the best number of tokens is worth before any is drawn [B], each accepted as the text's were."""
        prices = self.prices_at(state).tokens
        gains = self.posterior(state).unsqueeze(1) ** depths(self.deepest, prices.device)
        return worth(gains, prices, self.reached(state))

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        return state, live & (self.best_fixed(state) > 0)

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        state, following = self.score(step, state)
        return state, self.further(following, self.prices_at(state).tokens, state, step.depth) > 0
