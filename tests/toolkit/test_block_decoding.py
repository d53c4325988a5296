"""Blocks of tokens: whole outputs by enumeration for every method that takes them, and what policies decide of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.methods import others_slow
from toolkit import ModelPair, config
from toolkit.acceptance.calibration.by_depth import FILE, ByDepth, Calibration
from toolkit.costs.load import LoadCost
from toolkit.costs.table import CostTable
from toolkit.decoding import BlockProposer, ChainProposer, Method, Sampling, decode
from toolkit.drafts.block.estimator import BlockEstimator
from toolkit.errors import InputError
from toolkit.sampling import warp
from toolkit.stopping import (
    BatchRate,
    BlockBudget,
    BlockDraftRate,
    Bounded,
    Confidence,
    Fixed,
    Rate,
    StoppingPolicy,
)
from toolkit.stopping.prices import PriceTable
from toolkit.testing import chi_square, ragged_prompts, random_heads, tiny_llama
from toolkit.testing.batches import coupled_error
from toolkit.testing.blocks import block_pair, tiny_block
from toolkit.types import DraftStep
from toolkit.verification import get
from toolkit.verification.chain_enumeration import PrefixTables

CHAINS = [
    name for name in config.choices("method")
    if type(config.method(name).proposer) in (ChainProposer, BlockProposer) and config.method(name).rule.lossless
    and config.method(name).beams is None
]  # fmt: skip
LEVEL = 1e-3 / 60  # Bonferroni over the tests of whole outputs
RUNS = 4000
SETTINGS = {
    "plain": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "penalty": {"repetition_penalty": 1.6},
}


class ConstantScore:
    """Estimates for tests: a token's acceptance by q's largest probability, whatever was asked."""

    def bind(self, pair):
        return self

    def position_prob(self, step):
        return step.top_probs[:, 0].to(torch.float32)

    def read_prob(self, step):
        return self.position_prob(step)

    def drawn_prob(self, step):
        return self.position_prob(step)

    def drawn_probs(self, step):
        return self.position_prob(step), self.position_prob(step)


def method_of(name, *overrides):
    """A method whose head, if it has one, is replaced by a score."""
    method = config.method(name, overrides)
    if (
        "Preread" in type(getattr(method.policy, "estimator", None)).__name__
        or "Head" in type(getattr(method.policy, "estimator", None)).__name__
    ):
        method = replace(method, policy=replace(method.policy, estimator=ConstantScore()))
    return method


def expected_outputs(pair, prompt, length, sampling):
    """Probability of every output of at most `length` tokens by the target alone, and the outputs."""
    end, size, distribution = pair.end_ids[0], pair.vocab_size, {}
    for output in product(range(size), repeat=length):
        cut = output[: output.index(end) + 1] if end in output else output
        probability, text = 1.0, list(prompt)
        for token in cut:
            seen = torch.zeros(size, dtype=torch.bool).index_fill(0, torch.tensor(text), True)
            logits = pair.target.probs[pair.target.state(text)].log()
            probability *= float(warp(logits, sampling, seen)[token])
            text.append(token)
        distribution[tuple(cut)] = probability
    return distribution


def pvalue(pair, method, sampling, runs=RUNS, batch_size=RUNS):
    """p-value of whole outputs of two different prompts side by side, by chi-square."""
    prompts = [[0, 1], [2]]
    generations = decode(pair, prompts * (runs // 2), method, sampling, batch_size=min(batch_size, runs))
    values = []
    for number, prompt in enumerate(prompts):
        expected = expected_outputs(pair, prompt, sampling.max_new_tokens, sampling)
        outputs = sorted(expected)
        seen = dict.fromkeys(outputs, 0)
        for generation in generations[number::2]:
            seen[tuple(generation.token_ids)] = seen.get(tuple(generation.token_ids), 0) + 1
        assert set(seen) == set(outputs)
        counts = torch.tensor([seen[output] for output in outputs]).double()
        means = torch.tensor([expected[output] for output in outputs]).double() * (runs // 2)
        rare = (means < 5) & (means > 0)  # together: chi-square needs some of each
        kept = [torch.cat([part[~rare], part[rare].sum(0, keepdim=True)]) for part in (counts, means)]
        values.append(chi_square(*kept))
    return min(values), generations


@pytest.mark.parametrize("name", others_slow(CHAINS))
def test_whole_outputs_follow_the_targets_distribution(name):
    """Four tokens, one of which ends a text; blocks of four whose q depends on the token before."""
    if name == "autoregressive":
        pytest.skip("it drafts nothing")
    method = method_of(name)
    size = 40 if method.couples_rows else RUNS
    value, generations = pvalue(block_pair(4), method, Sampling(max_new_tokens=3, seed=5), batch_size=size)
    rounds = [round_ for generation in generations for round_ in generation.rounds]
    assert value > LEVEL
    assert all(round_.num_drafted <= 2 and round_.num_draft_calls <= 1 for round_ in rounds)
    assert any(round_.num_accepted for round_ in rounds) and any(not round_.bonus for round_ in rounds)


@pytest.mark.parametrize(("setting", "rule", "markov"), [
    *product(SETTINGS, ["rejection", "block"], [True]), *(("plain", rule, False) for rule in ("rejection", "block")),
])  # fmt: skip
def test_sampling_settings_and_both_rules(setting, rule, markov):
    method = Method("blocks", Confidence(0.4), get(rule))
    sampling = Sampling(max_new_tokens=3, seed=7, **SETTINGS[setting])
    assert pvalue(block_pair(3, markov), method, sampling)[0] > LEVEL


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [7, RUNS])
def test_blocks_of_every_length_in_uneven_batches(length, batch_size):
    """Texts end inside of blocks, and limits cut them."""
    runs = RUNS if batch_size == RUNS else 700
    method = Method("blocks", Fixed(4), get("rejection"))
    pair = block_pair(length)
    value, generations = pvalue(pair, method, Sampling(max_new_tokens=4, seed=length), runs, batch_size)
    assert value > LEVEL
    rounds = [round_ for generation in generations for round_ in generation.rounds]
    assert max(round_.num_drafted for round_ in rounds) == min(length, 3)
    assert length == 1 or any(
        generation.token_ids[-1] == 3 and generation.rounds[-1].num_produced == generation.rounds[-1].num_accepted
        for generation in generations
    ), "some text ends inside of a block"
    for generation in generations:
        counts = generation.counts
        assert counts.num_drafted + counts.num_target_calls == counts.num_generated + counts.num_discarded


def test_a_row_does_not_depend_on_its_neighbours():
    pair, method = block_pair(3), Method("blocks", Confidence(0.4), get("rejection"))
    prompts, sampling = [[0, 1], [2], [1, 1, 0]] * 4, Sampling(max_new_tokens=12, seed=2)
    together = decode(pair, prompts, method, sampling, batch_size=5)
    alone = [decode(pair, [prompt], method, sampling, row_ids=[row])[0] for row, prompt in enumerate(prompts)]
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids and one.counts == other.counts


class AsksTooSoon(StoppingPolicy):
    """A policy that reads the token's own probability before the token is drawn."""

    reads = True

    def read(self, step, state):
        return state, step.token_prob > 0.5


