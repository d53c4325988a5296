"""The batch's rate rule as the head of `toolkit/stopping/batch_rate.py` says it, slow and obvious."""

from __future__ import annotations

import torch

from toolkit.stopping import BatchRate
from toolkit.stopping.batch_rate import HELD, RESTING, SURER

FIRST, LATER, MADE = range(3)
NEW = -1000  # of a row that has not been planned for


class SlowBatchRate:
    """The rule, row by row in plain numbers."""

    def __init__(self, policy: BatchRate, rows: int):
        known = policy._known(rows, torch.device("cpu"))
        self.policy, self.cost, self.settled_cost, self.reading = policy, known.cost, known.settled, known.reading
        self.gain = policy.gain_many + (policy.gain - policy.gain_many) / rows**2
        self.kept = policy.kept_many + (policy.kept - policy.kept_many) / rows
        self.seen, self.held = [self.nothing() for _ in range(rows)], [NEW] * rows
        self.drafts, self.settled = False, 0

    def nothing(self) -> list[list[float]]:
        return [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]

    def join(self, row: int) -> None:
        self.seen[row], self.held[row] = self.nothing(), NEW

    def begin(self, live: list[bool]) -> bool:
        self.live, self.survival = [row for row, here in enumerate(live) if here], [1.0] * len(live)
        held = [left for left in self.held if left != NEW]  # the batch's plan is that of a row that was there
        if held and held[0] > 0:
            self.held = [held[0] - 1] * len(live)
        else:
            if held and not self.drafts:  # it has been at rest
                faded = (1 - 1 / self.policy.memory) ** (1 + RESTING)
                self.seen = [[[faded * count for count in kind] for kind in seen] for seen in self.seen]
            self.drafts = self.plan()
            self.held = [(HELD if self.drafts else RESTING) if self.live else 0] * len(live)
        self.rate = self.price * len(self.live)
        return self.drafts

    def plan(self) -> bool:
        policy, deepest = self.policy, self.policy.deepest
        total = lambda kind, part: sum(self.seen[row][kind][part] for row in self.live)
        share = lambda seen, tries, prior: (seen + policy.memory * prior) / (tries + policy.memory)
        priors = (policy.first, policy.later)
        pooled = [share(total(kind, 0), total(kind, 1), priors[kind]) for kind in (FIRST, LATER)]
        chances = [[share(*seen[kind], pooled[kind]) for kind in (FIRST, LATER)] for seen in self.seen]
        self.later = sum(chances[row][LATER] for row in self.live) / max(len(self.live), 1)
        mean = lambda d: sum(self.accepted(chances[row][FIRST], d) for row in self.live) / max(len(self.live), 1)
        gained = lambda d: len(self.live) * min(max(mean(d), 0), d)
        count = max(len(self.live), 1)
        rates = lambda costs: [(count + gained(d)) / costs[d] / count for d in range(1, deepest + 1)]  # per row
        fixed, asked = rates(self.settled_cost), max(rates(self.cost))
        made, spent = (total(MADE, part) for part in (0, 1))
        rate = self.price = (made + policy.memory * self.gain * asked) / (spent + policy.memory)
        if policy.settles and rate <= SURER * max(fixed):
            rate, self.settled = max(fixed), 1 + fixed.index(max(fixed))
        else:
            self.settled = 0
        pays = 1 / (self.kept * rate) + self.reading < self.cost[0]
        return bool(self.live) and (pays or not policy.rests)

    def accepted(self, first: float, depth: int) -> float:
        """Tokens accepted of a fixed depth: by the acceptance rates, and what the recording had beyond them."""
        policy, beyond = self.policy, 0.0
        if policy.made is not None:
            known = min(depth, len(policy.made))
            beyond = policy.made[known - 1] - 1 - policy.first * sum(policy.later**j for j in range(known))
        return first * self.ahead(depth) + beyond

    def ahead(self, count: int) -> float:
        """Tokens accepted of the next `count`, if the first is."""
        return sum(self.later**j for j in range(count))

    def step(self, depth: int, accepted: list[float], following: list[float], live: list[bool]) -> bool:
        if self.settled:
            return depth < self.settled
        self.survival = [a * b for a, b in zip(self.survival, accepted, strict=True)]
        worth = lambda d: sum(
            self.survival[row] * following[row] * self.ahead(d - depth) for row in range(len(live)) if live[row]
        )
        deeper = range(depth + 1, self.policy.deepest + 1)
        return any(worth(d) > self.rate * (self.cost[d] - self.cost[depth]) for d in deeper)

    def observe(self, drafted: list[int], length: list[int]) -> None:
        if not any(drafted):
            return
        spent = self.cost[min(max(drafted), self.policy.deepest)]
        for row in self.live:
            d, n = drafted[row], length[row]
            rewarded = [0, 0] if self.settled else [n + 1, spent]
            new = [[min(n, 1), min(d, 1)], [max(n - 1, 0), max(min(n, d - 1), 0)], rewarded]
            kept = 1 - 1 / self.policy.memory
            for kind in (FIRST, LATER, MADE):
                self.seen[row][kind] = [kept * a + b for a, b in zip(self.seen[row][kind], new[kind], strict=True)]
