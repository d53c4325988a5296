"""The batch's rate rule: by hand, by enumeration over two rows, and where it is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.slow_batch_rate import SlowBatchRate
from toolkit import config
from toolkit.costs.load import CostGrid, LoadCost
from toolkit.decoding import ChainProposer, Method, Sampling, TreeProposer, decode
from toolkit.decoding.proposers.base import where_active
from toolkit.decoding.text import TextBatch
from toolkit.engine.device import Gate
from toolkit.errors import InputError
from toolkit.stopping import BatchRate, Bounded
from toolkit.stopping.base import in_context, with_fresh
from toolkit.testing.batches import coupled_error
from toolkit.types import DraftStep, Proposal, Verdict
from toolkit.verification import get
from toolkit.verification.chain_enumeration import PrefixTables

COUNTS = ("accepted", "verified", "tokens", "cost")


class Probabilities:
    """An estimator for tests: q(y_k) of the drawn token, and q's largest probability for the one after it."""

    def bind(self, pair: object) -> Probabilities:
        return self

    def drawn_probs(self, step: DraftStep) -> tuple[torch.Tensor, torch.Tensor]:
        return step.draft_prob, step.probs.max(-1).values


def bound(most: int = 4, **settings: Any) -> BatchRate:
    policy = Bounded(BatchRate(Probabilities(), **settings), 1, most).bind(None).policy
    assert isinstance(policy, BatchRate)
    return policy


def step_of(depth: int, *chosen: float, live: list[bool] | None = None) -> DraftStep:
    """Rows whose drawn token has this probability, of two tokens."""
    probs = torch.tensor([[p, 1 - p] for p in chosen])
    marks = torch.tensor(live or [True] * len(chosen))
    return DraftStep(depth, probs.log(), probs, probs[:, :0], torch.zeros(len(chosen), dtype=torch.long), marks)


def judged(drafted: list[int], accepted: list[int]) -> tuple[Proposal, Verdict]:
    sent, length = torch.tensor(drafted), torch.tensor(accepted)
    tokens = torch.zeros(len(drafted), max(drafted, default=0), dtype=torch.long)
    return Proposal(tokens, torch.zeros(*tokens.shape, 2), sent, sent), Verdict(
        tokens, length, length, length == sent, length >= 0
    )


def test_it_goes_on_while_the_rows_sum_exceeds_what_a_forward_costs_at_the_batchs_rate():
    """Of depths 1 to 4, one has the best rate of tokens accepted with .6: 1.6 per row in 1.3."""
    policy = bound(most=4, cost_ratio=0.2, column_cost=0.1, acceptance=0.6)
    live = torch.tensor([True, True])
    state, going = policy.begin(live, policy.init(2, live.device))
    rates = [sum(0.6**j for j in range(d + 1)) / (1 + 0.3 * d) for d in range(5)]
    assert going.tolist() == [True, True] and max(rates) == rates[1]
    torch.testing.assert_close(state["rate"], 2 * torch.full((2,), rates[1]))
    for chosen in ((0.9, 0.5), (0.6, 0.5), (0.55, 0.5), (0.99, 0.01)):
        gained = sum(p * max(p, 1 - p) for p in chosen)
        _, going = policy.step(step_of(1, *chosen), state)
        assert going.tolist() == [gained > 2 * rates[1] * 0.3] * 2


def test_rows_that_have_stopped_count_for_nothing():
    policy = bound(cost_ratio=0.2, acceptance=0.6)
    state, _ = policy.begin(torch.tensor([True, True]), policy.init(2, torch.device("cpu")))
    assert policy.step(step_of(1, 0.9, 0.9), state)[1].tolist() == [True, True]
    assert policy.step(step_of(1, 0.9, 0.45, live=[False, True]), state)[1].tolist() == [False, False]