@pytest.mark.parametrize("name", ["token_prob", "draft_prob"])
def test_what_is_not_drawn_is_not_known(name):
    probs = torch.tensor([[0.25, 0.75]])
    with pytest.raises(InputError, match="before it is drawn"):
        getattr(DraftStep(1, probs.log(), probs, probs), name)
    with pytest.raises(InputError, match="before it is drawn"):
        decode(block_pair(3), [[0]], Method("early", AsksTooSoon(), get("rejection")), Sampling(max_new_tokens=3))


# -- all rows' positions under one budget -----------------------------------------------------------------------------


class BudgetOfThisRound(BlockBudget):
    """A control: a budget by what the round's own tokens led to, so that they decide whether they are sent."""

    def sent(self, num_drafted, state):
        last = state["entries"][:, -1]
        return super().sent(num_drafted, {**state, "budget": torch.where(last[0] > last[-1], 6.0, 0.0).expand_as(last)})


def budget_policy(kind=BlockBudget, most=2, **settings):
    settings = {"cost_ratio": 0.1, "column_cost": 0.3, "acceptance": 0.7, **settings}
    return Bounded(kind(ConstantScore(), **settings), 0, most).bind(None).policy


@pytest.mark.parametrize(("kind", "exact"), [(BlockBudget, True), (BudgetOfThisRound, False)])
def test_rows_that_share_a_budget_are_independent_and_follow_their_targets(kind, exact):
    """Jointly, by enumeration over two rows."""
    policy, errors, lengths = budget_policy(kind, acceptance=0.55), [], set()
    state = policy.init(2, torch.device("cpu"))
    for seed in range(8, 12):
        rows = [PrefixTables(2, 2, 2 * seed), PrefixTables(2, 2, 2 * seed + 1)]
        error, seen = coupled_error(policy, get("rejection"), rows, state)
        errors.append(error)
        lengths |= seen
    assert max(errors) < 1e-12 if exact else max(errors) > 0.01
    assert len(lengths) > 1, "the policy never decided otherwise: the check shows nothing"


