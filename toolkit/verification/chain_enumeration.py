"""What a rule for chains emits, exactly: summed over every drafted chain. For small vocabularies and few tokens."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from toolkit.types import Proposal
from toolkit.verification.base import PathRule, TreeRule


class PrefixTables:
    """Next-token distributions p and q by the whole prefix, with zeros and ties: prefix -> [V]."""

    def __init__(self, vocab_size: int, depth: int, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.vocab_size, self.depth = vocab_size, depth
        prefixes = [prefix for n in range(depth + 1) for prefix in product(range(vocab_size), repeat=n)]
        self.p = {prefix: self._distribution() for prefix in prefixes}
        self.q = {prefix: self.p[prefix] if self._happens(0.15) else self._distribution() for prefix in prefixes}

    def probability(self, table: dict[tuple[int, ...], Tensor], tokens: tuple[int, ...]) -> float:
        """Probability of these tokens in a row under `p` or `q`."""
        prob = 1.0
        for i, token in enumerate(tokens):
            prob *= float(table[tokens[:i]][token])
        return prob

    def _happens(self, prob: float) -> bool:
        return float(torch.rand((), generator=self.generator)) < prob

    def _distribution(self) -> Tensor:
        weights = torch.rand(self.vocab_size, generator=self.generator, dtype=torch.float64) ** 3 + 1e-3
        if self._happens(0.3):
            weights[0] = 0.0
        if self._happens(0.2):
            weights[1:] = 0.5
        return weights / weights.sum()


def chain_outputs(rule: PathRule | TreeRule, tables: PrefixTables) -> tuple[dict[tuple[int, ...], float], float]:
    """Distribution of the first depth + 1 emitted tokens (completed by p), and the expected accepted length."""
    depth, distribution, expected = tables.depth, dict[tuple[int, ...], float](), 0.0
    for drafted in product(range(tables.vocab_size), repeat=depth):
        drawn = tables.probability(tables.q, drafted)
        if drawn == 0:
            continue
        p = torch.stack([tables.p[drafted[:i]] for i in range(depth + 1)])
        q = torch.stack([tables.q[drafted[:i]] for i in range(depth)])
        lengths, residuals = _on_chain(rule, p, q, torch.tensor(drafted))
        expected += drawn * float((lengths * torch.arange(depth + 1)).sum())
        for n, token in product(range(depth + 1), range(tables.vocab_size)):
            start = (*drafted[:n], token)
            mass = drawn * float(lengths[n] * residuals[n, token])
            for rest in product(range(tables.vocab_size), repeat=depth - n):
                done = (*start, *rest)
                tail = 1.0
                for i in range(n + 1, depth + 1):
                    tail *= float(tables.p[done[:i]][done[i]])
                distribution[done] = distribution.get(done, 0.0) + mass * tail
    return distribution, expected


def _on_chain(rule: PathRule | TreeRule, p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(rule, PathRule):
        return rule.distribution(p, q, tokens)
    count = torch.tensor([len(tokens)])
    ends, residuals = rule.distribution(Proposal(tokens.unsqueeze(0), q.unsqueeze(0), count, count), p.unsqueeze(0))
    return ends[0], residuals[0]


def chain_error(rule: PathRule | TreeRule, tables: PrefixTables) -> float:
    """Total variation between what a rule for chains emits and p's own tokens."""
    distribution, _ = chain_outputs(rule, tables)
    outputs = product(range(tables.vocab_size), repeat=tables.depth + 1)
    return sum(abs(distribution[out] - tables.probability(tables.p, out)) for out in outputs) / 2


def prefix_survival(tables: PrefixTables, prefix: tuple[int, ...]) -> tuple[float, float]:
    """Probability that a drafted prefix is accepted whole: prod min(1, p/q) token by token, block verification's P_i."""
    tokens, block = 1.0, 1.0
    for i, token in enumerate(prefix):
        ratio = float(tables.p[prefix[:i]][token] / tables.q[prefix[:i]][token])
        tokens, block = tokens * min(1.0, ratio), min(block * ratio, 1.0)
    return tokens, block


def expected_lengths(tables: PrefixTables) -> tuple[float, float]:
    """Mean accepted length by formula: of token-by-token rejection, and of block verification."""
    by_token, by_block = 0.0, 0.0
    for length in range(1, tables.depth + 1):
        for prefix in product(range(tables.vocab_size), repeat=length):
            if (drawn := tables.probability(tables.q, prefix)) > 0:
                tokens, block = prefix_survival(tables, prefix)
                by_token, by_block = by_token + drawn * tokens, by_block + drawn * block
    return by_token, by_block
