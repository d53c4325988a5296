"""The batch's rate rule as the head of `toolkit/stopping/batch_rate.py` says it, slow and obvious."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.stopping import BatchRate


@dataclass
class Row:
    """What a row's text has shown so far, and the probability that its round's tokens are all accepted."""

    accepted: int = 0
    verified: int = 0
    tokens: int = 0
    cost: float = 0.0
    survival: float = 1.0


class SlowBatchRate:
    """The rule, row by row in plain numbers."""

    def __init__(self, policy: BatchRate, rows: int):
        assert policy.table is not None
        self.policy, self.rows = policy, [Row() for _ in range(rows)]
        seconds = [policy.table.round(rows, depth, policy.table.middle) for depth in range(policy.deepest + 1)]
        self.cost = [one / seconds[0] for one in seconds]

    def join(self, row: int) -> None:
        self.rows[row] = Row()

    def begin(self, live: list[bool]) -> bool:
        memory, a = self.policy.memory, self.policy.acceptance
        for row in self.rows:
            row.survival = 1.0
        texts = [row for row, is_live in zip(self.rows, live, strict=True) if is_live]
        best = max((1 + self.ahead(a, d)) / self.cost[d] for d in range(self.policy.deepest + 1))
        made, spent = sum(row.tokens for row in texts), sum(row.cost for row in texts)
        self.rate = len(texts) * (made + memory * best) / (spent + memory)
        accepted, verified = sum(row.accepted for row in texts), sum(row.verified for row in texts)
        running = (accepted + memory * a) / (verified + memory)
        deeper = range(1, self.policy.deepest + 1)
        return any(len(texts) * self.ahead(running, d) > self.rate * (self.cost[d] - self.cost[0]) for d in deeper)

    @staticmethod
    def ahead(probability: float, depth: int) -> float:
        """Tokens accepted of `depth`, if each is with this probability."""
        return sum(probability**j for j in range(1, depth + 1))

    def step(self, depth: int, accepted: list[float], following: list[float], live: list[bool]) -> bool:
        worth = 0.0
        for row, now, after, is_live in zip(self.rows, accepted, following, live, strict=True):
            row.survival *= now
            worth += row.survival * after * is_live
        return worth > self.rate * (self.cost[depth + 1] - self.cost[depth])

    def observe(self, drafted: list[int], length: list[int]) -> None:
        spent = self.cost[max(drafted)]
        for row, sent, kept in zip(self.rows, drafted, length, strict=True):
            row.accepted += kept
            row.verified += min(kept + 1, sent)
            row.tokens += kept + 1
            row.cost += spent
