"""What a rule for trees emits, exactly: summed over every tree that can be drawn. For small vocabularies and few nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from toolkit.testing import draft_distributions
from toolkit.types import Proposal
from toolkit.verification import TreeRule
from toolkit.verification.chain_enumeration import PrefixTables
from toolkit.verification.enumeration import candidate_tuples

Chains = list[
    tuple[tuple[int, ...], Tensor]
]  # every drawn text with what its last token was drawn from, level by level


def drawn_trees(scheme: str, k_config: Sequence[int], tables: PrefixTables) -> list[tuple[float, Chains]]:
    """Every tree with this many children per level, and its probability. Chains that draw the same are drawn on apart."""
    prefixes, trees = list(tables.q), [(1.0, Chains(), [()])]
    for width in k_config:
        q = draft_distributions(torch.stack([tables.q[prefix] for prefix in prefixes]), width, scheme)
        tuples = candidate_tuples(scheme, q)
        children = {
            prefix: [
                (float(tuples.probs[i, t]), [((*prefix, int(tuples.tokens[t, k])), q[i, k]) for k in range(tuples.counts[i])])
                for t in tuples.probs[i].nonzero().flatten().tolist()
            ]
            for i, prefix in enumerate(prefixes)
        }  # fmt: skip
        grown = []
        for prob, chains, ends in trees:
            for drawn in product(*(children[prefix] for prefix in ends)):
                level = [chain for _, below in drawn for chain in below]
                grown.append((prob * math.prod(each for each, _ in drawn), chains + level, [text for text, _ in level]))
        trees = grown
    return [(prob, chains) for prob, chains, _ in trees]


def proposal_of(trees: Sequence[Chains], tables: PrefixTables) -> tuple[Proposal, Tensor, list[list[tuple[int, ...]]]]:
    """A row per tree, p at its nodes [B, N + 1, V], and the texts that the nodes end, the context's first."""
    texts = [list(dict.fromkeys([(), *(text for text, _ in chains)])) for chains in trees]
    most, num_chains = max(map(len, texts)), max(map(len, trees))
    tokens, parents = (torch.full((len(trees), most - 1), fill) for fill in (0, -1))
    candidates = torch.full((len(trees), num_chains), -1)
    p = tables.p[()].expand(len(trees), most, -1).clone()
    draft_probs = tables.p[()].expand(len(trees), num_chains, -1).clone()
    for row, (chains, nodes) in enumerate(zip(trees, texts, strict=True)):
        for n, text in enumerate(nodes):
            p[row, n] = tables.p[text]
            if text:
                tokens[row, n - 1], parents[row, n - 1] = text[-1], nodes.index(text[:-1]) - 1
        for m, (text, q) in enumerate(chains):
            candidates[row, m], draft_probs[row, m] = nodes.index(text) - 1, q
    counts = torch.tensor([len(nodes) - 1 for nodes in texts])
    return Proposal(tokens, draft_probs, counts, counts, parents, candidates=candidates), p, texts


def tree_outputs(
    rule: TreeRule, scheme: str, k_config: Sequence[int], tables: PrefixTables
) -> tuple[dict[tuple[int, ...], float], float]:
    """Distribution of the emitted texts, accepted tokens and the extra one, and the expected accepted length."""
    trees, emitted = drawn_trees(scheme, k_config, tables), dict[tuple[int, ...], float]()
    proposal, p, texts = proposal_of([chains for _, chains in trees], tables)
    ends, residuals = rule.distribution(proposal, p)
    joint = torch.tensor([prob for prob, _ in trees], dtype=p.dtype).view(-1, 1, 1) * ends.unsqueeze(2) * residuals
    for row, n, token in joint.nonzero().tolist():
        text = (*texts[row][n], token)
        emitted[text] = emitted.get(text, 0.0) + float(joint[row, n, token])
    return emitted, sum(mass * (len(text) - 1) for text, mass in emitted.items())


def tree_error(rule: TreeRule, scheme: str, k_config: Sequence[int], tables: PrefixTables) -> float:
    """Total variation between the first tokens emitted (completed by p), one more than levels, and p's own."""
    emitted, _ = tree_outputs(rule, scheme, k_config, tables)
    error = 0.0
    for output in product(range(tables.vocab_size), repeat=len(k_config) + 1):
        steps = [float(tables.p[output[:i]][token]) for i, token in enumerate(output)]
        tail, mass = 1.0, 0.0
        for n in reversed(range(1, len(output) + 1)):
            mass += emitted.get(output[:n], 0.0) * tail
            tail *= steps[n - 1]
        error += abs(mass - tail) / 2
    return error
