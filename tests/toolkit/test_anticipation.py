"""`check_anticipation`: no shipped policy lets draws decide that they are sent, and policies that do so are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.toolkit.test_block_decoding import BudgetOfThisRound, ConstantScore, budget_policy, pvalue
from toolkit import config
from toolkit.acceptance import CandidateEstimator
from toolkit.decoding import BestFirstProposer, BlockProposer, ChainProposer, Method, Sampling, TreeProposer
from toolkit.decoding.proposers import BestSourceProposer, PromptLookupProposer
from toolkit.errors import InputError
from toolkit.stopping import Always, Confidence, StoppingPolicy, TreeRate
from toolkit.testing import check_anticipation
from toolkit.testing.batches import coupled_error
from toolkit.testing.blocks import block_pair
from toolkit.verification import get
from toolkit.verification.chain_enumeration import PrefixTables

DEEPEST = 8
CAUGHT = "is sent or left out by what is drawn there or later"

# -- shipped policies -------------------------------------------------------------------------------------------------


def policies():
    for name in config.choices("stopping"):
        settings = config.plain(config.compose("method_only", [f"+stopping@policy={name}"])["policy"])
        estimator = settings.get("estimator", {})
        if "head" in estimator or "Confidence" in estimator.get("_target_", ""):
            settings.pop("estimator")
            policy = config.instantiate({**settings, "_partial_": True})(estimator=ConstantScore())
        else:
            policy = config.instantiate(settings)
        if policy.chooses_nodes:  # trees: below
            continue
        if not policy.reads_matches:
            proposers = BlockProposer(), ChainProposer()
        elif policy.needs_draft_model:
            proposers = (BestSourceProposer(copies=PromptLookupProposer()),)
        else:
            proposers = (PromptLookupProposer(),)
        for proposer in proposers:
            costly = policy.couples_rows and type(proposer) is ChainProposer  # a block shows rows more, and is not slow
            marks = [pytest.mark.slow] if costly else []
            bound = policy.within(DEEPEST).bind(None)
            yield pytest.param(bound, proposer, id=f"{name}-{type(proposer).__name__}", marks=marks)


@pytest.mark.parametrize(("policy", "proposer"), policies())
def test_no_policy_anticipates(policy, proposer):
    assert check_anticipation(policy, proposer) < 1e-12


# -- controls ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CutsAfterDrawing(StoppingPolicy):
    """A control: a drafted round ends before the first unwanted position, by anything that the round has shown.

    unwanted  of (num_drafted [B, 1], state): positions [B, D] bool. The state has by position the `drawn` token, its
              probability `prob` and the `largest` one; and [B, 1] the earlier `rounds`, how many rows are `live`, the `context`
    """

    unwanted: Callable[[Tensor, dict[str, Tensor]], Tensor]
    couples_rows: bool = False
    reads_context: bool = False

    def init(self, num_rows, device):
        state = {name: torch.zeros(num_rows, DEEPEST) for name in ("drawn", "prob", "largest")}
        return {**state, **{name: torch.zeros(num_rows, 1) for name in ("rounds", "live", "context")}}

    def begin(self, live, state):
        return {**state, "live": live.sum().expand(len(live), 1), "context": state["context"].reshape(-1, 1)}, live

    def step(self, step, state):
        depth = torch.arange(1, DEEPEST + 1) == step.depth
        shown = {"drawn": step.tokens, "prob": step.token_prob, "largest": step.top_probs[:, 0]}
        shown = {name: torch.where(depth, value.unsqueeze(1).float(), state[name]) for name, value in shown.items()}
        return {**state, **shown}, torch.ones_like(step.tokens, dtype=torch.bool)

    def sent(self, num_drafted, state):
        drafted = torch.arange(DEEPEST) < num_drafted.unsqueeze(1)
        unwanted = self.unwanted(num_drafted.unsqueeze(1), state) & drafted
        return torch.where(unwanted.any(1), unwanted.int().argmax(1), num_drafted)

    def observe(self, proposal, verdict, state):
        return {**state, "rounds": state["rounds"] + 1}


def unlikely(state):
    return state["prob"] < 0.5


def by_the_neighbours_first_token(num_drafted, state):
    return (state["drawn"][:, :1].roll(1, 0) == 1) & (torch.arange(DEEPEST) > 0)


BUDGET = CutsAfterDrawing(
    lambda count, state: (state["largest"].sum(1, keepdim=True) < 0.77 * count) & (torch.arange(DEEPEST) > 0)
)
NEIGHBOUR = CutsAfterDrawing(lambda count, state: state["drawn"].roll(1, 0) == 1, couples_rows=True)
CONTROLS = {
    "a rare token": CutsAfterDrawing(lambda count, state: state["prob"] < 0.2),
    "where the largest q exceeds .8": CutsAfterDrawing(lambda count, state: unlikely(state) & (state["largest"] > 0.8)),
    "a budget on this round's confidences": BUDGET,
    "in rounds of four": CutsAfterDrawing(lambda count, state: unlikely(state) & (count == 4)),
    "from the fourth round on": CutsAfterDrawing(lambda count, state: unlikely(state) & (state["rounds"] >= 3)),
    "with three live rows": CutsAfterDrawing(
        lambda count, state: unlikely(state) & (state["live"] == 3), couples_rows=True),
    "in texts of more than three tokens": CutsAfterDrawing(
        lambda count, state: unlikely(state) & (state["context"] > 3), reads_context=True),
    "by the neighbour's draw": NEIGHBOUR,
    "a budget for all rows of what they have drawn": budget_policy(BudgetOfThisRound, DEEPEST),
    "as rare as one in twenty": CutsAfterDrawing(lambda count, state: state["prob"] < 0.05),
    "like the token after it": CutsAfterDrawing(lambda count, state: state["drawn"] == state["drawn"].roll(-1, 1)),
    "at the last depth": CutsAfterDrawing(lambda count, state: unlikely(state) & (torch.arange(1, DEEPEST + 1) == DEEPEST)),
    "by a neighbour, undeclared": CutsAfterDrawing(by_the_neighbours_first_token),
}  # fmt: skip


@pytest.mark.parametrize("proposer", [BlockProposer(), ChainProposer()], ids=["block", "chain"])
@pytest.mark.parametrize("control", CONTROLS)
def test_tokens_that_are_left_out_after_drawing_are_caught(control, proposer):
    with pytest.raises(AssertionError, match=CAUGHT):
        check_anticipation(CONTROLS[control], proposer)


@pytest.mark.parametrize(("policy", "rows"), [(BUDGET, 1), (NEIGHBOUR, 2)], ids=["budget", "neighbour"])
def test_what_is_caught_changes_whole_texts(policy, rows):
    """The first four tokens of a row; of two rows together, each of which follows its target alone."""
    tables = [
        [PrefixTables(2, 3 if rows == 1 else 1, seed * rows + row) for row in range(rows)] for seed in range(41, 60)
    ]
    state = policy.init(rows, torch.device("cpu"))
    assert max(coupled_error(policy, get("rejection"), pair, state)[0] for pair in tables) > (
        0.1 if rows == 1 else 0.003
    )


def test_what_a_neighbour_sends_may_decide():
    """It is drawn in any case, so rows stay independent; a policy of this kind declares that it couples rows."""
    policy = CutsAfterDrawing(by_the_neighbours_first_token, couples_rows=True)
    for seed in range(41, 60):
        tables = [PrefixTables(2, 2, 2 * seed + row) for row in range(2)]
        error, lengths = coupled_error(policy, get("rejection"), tables, policy.init(2, torch.device("cpu")))
        assert error < 1e-12 and lengths <= {1, 2}
    assert check_anticipation(policy, BlockProposer()) < 1e-12


@dataclass
class Trimmed(BlockProposer):
    """A control: it draws the whole block, and leaves out what comes after a token that its draft is not sure of."""

    threshold: float = 0.5

    def propose(self, context, policy, state):
        proposal, state = super().propose(context, Always(), state)
        if not proposal.num_nodes:
            return proposal, state
        probs = proposal.draft_probs.gather(-1, proposal.tokens.unsqueeze(-1)).squeeze(-1)
        unsure = probs < self.threshold
        sent = torch.where(unsure.any(1), unsure.int().argmax(1), proposal.num_drafted)
        return replace(proposal, num_drafted=torch.minimum(sent, proposal.num_drafted)), state


@pytest.mark.parametrize("threshold", [0.5, 0.24])
def test_proposers_that_trim_are_caught(threshold):
    with pytest.raises(AssertionError, match=CAUGHT):
        check_anticipation(Always(), Trimmed(threshold))


def test_short_rounds_are_enumerated(monkeypatch):
    monkeypatch.setattr("toolkit.testing.blocks._check_pairs", lambda *arguments: None)
    assert check_anticipation(Always(), Trimmed()) > 0.01, "the text no longer follows the target's distribution"


def test_trimming_after_drawing_changes_whole_outputs():
    method = Method("trimmed", Always(), get("rejection"), Trimmed())
    assert pvalue(block_pair(3), method, Sampling(max_new_tokens=3, seed=5))[0] < 1e-6


# -- trees ------------------------------------------------------------------------------------------------------------

STATES = 32  # nodes of tables with fewer tie, and rounding decides
DRAWN = BestFirstProposer(num_nodes=5, width=2, num_children=3, scheme="without_replacement")


def tree_rate(kind=TreeRate, **settings):
    settings = {"cost_ratio": 0.05, "column_cost": 0.05, **settings}
    return kind(CandidateEstimator(), **settings).within(3).bind(None)


def check_tree(policy, proposer):
    return check_anticipation(policy, proposer, hidden_size=STATES)


@pytest.mark.parametrize("proposer", [replace(DRAWN, scheme="top_k"), DRAWN], ids=["top_k", "drawn"])
def test_tree_rate_does_not_anticipate(proposer):
    assert check_tree(tree_rate(), proposer) < 1e-12


def test_nodes_of_fixed_trees_may_stop():
    assert check_tree(Confidence(0.4), TreeProposer("2x1x1", "without_replacement")) < 1e-12


@dataclass(frozen=True)
class ByCousins(TreeRate):
    """As many children as earlier levels' survival says, which follows from what was drawn there, in other branches, too."""

    def choose(self, nodes, state):
        state, _, _ = super().choose(nodes, state)
        earlier = torch.where(nodes.readable, 1.0, nodes.survival).amin(1)
        return state, nodes.drawn + 1 + (earlier < 0.3), nodes.readable


