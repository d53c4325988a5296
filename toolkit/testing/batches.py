"""For people who write a policy that decides for the rows of a batch together: are they still independent?

    error, lengths = coupled_error(policy, rule, [PrefixTables(2, 2, 0), PrefixTables(2, 2, 1)], state)

By enumeration, for small vocabularies and few tokens. `lengths` says which draft lengths occurred: a check in which the
policy always drafts the same number shows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch

from toolkit.decoding import ChainProposer
from toolkit.stopping import StoppingPolicy
from toolkit.stopping.base import State, check_obeyed
from toolkit.types import DraftStep
from toolkit.verification import PathRule
from toolkit.verification.chain_enumeration import PrefixTables


def coupled_error(
    policy: StoppingPolicy, rule: PathRule, rows: Sequence[PrefixTables], state: State
) -> tuple[float, set[int]]:
    """Total variation between what rows decoded together emit jointly and the product of their targets' distributions.

    One round, summed over everything that the rows may draft; each row's tokens are completed by its p. `policy` is bound, and
    sees q's statistics, hidden states of zeros, and which rows are live. Also returns the draft lengths that occurred.
    """
    check_obeyed(policy, ChainProposer.obeys, "coupled_error")
    depth, size = rows[0].depth, rows[0].vocab_size
    singles = list(product(range(size), repeat=depth))
    joint: dict[tuple[tuple[int, ...], ...], float] = {}
    lengths: set[int] = set()
    for drafts in product(singles, repeat=len(rows)):
        drawn = math.prod(table.probability(table.q, draft) for table, draft in zip(rows, drafts, strict=True))
        if drawn == 0:
            continue
        sent = _sent(policy, rows, drafts, state)
        lengths.update(sent)
        outs = [_emitted(rule, table, draft[:n]) for table, draft, n in zip(rows, drafts, sent, strict=True)]
        for texts in product(*outs):
            mass = drawn * math.prod(out[text] for out, text in zip(outs, texts, strict=True))
            joint[texts] = joint.get(texts, 0.0) + mass
    error = 0.0
    for texts in product(product(range(size), repeat=depth + 1), repeat=len(rows)):
        expected = math.prod(table.probability(table.p, text) for table, text in zip(rows, texts, strict=True))
        error += abs(joint.get(texts, 0.0) - expected) / 2
    return error, lengths


def _sent(
    policy: StoppingPolicy, rows: Sequence[PrefixTables], drafts: Sequence[tuple[int, ...]], state: State
) -> list[int]:
    """How many of each row's drafted tokens a policy that decides for all rows together sends to the target."""
    live = torch.ones(len(rows), dtype=torch.bool)
    state, going = policy.begin(live, state)
    drafted = torch.zeros(len(rows), dtype=torch.long)
    for depth in range(rows[0].depth):
        probs = torch.stack([table.q[draft[:depth]] for table, draft in zip(rows, drafts, strict=True)])
        step = DraftStep(depth + 1, probs.log(), probs, probs[:, :0], live=live)
        if policy.reads and bool(going.all()):
            state, going = policy.read(step, state)
        assert bool(going.all()) or not bool(going.any()), "the rows of a batch go on or stop together"
        if not bool(going.all()):
            break
        drafted += 1
        step.tokens = torch.tensor([draft[depth] for draft in drafts])
        state, going = policy.step(step, state)
    lengths: list[int] = policy.sent(drafted, state).tolist()
    return lengths


def _emitted(rule: PathRule, table: PrefixTables, drafted: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Distribution of a row's first depth + 1 tokens, given what it drafted; completed by p."""
    distribution: dict[tuple[int, ...], float] = {}
    p = torch.stack([table.p[drafted[:i]] for i in range(len(drafted) + 1)])
    q = torch.stack([table.q[drafted[:i]] for i in range(len(drafted))]) if drafted else p[:0]
    lengths, residuals = rule.distribution(p, q, torch.tensor(drafted, dtype=torch.long))
    for n, token in product(range(len(drafted) + 1), range(table.vocab_size)):
        start = (*drafted[:n], token)
        for rest in product(range(table.vocab_size), repeat=table.depth - n):
            done = (*start, *rest)
            tail = math.prod(float(table.p[done[:i]][done[i]]) for i in range(n + 1, table.depth + 1))
            distribution[done] = distribution.get(done, 0.0) + float(lengths[n] * residuals[n, token]) * tail
    return distribution
