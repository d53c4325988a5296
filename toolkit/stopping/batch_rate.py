"""Batch rate: the rate rule for a batch whose rows draft side by side. It has no threshold. It may choose autoregressive
decoding.

The rule is ours, from renewal-reward theory as `rate` is. In a batch, every row pays for the deepest one. A draft forward pass
and one more column of the target's forward pass cost the same whether one row wants them or all. So all rows decide together.
C(k) is the cost of a round of depth k, and the batch reaches lambda tokens per unit of cost. After depth k, drafting goes on
iff

    for some d:  (1 + a + .. + a^(d - 1)) * sum over live rows of P(all drafted so far are accepted) * P(the next one is)
                     >  lambda * (C(k + d) - C(k))

The estimator gives both probabilities; a stands for the tokens after the next one. Where every token costs the same, d = 1
decides. Before anything is drafted, no estimate exists: each token counts as accepted with the
live rows' running acceptance rate a. A round drafts iff for some depth d

    live rows * (a + a^2 + .. + a^d)  >  lambda * (C(d) - C(0))

Otherwise it has depth 0, which is autoregressive decoding. lambda is what the live rows' texts have reached so far. Before
any round it is the rate of the best fixed depth, by the assumed acceptance rate. Costs come from a table, never from a
clock, so equal batches give equal texts; they are those of the longest live row's context. The unit of cost is a round of
autoregressive decoding with this many slots.

A row's text depends on its neighbours, but its distribution does not. The depth of a round is decided before its acceptance
draws are looked at (`couples_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from toolkit.config.notes import Between, File, Internal
from toolkit.config.values import check_ranges
from toolkit.costs.load import LoadCost
from toolkit.costs.table import CostTable
from toolkit.drafts.kinds import gives_blocks
from toolkit.engine.device import floats_on
from toolkit.stopping.base import DrawnEstimator, State, StoppingPolicy, entry_probs
from toolkit.stopping.prices import BATCH_COLUMN, BatchColumn, PriceTable, Ratio, table_of
from toolkit.types import Drafted, Step, Verified

COUNTS = ("accepted", "tried", "tokens", "cost")  # of a row's text so far


@dataclass(frozen=True)
class BatchRate(StoppingPolicy):
    """Draft on while the tokens that the batch expects exceed their cost times the batch's rate.

    estimator   gives `drawn_probs(step)`, P(y_k accepted) and P(y_{k+1} accepted), before y_k is read
    costs       a table by batch size, a JSON or CSV file of `analysis.timing`; None: `cost_ratio` and `column_cost`
    cost_ratio  c, draft forward pass / target forward pass, whatever the batch; None: what is measured, else .2
    column_cost  what one more token per row adds to a target forward pass, as a share of it; None: what is measured, else 0
    acceptance  probability that a drafted token is accepted, before any round
    memory      how many drafted tokens, and how many rounds, the start counts for
    deepest     the deepest round that is planned for: set by `within`
    table, blocks  the costs, and whether a round's tokens come from one draft forward pass: set by `bind`
    """

    name = "batch_rate"
    reads_states: ClassVar[bool] = True
    couples_rows: ClassVar[bool] = True
    estimator: DrawnEstimator
    costs: Annotated[str | CostTable | None, File()] = None
    cost_ratio: Ratio = None
    column_cost: BatchColumn = None
    acceptance: Annotated[float, Between(0, 1, "()")] = 0.75
    memory: Annotated[float, Between(0, 1e9, "(]")] = 20.0
    deepest: Annotated[int, Internal()] = 20
    table: Annotated[LoadCost | None, Internal()] = None
    blocks: Annotated[bool, Internal()] = False
    _planned: dict[int, PriceTable] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    @property
    def reads_context(self) -> bool:  # type: ignore[override]
        return self.table is not None and len(self.table.contexts) > 1

    def within(self, max_drafted: int) -> BatchRate:
        return replace(self, deepest=max_drafted)

    def bind(self, pair: object) -> BatchRate:
        column = BATCH_COLUMN if self.column_cost is None else self.column_cost
        table = table_of(self.costs, self.cost_ratio, column, (), self.deepest + 1)
        blocks = gives_blocks(getattr(pair, "draft", None))
        return replace(self, estimator=self.estimator.bind(pair), table=table, blocks=blocks)

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state: survival of the round, the row's counts so far, and the batch's rate and acceptance in every row."""
        names = ("survival", "rate", "acceptance", *COUNTS)
        return {name: torch.zeros(num_rows, dtype=torch.float32, device=device) for name in names}

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        if not len(live):
            return state, live
        if "context" in state:  # the batch's, from here on
            longest = torch.where(live, state["context"], 0.0).amax()
            state = {**state, "context": longest.expand(len(live))}
        extra, depths = self._costs(state)
        start = self._best_fixed(extra)
        weight = live.to(extra.dtype)
        accepted, tried, tokens, cost = (torch.dot(weight, state[name]) for name in COUNTS)
        acceptance = (accepted + self.memory * self.acceptance) / (tried + self.memory)
        rate = (tokens + self.memory * start) / (cost + self.memory)  # per row
        drafts = ((acceptance**depths).cumsum(0) > rate * extra.cumsum(0)).any()
        shared = {"rate": (weight.sum() * rate).expand(len(live)), "acceptance": acceptance.expand(len(live))}
        return {**state, **shared}, live & drafts

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        assert step.live is not None, "the proposer says which rows are live"
        extra, depths = self._costs(state)
        survival, following = entry_probs(self.estimator, step, state["survival"] if step.depth > 1 else None)
        first = min(step.depth, self.deepest - 1)
        price = extra[first : first + 1 if self.costs is None else None].cumsum(0)  # equal ones pay for no earlier one
        ahead = (state["acceptance"][0] ** (depths[: len(price)] - 1)).cumsum(0)
        following = following.nan_to_num(0.0).to(extra.dtype)  # a row that is broken adds nothing
        gained = torch.dot(following, step.live.to(extra.dtype))
        return {**state, "survival": survival}, (gained * ahead > state["rate"][0] * price).any().expand_as(step.live)

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        extra, _ = self._costs(state)
        tried = torch.minimum(verdict.length + 1, proposal.num_drafted)
        spent = 1 + extra[: proposal.num_nodes].sum()
        counts = zip(COUNTS, (verdict.length, tried, verdict.length + 1, spent), strict=True)
        return {**state, **{name: state[name] + more for name, more in counts}}

    def _costs(self, state: State) -> tuple[Tensor, Tensor]:
        """C(1) - C(0) .. C(D) - C(D - 1) of a batch of this state's rows [D], and the depths 1 .. D [D]."""
        assert self.table is not None, "bind the policy to a pair first"
        batch, device = len(state["cost"]), state["cost"].device
        if batch not in self._planned:
            self.table.warn(self.costs, [batch])
            self._planned[batch] = PriceTable.of(self.table, batch, self.deepest, flat=False, blocks=self.blocks)
        context = state["context"][:1] if "context" in state else None
        extra = self._planned[batch].at(context, device).tokens[0]
        return extra, floats_on(device, [float(depth) for depth in range(1, self.deepest + 1)])

    def _best_fixed(self, extra: Tensor) -> Tensor:
        """The tokens per cost of the best fixed depth, by the assumed acceptance, []."""
        depths = floats_on(extra.device, [float(depth) for depth in range(self.deepest + 1)])
        tokens, cost = (self.acceptance**depths).cumsum(0), torch.nn.functional.pad(extra, (1, 0)).cumsum(0) + 1
        return (tokens / cost).amax()
