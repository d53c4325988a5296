"""Traversal verification, decided by enumeration of every tree, beside a slow version that deletes leaves as the paper does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from benchmarks.tree_enumeration import drawn_trees, proposal_of, tree_error, tree_outputs
from toolkit import config, verification
from toolkit.decoding import Method, Sampling, TreeProposer, decode
from toolkit.errors import InputError
from toolkit.stopping import Fixed
from toolkit.testing import output_pvalue
from toolkit.types import Proposal
from toolkit.verification import TreeRule
from toolkit.verification.base import candidate_nodes, candidate_parents, candidate_probs, normalized, num_uniforms
from toolkit.verification.chain_enumeration import PrefixTables, chain_outputs, expected_lengths
from toolkit.verification.rules.traversal import Traversal, TraversalWithoutReplacement

RULES = [name for name in verification.names() if isinstance(verification.get(name), TreeRule)]
DECLARED = [(name, scheme) for name in RULES for scheme in verification.get(name).schemes]
SHAPES = [
    (2, (2, 2)), (2, (1, 2, 2)), (2, (1, 3, 1)), (2, (7,)), (2, (2, 1, 1)), (3, (2, 2)), (3, (3, 1)), (3, (2, 1, 1)), (3, (4,)),
]  # fmt: skip


class Node:
    """A node of the slow version; of a candidate that repeats an earlier one, a leaf of its own."""

    def __init__(self, number: int, token: int, p: list[float], q: list[float]):
        self.number, self.token, self.p, self.q = number, token, p, q
        self.children: list[Node] = []
        self.weight: float | None = None


class Slow(TreeRule):
    """The algorithm, one row and one leaf at a time; `mistake` plants one."""

    name, lossless = "slow", True

    def __init__(self, scheme: str, mistake: str = ""):
        self.schemes, self.mistake = (scheme,), mistake  # type: ignore[misc]

    def _distribution(self, proposal: Proposal, target_probs: Tensor) -> tuple[Tensor, Tensor]:
        ends, joint = torch.zeros_like(target_probs[..., 0]), torch.zeros_like(target_probs)
        for row in range(len(target_probs)):
            reach, root = 1.0, self.tree(proposal, target_probs, row)
            while True:
                path = [root]  # the leftmost chain that is left
                while path[-1].children:
                    node, child = path[-1], path[-1].children[0]
                    if child.weight is None:
                        child.weight = min(node.weight * node.p[child.token] / child.q[child.token], 1.0)
                    path.append(child)
                leaf = path.pop()
                ends[row, leaf.number] += reach * leaf.weight
                joint[row, leaf.number] += reach * leaf.weight * torch.tensor(leaf.p, dtype=joint.dtype)
                if not path:
                    break
                reach *= 1 - leaf.weight
                self.delete(leaf, path[-1])
        return ends, normalized(joint, target_probs)

    def delete(self, leaf: Node, parent: Node) -> None:
        """Delete a rejected leaf."""
        parent.children.remove(leaf)
        weight = 1.0 if self.mistake == "residual not scaled" else parent.weight
        left = [max(weight * p - q, 0.0) for p, q in zip(parent.p, leaf.q, strict=True)]
        if self.mistake != "weight of the parent kept":
            below = sum(left) + 1 - parent.weight
            parent.weight = sum(left) / below if below > 0 else 0.0
        if sum(left) > 0 and self.mistake != "p of the parent kept":
            parent.p = [x / sum(left) for x in left]
        if self.schemes == ("without_replacement",) and self.mistake != "q of siblings kept":
            for sibling in parent.children:
                sibling.q[leaf.token] = 0.0
                sibling.q[:] = [x / sum(sibling.q) for x in sibling.q]

    def tree(self, proposal: Proposal, target_probs: Tensor, row: int) -> Node:
        nodes, above = candidate_nodes(proposal)[row].tolist(), candidate_parents(proposal)[row].tolist()
        draft_probs, p = candidate_probs(proposal)[row].tolist(), target_probs[row].tolist()
        first = {-1: Node(0, -1, list(p[0]), [])}
        first[-1].weight = 1.0
        for node, parent, q in zip(nodes, above, draft_probs, strict=True):
            if node >= 0:
                child = Node(node + 1, int(proposal.tokens[row, node]), list(p[node + 1]), q)
                first[parent].children.append(child)
                first.setdefault(node, child)
        return first[-1]


def trees(scheme: str, k_config: Sequence[int], seed: int, vocab_size: int = 3) -> tuple[Proposal, Tensor]:
    tables = PrefixTables(vocab_size, len(k_config), seed)
    return proposal_of([chains for _, chains in drawn_trees(scheme, k_config, tables)], tables)[:2]


@pytest.mark.parametrize(("name", "scheme"), DECLARED)
@pytest.mark.parametrize(("vocab_size", "k_config"), SHAPES)
def test_exact_by_enumeration_of_every_tree(name, scheme, vocab_size, k_config):
    for seed in range(4):
        tables = PrefixTables(vocab_size, len(k_config), seed)
        assert tree_error(verification.get(name), scheme, k_config, tables) < 1e-12


@pytest.mark.parametrize(("name", "scheme"), DECLARED)
def test_the_slow_version_agrees_at_every_node(name, scheme):
    """Rows of different size: equal draws are one node."""
    for seed, k_config in enumerate([(2, 2), (1, 2, 1)]):
        proposal, p = trees(scheme, k_config, seed)
        ends, residuals = verification.get(name).distribution(proposal, p)
        expected, slow = Slow(scheme).distribution(proposal, p)
        assert torch.allclose(ends, expected, atol=1e-10, rtol=0)
        assert torch.allclose(ends.sum(1), torch.ones(len(ends), dtype=ends.dtype))
        assert torch.allclose(ends.unsqueeze(2) * residuals, expected.unsqueeze(2) * slow, atol=1e-10, rtol=0)
        assert not ends[torch.arange(ends.shape[1]) > proposal.num_drafted.unsqueeze(1)].any()


@pytest.mark.parametrize(
    ("mistake", "scheme"),
    [
        ("residual not scaled", "iid"),
        ("weight of the parent kept", "iid"),
        ("p of the parent kept", "iid"),
        ("q of siblings kept", "without_replacement"),
    ],
)
def test_a_planted_mistake_is_noticed(mistake, scheme):
    tables = [PrefixTables(3, 2, seed) for seed in range(2)]
    assert max(tree_error(Slow(scheme), scheme, (2, 2), table) for table in tables) < 1e-12
    assert max(tree_error(Slow(scheme, mistake), scheme, (2, 2), table) for table in tables) > 1e-3


def test_under_another_scheme_than_its_own_it_would_be_wrong(table_pair):
    tables = [PrefixTables(3, 2, seed) for seed in range(4)]
    for scheme in ("without_replacement", "greedy"):
        assert max(tree_error(Traversal(), scheme, (3, 2), table) for table in tables) > 1e-3
    with pytest.raises(InputError, match="by the scheme without_replacement, but Traversal is exact only for iid"):
        Method("mixed", Fixed(9), Traversal(), TreeProposer("2x2", "without_replacement"))

    class Undeclared(Traversal):
        schemes = ("without_replacement",)  # not true

    method = Method("mixed", Fixed(9), Undeclared(), TreeProposer("3x2", "without_replacement"))
    assert output_pvalue(table_pair, method, 10_000, batch_size=10_000) < 1e-6


@pytest.mark.parametrize("name", RULES)
def test_a_chain_is_block_verification(name):
    """Accepted lengths and extra tokens of every chain, and their mean."""
    scheme = verification.get(name).schemes[0]
    for seed in range(4):
        tables = PrefixTables(3, 3, seed)
        proposal, p = trees(scheme, (1, 1, 1), seed)
        ends, residuals = verification.get(name).distribution(proposal, p)
        lengths, rest = verification.get("block").distribution(p, proposal.draft_probs, proposal.tokens)
        assert torch.allclose(ends, lengths, atol=1e-12, rtol=0)
        reached = ends.unsqueeze(2) > 1e-12
        assert torch.allclose(residuals * reached, rest * reached, atol=1e-12, rtol=0)
        mean = tree_outputs(verification.get(name), scheme, (1, 1, 1), tables)[1]
        assert mean == pytest.approx(chain_outputs(verification.get("block"), tables)[1], abs=1e-12)
        assert mean == pytest.approx(expected_lengths(tables)[1], abs=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_verdicts_follow_the_distribution(name):
    """One tree, many uniforms: the shares of last nodes and extra tokens, and what a verdict says of them."""
    rule, rows = verification.get(name), 40_000
    proposal, p = trees(rule.schemes[0], (2, 2), seed=1)
    widest = int(proposal.num_drafted.argmax())
    part = slice(widest, widest + 1)
    expected, residuals = rule.distribution(proposal, p)
    many = Proposal(*(values[part].expand(rows, *values.shape[1:]) for values in (
        proposal.tokens, proposal.draft_probs, proposal.num_drafted, proposal.num_calls, proposal.parents,
    )), candidates=proposal.candidates[part].expand(rows, -1))  # fmt: skip
    uniforms = torch.rand(rows, num_uniforms(6), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    verdict = rule.verify(many, p[part].expand(rows, -1, -1), uniforms)
    end = torch.where(
        verdict.length > 0, verdict.path.gather(1, (verdict.length - 1).clamp(min=0).unsqueeze(1))[:, 0], -1
    )
    share = torch.bincount((end + 1) * 3 + verdict.extra, minlength=3 * p.shape[1]) / rows
    probs = (expected[widest].unsqueeze(1) * residuals[widest]).flatten()
    assert ((share - probs).abs() <= 5 * (probs * (1 - probs) / rows).sqrt()).all()
    parents = proposal.parents[widest].tolist()
    assert verdict.bonus.tolist() == [node not in parents for node in end.tolist()]
    for path, last in {(tuple(path), last) for path, last in zip(verdict.path.tolist(), end.tolist(), strict=True)}:
        climbed = []
        while last >= 0:
            climbed, last = [last, *climbed], parents[last]
        assert list(path) == climbed + [-1] * (len(path) - len(climbed))


def test_more_than_the_walk_from_the_root_and_never_less_on_these_tables():
    """Expected accepted length, beside SpecInfer's on the same trees, for which a node's text survives by its tokens alone."""
    gains = []
    for seed in range(6):
        tables = PrefixTables(2, 3, seed)
        _, length = tree_outputs(Traversal(), "iid", (1, 2, 1), tables)
        gains.append(length - walked(tables, (), (1, 2, 1)))
    assert min(gains) > -1e-12 and max(gains) > 0.01


def walked(tables: PrefixTables, prefix: tuple[int, ...], k_config: Sequence[int]) -> float:
    """SpecInfer's expected accepted length where no two chains may meet below a repeat: every draw is summed up."""
    if not k_config:
        return 0.0
    rule, total = verification.get("specinfer"), 0.0
    p, q = tables.p[prefix], tables.q[prefix]
    for drawn in product(range(len(p)), repeat=k_config[0]):
        prob = float(q[list(drawn)].prod())
        if prob > 0:
            accept, _ = rule.distribution(p, q.expand(len(drawn), -1), torch.tensor(drawn))
            for token in set(drawn):
                below = (k_config[1] * drawn.count(token), *k_config[2:]) if len(k_config) > 1 else ()
                mass = float(accept[[i for i, other in enumerate(drawn) if other == token]].sum())
                total += prob * mass * (1 + walked(tables, (*prefix, token), below))
    return total


