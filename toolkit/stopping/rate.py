"""Rate: draft one more token while it pays, at the rate of tokens per target-forward time that is reached. No threshold.

The rule is ours, from renewal-reward theory (Dinkelbach's fixed point). The aim is to maximise E[tokens of a round] /
E[cost of a round]; lambda is the best such rate. Looking one step ahead, another draft forward pass of cost c is worth it iff

    P(all drafted so far accepted) * P(the next one accepted)  >  lambda * c

lambda is the rate that the rule itself achieves. It is tracked while decoding, prompt by prompt, or solved on traces
and given as `rate`. For the latter, `analysis.timing` keeps the best rate on the way to the fixed point. With an acceptance
head instead of a pre-read one, this is SpecDec++'s rule at the threshold that theory gives, h = 1 - lambda c.
Looking one step ahead is not optimal, because the next token's score is information with a value of its own.

With a table of costs, c is the draft's and a column's price. A table may fall: five tokens may be cheaper to read than two. So
a round goes on while some number of further tokens is worth its price, those after the next one accepted at the rate a of the
text so far; and it begins without a draft if no number of tokens is worth it at that rate. The estimator may have been fitted
to another pair or domain, and promise too much. So its products of probabilities are multiplied by what the text shows of them:

    s = min(1, (tokens accepted so far + n) / (sum of the products of all tokens drafted so far + n)),    n = `evidence`

Under block verification (method=block_rate) more than the product is kept; the rule is then a cautious one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from toolkit.config.notes import Above, Between
from toolkit.drafts.kinds import gives_blocks
from toolkit.stopping.base import DrawnEstimator, State, Thresholded, entry_probs
from toolkit.stopping.priced import PricedDraft
from toolkit.stopping.prices import RATIO, Prices, PriceTable, Ratio, table_of
from toolkit.types import Drafted, Step, Verified


@dataclass(frozen=True)
class Rate(PricedDraft, Thresholded):
    """Stop when survival * P(next accepted) < rate * cost_ratio.

    estimator   gives `drawn_probs(step)`, P(y_k accepted) and P(y_{k+1} accepted), before y_k is read
    cost_ratio  c, draft forward pass / target forward pass; None: `costs`, measured or named, else .2
    rate        lambda, tokens per target-forward time; None: what this prompt has reached so far, from `initial_rate` on
    costs       a cost table, a JSON or CSV file of `analysis.timing`; None: the one measured here, or `cost_ratio`, named or
                assumed, and columns for nothing

    The rest is `PricedDraft`'s; `batch_size`, `acceptance` and `evidence` count with a table alone.
    """

    name = "rate"
    reads_states: ClassVar[bool] = True
    estimator: DrawnEstimator
    cost_ratio: Ratio = None
    rate: Annotated[float, Above(0)] | None = None
    initial_rate: Annotated[float, Between(0, 1e6, "(]")] = field(default=2.0, kw_only=True)

    @property
    def uses_history(self) -> bool:  # type: ignore[override]
        return self.rate is None or self.costs is not None

    @property
    def ratio(self) -> float:
        """c without a table: `cost_ratio`, or what is assumed."""
        return RATIO if self.cost_ratio is None else self.cost_ratio

    @property
    def level(self) -> float:
        return (self.initial_rate if self.rate is None else self.rate) * self.ratio

    def bind(self, pair: object) -> Rate:
        estimator = self.estimator.bind(pair)
        if self.costs is None:
            return replace(self, estimator=estimator)
        table = table_of(self.costs, 0.0, 0.0, [self.batch_size], self.deepest + 1)
        blocks = gives_blocks(getattr(pair, "draft", None))
        prices = PriceTable.of(table, self.batch_size, self.deepest, flat=False, blocks=blocks)
        return replace(self, estimator=estimator, prices=prices)

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state of `PricedDraft`: tokens and cost if the rate is tracked, counts of drafted tokens with a table.

        expected    how many of the drafted tokens the estimator expected to enter the text
        correction  s, after the text's verdicts
        """
        state = super().init(num_rows, device)
        state |= {"expected": torch.zeros_like(state["cost"]), "correction": torch.ones_like(state["cost"])}
        left_out = set() if self.rate is None else {"tokens", "cost"}
        left_out |= {"verified", "accepted", "expected", "correction"} if self.prices is None else set()
        return {name: tensor for name, tensor in state.items() if name not in left_out}

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        if self.prices is None:
            return super().begin(live, state)
        return state, live & self._pays(self.prices_at(state), self.posterior(state), state, 0)

    def _pays(self, prices: Prices, next_prob: Tensor, state: State, depth: int) -> Tensor:
        """Whether a next token is worth its price [B]; next_prob [B]: its probability to enter the text."""
        rate = (
            torch.full_like(state["survival"], self.rate) if self.rate is not None else state["tokens"] / state["cost"]
        )
        return prices.pay(next_prob, self.posterior(state), rate, depth)

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        state, score = self.score(step, state)
        if self.prices is not None:
            state = {**state, "expected": state["expected"] + state["survival"]}
            return state, self._pays(self.prices_at(state), score * state["correction"], state, step.depth)
        if self.rate is not None:
            return state, score >= self.level
        return state, score >= state["tokens"] / state["cost"] * self.ratio

    def score(self, step: Step, state: State) -> tuple[State, Tensor]:
        survival, following = entry_probs(self.estimator, step, state["survival"])
        return {**state, "survival": survival}, following

    def foresee(self, step: Step) -> Tensor:
        return self.estimator.drawn_probs(step)[1]

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        fresh = {"survival": torch.ones_like(state["survival"])}
        if self.prices is not None:
            verified = torch.minimum(verdict.length + 1, proposal.num_drafted)
            accepted, expected = state["accepted"] + verdict.length, state["expected"]
            fresh |= {"verified": state["verified"] + verified, "accepted": accepted, "expected": expected}
            fresh["correction"] = ((accepted + self.evidence) / (expected + self.evidence)).clamp(max=1)
        if self.rate is not None:
            return fresh
        if self.prices is None:
            cost = proposal.num_calls * self.ratio + 1
        else:
            prices = self.prices_at(state)
            cost = proposal.num_calls * prices.forward + 1 + prices.read(proposal.num_drafted)
        return {**fresh, "tokens": state["tokens"] + verdict.length + 1, "cost": state["cost"] + cost}