@pytest.mark.parametrize("live", [[True, False], [False, True]])
def test_a_free_slot_does_not_bring_an_older_threshold(live):
    """Rows that do not draft keep their state in a round: the batch's threshold must not be theirs."""
    policy, marks = bound(cost_ratio=0.2, acceptance=0.6), torch.tensor(live)
    old, _ = policy.begin(marks, policy.init(2, marks.device))
    for chosen in (0.9, 0.45):
        new, going = policy.step(step_of(1, chosen, chosen, live=live), old)
        state = where_active(new, old, marks)
        assert going.tolist() == [chosen > 0.8] * 2
        assert policy.step(step_of(2, 0.7, 0.7, live=live), state)[1].tolist() == [chosen > 0.8] * 2


def test_a_batch_drafts_nothing_where_drafting_does_not_pay():
    live = torch.ones(8, dtype=torch.bool)
    for column, expected in ((0.0, True), (2.0, False)):
        policy = bound(cost_ratio=0.2, column_cost=column)
        assert policy.begin(live, policy.init(8, live.device))[1].tolist() == [expected] * 8


def test_it_looks_behind_a_dear_first_column():
    """The target's second column doubles its forward, further ones are free: one step ahead never pays, four do."""
    seconds = torch.ones(1, 21, 1, dtype=torch.float64).numpy()
    seconds[:, 1:] = 2.0
    target = CostGrid((1.0,), tuple(float(w) for w in range(1, 22)), (0.0,), seconds)
    draft = CostGrid((1.0,), (1.0,), (0.0,), torch.full((1, 1, 1), 0.05, dtype=torch.float64).numpy())
    policy = replace(bound(most=8, acceptance=0.9), table=LoadCost(draft, target, "test"))
    live = torch.ones(1, dtype=torch.bool)
    assert (1 + 0.9) / 2.05 < 1  # one drafted token makes it slower than plain decoding
    assert policy.begin(live, policy.init(1, live.device))[1].tolist() == [True]


def test_what_a_row_counts():
    policy = bound(cost_ratio=0.2, column_cost=0.1)
    state = policy.observe(*judged([4, 4, 0], [2, 0, 0]), policy.init(3, torch.device("cpu")))
    state = policy.observe(*judged([2, 1, 0], [2, 1, 0]), state)
    torch.testing.assert_close(
        torch.stack([state[name] for name in COUNTS], 1),
        torch.tensor([[4, 5, 6, 3.8], [1, 2, 3, 3.8], [0, 0, 2, 3.8]]),
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"cost_ratio": 0.2, "acceptance": 0.6, "memory": 3.0},
        {"cost_ratio": 0.3, "column_cost": 0.02, "acceptance": 0.9, "memory": 1.5},
        {"cost_ratio": 0.4, "column_cost": 0.2, "acceptance": 0.7, "memory": 8.0},
        {"cost_ratio": 0.5, "column_cost": 0.1, "acceptance": 0.6, "memory": 2.0},
    ],
)
def test_round_after_round_it_is_its_definition(settings):
    rows, most, generator = 3, 4, torch.Generator().manual_seed(5)
    policy = bound(most, **settings)
    slow, state, decided = SlowBatchRate(policy, rows), policy.init(rows, torch.device("cpu")), set()
    random = lambda: torch.rand(rows, generator=generator)
    for number in range(200):
        if number % 5 == 4:  # a new text in a slot
            joined = number % rows
            slow.join(joined)
            state = with_fresh(policy, state, joined)
        live = (random() < (0.8 if number != 7 else 0.0)).tolist()
        state, going = policy.begin(torch.tensor(live), state)
        drafts = slow.begin(live)
        assert going.tolist() == [drafts and is_live for is_live in live]
        torch.testing.assert_close(state["rate"], torch.full((rows,), float(slow.rate)), rtol=1e-4, atol=1e-4)
        decided |= {(0, drafts)} if any(live) else set()
        for depth in range(1, most):
            chosen = (1 - random() ** 3 / 2).tolist()  # at least 1/2: q's largest probability is the token's own
            drafting = [a and b for a, b in zip(live, (random() < 0.9).tolist(), strict=True)]
            state, going = policy.step(step_of(depth, *chosen, live=drafting), state)
            assert going.tolist() == [slow.step(depth, chosen, chosen, drafting)] * rows
            decided.add((depth, bool(going[0])))
        drafted = (random() * (most + 1)).long() * torch.tensor(live)
        length = (drafted * random() * 1.5).long().clamp(max=drafted)
        slow.observe(drafted.tolist(), length.tolist())
        state = policy.observe(*judged(drafted.tolist(), length.tolist()), state)
        for name in COUNTS:
            expected = torch.tensor([float(getattr(row, name)) for row in slow.rows])
            torch.testing.assert_close(state[name], expected, rtol=1e-4, atol=1e-4)
    assert {(0, True), (1, True), (1, False), (most - 1, False)} <= decided


