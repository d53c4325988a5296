"""Batch rate: the rate rule for a batch whose rows draft side by side. It has no threshold, and may choose plain decoding.

The rule is ours, from renewal-reward theory as `rate` is. In a batch, every row pays for the deepest one. A draft forward
and one more column of the target's forward cost the same whether one row wants them or all. So all rows decide
together. With B rows, C(d) is the cost of a round of depth d. The batch reaches lambda tokens per unit of cost. Drafting
goes on behind depth k iff for some depth d > k

    sum over live rows, j = k+1 .. d, of P(the first j tokens are accepted)  >  lambda * (C(d) - C(k))

One step ahead, P comes from the estimator. Before anything is drafted, P comes from each row's running acceptance rate of
first tokens. Further ahead, each token is accepted with the live rows' mean running rate of later tokens. Looking further
than one step matters where the first extra column is expensive and the next ones are cheap. Depth d = 0 is plain
decoding: a batch for which drafting does not pay drafts nothing.

The lengths of accepted runs are not geometric, and texts end inside of rounds. If there is a recording, it says how many tokens
a round of every fixed depth makes (`made`). What it has beyond the tokens that the two acceptance rates expect of it is added
to what the running rates expect.

A batch may also settle on a depth before its round. Then no estimator is asked, and the round is one of a fixed length.
The seconds that the policy itself takes are a part of C(d) for d > 0, if the table has them (`own`). Those per drafted token,
such as a head's forward, count only where the estimator is asked.

A draft model must read a row's prompt before it drafts. These seconds are spread over the tokens of a usual response
(`prompt`, `response`). They count for all rows, whether their prompts have been read or not: while a batch drafts, every
new text is read.

lambda is the rate of the rounds so far that asked the estimator. Before such rounds, it is the rate that the best fixed depth
would reach by the running acceptance rates and the costs, times a gain. Stopping inside a round gains most for a row alone
(`gain`), because the chances of many rows average out (`gain_many`). With B rows the gain is gain_many + (gain - gain_many) /
B^2, because it fell like this on the pairs that were measured. If lambda does not exceed the best fixed depth's rate by the
factor `SURER`, the batch settles on that depth.

Fewer tokens are made than expected where texts end and slots stay free. The share that is kept is `kept` for a row alone and
`kept_many` with many rows. With B rows it is kept_many + (kept - kept_many) / B. A batch drafts if the better rate, times this
share and with the reading of prompts, exceeds the rate of plain decoding. Costs come from a table, never from a clock, so equal
batches give equal texts.

Planning takes as long as a draft forward of a small model. So a plan holds for several rounds: whether to draft, lambda and the
settled depth. The batch keeps to it for `HELD` further rounds (`RESTING` without drafts), unless its number of slots changes or
all its rows are new. Rounds without drafts add no counts. The older counts fade by these rounds when the next plan is made.

A row's text depends on its neighbours, but its distribution does not. The depth of a round is decided before its
acceptance draws are looked at (`couples_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from toolkit.config.notes import Above, AtLeast, Between, File
from toolkit.config.values import check_ranges
from toolkit.errors import InputError
from toolkit.load_cost import LoadCost
from toolkit.stopping.base import DrawnEstimator, State, StoppingPolicy, chances_to_enter
from toolkit.transfer import floats_on, numbers_of
from toolkit.types import Drafted, Judged, Step

# Columns of `seen` [B, 6], in which older rounds count less. Drafted tokens that were accepted and those that were tried: a
# round's first token and later ones apart. Tokens made in rounds that asked the estimator, and what these rounds cost.
FIRST, LATER, MADE, FIRST_TRIED, LATER_TRIED, SPENT = range(6)
GOT, TRIED = slice(FIRST, MADE), slice(FIRST_TRIED, SPENT)
# Columns of a plan [4 + D + 1]: rounds for which it still holds, slots that it was made for, and whether to draft.
# Then the settled depth (0: the estimator is asked) and D + 1 prices. Behind depth k = 0 .. D, the live rows' mean chance must
# exceed the k-th price.
LEFT, SLOTS, DRAFTS, DEPTH, PRICE = range(5)
# Further rounds for which a batch keeps to a plan with drafts, and to one without.
HELD, RESTING = 15, 63
# Asking the estimator must gain this factor over the best fixed depth. Costs are measured with fixed lengths. Depths that vary
# cost more in practice, because each has shapes of its own to be captured.
SURER = 1.03
NEVER = float("inf")


@dataclass(frozen=True)
class Known:
    """What follows from the costs of a batch of one size, planned to depth D. The unit of cost is a round of plain decoding.

    cost   C(d) / C(0), d = 0 .. D, where the estimator is asked, as numbers
    settled  the same costs where the depth is settled
    reading  cost of a draft's reading of all rows' prompts, per token of a response
    gain   tokens per cost that stopping inside a round makes, over those of the best fixed depth
    kept   tokens that a fixed depth makes, as a share of the expected ones
    deeper [2, D]     C(1) .. C(D) where the depth is settled, and where the estimator is asked
    beyond [D]        accepted tokens of a fixed depth on the recording, less those that `first` and `later` expect of it
    gaps [D + 1, D]   C(k + j) - C(k) for k = 0 .. D, j = 1 .. D; infinite beyond D
    powers [D]        0 .. D - 1
    prior [6]         what `seen` starts from, all rows together; tokens made are 0 here, as they depend on the depth
    slots []          the size
    tick [5 + D]      what is subtracted from a kept plan per round
    counts            values of `counted`, by the round's depth and whether this depth was settled
    """

    cost: list[float]
    settled: list[float]
    reading: float
    gain: float
    kept: float
    deeper: Tensor
    beyond: Tensor
    gaps: Tensor
    powers: Tensor
    prior: Tensor
    slots: Tensor
    tick: Tensor
    counts: dict[tuple[int, bool], Tensor] = field(default_factory=dict, kw_only=True)

    def counted(self, most: int, settled: bool) -> Tensor:
        """What a round of depth `most` adds to `seen` [(most + 1)^2, 6]: at drafted * (most + 1) + accepted.

        Of rounds whose depth was settled, only the acceptance counts.
        """
        if (most, settled) not in self.counts:
            asked, cost = int(not settled), self.cost[min(most, len(self.cost) - 1)]
            lines = [
                [min(n, 1), max(n - 1, 0), asked * (n + 1), min(d, 1), max(min(n + 1, d) - 1, 0), asked * cost]
                for d in range(most + 1)
                for n in range(most + 1)
            ]
            self.counts[most, settled] = floats_on(self.prior.device, lines).to(self.prior.dtype)
        return self.counts[most, settled]


@dataclass(frozen=True)
class BatchRate(StoppingPolicy):
    """Draft on while the tokens that the batch expects exceed their cost times the batch's rate.

    estimator   gives `drawn_probs(step)`, P(y_k accepted) and P(y_{k+1} accepted), before y_k is read
    costs       a table by batch size, a JSON or CSV file (`toolkit.load_cost`); None: `cost_ratio` and `column_cost`
    cost_ratio  c, draft forward / target forward, whatever the batch
    column_cost  what one more token per row adds to a target forward, as a share of it
    own         entry of `costs` with the seconds that this policy itself takes (`LoadCost.rules`); None: they count as 0
    context     tokens before a forward that costs are taken at; None: the middle of those that the table was measured at
    longest     tokens before a forward in the longest of many rows, where a batch costs as much as its longest row does. With
                B rows the context is longest - 2 (longest - context) / (B + 1): the expected maximum of B uniform contexts.
                None: the mean context counts
    prompt, response  tokens of a usual prompt, and of its response; without both, the reading of prompts costs nothing
    first, later  acceptance rate of a round's first token, and of one behind accepted ones, before any round
    made        tokens that a round of a fixed depth 1, 2, .. makes on a recording whose acceptance rates are `first` and
                `later`. Deeper rounds differ from what these rates expect as the last one does. None: as these rates expect
    gain        tokens per cost that stopping inside a round makes for a row alone, over those of the best fixed depth,
                before any round. The defaults exceed `SURER`, so that the estimator is asked until the gain is known
    gain_many   the same for many rows
    kept        tokens that a fixed depth makes for a row alone, as a share of the expected ones: fewer where a text ends
    kept_many   the same for many rows
    memory      how many tries the acceptance rates and the gain above count for, and how many rounds the past is remembered for
    rests       whether rounds without drafts are allowed
    settles     whether rounds of a settled depth are allowed
    deepest     the deepest round that is planned for: set by `within`
    table       costs, and `known`, what follows from them by batch size: set by `bind`
    """

    reads_states: ClassVar[bool] = True
    couples_rows: ClassVar[bool] = True
    estimator: DrawnEstimator
    costs: Annotated[str | None, File()] = None
    own: str | None = None
    cost_ratio: Annotated[float, AtLeast(0)] = 0.2
    column_cost: Annotated[float, AtLeast(0)] = 0.0
    context: Annotated[int, AtLeast(0)] | None = None
    longest: Annotated[int, AtLeast(0)] | None = None
    prompt: Annotated[int, AtLeast(1)] | None = None
    response: Annotated[int, AtLeast(1)] | None = None
    first: Annotated[float, Between(0, 1, "()")] = 0.75
    later: Annotated[float, Between(0, 1, "()")] = 0.75
    made: Sequence[Annotated[float, AtLeast(1)]] | None = None
    gain: Annotated[float, Above(0)] = 1.15
    gain_many: Annotated[float, Above(0)] = 1.05
    kept: Annotated[float, Above(0)] = 1.0
    kept_many: Annotated[float, Above(0)] = 1.0
    memory: Annotated[float, Between(1, 1e9)] = 20.0
    rests: bool = True
    settles: bool = True
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

    def asking(self) -> BatchRate:
        return replace(self, settles=False, known={})

    def settled(self, state: State) -> bool:
        return "settled" in state

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state per row. A new row has zeros.

        survival [B]   of the round
        share [B]      1 / the number of live rows, 0 for others
        seen [B, 6]    counts of older rounds
        plan [B, 5 + D]  the batch's plan, the same in all rows but new ones
        settled [B]    the settled depth; only in rounds that have one
        """
        none = torch.zeros(num_rows, PRICE + self.deepest + 1, device=device)
        return {"survival": none[:, 0], "share": none[:, 0], "seen": none.new_zeros(num_rows, 6), "plan": none}

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        rows, plan = len(live), state["plan"][:1]
        if not rows:
            return state, live
        said = numbers_of(plan[0, :PRICE])
        if rows > 1 and not said[SLOTS]:  # a new text in the first slot
            plan = state["plan"].index_select(0, state["plan"][:, SLOTS].argmax().view(1))
            said = numbers_of(plan[0, :PRICE])
        if said[LEFT] > 0 and said[SLOTS] == rows:
            new = {**state, "plan": (plan - self._known(rows, live.device).tick).expand(rows, -1)}
        else:
            seen = state["seen"]
            if said[SLOTS] and not said[DRAFTS]:  # what was known when the batch began to rest
                seen = seen * (1 - 1 / self.memory) ** (1 + RESTING - max(said[LEFT], 0.0))
            made = self._plan(live, seen)
            said = numbers_of(made[:PRICE])
            new = {**state, "seen": seen, "plan": made.expand(rows, -1)}
        if not said[DRAFTS]:
            return new, torch.zeros_like(live)
        if said[DEPTH]:
            new["settled"] = torch.full_like(live, int(said[DEPTH]), dtype=torch.long)
        elif rows > 1:
            weight = live.to(state["share"].dtype)
            new["share"] = weight / weight.sum().clamp(min=1)
        return new, live

    def _plan(self, live: Tensor, seen: Tensor) -> Tensor:
        """A plan from the counts of the live rows: [5 + D]."""
        known, weight = self._known(len(live), live.device), live.to(seen.dtype)
        rows, alive = weight.sum().clamp(min=1), weight.amax()  # without a live row there is nothing to plan for
        batch = torch.addmv(known.prior, seen.T, weight)
        # Acceptance rates of first and later tokens: the batch's shrink to the prior, and the rows' to the batch's.
        of_batch = batch[GOT] / batch[TRIED]
        of_rows = torch.add(seen[:, GOT], of_batch, alpha=self.memory) / (seen[:, TRIED] + self.memory)
        first, later = (weight @ of_rows / rows).unbind()
        ahead = (later**known.powers).cumsum(0)  # [D]: accepted of the next j tokens if the first is
        accepted = (first * ahead + known.beyond).clamp(min=0)
        made = 1 + torch.minimum(accepted, known.powers + 1)  # tokens per row
        (fixed, asked), depths = (made / known.deeper).max(1)  # per unit of cost
        rate = torch.add(batch[MADE], asked, alpha=self.memory * known.gain) / batch[SPENT]
        settled = rate <= SURER * fixed if self.settles else torch.zeros_like(alive)
        reached = known.kept * torch.where(settled.bool(), fixed, rate)
        drafts = (reached > 1 + known.reading * reached) * alive if self.rests else alive
        left = torch.sub(RESTING * alive, drafts, alpha=RESTING - HELD)
        depth = (1 + depths[0]) * settled
        return torch.cat([torch.stack([left, known.slots, drafts, depth]), rate * (known.gaps / ahead).amin(1)])

    def expected(self, batch: int) -> tuple[list[float], list[float]]:
        """Tokens over plain decoding's in equal time at depth 1 .. D: where the depth is settled, and where it is not.

        They follow from `first`, `later`, `made` and the costs. Where the depth is not settled, the estimator is asked.
        """
        known = self._known(batch, torch.device("cpu"))
        accepted = zip(self._accepted(), known.beyond.tolist(), strict=True)
        made = [1 + min(max(more + beyond, 0), depth) for depth, (more, beyond) in enumerate(accepted, start=1)]
        settled, asked = (
            [tokens / cost for tokens, cost in zip(made, costs[1:], strict=True)]
            for costs in (known.settled, known.cost)
        )
        return settled, asked

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        assert step.live is not None, "the proposer says which rows are live"
        if "settled" in state:
            return state, state["settled"] > step.depth
        price = state["plan"][0, PRICE + step.depth]
        survival, following = chances_to_enter(self.estimator, step, state["survival"] if step.depth > 1 else None)
        if len(step.live) == 1:
            return {**state, "survival": survival}, following > price
        mean = torch.dot(following.to(price.dtype), state["share"] * step.live)
        return {**state, "survival": survival}, (mean > price).expand_as(step.live)

    def observe(self, proposal: Drafted, verdict: Judged, state: State) -> State:
        most, settled = proposal.num_nodes, "settled" in state
        if settled:
            state = {name: value for name, value in state.items() if name != "settled"}
        if not most:
            return state
        known, kept = self._known(len(state["seen"]), verdict.length.device), 1 - 1 / self.memory
        at = torch.add(verdict.length, proposal.num_drafted, alpha=most + 1)
        return {**state, "seen": torch.add(known.counted(most, settled).index_select(0, at), state["seen"], alpha=kept)}

    def _accepted(self) -> list[float]:
        """Tokens that `first` and `later` expect to be accepted of the first 1 .. D."""
        return [self.first * sum(self.later**j for j in range(depth)) for depth in range(1, self.deepest + 1)]

    def _beyond(self) -> list[float]:
        """`Known.beyond`."""
        made = list(self.made or ())[: self.deepest]
        found = [tokens - 1 - more for tokens, more in zip(made, self._accepted(), strict=False)]
        return found + (found[-1:] or [0.0]) * (self.deepest - len(found))

    def _contexts(self, batch: int) -> float:
        """Tokens before a forward that a batch of this size pays for."""
        assert self.table is not None
        mean = self.table.middle if self.context is None else float(self.context)
        return mean if self.longest is None else max(mean, self.longest - 2 * (self.longest - mean) / (batch + 1))

    def _known(self, batch: int, device: torch.device) -> Known:
        assert self.table is not None, "bind the policy to a pair first"
        if batch not in self.known:
            depths = range(self.deepest + 1)
            context = self._contexts(batch)
            seconds = [self.table.round(batch, depth, context) for depth in depths]
            cost = settled = [one / seconds[0] for one in seconds]
            if self.own is not None:
                own = self.table.rules[self.own]
                cost, settled = (
                    [one + own(batch, asked * depth) / seconds[0] * (depth > 0) for depth, one in enumerate(cost)]
                    for asked in (1, 0)
                )
            gaps = [[cost[k + j] - cost[k] if k + j in depths else NEVER for j in depths[1:]] for k in depths]
            reading = 0.0
            if self.prompt is not None and self.response is not None:
                reading = batch * self.table.draft(1, self.prompt) / self.response / seconds[0]
            tried = self.memory
            prior = [tried * self.first, tried * self.later, 0.0, tried, tried, tried]
            tick = [1.0] + [0.0] * (PRICE + self.deepest)
            powers = [float(depth) for depth in depths[:-1]]
            lists = [settled[1:], cost[1:]], self._beyond(), gaps, powers, prior, float(batch), tick
            tensors = [floats_on(device, values) for values in lists]
            gain = self.gain_many + (self.gain - self.gain_many) / batch**2
            kept = self.kept_many + (self.kept - self.kept_many) / batch
            self.known[batch] = Known(cost, settled, reading, gain, kept, *tensors)
        return self.known[batch]