def test_the_best_positions_of_all_rows_are_sent():
    """Two rows of three positions, and a budget of four: equal ones are taken by depth, none before an earlier one."""
    policy = budget_policy(most=3)
    state = policy.init(2, torch.device("cpu"))
    state["budget"] += 4
    for depth, largest in enumerate([(0.9, 0.6), (0.8, 0.9), (0.5, 0.9)], start=1):
        probs = torch.tensor([[p, 1 - p] for p in largest])
        state, going = policy.read(DraftStep(depth, probs.log(), probs, probs), state)
        assert going.tolist() == [True, True]
        state, _ = policy.step(DraftStep(depth, probs.log(), probs, probs, torch.zeros(2, dtype=torch.long)), state)
    assert policy.sent(torch.tensor([3, 3]), state).tolist() == [2, 2]
    assert policy.sent(torch.tensor([3, 1]), state).tolist() == [3, 1]


def test_the_budget_is_what_paid_in_earlier_rounds():
    """By the assumed acceptance a token costs more than it brings from some depth on; there is none where no block pays."""
    live = torch.ones(2, dtype=torch.bool)
    for column_cost, expected in ((0.0, 6), (0.3, 4), (0.5, 2)):
        policy = budget_policy(most=3, column_cost=column_cost, cost_ratio=0.05)
        state, going = policy.begin(live, policy.init(2, live.device))
        paying = sum(0.7**k > 1.2 * column_cost for k in (1, 2, 3)) * 2
        assert state["budget"].tolist() == [paying] * 2 == [expected] * 2 and going.tolist() == [True, True]
    assert budget_policy(most=3, cost_ratio=2.0).begin(live, policy.init(2, live.device))[1].tolist() == [False, False]


def test_slots_without_a_text_have_no_context():
    """Columns cost more after longer texts: free slots, which hold a token, leave the budget as it is without them."""
    table = CostTable(2, (1, 4), (0, 1000), ((1.0, 1.0), (1.0, 2.8)), (0.05, 0.05))
    policy = budget_policy(most=3, costs=table, cost_ratio=None, column_cost=None)
    live, budgets = torch.tensor([True, True, False, False]), []
    for rows in (2, 4):
        state = {**policy.init(rows, live.device), "context": torch.tensor([600.0, 400.0, 1.0, 1.0])[:rows]}
        state, going = policy.begin(live[:rows], state)
        assert going.tolist() == live[:rows].tolist()
        budgets.append(state["budget"][0].item())
    assert budgets == [4, 4]  # a column costs .3


# -- what a block costs -----------------------------------------------------------------------------------------------


class Positions:
    """An estimator for tests: the acceptance of a position is q's largest probability there."""

    def bind(self, pair):
        return self

    def position_prob(self, step):
        return step.top_probs[:, 0]


def block_step(largest, depth):
    probs = torch.tensor([[largest, 1 - largest]])
    return DraftStep(depth, probs.log(), probs, probs)


def block_rate_policy(most=4, **settings):
    return Bounded(BlockDraftRate(Positions(), **settings), 0, most).bind(None).policy


