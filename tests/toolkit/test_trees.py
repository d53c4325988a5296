"""Draft trees in the loop: chains as trees of width 1, forwards, stopping policies on nodes, several drafts, refusals."""

from __future__ import annotations

import pytest
import torch

from tests.toolkit.test_decoding import sequence_test
from toolkit import ModelPair, config
from toolkit.decoding import Method, Sampling, TreeProposer, decode
from toolkit.decoding.tree import num_nodes, parse_k_config
from toolkit.errors import InputError
from toolkit.session import TabularModel
from toolkit.stopping import AdaEdl, Confidence, DynamicConfidence, Fixed, Heuristic, Survival
from toolkit.verification import get
from toolkit.verification.specinfer import SpecInfer

TREES = [
    name for name in config.choices("method") if "proposer: tree" in (config.CONF / f"method/{name}.yaml").read_text()
]
SHAPES = ("2x2", "3x1x1", "2x1x2")


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
def test_whole_outputs_follow_the_targets_law_in_trees_of_every_shape(name, shape, table_pair):
    method = config.method(name, [f"proposer.k_config={shape}"])
    assert sequence_test(table_pair, method, 4_000, batch_size=4000) > 0.001 / (len(TREES) * len(SHAPES))


def test_a_rule_under_another_drawing_is_refused_and_would_be_wrong(table_pair):
    with pytest.raises(
        InputError, match="candidates are drawn without_replacement, but SpecInfer is exact only for iid"
    ):
        Method("mixed", Fixed(9), get("specinfer"), TreeProposer("2x2", "without_replacement"))

    class Undeclared(SpecInfer):
        drawing = ("without_replacement",)  # not true: what the published DSBD and its kin do

    method = Method("mixed", Fixed(9), Undeclared(), TreeProposer("3x2", "without_replacement"))
    assert sequence_test(table_pair, method, 10_000, batch_size=5000) < 1e-6


def test_nodes_and_forwards_are_counted_apart(exact_pair, prompts):
    method = config.method("mcsd", ["proposer.k_config=3x2"])
    for generation in decode(exact_pair, prompts, method, Sampling(max_new_tokens=12)):
        room = 12
        for r in generation.rounds:
            assert (r.num_drafted, r.num_draft_calls) == {1: (0, 0), 2: (3, 1)}.get(room, (9, 2)) or r.num_drafted < 9
            room -= r.num_produced


def test_policies_leave_nodes_without_children_and_withdraw_nothing(table_pair):
    """A node whose own token is unlikely gets no children; its siblings may. All drawn candidates are judged."""
    method = Method("careful", Confidence(0.45), get("specinfer"), TreeProposer("2x2x2", "iid"))
    generations = decode(table_pair, [[0, 1]] * 200, method, Sampling(max_new_tokens=12))
    drafted = {r.num_drafted for g in generations for r in g.rounds}
    assert drafted <= {0, 2, 4, 6, 8, 10, 12, 14}
    assert len(drafted - {0, 2, 14}) >= 3  # trees of uneven shape
    assert sequence_test(table_pair, method, 10_000, batch_size=5000) > 0.0005


@pytest.mark.parametrize("lag", [0, 1])
def test_trained_heads_stop_trees(table_pair, lag):
    """Any estimator that reads states works on nodes as it does on chains."""

    class Score:
        def bind(self, pair):
            return self

        def read_prob(self, step):
            return 0.3 + 0.6 * step.hidden[:, :3].sum(-1)

    method = Method("head", Survival(Score(), 0.5, lag), get("mcsd"), TreeProposer("2x2x1", "without_replacement"))
    assert sequence_test(table_pair, method, 10_000, batch_size=5000) > 0.0005


def test_different_drafts_and_one_draft_at_several_temperatures(table_pair):
    other = TabularModel.random(3, 1, torch.Generator().manual_seed(9), sharpness=1.5)
    several = ModelPair(target=table_pair.target, drafts=[table_pair.draft, other], end_ids=(2,))
    for rule in ("specinfer", "importance"):
        method = Method("drafts", Fixed(9), get(rule), TreeProposer("2x2", "independent"))
        assert sequence_test(several, method, 6_000, batch_size=3000) > 0.0005
        warm = Method("warm", Fixed(9), get(rule), TreeProposer("2x1", "independent", temperatures=(0.7, 1.6)))
        assert sequence_test(table_pair, warm, 6_000, batch_size=3000) > 0.0005


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
    with pytest.raises(InputError, match="drawing: expected one of iid, independent"):
        TreeProposer("2x2", "sorted")
    with pytest.raises(InputError, match="several temperatures need drawing=independent, got iid"):
        TreeProposer("2x2", "iid", temperatures=(1.0, 2.0))
