"""Draft trees in the loop: chains as trees of width 1, forwards, stopping policies on nodes, several drafts, refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from toolkit import ModelPair, config
from toolkit.acceptance import HeadEstimator
from toolkit.decoding import DraftContext, Method, Sampling, TreeProposer, decode
from toolkit.decoding.proposers.tree import num_nodes, parse_k_config
from toolkit.engine import TabularModel
from toolkit.engine.engine import engine_of
from toolkit.errors import InputError
from toolkit.metrics import total
from toolkit.sampling import draw, warp
from toolkit.stopping import AdaEdl, Confidence, DynamicConfidence, Fixed, Heuristic, Survival
from toolkit.testing import output_pvalue
from toolkit.verification import SelectionRule, get
from toolkit.verification.rules.specinfer import SpecInfer

TREES = [name for name in config.choices("method") if "TreeProposer" in str(config.method_config(name).get("proposer"))]
SHAPES = ("2x2", *(pytest.param(shape, marks=pytest.mark.slow) for shape in ("3x1x1", "2x1x2")))


def test_k_config():
    assert parse_k_config("4x2x1") == parse_k_config("4,2,1") == parse_k_config([4, 2, 1]) == (4, 2, 1)
    assert num_nodes((4, 2, 2)) == 28
    for wrong in ("4x0", "axb", "", "-1x2", []):
        with pytest.raises(InputError, match="k_config: expected positive integers like 4x2x1, got"):
            parse_k_config(wrong)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_of_width_1_is_the_chain_token_for_token(temperature, exact_pair, prompts):
    sampling = Sampling(temperature=temperature, max_new_tokens=20)
    chain = decode(exact_pair, prompts, config.method("speculative", ["policy.num_drafted=4"]), sampling)
    tree = decode(exact_pair, prompts, config.method("specinfer", ["proposer.k_config=1x1x1x1"]), sampling)
    assert [g.token_ids for g in chain] == [g.token_ids for g in tree]
    strip = lambda g: [(r.num_drafted, r.num_draft_calls, r.num_accepted, r.num_produced, r.bonus) for r in g.rounds]
    assert [strip(g) for g in chain] == [strip(g) for g in tree]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TREES)
def test_whole_outputs_follow_the_targets_distribution_in_trees_of_every_shape(name, shape, table_pair):
    method = config.method(name, [f"proposer.k_config={shape}"])
    assert output_pvalue(table_pair, method, 4000, batch_size=4000) > 0.001 / (len(TREES) * len(SHAPES))


def test_a_rule_under_another_scheme_is_refused_and_would_be_wrong(table_pair):
    with pytest.raises(InputError, match="by the scheme without_replacement, but SpecInfer is exact only for iid"):
        Method("mixed", Fixed(9), get("specinfer"), TreeProposer("2x2", "without_replacement"))

    class Undeclared(SpecInfer):
        schemes = ("without_replacement",)  # not true: what the published DSBD and its kin do

    method = Method("mixed", Fixed(9), Undeclared(), TreeProposer("3x2", "without_replacement"))
    assert output_pvalue(table_pair, method, 10_000, batch_size=10_000) < 1e-6


def test_policies_leave_nodes_without_children_and_withdraw_nothing(table_pair):
    """A node whose own token is unlikely gets no children; its siblings may. All drawn candidates are judged."""
    method = Method("careful", Confidence(0.45), get("specinfer"), TreeProposer("2x2x2", "iid"))
    generations = decode(table_pair, [[0, 1]] * 200, method, Sampling(max_new_tokens=12))
    drafted = {r.num_drafted for g in generations for r in g.rounds}
    assert max(drafted) <= 14
    assert len(drafted) >= 6  # trees of uneven shape, and equal draws are one node
    assert output_pvalue(table_pair, method, 4000, batch_size=4000) > 0.0005


@pytest.mark.parametrize("lag", [0, 1])
def test_trained_heads_stop_trees(table_pair, lag):
    """Any estimator that reads states works on nodes as it does on chains."""

    class Score:
        def bind(self, pair):
            return self

        def read_prob(self, step):
            return 0.3 + 0.6 * step.hidden[:, :3].sum(-1)

    method = Method("head", Survival(Score(), 0.5, lag), get("mcsd"), TreeProposer("2x2x1", "without_replacement"))
    assert output_pvalue(table_pair, method, 4000, batch_size=4000) > 0.0005


def test_different_drafts_and_one_draft_at_several_temperatures(table_pair):
    other = TabularModel.random(3, 1, torch.Generator().manual_seed(9), sharpness=1.5)
    several = ModelPair(target=table_pair.target, drafts=[table_pair.draft, other], end_ids=(2,))
    for rule in ("specinfer", "importance"):
        method = Method("drafts", Fixed(9), get(rule), TreeProposer("2x2", "independent"))
        assert output_pvalue(several, method, 4000, batch_size=4000) > 0.0005
        warm = Method("warm", Fixed(9), get(rule), TreeProposer("2x1", "independent", temperatures=(0.7, 1.6)))
        assert output_pvalue(table_pair, warm, 4000, batch_size=4000) > 0.0005


def test_candidates_of_one_distribution_come_from_the_first_draft_alone(table_pair):
    other = TabularModel.random(3, 1, torch.Generator().manual_seed(9), sharpness=1.5)
    several = ModelPair(target=table_pair.target, drafts=[table_pair.draft, other], end_ids=(2,))
    method = config.method("specinfer")
    assert method.proposer.num_drafts(2) == 1
    sampling = Sampling(max_new_tokens=12)
    both, one = (decode(pair, [[0, 1]] * 9, method, sampling) for pair in (several, table_pair))
    assert [(g.token_ids, g.counts) for g in both] == [(g.token_ids, g.counts) for g in one]


def test_repetition_penalty_follows_each_nodes_own_path(exact_pair, prompts):
    sampling = Sampling(temperature=0, max_new_tokens=12, repetition_penalty=1.4)
    plain = decode(exact_pair, prompts, config.method("autoregressive"), sampling)
    tree = decode(exact_pair, prompts, config.method("mcsd", ["proposer.k_config=3x2x1"]), sampling)
    assert [g.token_ids for g in plain] == [g.token_ids for g in tree]
    sampled = Sampling(max_new_tokens=12, repetition_penalty=1.4, seed=5)
    alone = decode(exact_pair, prompts, config.method("mcsd"), sampled, batch_size=1)
    assert [g.token_ids for g in alone] == [
        g.token_ids for g in decode(exact_pair, prompts, config.method("mcsd"), sampled, batch_size=4)
    ]


def test_policies_that_learn_from_chains_are_refused():
    for policy in (Heuristic(), DynamicConfidence(), AdaEdl()):
        with pytest.raises(InputError, match=f"{type(policy).__name__} learns from rounds of chains"):
            Method("tree", policy, get("mcsd"), TreeProposer("2x2", "without_replacement"))


def test_bad_trees_are_refused():
    with pytest.raises(InputError, match="scheme: expected one of iid, independent"):
        TreeProposer("2x2", "sorted")
    with pytest.raises(InputError, match="several temperatures need scheme=independent, got iid"):
        TreeProposer("2x2", "iid", temperatures=(1.0, 2.0))


# -- chains that share a prefix ---------------------------------------------------------------------------------------


def sharing_pair(seed=0):
    """Peaked tables over three tokens: equal draws are frequent."""
    generator = torch.Generator().manual_seed(seed)
    models = [TabularModel.random(3, 2, generator, sharpness=1.6) for _ in range(3)]
    return ModelPair(target=models[0], drafts=models[1:], end_ids=())


def drafted_tree(pair, proposer, rows, seed, num_new=9, temperature=1.0):
    """The proposals of `rows` first rounds behind one prompt, and the draft models' caches after it."""
    sessions = engine_of(pair).open(rows, 64)
    uniforms = torch.rand(rows, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    unread = (torch.tensor([[0, 1]] * rows), [2] * rows)
    context = DraftContext(
        sequences=[[0, 1]] * rows, sessions=sessions.drafts, unread=lambda draft: unread,
        limits=torch.full((rows,), num_new), room=[num_new] * rows, uniforms=uniforms,
        sampling=Sampling(temperature=temperature), vocab_size=3, fit=pair.fit, seen=None, end_ids=(),
    )  # fmt: skip
    proposal, _ = proposer.propose(context, Fixed(num_new), {})
    return proposal, sessions.drafts, uniforms


def slow_chains(pair, widths, uniforms, sources):
    """Every chain's tokens and the distributions they were drawn from, one by one: level by level, in order."""
    levels, first, chains = [], 0, [((0, 1), None)]
    for level, width in enumerate(widths):
        new = []
        for c, (text, source) in enumerate(chains):
            for j in range(width):
                own = sources[j % len(sources)] if level == 0 else source
                model, temperature = own
                q = warp(model.probs[model.state(list(text))].log(), Sampling(temperature=temperature))
                token = int(draw(q, uniforms[first + c * width + j]))
                new.append(((*text, token), own, q))
        first += len(new)
        levels.append(new)
        chains = [(text, own) for text, own, _ in new]
    return levels


@pytest.mark.parametrize("shape", ["3x1x1", "2x2", "3x2x1", "4x1"])
@pytest.mark.parametrize("kind", ["iid", "temperatures", "drafts"])
def test_a_drafted_tree_is_the_slow_ones_chains_with_equal_draws_merged(shape, kind):
    pair = sharing_pair()
    if kind != "drafts":
        pair = ModelPair(target=pair.target, draft=pair.drafts[0], end_ids=())
    temperatures = (0.6, 1.7) if kind == "temperatures" else ()
    proposer = TreeProposer(shape, "iid" if kind == "iid" else "independent", temperatures)
    sources = [(model, t) for model in pair.drafts for t in (temperatures or (1.0,))]
    proposal, drafts, uniforms = drafted_tree(pair, proposer, 60, seed=3)
    merged = 0
    for row in range(60):
        levels = slow_chains(pair, proposer.widths, uniforms[row], sources)
        nodes = list(dict.fromkeys(text for level in levels for text, _, _ in level))
        count = int(proposal.num_drafted[row])
        assert count == len(nodes) == len(set(nodes))
        paths = []
        for node in range(count):
            parent = int(proposal.parents[row, node])
            paths.append(((0, 1) if parent < 0 else paths[parent]) + (int(proposal.tokens[row, node]),))
        assert paths == nodes
        chains = [chain for level in levels for chain in level]
        merged += len(chains) - count
        for m, (text, _, q) in enumerate(chains):
            assert paths[int(proposal.candidates[row, m])] == text
            assert torch.equal(proposal.draft_probs[row, proposal.drawn_from[row, m]], q)
        calls = sum(any(own[0] is model for _, own, _ in level) for level in levels for model in pair.drafts)
        assert int(proposal.num_calls[row]) == calls
    assert merged > 60
    assert all(session.num_calls == len(proposer.widths) for session in drafts)


@pytest.mark.parametrize("name", [n for n in TREES if "iid" in get(n).schemes and isinstance(get(n), SelectionRule)])
def test_chains_that_share_a_prefix_are_exact_by_enumeration(name):
    """Three chains of two tokens over three: every draw, both levels of the walk, summed in float64."""
    rule, pair = get(name), sharing_pair(4)
    target, draft = pair.target.probs, pair.drafts[0].probs
    start = pair.target.state([0, 1])
    after = lambda token: (start * 3 + token) % len(target)
    joint = torch.zeros(3, 3, dtype=torch.float64)
    second = {}  # the second token's distribution, by the first and by the multiset of candidates behind it
    for first in product(range(3), repeat=3):
        prob = float(torch.stack([draft[start, y] for y in first]).prod())
        q = draft[start].expand(3, -1)
        accept, residual = rule.distribution(target[start], q, torch.tensor(first))
        emitted = (residual * (1 - accept.sum())).index_add(0, torch.tensor(first), accept)
        for token in range(3):
            shared = first.count(token)
            key = (token, shared)
            if key not in second:
                second[key] = node_emission(rule, target[after(token)], draft[after(token)], shared)
            joint[token] += prob * emitted[token] * second[key]
    expected = torch.stack([target[start, t] * target[after(t)] for t in range(3)])
    assert (joint - expected).abs().max() < 1e-12


def node_emission(rule, p, q, count):
    """The emitted token's distribution at a node with `count` i.i.d. candidates."""
    if not count:
        return p
    total = torch.zeros(3, dtype=torch.float64)
    for drawn in product(range(3), repeat=count):
        accept, residual = rule.distribution(p, q.expand(count, -1), torch.tensor(drawn))
        total += float(q[list(drawn)].prod()) * (residual * (1 - accept.sum())).index_add(
            0, torch.tensor(drawn), accept
        )
    return total


def test_more_chains_accept_more_when_prefixes_are_shared(exact_pair, prompts):
    """The children of all chains that agree with the text stay candidates: longer accepted paths than one chain's."""
    sampling = Sampling(max_new_tokens=24)
    efficiency = {}
    for shape in ("1x1x1", "4x1x1"):
        method = config.method("specinfer", [f"proposer.k_config={shape}"])
        generations = [
            g for seed in range(3) for g in decode(exact_pair, prompts, method, replace(sampling, seed=seed))
        ]
        counts = total(generations)
        efficiency[shape] = counts.num_generated / counts.num_target_calls
    assert efficiency["4x1x1"] > 1.05 * efficiency["1x1x1"]


def test_each_draft_reads_its_own_chains_only(table_pair):
    """Two drafts, three children: the first draft has two chains, the second one."""
    pair = sharing_pair(2)
    proposal, drafts, _ = drafted_tree(pair, TreeProposer("3x1", "independent"), 5, seed=1)
    read = [int((proposal.cache_ids[:, d] >= 0).sum(1).max()) for d in range(2)]
    assert read[0] <= 2 and read[1] <= 1
    assert max(session.index.num_nodes(0) for session in drafts[1:]) == 1
    method = Method("drafts", Fixed(9), get("specinfer"), TreeProposer("1x1", "independent"))
    (generation,) = decode(pair, [[0, 1]], method, Sampling(max_new_tokens=8))
    assert generation.counts.num_draft_calls <= generation.counts.num_drafted  # a draft without a child is not asked


# -- temperature 0 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TREES)
def test_greedy_trees_hold_the_most_probable_tokens_and_decode_the_targets_own_text(name, exact_pair, prompts):
    sampling = Sampling(temperature=0, max_new_tokens=20)
    plain = decode(exact_pair, prompts, config.method("autoregressive"), sampling)
    chain = decode(exact_pair, prompts, config.method("speculative", ["policy.num_drafted=3"]), sampling)
    tree = decode(exact_pair, prompts, config.method(name, ["proposer.k_config=4x2x1"]), sampling)
    assert [g.token_ids for g in tree] == [g.token_ids for g in plain]
    assert {r.num_drafted for g in tree for r in g.rounds} >= {20}
    assert total(tree).num_target_calls < total(chain).num_target_calls


@pytest.mark.parametrize("shape", ["2x1x1", "4x1", "3x2x1", "5x2"])
def test_at_temperature_0_every_draft_gives_its_next_most_probable_children(shape):
    """Child j is token number j // 2 of draft j mod 2, and its descendants are that draft's; equal ones are one node."""
    merged = 0
    for seed in range(8):
        pair = sharing_pair(seed)
        proposer = TreeProposer(shape, "independent").greedy()
        proposal, *_ = drafted_tree(pair, proposer, 2, seed=3, temperature=0.0)
        chains, levels = [((0, 1), None)], []
        for level, width in enumerate(proposer.widths):
            children = [(text, source, j) for text, source in chains for j in range(width)]
            chains = []
            for text, source, j in children:
                model, rank = (source, j) if level else (pair.drafts[j % 2], j // 2)
                most_probable = model.probs[model.state(list(text))].argsort(descending=True).tolist()
                chains += [((*text, most_probable[rank]), model)] if rank < 3 else []
            levels.append([text for text, _ in chains])
        sequences = [text for level in levels for text in level]
        nodes = list(dict.fromkeys(sequences))
        assert int(proposal.num_drafted[0]) == len(nodes)
        merged += len(sequences) - len(nodes)
        paths = []
        for token, parent in zip(proposal.tokens[0].tolist(), proposal.parents[0].tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else (0, 1)), token))
        assert paths[: len(nodes)] == nodes
        assert [paths[node] for node in proposal.candidates[0].tolist()[: len(sequences)]] == sequences
    assert merged > 0


