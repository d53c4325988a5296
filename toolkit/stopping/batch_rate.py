"""Batch rate: the rate rule for a batch whose rows draft side by side. No threshold; plain decoding is one of its choices.

The rule is ours, from renewal-reward theory as `rate` is. In a batch, every row pays for the deepest one. A draft forward
and one more column of the target's forward cost the same whether one row wants them or all. So all rows decide
together. With B rows, C(d) is the cost of a round of depth d. The batch reaches lambda tokens per unit of cost. Drafting
goes on behind depth k iff for some depth d > k

    sum over live rows, j = k+1 .. d, of P(the first j tokens are accepted)  >  lambda * (C(d) - C(k))

One step ahead, P comes from the estimator. Before anything is drafted, P comes from each row's running acceptance rate of
first tokens. Further ahead, each token is accepted with the live rows' mean running rate of later tokens. Looking further
than one step matters where the first extra column is expensive and the next ones are cheap. Depth d = 0 is plain
decoding: a batch for which drafting does not pay drafts nothing.

What the policy itself takes, such as its head's forward, is a part of C(d) for d > 0 if the table knows it (`own`). C(0) has
none of it, because plain decoding asks no head.

A draft model that has not read a row's prompt must read it first. These seconds are spread over the tokens of a usual
response, and only rows that have not been drafted for count (`prompt`, `response`).

Whether to draft, and lambda, are a plan, because planning takes as long as a draft forward of a small model. The batch keeps
to its plan for `HELD` further rounds, unless its number of slots changes. Rounds without drafts teach nothing, and what is
known fades in them.

lambda is the best rate of a fixed depth by the running acceptance rates and the costs. It is multiplied by the ratio of
achieved to planned tokens so far. This factor is needed because stopping inside a round beats every fixed depth. Costs
come from a table, never from a clock, so equal batches give equal texts.

A row's text depends on its neighbours, but its distribution does not. The depth of a round is decided before its
acceptance draws are looked at (`couples_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.load_cost import LoadCost
from toolkit.schema.arguments import check_ranges
from toolkit.schema.ranges import AtLeast, Between
from toolkit.stopping.base import DrawnEstimator, State, StoppingPolicy, chances_to_enter
from toolkit.transfer import Gate, floats_on
from toolkit.types import Drafted, Judged, Step

# Columns of `seen` [B, 2, 3], in which older rounds count less: drafted tokens that were accepted, out of those that were
# tried, for a round's first token and for later ones; tokens made, out of those that were planned.
FIRST, LATER, MADE = 0, 1, 2
HELD = 7  # further rounds for which a batch keeps to its plan
NEVER = float("inf")


@dataclass(frozen=True)
class Known:
    """What follows from the costs of a batch of one size, planned to depth D.

    cost   C(d), d = 0 .. D, as numbers
    plain  1 / C(0), tokens that plain decoding makes per row and unit of cost []
    reading  cost of a draft's reading of all rows' prompts, per token of a response
    deeper [D]        C(1) .. C(D)
    gaps [D + 1, D]   C(k + j) - C(k) for k = 0 .. D, j = 1 .. D; infinite beyond D
    powers [D]        0 .. D - 1
    prior [2, 3]      what `seen` starts from
    """

    cost: list[float]
    reading: float
    plain: Tensor
    deeper: Tensor
    gaps: Tensor
    powers: Tensor
    prior: Tensor


@dataclass(frozen=True)
class BatchRate(StoppingPolicy):
    """Draft on while the tokens that the batch expects exceed their cost times the batch's rate.

    estimator   gives `drawn_probs(step)`, P(y_k accepted) and P(y_{k+1} accepted), before y_k is read
    costs       a table by batch size, a JSON or CSV file (`toolkit.load_cost`); None: `cost_ratio` and `column_cost`
    cost_ratio  c, draft forward / target forward, whatever the batch
    column_cost  what one more token per row adds to a target forward, as a share of it
    own         entry of `costs` with the seconds that this policy itself takes (`LoadCost.rules`); None: they count as free
    context     tokens behind a forward that costs are taken at; None: the middle of those that the table was measured at
    prompt, response  tokens of a usual prompt, and of its response; without both, reading prompts counts as free
    first, later  acceptance of a round's first token, and of one behind accepted ones, before anything is known
    memory      how many tries that counts for, and how many rounds the past is remembered for
    deepest     the deepest round that is planned for: set by `within`
    table       costs, and `known`, what follows from them by batch size: set by `bind`
    """

    reads_states: ClassVar[bool] = True
    couples_rows: ClassVar[bool] = True
    estimator: DrawnEstimator
    costs: str | None = None
    own: str | None = None
    cost_ratio: Annotated[float, AtLeast(0)] = 0.2
    column_cost: Annotated[float, AtLeast(0)] = 0.0
    context: Annotated[int, AtLeast(0)] | None = None
    prompt: Annotated[int, AtLeast(1)] | None = None
    response: Annotated[int, AtLeast(1)] | None = None
    first: Annotated[float, Between(0, 1, "()")] = 0.75
    later: Annotated[float, Between(0, 1, "()")] = 0.75
    memory: Annotated[float, Between(1, 1e9)] = 20.0
    deepest: int = 20
    table: LoadCost | None = None
    known: dict[int, Known] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    def within(self, max_drafted: int) -> BatchRate:
        return replace(self, deepest=max_drafted)

    def bind(self, pair: object) -> BatchRate:
        table = LoadCost.ratio(self.cost_ratio, self.column_cost) if self.costs is None else LoadCost.load(self.costs)
        if self.own is not None and self.own not in table.rules:
            raise InputError(
                f"policy.own: expected an entry of {self.costs or 'the cost table'}'s `rules`, "
                f"{', '.join(table.rules) or 'which has none'}; got {self.own}"
            )
        return replace(self, estimator=self.estimator.bind(pair), table=table, known={})

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state per row.

        survival [B] of the round; seen [B, 2, 3]: counts of older rounds; unread [B]: 1 until the row is drafted for;
        needed [B, D + 1]: what the live rows' chances must exceed in sum behind depth k.
        The plan: price [B, D + 1], the same per live row; planned [B]: tokens per row and unit of cost; drafts [B]: 1 if it
        is to draft; slots [B] that it was made for; held [B]: rounds for which it still holds. A new row has zeros.
        """
        seen = torch.zeros(num_rows, 2, 3, device=device)
        seen[:, :, MADE] = self.memory
        one, nothing = torch.ones(num_rows, device=device), torch.zeros(num_rows, device=device)
        none = torch.zeros(num_rows, self.deepest + 1, device=device)
        return {
            "survival": one, "seen": seen, "unread": one, "needed": none, "price": none, "planned": nothing,
            "drafts": nothing, "slots": nothing, "held": nothing,
        }  # fmt: skip

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        held = (state["held"] > 0) & (state["slots"] == len(live))
        if Gate(live.device).passes(held, now=True):
            plan = {key: state[key].amax(0).expand_as(state[key]) for key in ("price", "planned", "drafts")}
            plan["held"] = state["held"] - 1
        else:
            plan = self._plan(live, state)
        new = {"needed": plan["price"] * live.sum(), "survival": torch.ones_like(state["survival"])}
        return {**state, **plan, **new}, plan["drafts"] > 0

    def _plan(self, live: Tensor, state: State) -> State:
        """The plan's part of the state, alike in all rows."""
        known, seen = self._known(len(live), live.device), state["seen"]
        weight = live.to(seen.dtype)
        rows = weight.sum().clamp(min=1)
        got, tried = (weight @ seen.flatten(1)).view(2, 3) + known.prior
        # the batch's acceptance of first and later tokens, shrunk to the prior; tokens made over planned ones
        batch = got / tried
        of_rows = torch.add(seen[:, 0], batch, alpha=self.memory) / (seen[:, 1] + self.memory)  # shrunk to the batch's
        first, later, _ = (weight @ of_rows / rows).unbind()
        ahead = (later**known.powers).cumsum(0)  # [D]: accepted of the next j tokens if the first is
        drafting = ((1 + first * ahead) / known.deeper).amax()  # per row and unit of cost, at the best fixed depth
        planned = torch.maximum(drafting, known.plain)
        pays = drafting > known.plain
        if known.reading:
            unread = torch.dot(weight, state["unread"]) / rows
            pays = drafting > known.plain * (1 + unread * known.reading * drafting)
        rate = planned * batch[MADE].clamp(min=1)
        price = rate * (known.gaps / ahead).amin(1)
        return {
            "price": price.expand_as(state["price"]),
            "planned": planned.expand_as(weight),
            "drafts": pays.to(weight.dtype).expand_as(weight),
            "slots": torch.full_like(weight, len(live)),
            "held": (HELD * weight.amax()).expand_as(weight),  # without a live row there is nothing to plan for
        }

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        assert step.live is not None, "the proposer says which rows are live"
        survival, following = chances_to_enter(self.estimator, step, state["survival"])
        goes_on = (following * step.live).sum() > state["needed"][0, step.depth]
        return {**state, "survival": survival}, goes_on.expand_as(step.live)

    def observe(self, proposal: Drafted, verdict: Judged, state: State) -> State:
        kept, drafted, length = 1 - 1 / self.memory, proposal.num_drafted, verdict.length
        if not proposal.num_nodes:
            return {**state, "seen": kept * state["seen"]}
        cost = self._known(len(drafted), drafted.device).cost
        first, tried = length.clamp(max=1), drafted.clamp(max=1)
        later = torch.minimum(length, drafted - tried)  # tried behind an accepted first one
        promised = cost[min(proposal.num_nodes, self.deepest)] * state["planned"]
        counts = torch.stack([first, length - first, length + 1, tried, later, promised], 1).view(-1, 2, 3)
        seen = torch.add(counts, state["seen"], alpha=kept)
        return {**state, "seen": seen, "unread": torch.zeros_like(state["unread"])}

    def _known(self, batch: int, device: torch.device) -> Known:
        assert self.table is not None, "bind the policy to a pair first"
        if batch not in self.known:
            depths = range(self.deepest + 1)
            context = self.table.middle if self.context is None else self.context
            cost = [self.table.round(batch, depth, context) for depth in depths]
            if self.own is not None:
                own = self.table.rules[self.own]
                cost = [seconds + own(batch, depth) * (depth > 0) for depth, seconds in enumerate(cost)]
            gaps = [[cost[k + j] - cost[k] if k + j in depths else NEVER for j in depths[1:]] for k in depths]
            reading = 0.0
            if self.prompt is not None and self.response is not None:
                reading = batch * self.table.draft(1, self.prompt) / self.response
            tried = self.memory
            prior = [[tried * self.first, tried * self.later, 0.0], [tried, tried, 1e-9]]
            tensors = ([1 / cost[0]], cost[1:], gaps, [float(depth) for depth in depths[:-1]], prior)
            plain, deeper, further, powers, start = (floats_on(device, values) for values in tensors)
            self.known[batch] = Known(cost, reading, plain[0], deeper, further, powers, start)
        return self.known[batch]
