"""Best-first trees and `tree_rate`: exact by enumeration, the tree of a slow search, refusals. The loop: test_decoding.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch

from toolkit import ModelPair, config
from toolkit.acceptance import CandidateEstimator
from toolkit.costs.load import LoadCost
from toolkit.costs.table import CostTable
from toolkit.decoding import BestFirstProposer, DraftContext, Method, Sampling, TreeProposer, decode
from toolkit.engine import TabularModel
from toolkit.engine.engine import engine_of
from toolkit.errors import InputError
from toolkit.sampling import warp
from toolkit.stopping import Fixed, Rate, TreeRate
from toolkit.testing import output_pvalue
from toolkit.testing.blocks import block_pair
from toolkit.testing.trees import emitted as outcomes_of
from toolkit.testing.trees import paths_of
from toolkit.types import Children, Proposal, Verdict
from toolkit.verification import get

CONTEXTS = [[0, 1], [2, 2]]
VOCAB = 3
DEPTH = 3
AS_DRAFT = CandidateEstimator(confidence=True)


def tables(seed: int = 4) -> ModelPair:
    generator = torch.Generator().manual_seed(seed)
    target, draft = (TabularModel.random(VOCAB, 2, generator, sharpness=1.3) for _ in range(2))
    return ModelPair(target=target, draft=draft, end_ids=())


def rated(column: float, draft: float = 0.0, rate: float = 1.0, **settings) -> TreeRate:
    """A policy at a fixed lambda, with plain costs."""
    settings = {"initial_rate": rate, "memory": 1e6, "estimator": AS_DRAFT, **settings}
    return TreeRate(cost_ratio=draft, column_cost=column, **settings)


def drafted(
    pair: ModelPair, policy: TreeRate, sampling: Sampling, proposer=None, depth: int = DEPTH, state=None, uniforms=None,
    end_ids=(),
):  # fmt: skip
    """The trees after both contexts, and the policy."""
    policy = policy.within(depth).bind(pair)
    sessions = engine_of(pair).open(len(CONTEXTS), 64)
    context = DraftContext(
        sequences=CONTEXTS, sessions=sessions.drafts, unread=lambda draft: (torch.tensor(CONTEXTS), [2, 2]),
        limits=torch.full((2,), depth), room=[depth] * 2, sampling=sampling,
        uniforms=torch.zeros(2, 0) if uniforms is None else uniforms, vocab_size=VOCAB, fit=pair.fit, seen=None,
        end_ids=end_ids,
    )  # fmt: skip
    state = policy.init(2, torch.device("cpu")) if state is None else state
    with torch.inference_mode():
        proposal, _ = (proposer or BestFirstProposer(width=4)).propose(context, policy, state)
    return proposal


def probs_after(model: TabularModel, sampling: Sampling, text) -> torch.Tensor:
    return warp(model.probs[model.state(list(text))].log(), sampling)


def emitted(pair: ModelPair, proposal: Proposal, sampling: Sampling, row: int, rule) -> dict[tuple[int, ...], float]:
    """P(tokens that the round emits), by the rule's formula at every node."""
    return outcomes_of(proposal, row, lambda path: probs_after(pair.target, sampling, (*CONTEXTS[row], *path)), rule)


def distance(pair: ModelPair, outcomes: dict[tuple[int, ...], float], sampling: Sampling, row: int) -> float:
    """Total variation of texts that begin with a round and go on with the target, from the target's."""
    total = 0.0
    for text in product(range(VOCAB), repeat=DEPTH + 1):
        by_length = [1.0]
        for length, token in enumerate(text):
            p = probs_after(pair.target, sampling, (*CONTEXTS[row], *text[:length]))
            by_length.append(by_length[-1] * float(p[token]))
        ours = sum(
            outcomes.get(text[:length], 0.0) * by_length[-1] / by_length[length] for length in range(1, DEPTH + 2)
        )
        total += abs(ours - by_length[-1]) / 2
    return total


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("policy", [rated(0.02), rated(0.15), rated(0.05, num_nodes=9)], ids=["wide", "narrow", "nine"])
def test_texts_follow_the_target_by_enumeration(policy, temperature):
    """Two rows with trees of their own, of several shapes, every token of a round: float64."""
    sampling, sizes = Sampling(temperature=temperature), set()
    for seed in range(4):
        pair = tables(seed)
        proposal = drafted(pair, policy, sampling)
        for row in range(2):
            outcomes = emitted(pair, proposal, sampling, row, get("specinfer"))
            assert abs(sum(outcomes.values()) - 1) < 1e-12
            assert distance(pair, outcomes, sampling, row) < 1e-12
            sizes.add(int(proposal.num_drafted[row]))
    assert policy.num_nodes or len(sizes) > 2