def test_the_order_of_the_drafts_does_not_matter_at_temperature_0(exact_pair, prompts):
    """A draft that is the target itself is followed to the end, whether it stands first or second."""
    sampling, efficiency = Sampling(temperature=0, max_new_tokens=21), []
    for drafts in ([exact_pair.draft, exact_pair.target], [exact_pair.target, exact_pair.draft]):
        pair = ModelPair(target=exact_pair.target, drafts=drafts, end_ids=())
        tree = decode(pair, prompts, config.method("specinfer", ["proposer.k_config=2x1x1x1"]), sampling)
        counts = total(tree)
        efficiency.append(counts.num_generated / counts.num_target_calls)
    assert min(efficiency) > 4


def test_a_policy_sees_each_first_child_with_its_own_drafts_distribution():
    seen = []

    class Watching(Fixed):
        def step(self, step, state):
            seen.append(step.logits.softmax(-1))
            return super().step(step, state)

    pair = sharing_pair()
    decode(pair, [[0, 1]], Method("watched", Watching(1), get("specinfer"), TreeProposer("3", "independent")),
           Sampling(max_new_tokens=2))  # fmt: skip
    expected = [model.probs[model.state([0, 1])] for model in (*pair.drafts, pair.drafts[0])]
    assert torch.allclose(seen[0], torch.stack(expected))