def test_a_position_is_sent_while_its_probability_exceeds_its_column_at_the_texts_rate():
    """Once the block is drafted its cost is spent, however high it was."""
    for cost_ratio in (0.0, 5.0):
        policy = block_rate_policy(cost_ratio=cost_ratio, column_cost=0.3, initial_rate=1.5)
        state, survival = policy.init(1, torch.device("cpu")), 1.0
        for depth, largest in enumerate((0.9, 0.8, 0.7, 0.6), start=1):
            state, sent = policy.read(block_step(largest, depth), state)
            survival *= largest
            assert bool(sent) == (survival > 1.5 * 0.3), depth
            step = block_step(largest, depth)
            step.tokens = torch.zeros(1, dtype=torch.long)
            state, _ = policy.step(step, state)


def test_a_block_is_drafted_iff_its_expected_tokens_exceed_its_cost():
    live = torch.ones(1, dtype=torch.bool)
    gain = sum(0.6**k for k in range(1, 5))
    for cost_ratio in (0.2, 0.6, 0.9, 1.2):
        policy = block_rate_policy(cost_ratio=cost_ratio, column_cost=0.0, acceptance=0.6, initial_rate=1.5)
        assert bool(policy.begin(live, policy.init(1, live.device))[1]) == (gain > 1.5 * cost_ratio)


def test_with_free_columns_the_whole_block_is_sent():
    policy = block_rate_policy(column_cost=0.0)
    state = policy.init(1, torch.device("cpu"))
    assert all(bool(policy.read(block_step(0.51, depth), state)[1]) for depth in range(1, 5))


def test_a_block_is_paid_for_once_by_every_rule_that_weighs_costs():
    table = PriceTable.of(LoadCost.ratio(0.4, 0.1), 1, 4, blocks=True)
    assert table.middle.tokens[0].tolist() == pytest.approx([0.5, 0.1, 0.1, 0.1])
    pair = block_pair(4)
    rate = Bounded(Rate(ConstantScore(), costs=CostTable.ratio(0.4, 0.1)), 1, 4).bind(pair).policy
    assert rate.prices_at(rate.init(2, torch.device("cpu"))).tokens[0].tolist() == pytest.approx([0.5, 0.1, 0.1, 0.1])
    batch = Bounded(BatchRate(ConstantScore(), cost_ratio=0.4, column_cost=0.1), 1, 4).bind(pair).policy
    assert batch.prices_at(batch.init(2, torch.device("cpu"))).tokens[0].tolist() == pytest.approx([0.5, 0.1, 0.1, 0.1])


def test_a_drafts_own_confidence_head_is_read(tmp_path):
    target = tiny_llama(32, 3, 1, torch.float64)
    pair = ModelPair(target, tiny_block(target, "dspark"), costs="assumed")
    estimator = BlockEstimator().bind(pair)
    hidden = torch.randn(5, pair.draft.state_width, dtype=torch.float64)
    logits = torch.randn(5, 97)
    step = DraftStep(1, logits, logits.softmax(-1), hidden)
    head = pair.draft.confidence_head.proj
    expected = torch.sigmoid(hidden @ head.weight[0] + head.bias)
    assert torch.allclose(estimator.position_prob(step).double(), expected, atol=1e-6)
    Calibration({"position": ByDepth((1.0, 2.0), (0.0, 0.5))}).save(tmp_path)
    calibrated = BlockEstimator(calibration=str(tmp_path / FILE)).bind(pair)
    for depth, logits in ((1, expected.logit()), (2, 2 * expected.logit() + 0.5)):
        again = calibrated.position_prob(replace(step, depth=depth)).double()
        assert torch.allclose(again, torch.sigmoid(logits), atol=1e-6)
    with pytest.raises(InputError, match="expected one of the draft's own confidence head"):
        BlockEstimator(calibration=str(tmp_path / FILE)).bind(block_pair())
    heads = random_heads(tmp_path / "heads", pair.draft.state_width, 32)  # of the state and the Markov embedding
    for method in (config.method("block_draft_rate"), config.method("block_draft_rate", head=str(heads))):
        for generation in decode(pair, ragged_prompts(4), method, Sampling(max_new_tokens=8)):
            assert generation.error is None
