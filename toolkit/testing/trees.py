"""What a round of a tree, or a chain, shows and emits: exactly, in plain loops. For small vocabularies and few nodes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

import torch
from torch import Tensor

from toolkit.types import Proposal
from toolkit.verification.base import SelectionRule, candidate_nodes, candidate_table

Path = tuple[int, ...]


def paths_of(proposal: Proposal, row: int) -> list[Path]:
    """The tokens from the context to every node of a row that counts."""
    paths: list[Path] = []
    tokens = proposal.tokens[row].tolist()[: int(proposal.num_drafted[row])]
    parents = range(-1, len(tokens)) if proposal.parents is None else proposal.parents[row].tolist()
    for token, parent in zip(tokens, parents, strict=False):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def levels_of(proposal: Proposal, row: int) -> list[list[Path]]:
    """The paths of a row's candidates level by level, in the order they are tried; equal draws each count."""
    paths, levels = paths_of(proposal, row), list[list[Path]]()
    nodes = range(len(paths)) if proposal.candidates is None else proposal.candidates[row].tolist()
    for path in (paths[node] for node in nodes if node >= 0):
        levels += [[] for _ in range(len(path) - len(levels))]
        levels[len(path) - 1].append(path)
    return levels


def check_children(proposal: Proposal, again: Proposal, times: int) -> None:
    """Raises AssertionError unless the numbers of children at a level follow from the levels before it.

    again  the rows of `proposal`, each so many times, one after the other, with other draws
    """
    for row in range(len(again.tokens)):
        levels = zip_longest(levels_of(proposal, row // times), levels_of(again, row), fillvalue=list[Path]())
        for depth, (first, second) in enumerate(levels, start=1):
            assert [path[:-1] for path in first] == [path[:-1] for path in second], (
                f"the number of children at level {depth} follows from what is drawn there or later, or by a neighbour: decide "
                "before drawing"
            )
            if first != second:
                break


def emitted(
    proposal: Proposal, row: int, target_probs: Callable[[Path], Tensor], rule: SelectionRule
) -> dict[Path, float]:
    """P(a round emits these tokens), by the rule's formula at every node; target_probs: p [V] after the tokens of a path."""
    paths, nodes, children = paths_of(proposal, row), candidate_nodes(proposal)[row], candidate_table(proposal)[row]
    outcomes: dict[Path, float] = {}

    def visit(node: int, path: Path, reached: float) -> None:
        ids = [child for child in children[node + 1].tolist() if child >= 0]
        below = {paths[int(nodes[child])][-1]: int(nodes[child]) for child in ids}
        left = target_probs(path)
        if ids:
            q = proposal.draft_probs[row, ids if proposal.drawn_from is None else proposal.drawn_from[row, ids]]
            tokens = torch.tensor([paths[int(nodes[child])][-1] for child in ids])
            accept, residual = rule.distribution(left, q, tokens)
            left = (residual * (1 - accept.sum())).index_add(0, tokens, accept)
        for token, prob in enumerate(left.tolist()):
            if token in below:
                visit(below[token], (*path, token), reached * prob)
            else:
                outcomes[*path, token] = reached * prob

    visit(-1, (), 1.0)
    return outcomes