def test_costs_come_from_the_table_that_is_named(tmp_path):
    """A table in which drafting is free against one in which it never pays; `bind` forgets an earlier table's costs."""
    live = torch.ones(2, dtype=torch.bool)
    going = []
    for name, ratio in (("cheap", 0.01), ("dear", 5.0)):
        path = LoadCost.ratio(ratio).save(tmp_path / f"{name}.json")
        policy = BatchRate(Probabilities(), costs=str(path)).within(3)
        assert policy.deepest == 3
        policy = policy.bind(None)
        going.append(policy.begin(live, policy.init(2, live.device))[1].tolist())
        again = replace(policy, costs=None, cost_ratio=100.0).bind(None)
        assert not bool(again.begin(live, again.init(2, live.device))[1].any())
    assert going == [[True, True], [False, False]]


def test_costs_are_those_at_the_longest_live_rows_context():
    """At the middle of the table's contexts where nobody tells."""
    seconds = torch.tensor([[[1.0, 3.0]]], dtype=torch.float64).numpy()
    draft = CostGrid((1.0,), (1.0,), (0.0, 100.0), seconds)
    target = CostGrid((1.0,), (1.0,), (0.0, 100.0), 0 * seconds + 4)
    policy = replace(bound(most=2), table=LoadCost(draft, target, "test"))
    live = torch.tensor([True, True, False])
    for context, price in (([0, 50, 100], 2 / 4), ([0, 25, 100], 1.5 / 4), ([10, 100, 0], 3 / 4), (None, 2 / 4)):
        state = in_context(policy, policy.init(3, live.device), None if context is None else torch.tensor(context))
        state, _ = policy.begin(live, state)
        after = policy.observe(*judged([1, 0, 0], [0, 0, 0]), state)
        assert after["cost"].tolist() == pytest.approx([1 + price] * 3)


def test_a_batch_drafts_again_once_its_acceptance_has_risen():
    """Rows without luck rest; new texts in their slots start from the assumed acceptance."""
    policy, live = bound(memory=2.0, cost_ratio=0.3), torch.tensor([True, True])
    state = policy.init(2, live.device)
    for _ in range(9):
        state = policy.observe(*judged([4, 4], [0, 0]), state)
    assert not policy.begin(live, state)[1].any()
    assert policy.begin(live, with_fresh(policy, with_fresh(policy, state, 0), 1))[1].all()


def test_a_batch_without_a_live_row_drafts_nothing():
    policy, live = bound(cost_ratio=0.01), torch.ones(2, dtype=torch.bool)
    state, going = policy.begin(~live, policy.init(2, live.device))
    assert not going.any()
    assert policy.begin(live, with_fresh(policy, state, 0))[1].all()