def test_nodes_that_are_chosen_as_if_they_were_drawn_are_noticed():
    """A control: the same nodes, under a rule that divides by the q that nobody drew them from."""
    pair, sampling = tables(), Sampling()
    proposal = drafted(pair, rated(0.02), sampling)
    proposal = replace(proposal, draft_probs=proposal.draft_probs.clone())
    for row in range(2):
        tree, parents = paths_of(proposal, row), proposal.parents[row].tolist()
        above = [tree[parent] if parent >= 0 else () for parent in parents[: len(tree)]]
        for node, path in enumerate(above):
            proposal.draft_probs[row, node] = probs_after(pair.draft, sampling, (*CONTEXTS[row], *path))
        assert distance(pair, emitted(pair, proposal, sampling, row, get("specinfer")), sampling, row) > 0.01


def test_choosing_among_sampled_nodes_after_the_draw_is_noticed():
    """A control: two draws from q, of which the unlikely ones are left out. Without that the rule is exact."""
    pair, sampling, rule = tables(), Sampling(), get("specinfer")
    p, q = (probs_after(model, sampling, CONTEXTS[0]) for model in (pair.target, pair.draft))

    def error(wanted) -> float:
        total = torch.zeros(VOCAB, dtype=torch.float64)
        for drawn in product(range(VOCAB), repeat=2):
            kept = torch.tensor([token for token in drawn if wanted(token)], dtype=torch.long)
            emission = p
            if len(kept):
                accept, residual = rule.distribution(p, q.expand(len(kept), -1), kept)
                emission = (residual * (1 - accept.sum())).index_add(0, kept, accept)
            total += float(q[list(drawn)].prod()) * emission
        return float((total - p).abs().sum() / 2)

    assert error(lambda token: True) < 1e-12
    assert error(lambda token: q[token] > q.min()) > 0.01


def test_whole_outputs_follow_the_target_and_a_planted_mistake_is_noticed(table_pair):
    method = config.method("tree_rate", ["policy.column_cost=.01", "policy.estimator.confidence=true"])
    assert output_pvalue(table_pair, method, 4000, batch_size=4000) > 0.0005

    class AsDrawn(BestFirstProposer):
        def propose(self, context, policy, state):
            proposal, state = super().propose(context, policy, state)
            flat = torch.full_like(proposal.draft_probs, 1 / max(1, proposal.draft_probs.shape[-1]))
            return replace(proposal, draft_probs=flat), state

    assert output_pvalue(table_pair, replace(method, proposer=AsDrawn()), 4000, batch_size=4000) < 1e-6


SAMPLED = ["policy.column_cost=.02", "policy.cost_ratio=.01"]


def test_whole_outputs_of_drawn_trees_follow_the_target_and_a_planted_mistake_is_noticed(table_pair):
    method = config.method("tree_rate_sampled", SAMPLED)
    assert output_pvalue(table_pair, method, 4000, batch_size=4000) > 0.0005

    class SameDraws(BestFirstProposer):
        """A control: draws by uniforms that are all the same."""

        def propose(self, context, policy, state):
            return super().propose(replace(context, uniforms=torch.zeros_like(context.uniforms)), policy, state)

    same = replace(method, proposer=SameDraws(scheme="without_replacement"))
    assert output_pvalue(table_pair, same, 4000, batch_size=4000) < 1e-6


def test_numbers_of_children_follow_from_draws_of_earlier_levels(table_pair):
    """Trees differ by what was drawn, in a node's number of children, too, and hold every child once."""
    pair, policy = tables(), replace(config.method("tree_rate_sampled", SAMPLED).policy, initial_rate=1.0)
    generator, numbers = torch.Generator().manual_seed(0), set()
    for _ in range(20):
        uniforms = torch.rand(2, 64, generator=generator, dtype=torch.float64)
        proposal = drafted(
            pair, policy, Sampling(), BestFirstProposer(width=4, scheme="without_replacement"), uniforms=uniforms
        )
        for row in range(2):
            paths = paths_of(proposal, row)
            assert len(set(paths)) == len(paths)
            numbers.add(tuple(sorted(Counter(path[:-1] for path in paths if len(path) > 1).values())))
    assert len(numbers) > 3