def test_numbers_that_follow_from_cousins_draws_pass():
    assert check_tree(tree_rate(ByCousins), DRAWN) < 1e-12


@dataclass
class LeavesOut(BestFirstProposer):
    """A control: of the nodes that were drawn it sends some, by the products of q along their paths [B, N]."""

    wanted: Callable[[Tensor], Tensor] = torch.isfinite

    def propose(self, context, policy, state):
        proposal, state = super().propose(context, policy, state)
        if not proposal.num_nodes:
            return proposal, state
        probs, index = torch.zeros_like(proposal.tokens, dtype=torch.float64), torch.arange(proposal.num_nodes)
        for row, count in enumerate(proposal.num_drafted.tolist()):
            for node in range(count):
                parent, q = int(proposal.parents[row, node]), proposal.draft_probs[row, proposal.drawn_from[row, node]]
                probs[row, node] = q[proposal.tokens[row, node]] * (probs[row, parent] if parent >= 0 else 1)
        kept = self.wanted(probs) & (index < proposal.num_drafted.unsqueeze(1))
        order = (~kept).int().argsort(dim=1, stable=True)
        parents = proposal.parents.gather(1, order)
        parents = torch.where(parents >= 0, order.argsort(1).gather(1, parents.clamp(min=0)), -1)
        return replace(
            proposal, tokens=proposal.tokens.gather(1, order), parents=parents, num_drafted=kept.sum(1),
            candidates=torch.where(index < kept.sum(1, keepdim=True), index, -1),
            drawn_from=proposal.drawn_from.gather(1, order), cache_ids=proposal.cache_ids.gather(2, order.unsqueeze(1)),
        ), state  # fmt: skip


LEFT_OUT = {
    "rare paths": lambda probs: probs > 0.15,
    "all but the best three": lambda probs: probs >= probs.topk(min(3, probs.shape[1])).values[:, -1:],
}


@pytest.mark.parametrize("wanted", LEFT_OUT)
def test_drawn_nodes_that_are_left_out_are_caught(wanted, monkeypatch):
    control = LeavesOut(**vars(DRAWN), wanted=LEFT_OUT[wanted])
    with pytest.raises(AssertionError, match="the number of children"):
        check_tree(tree_rate(), control)
    monkeypatch.setattr("toolkit.testing.blocks._check_pairs", lambda *arguments: None)
    assert check_tree(tree_rate(), control) > 0.005, "the text no longer follows the target's distribution"


def test_larger_trees_are_not_enumerated():
    with pytest.raises(InputError, match="at most 5 nodes"):
        check_tree(tree_rate(), BestFirstProposer())
