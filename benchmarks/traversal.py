"""python -m benchmarks.traversal: traversal verification beside rules that walk from the root, at equal trees of the toy pair.

Prompts are decoded one at a time by a rule that walks from the root. In every round expected tokens of both rules are summed up
over the round's own tree, so that no acceptance draw adds noise: P(at least d tokens are kept | the first d levels), over d.
By how many per cent traversal verification has more, with 95 % intervals over prompts, paired. Chains (1x1x1x1) show block
verification over rejection.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis.tables.bootstrap import Bootstrap
from benchmarks.trees import prompts_of
from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.errors import answer_signals
from toolkit.types import Proposal, Verdict
from toolkit.verification import SelectionRule, TreeRule, get
from toolkit.verification.base import candidate_nodes, candidate_probs, candidate_table

SHAPES = ("1x1x1x1", "2x1x1x1", "4x2x1", "2x2x2")
PAIRS = {"specinfer": "traversal", "mcsd": "traversal_without_replacement"}


def depths(proposal: Proposal) -> Tensor:
    """The level of every node [B, N], from 1."""
    levels = torch.ones_like(proposal.tokens)
    for node in range(proposal.num_nodes if proposal.parents is not None else 0):  # a parent stands before its children
        parent = proposal.parents[:, node : node + 1]
        levels[:, node : node + 1] += torch.where(parent >= 0, levels.gather(1, parent.clamp(min=0)), 0)
    return levels


def tokens_of_walk(rule: SelectionRule, proposal: Proposal, target_probs: Tensor) -> Tensor:
    """Expected tokens of a round [B] that walks from the root: the extra one, and a subtree's where the walk goes on there."""
    table, nodes = candidate_table(proposal), candidate_nodes(proposal).clamp(min=0)
    rows, index = torch.arange(len(table)).view(-1, 1, 1), table.clamp(min=0)
    accept, _ = rule._distribution_or_target(
        target_probs,
        candidate_probs(proposal)[rows, index],
        proposal.tokens[rows, nodes[rows, index]],
        (table >= 0).sum(2),
    )
    expected = torch.ones_like(target_probs[..., 0])
    for node in reversed(range(-1, proposal.num_nodes)):
        below = expected.gather(1, nodes.gather(1, index[:, node + 1]) + 1)
        expected[:, node + 1] += torch.where(table[:, node + 1] >= 0, accept[:, node + 1] * below, 0.0).sum(1)
    return expected[:, 0]


def tokens_of_tree(rule: TreeRule, proposal: Proposal, target_probs: Tensor) -> Tensor:
    """Expected tokens of a round [B]."""
    levels, nodes = depths(proposal), candidate_nodes(proposal)
    expected = torch.ones_like(target_probs[:, 0, 0])
    for depth in range(1, int(levels.max()) + 1):
        shown = torch.where(levels.gather(1, nodes.clamp(min=0)) <= depth, nodes, -1)
        ends, _ = rule._distribution(replace(proposal, candidates=shown), target_probs)
        expected += torch.where(levels == depth, ends[:, 1:], 0.0).sum(1)
    return expected


def expected_tokens(
    pair: ModelPair, names: tuple[str, str], words: list[str], prompts: list[str], sampling: Sampling
) -> np.ndarray:
    """Per prompt [n, 3]: expected tokens of the walk and of traversal verification, and rounds."""
    method, tree_rule, rounds = config.method(names[0], words), get(names[1]), list[tuple[float, float, float]]()
    verify = method.rule.verify

    def summed(proposal: Proposal, target_probs: Tensor, uniforms: Tensor) -> Verdict:
        walk, tree = (
            of(rule, proposal, target_probs) if proposal.num_nodes else 1.0
            for of, rule in ((tokens_of_walk, method.rule), (tokens_of_tree, tree_rule))
        )
        rounds.append((float(walk), float(tree), 1.0))
        return verify(proposal, target_probs, uniforms)

    method.rule.verify, sums = summed, []
    for number, prompt in enumerate(prompts):
        rounds.clear()
        decode(pair, [prompt], method, sampling, row_ids=[number])
        sums.append(np.sum(rounds, 0))
    return np.array(sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.6])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--prompts", type=int, default=16, help="of each domain")
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    pair, prompts = ModelPair.toy(), prompts_of("test", arguments.prompts)
    lines = []
    for temperature in arguments.temperatures:
        sampling = Sampling(temperature=temperature, max_new_tokens=arguments.tokens)
        for shape in arguments.shapes:
            for names in PAIRS.items():
                words = [f"proposer.k_config={shape}"]
                sums = expected_tokens(pair, names, words, prompts, sampling)
                more = Bootstrap().interval(sums, lambda s: 100 * (s[..., 1:2] / s[..., 0:1] - 1))
                walk, tree = sums[:, :2].sum(0) / sums[:, 2].sum()
                lines.append({
                    "T": temperature, "k_config": shape, "walk": names[0], "tau": walk, "tau_traversal": tree,
                    **{key: values[0] for key, values in zip(("more", "low", "high"), more, strict=True)},
                })  # fmt: skip
                print(
                    pd.DataFrame(lines[-1:]).to_string(index=False, header=len(lines) == 1, float_format="%.2f"),
                    flush=True,
                )


if __name__ == "__main__":
    answer_signals()
    main()
