"""The batch's rate rule as the head of `toolkit/stopping/batch_rate.py` says it, slow and obvious."""

from __future__ import annotations

import torch

from toolkit.stopping import BatchRate
from toolkit.stopping.batch_rate import HELD, RESTING

FIRST, LATER, MADE = range(3)
NEW = -1000  # of a row that has not been planned for


class SlowBatchRate:
    """The rule, row by row in plain numbers."""

    def __init__(self, policy: BatchRate, rows: int):
        known = policy._known(rows, torch.device("cpu"))
        self.policy, self.cost, self.reading = policy, known.cost, known.reading
        self.gain = policy.gain_many + (policy.gain - policy.gain_many) / rows**2
        self.seen, self.held = [self.nothing() for _ in range(rows)], [NEW] * rows
        self.drafts: bool | None = None

    def nothing(self) -> list[list[float]]:
        return [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]

    def join(self, row: int) -> None:
        self.seen[row], self.held[row] = self.nothing(), NEW

    def begin(self, live: list[bool]) -> bool:
        self.live, self.survival = [row for row, here in enumerate(live) if here], [1.0] * len(live)
        if self.held[0] > 0:  # the first row's plan is the batch's
            self.held = [left - 1 for left in self.held]
        else:
            if (
                self.drafts is False and self.held[0] != NEW
            ):  # the first row has been there since the batch began to rest
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
        gained = lambda d: sum(chances[row][FIRST] * self.ahead(d) for row in self.live)
        rates = [(len(self.live) + gained(d)) / self.cost[d] for d in range(deepest + 1)]
        fixed = max(rates[1:]) / max(len(self.live), 1)  # per row, as all that follows
        made, spent = (total(MADE, part) for part in (0, 1))
        rate = (made + policy.memory * self.gain * fixed) / (spent + policy.memory)
        self.price = max(rate, 1.0 / self.cost[0]) if policy.rests else rate
        pays = bool(self.live) and 1 / rate + self.reading < self.cost[0]
        return pays or (bool(self.live) and not policy.rests)

    def ahead(self, count: int) -> float:
        """Tokens accepted of the next `count`, if the first is."""
        return sum(self.later**j for j in range(count))

    def step(self, depth: int, accepted: list[float], following: list[float], live: list[bool]) -> bool:
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
            new = [[min(n, 1), min(d, 1)], [max(n - 1, 0), max(min(n, d - 1), 0)], [n + 1, spent]]
            kept = 1 - 1 / self.policy.memory
            for kind in (FIRST, LATER, MADE):
                self.seen[row][kind] = [kept * a + b for a, b in zip(self.seen[row][kind], new[kind], strict=True)]
