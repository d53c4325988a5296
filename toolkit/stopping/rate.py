"""Rate: draft one more token while it pays, at the rate of tokens per target-forward time that is reached. No threshold.

The rule is ours, from renewal-reward theory (Dinkelbach's fixed point). The aim is the best E[tokens of a round] / E[cost of a
round]; lambda is that rate. Looking one step ahead, another draft forward pass of cost c is worth it iff

    P(all drafted so far accepted) * P(the next one accepted)  >  lambda * c

lambda is tracked prompt by prompt, or solved on traces (`analysis.timing`) and given as `rate`. With an acceptance head instead
of a pre-read one, this is SpecDec++'s rule at the threshold that theory gives, h = 1 - lambda c. One step ahead is not
optimal: the next token's score is information with a value of its own.

With a table of costs, c is the draft's and a column's price. A round goes on while some number of further tokens is worth its
price, those after the next one accepted at the rate a of the text so far; it has no draft if no number is worth it at that
rate. The estimator may promise too much elsewhere than where it was fitted. So its products of probabilities are multiplied by
what the text shows of them:

    s = min(1, (tokens accepted so far + n) / (sum of the products of all tokens drafted so far + n)),    n = `evidence`

With every round that drafts nothing a tenth of these counts fades: such a round shows nothing, and else a text that has
rejected some tokens would never be drafted for again.

Under block verification (method=block_rate) more than the product is kept; the rule is then a cautious one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from toolkit.config.notes import Above
from toolkit.drafts.kinds import gives_blocks
from toolkit.stopping.base import DrawnEstimator, State, Thresholded
from toolkit.stopping.planner import PricedDraft, best_fixed
from toolkit.stopping.prices import RATIO, Ratio
from toolkit.types import Drafted, Step, Verified

FIRST_RATE = 2.0  # lambda of a text that begins, without a table


@dataclass(frozen=True)
class Rate(PricedDraft, Thresholded):
    """Stop when survival * P(next accepted) < rate * cost_ratio.

    estimator   gives `drawn_probs(step)`, P(y_k accepted) and P(y_{k+1} accepted), before y_k is read
    cost_ratio  c, draft forward pass / target forward pass; None: `costs`, measured or named, else .2
    rate        lambda, tokens per target-forward time; None: what this prompt has reached so far, from `initial_rate` on
    costs       a cost table, a JSON or CSV file of `analysis.timing`; None: the one measured here, or `cost_ratio`, named or
                assumed, and columns for nothing

    The rest is `PricedDraft`'s; `batch_size`, `acceptance` and `evidence` count with a table alone. In the state are
    `expected`, how many of the drafted tokens the estimator expected to enter the text, and `correction`, s.
    """

    name = "rate"
    reads_states: ClassVar[bool] = True
    counts = (*PricedDraft.counts, "expected")
    fading = (*PricedDraft.fading, "expected")
    round_values: ClassVar = {**PricedDraft.round_values, "correction": 1.0}
    estimator: DrawnEstimator
    cost_ratio: Ratio = None
    rate: Annotated[float, Above(0)] | None = None

    @property
    def uses_history(self) -> bool:  # type: ignore[override]
        return self.rate is None or self.costs is not None

    @property
    def ratio(self) -> float:
        """c without a table: `cost_ratio`, or what is assumed."""
        return RATIO if self.cost_ratio is None else self.cost_ratio

    @property
    def level(self) -> float:
        return (self.rate or self.initial_rate or FIRST_RATE) * self.ratio

    def bind(self, pair: object) -> Rate:
        if self.costs is None:
            return replace(self, estimator=self.estimator.bind(pair))
        return self.bound(pair, self.read_table(0.0, 0.0), blocks=gives_blocks(getattr(pair, "draft", None)))

    def first_rate(self, state: State) -> Tensor | float:
        """lambda of a text that begins: that of the best fixed depth by `acceptance` at a table's prices."""
        if self.table is None:
            return FIRST_RATE
        return best_fixed(self.acceptance, self.prices_at(state).tokens[0])

    def reached(self, state: State) -> Tensor:
        return super().reached(state) if self.rate is None else torch.full_like(state["cost"], self.rate)

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        if self.table is None:
            return state, live
        return state, live & (self.further(self.posterior(state), self.prices_at(state).tokens, state, 0) > 0)

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        state, score = self.score(step, state)
        if self.table is None:
            return state, score >= (self.reached(state) * self.ratio if self.rate is None else self.level)
        state = {**state, "expected": state["expected"] + state["survival"]}
        worth = self.further(score * state["correction"], self.prices_at(state).tokens, state, step.depth)
        return state, worth > 0

    def foresee(self, step: Step) -> Tensor:
        return self.estimator.drawn_probs(step)[1]

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        state = super().observe(proposal, verdict, state)
        accepted, expected = (state[name] + self.evidence for name in ("accepted", "expected"))
        return {**state, "correction": (accepted / expected).clamp(max=1)}

    def spent(self, proposal: Drafted, state: State) -> Tensor:
        return 1 + proposal.num_calls * self.ratio if self.table is None else super().spent(proposal, state)