def test_a_batch_with_fewer_slots_plans_anew():
    """In a batch of two slots drafting is too dear, in one of a single slot it is not."""
    seconds = torch.tensor([[[0.1]], [[10.0]]], dtype=torch.float64).numpy()
    draft = CostGrid((1.0, 2.0), (1.0,), (0.0,), seconds)
    policy = replace(bound(), table=replace(LoadCost.ratio(0.2), draft=draft))
    both = torch.tensor([True, True])
    state, going = policy.begin(both, policy.init(2, both.device))
    assert not going.any()
    assert not policy.begin(torch.tensor([True, False]), state)[1].any()
    one = {key: value[:1] for key, value in state.items()}
    assert policy.begin(both[:1], one)[1].all()


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_batch_that_does_not_draft_launches_nothing_on_the_draft(ahead, table_pair, monkeypatch):
    """Also where the host runs ahead of the answers, as on a GPU."""
    forwards, collected = [], []
    read, unread = ChainProposer._read, TextBatch._unread
    monkeypatch.setattr("toolkit.decoding.proposers.chain.Gate", lambda device: Gate(device, ahead))
    monkeypatch.setattr(ChainProposer, "_read", lambda *given: forwards.append(given) or read(*given))
    monkeypatch.setattr(
        TextBatch, "_unread", lambda self, one: collected.append(one is self.target) or unread(self, one)
    )
    for ratio, drafts in ((5.0, False), (0.01, True)):
        method = Method("batch_rate", BatchRate(Probabilities(), cost_ratio=ratio), get("rejection"), max_drafted=3)
        decode(table_pair, [[0], [1], [0, 1]] * 3, method, Sampling(max_new_tokens=12), batch_size=2)
        assert bool(forwards) == drafts
        assert all(collected) != drafts, "what the draft has not read is not even collected"


class Bindable(Probabilities):
    """Remembers what it was bound to."""

    def __init__(self, pair: object = None):
        self.pair = pair

    def bind(self, pair: object) -> Bindable:
        return Bindable(pair)


def test_its_estimator_is_bound_to_the_pair():
    bound_to = BatchRate(Bindable()).bind("pair").estimator
    assert isinstance(bound_to, Bindable) and bound_to.pair == "pair"


def test_a_gain_that_equals_its_price_is_not_worth_it():
    """Free drafts of no use: the gain behind a token that is never accepted is 0, and so is what the next one costs."""
    policy = bound(most=3, cost_ratio=0.0)
    state, _ = policy.begin(torch.tensor([True]), policy.init(1, torch.device("cpu")))
    assert policy.step(step_of(1, 0.0), state)[1].tolist() == [False]


class Always(type(get("rejection"))):
    """Keeps every drafted token: wrong wherever q is not p."""

    def distribution(self, p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.zeros(len(p), dtype=p.dtype)
        lengths[-1] = 1.0
        return lengths, p


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("size", [2, 3])
def test_two_rows_are_independent_and_follow_their_targets(rule, size):
    policy = bound(most=2, cost_ratio=0.3, column_cost=0.2, acceptance=0.6)
    state = policy.init(2, torch.device("cpu"))
    seen = set()
    for seed in range(4 if size == 2 else 2):
        rows = [PrefixTables(size, 2, 2 * seed), PrefixTables(size, 2, 2 * seed + 1)]
        error, lengths = coupled_error(policy, get(rule), rows, state)
        assert error < 1e-12
        seen |= lengths
    assert {1, 2} <= seen, "the policy never decided otherwise: the check shows nothing"


def test_the_enumeration_notices_a_rule_that_is_wrong():
    policy = bound(most=2, cost_ratio=0.3, column_cost=0.2, acceptance=0.6)
    rows = [PrefixTables(2, 2, 0), PrefixTables(2, 2, 1)]
    assert coupled_error(policy, Always(), rows, policy.init(2, torch.device("cpu")))[0] > 0.01


def test_the_method_plans_no_deeper_than_it_may_draft(table_pair):
    method = Method("batch_rate", BatchRate(Probabilities(), cost_ratio=0.01), get("rejection"), max_drafted=3)
    generations = decode(table_pair, [[0], [1], [0, 1]] * 5, method, Sampling(max_new_tokens=30), batch_size=4)
    drafted = [r.num_drafted for g in generations for r in g.rounds]
    assert max(drafted) == 3
    assert method.couples_rows and not config.method("rate").couples_rows


def test_only_chains_decide_together():
    with pytest.raises(InputError, match="which only chains do; got TreeProposer"):
        Method("x", BatchRate(Probabilities()), get("specinfer"), TreeProposer((2, 1)))
    assert ChainProposer.shows_live_rows