def test_a_drafts_own_temperature_0_changes_no_scheme(table_pair):
    """The target samples: the draft's distribution is a point mass, and the rule stays exact."""
    method = Method("cold", Fixed(9), get("specinfer"), TreeProposer("2x2"), draft_temperature=0.0)
    assert output_pvalue(table_pair, method, 4000, batch_size=4000) > 0.0005


@pytest.mark.parametrize("rule", ["specinfer", "importance", "mcsd_naive"])
def test_most_probable_children_at_higher_temperatures_where_a_rule_is_exact_for_them(rule, table_pair):
    method = Method("top", Fixed(9), get(rule), TreeProposer("2x2", "top_k"))
    other = TabularModel.random(3, 1, torch.Generator().manual_seed(9), sharpness=1.5)
    several = ModelPair(target=table_pair.target, drafts=[table_pair.draft, other], end_ids=(2,))
    for pair in (table_pair, several):
        assert output_pvalue(pair, method, 4000, batch_size=4000) > 0.0005
    with pytest.raises(InputError, match="by the scheme top_k, but SpecTr is exact only for iid"):
        Method("top", Fixed(9), get("spectr"), TreeProposer("2x2", "top_k"))


def test_heads_are_refused_where_several_drafts_take_part():
    method = Method("heads", Survival(HeadEstimator()), get("specinfer"), TreeProposer("2x2", "independent"))
    with pytest.raises(InputError, match="BoundSurvival reads the states of one draft model, and 2 take part"):
        decode(sharing_pair(), [[0, 1]], replace(method, policy=BoundSurvival(HeadEstimator())), Sampling())


class BoundSurvival(Survival):
    def bind(self, pair):
        return self


def test_temperatures_may_come_as_an_array():
    proposer = TreeProposer("2x1", "independent", temperatures=np.array([0.5, 2.0]))
    assert proposer.temperatures == (0.5, 2.0)