def test_point_masses_gain_nothing_over_the_walk():
    """Nothing is drawn: a node enters the text with the product of p along its path under both."""
    for seed in range(4):
        tables = PrefixTables(3, 2, seed)
        proposal, p = trees("top_k", (2, 2), seed)
        ends, _ = Traversal().distribution(proposal, p)
        expected = 0.0
        for node in range(int(proposal.num_drafted[0])):
            path, prob = node, 1.0
            while path >= 0:
                above = int(proposal.parents[0, path])
                prob, path = prob * float(p[0, above + 1, proposal.tokens[0, path]]), above
            expected += prob
        mean = tree_outputs(Traversal(), "top_k", (2, 2), tables)[1]
        assert mean == pytest.approx(expected, abs=1e-12)
        assert float(ends.sum()) == pytest.approx(1)


def test_bad_input_is_refused_in_a_line():
    proposal, p = trees("iid", (2,), 1)
    with pytest.raises(InputError, match=r"^target_probs: expected shape"):
        Traversal().distribution(proposal, p[:, :1])
    with pytest.raises(InputError, match=r"^draft_probs: expected distributions that sum to 1"):
        Traversal().distribution(replace(proposal, draft_probs=proposal.draft_probs * 0.9), p)
    tokens = proposal.tokens.gather(1, proposal.candidates)
    point = torch.nn.functional.one_hot((tokens + 1) % 3, 3).to(p.dtype)
    with pytest.raises(InputError, match=r"^candidates: expected tokens that their draft distribution can produce"):
        Traversal().distribution(replace(proposal, draft_probs=point), p)
    proposal, p = trees("without_replacement", (2, 2), 1)
    TraversalWithoutReplacement().distribution(proposal, p)  # cousins may be the same token
    tokens = proposal.tokens.clone()
    tokens[:, 1] = tokens[:, 0]
    with pytest.raises(InputError, match=r"^candidates: expected different tokens"):
        TraversalWithoutReplacement().distribution(replace(proposal, tokens=tokens), p)


# -- whole texts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["independent", "top_k"])
def test_whole_outputs_of_the_other_schemes(scheme, table_pair):
    method = Method("other", Fixed(9), Traversal(), TreeProposer("2x2", scheme))
    assert output_pvalue(table_pair, method, 4000, batch_size=4000) > 0.0005


def test_best_first_trees(table_pair, exact_pair, prompts):
    """Point masses that a policy chooses; at temperature 0 the text is the target's own."""
    method = replace(config.method("tree_rate", ["proposer.num_nodes=5", "max_drafted=4"]), rule=Traversal())
    assert output_pvalue(table_pair, method, 4000, batch_size=4000) > 0.0005
    sampling = Sampling(temperature=0, max_new_tokens=16)
    plain = decode(exact_pair, prompts, config.method("autoregressive"), sampling)
    assert [g.token_ids for g in decode(exact_pair, prompts, method, sampling)] == [g.token_ids for g in plain]