# -- which nodes --------------------------------------------------------------------------------------------------------


def survivals(pair: ModelPair, row: int, depth: int, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Of every path of the full tree, the product of q."""
    values = {(): 1.0}
    for path in (p for length in range(1, depth + 1) for p in product(range(VOCAB), repeat=length)):
        q = probs_after(pair.draft, sampling, (*CONTEXTS[row], *path[:-1]))
        values[path] = values[path[:-1]] * float(q[path[-1]])
    return {path: value for path, value in values.items() if path}


@pytest.mark.parametrize("column", [0.02, 0.06, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_a_tree_has_every_node_that_is_worth_its_column_where_draft_passes_cost_nothing(seed, column):
    pair, sampling = tables(seed), Sampling()
    proposal = drafted(pair, rated(column, acceptance=0.99), sampling, BestFirstProposer(width=27))
    for row in range(2):
        values = survivals(pair, row, DEPTH, sampling)
        assert set(paths_of(proposal, row)) == {path for path, value in values.items() if value > column}
        assert paths_of(proposal, row) == sorted(paths_of(proposal, row), key=lambda path: -values[path])


def test_trees_of_a_set_size_are_eagle_2s():
    """Of every level the best `width` nodes are expanded, then the best of all are sent."""
    pair, sampling, width, count = tables(), Sampling(), 2, 7
    proposal = drafted(pair, rated(9.0, 9.0, num_nodes=count), sampling, BestFirstProposer(width=width))
    assert proposal.num_drafted.tolist() == [count] * 2 and proposal.num_calls.tolist() == [DEPTH] * 2
    for row in range(2):
        values = survivals(pair, row, DEPTH, sampling)
        level, every = [()], []
        for _ in range(DEPTH):
            children = [(*path, token) for path in level for token in range(VOCAB)]
            level = sorted(children, key=lambda path: -values[path])[:width]
            every += children
        assert set(paths_of(proposal, row)) == set(sorted(every, key=lambda path: -values[path])[:count])


def test_prices_decide_how_wide_and_how_deep():
    pair, sampling = tables(), Sampling()

    def size(column: float, draft: float) -> tuple[int, int]:
        proposal = drafted(pair, rated(column, draft), sampling)
        return int(proposal.num_drafted.sum()), int(proposal.num_calls.sum())

    assert size(0.02, 0.0)[0] > size(0.1, 0.0)[0] > size(0.4, 0.0)[0] > 0
    assert size(0.02, 0.0)[1] > size(0.02, 0.7)[1] > size(0.02, 2.0)[1] == 0
    assert size(2.0, 0.0) == (0, 0), "nothing pays: plain decoding"


def test_gains_are_corrected_by_what_the_text_has_accepted():
    """After rounds that promised much and held nothing the tree is smaller, in that row alone."""
    pair, policy = tables(), rated(0.05).within(DEPTH).bind(tables())
    state = policy.init(2, torch.device("cpu"))
    promised = {"depth": torch.tensor([3.0, 3.0]), "promised": torch.tensor([3.0, 3.0])}
    whole = torch.full((2,), 3)
    for _ in range(6):
        length = torch.tensor([0, 3])
        proposal = Proposal(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, 1), whole, whole)
        verdict = Verdict(proposal.tokens, length, length, length == 3, length >= 0)
        state = policy.observe(proposal, verdict, {**state, **promised})
    fresh, after = (drafted(pair, rated(0.05), Sampling(), state=each).num_drafted for each in (None, state))
    assert after[0] < fresh[0] and after[1] == fresh[1]


def levels_at(pair: ModelPair, table: LoadCost, width: int = 4, end_ids: tuple[int, ...] = ()) -> int:
    """Levels that are drafted at a table, at a lambda of 1, where the draft reads at most `width` nodes at once."""

    @dataclass(frozen=True)
    class Priced(TreeRate):
        def read_table(self, ratio, column):
            return table

    policy, proposer = Priced(AS_DRAFT, initial_rate=1.0, memory=1e6), BestFirstProposer(width=width)
    return int(drafted(pair, policy, Sampling(), proposer, end_ids=end_ids).num_calls.sum())


def test_the_draft_pays_for_every_node_that_it_reads():
    """At a table where reading is what costs, levels are read narrower."""
    flat = LoadCost.ratio(0.05, 0.02)
    steep = replace(flat, draft=replace(flat.draft, width=(1.0, 2.0), seconds=flat.draft.seconds.repeat(2, 1)))
    steep.draft.seconds[0, 1] = 1.0
    assert levels_at(tables(), steep) < levels_at(tables(), flat)
    for of_one in ({"width": 1}, {"end_ids": (1, 2)}):  # of no other node than it reads: ends of text are not read
        assert levels_at(tables(), steep, **of_one) == levels_at(tables(), flat, **of_one) > 1


def test_a_dear_column_before_cheap_ones_does_not_end_a_tree():
    """What counts is the mean over the columns to come: five may cost less than three."""

    def table(*seconds: float) -> LoadCost:
        even = LoadCost.ratio(0.02, 0.02)
        widths, costs = tuple(map(float, range(1, len(seconds) + 1))), np.array(seconds).reshape(1, -1, 1)
        return replace(even, target=replace(even.target, width=widths, seconds=costs))

    cheap = [1 + 0.02 * columns for columns in range(16)]
    for hump in range(1, 12):
        assert levels_at(tables(), table(*cheap[:hump], 2.0, *cheap[hump + 1 :])) == levels_at(tables(), table(*cheap))
    assert levels_at(tables(), table(1, 2)) < levels_at(tables(), table(*cheap))


# -- the estimator -------------------------------------------------------------------------------------------------------


def test_shipped_weights_fall_with_the_rank_and_rise_with_q():
    estimator = CandidateEstimator().bind(None)
    q = torch.tensor([[[0.6, 0.2, 0.1, 0.05]], [[0.9, 0.05, 0.02, 0.01]]], dtype=torch.float64)
    for greedy in (False, True):
        probs = estimator.candidate_probs(Children(q, torch.tensor([[1.1], [0.45]]).double(), q > 0, greedy))
        assert ((probs > 0) & (probs < 1)).all()
        assert probs[1, 0, 0] > probs[0, 0, 0] > probs[0, 0, 1]


def test_a_file_of_another_kind_is_one_line(tmp_path):
    (tmp_path / "statistics.json").write_text('{"outputs": {"drawn": {}}}')
    with pytest.raises(InputError, match="holds no acceptance of candidates"):
        CandidateEstimator(str(tmp_path / "statistics.json")).bind(None)


# -- refusals ------------------------------------------------------------------------------------------------------------


def test_what_cannot_take_such_a_tree_is_refused_in_one_line(table_pair):
    method = config.method("tree_rate")
    several = ModelPair(target=table_pair.target, drafts=[table_pair.draft, table_pair.target], end_ids=(2,))
    for refused, message in (
        (lambda: replace(method, rule=get("spectr")), "draws candidates by the scheme top_k, but SpecTr"),
        (lambda: replace(method, rule=get("rejection")), "draws candidates by the scheme top_k, but Rejection"),
        (lambda: replace(method, policy=Fixed(3)), "best_first need each other, got Fixed"),
        (lambda: Method("x", method.policy, get("specinfer"), TreeProposer("2x2", "top_k")), "need each other"),
        (lambda: replace(config.method("dsbd"), proposer=BestFirstProposer()), "for several beams"),
        (lambda: decode(several, [[0]], method, Sampling()), "expected one draft model"),
        (lambda: decode(block_pair(3, vocab_size=3), [[0]], method, Sampling()), "gives a block at once"),
        (
            lambda: decode(table_pair, [[0]], replace(method, policy=TreeRate(AS_DRAFT, num_nodes=65)), Sampling()),
            "policy.num_nodes=65: expected at most proposer.num_nodes=64",
        ),
        (lambda: TreeRate(Rate), "policy.estimator"),
        (lambda: BestFirstProposer(num_nodes=0), "proposer.num_nodes"),
    ):
        with pytest.raises(InputError, match=message) as error:
            refused()
        assert "\n" not in str(error.value)


def test_a_tree_beyond_the_cost_table_is_said_once(table_pair):
    table = CostTable(1, (1, 2, 4), (0,), ((1.0, 1.1, 1.3),), (0.1,))
    policy = TreeRate(AS_DRAFT, costs=table, max_nodes=16)
    with pytest.warns(RuntimeWarning, match="width 17 is beyond the cost table, which ends at 4") as warnings:
        bound = policy.within(3).bind(table_pair)
    assert len(warnings) == 1
    columns = bound.prices_at(bound.init(1, torch.device("cpu"))).columns[0]
    assert columns[-1] == pytest.approx(0.1) and len(columns) == 16
