"""One line per rule and scheme: how far what it emits is from the target's distribution, by enumeration in float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.multi_draft import random_pairs
from toolkit.testing import draft_distributions
from toolkit.verification import LayerRule, PathRule, SelectionRule, get, names
from toolkit.verification.chain_enumeration import PrefixTables, chain_error
from toolkit.verification.enumeration import beam_distribution, emission

TABLES, PAIRS = 20, 20
CHAINS = ((2, 3), (3, 2), (3, 3), (4, 2), (5, 2))  # V, K
VOCABULARIES, CANDIDATES = (2, 3, 4), (1, 2, 3, 4)
LAYERS = ((2, 1, 1), (3, 2, 1), (4, 2, 2), (4, 3, 2), (3, 3, 3))  # beam-token pairs M, candidates W_S, output beams
ABOUT = {
    "chain": f"all drafts of K tokens, (V, K) = {', '.join(map(str, CHAINS))}; {TABLES} random tables over prefixes each",
    "candidates": f"all tuples of K = {CANDIDATES[0]}..{CANDIDATES[-1]} candidates, V = {VOCABULARIES[0]}..{VOCABULARIES[-1]}; "
    f"{PAIRS} random p and q each",
    "beams": f"all candidates of a layer, (M, W_S, W) = {', '.join(map(str, LAYERS))}; {PAIRS} random p and q each",
}


def certificates() -> str:
    """Every rule of `toolkit.verification` under every scheme it declares: total variation of what it emits from the target."""
    lines = ["| rule | checked on | scheme | declared | largest total variation |", "|---|---|---|---|---:|"]
    for name in names():
        for kind, scheme, error in errors(name):
            declared = "lossless" if get(name).lossless else "lossy"
            lines.append(f"| {name} | {kind} | {scheme} | {declared} | {error:.1e} |")
    sizes = [f"- {kind}: {about}" for kind, about in ABOUT.items()]
    head = "All distributions are random, with zeros among their probabilities. Sizes:"
    return "\n".join([head, "", *sizes, "", *lines])


def errors(name: str) -> Iterator[tuple[str, str, float]]:
    """What a rule is checked on, the scheme, and the largest total variation over all sizes."""
    rule = get(name)
    if isinstance(rule, PathRule):
        found = (chain_error(rule, PrefixTables(size, depth, seed)) for size, depth in CHAINS for seed in range(TABLES))
        yield "chain", "any", max(found)  # a chain is drawn token by token, whatever the scheme is called
    elif isinstance(rule, SelectionRule):
        for scheme in rule.schemes:
            yield "candidates", scheme, _selection_error(rule, scheme)
    else:
        assert isinstance(rule, LayerRule)
        for scheme in rule.schemes:
            yield "beams", scheme, _layer_error(rule, scheme)


# -- inside -----------------------------------------------------------------------------------------------------------


def _selection_error(rule: SelectionRule, scheme: str) -> float:
    worst = 0.0
    for size in VOCABULARIES:
        p, q = random_pairs(PAIRS, size, zeros=True)
        for count in CANDIDATES:
            got = emission(rule, scheme, p, draft_distributions(q, count, scheme))
            worst = max(worst, float((got.distribution - p).abs().sum(-1).max() / 2))
    return worst


def _layer_error(rule: LayerRule, scheme: str) -> float:
    worst = 0.0
    for size, count, width in LAYERS:
        for p, q in zip(*random_pairs(PAIRS, size, zeros=True), strict=True):
            joint = beam_distribution(rule, p, q, count, width, scheme)
            worst = max(worst, float((joint - _independent(p, width)).abs().sum() / 2))
    return worst


def _independent(p: Tensor, width: int) -> Tensor:
    """The joint distribution of `width` independent draws from p."""
    joint = torch.ones((), dtype=p.dtype)
    for _ in range(width):
        joint = joint.unsqueeze(-1) * p
    return joint
