"""The batch's rate rule: by hand, by enumeration over two rows, and where it is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.slow_batch_rate import SlowBatchRate
from toolkit import config
from toolkit.decoding import ChainProposer, Method, Sampling, TreeProposer, decode
from toolkit.decoding.proposers.base import frozen
from toolkit.decoding.text import TextBatch
from toolkit.errors import InputError
from toolkit.load_cost import CostGrid, LoadCost, RuleSeconds
from toolkit.stopping import BatchRate, Bounded
from toolkit.stopping.base import with_fresh
from toolkit.stopping.batch_rate import FIRST, FIRST_TRIED, HELD, LATER, LATER_TRIED, LEFT, PRICE, RESTING, SPENT
from toolkit.testing_batches import coupled_error
from toolkit.transfer import Gate
from toolkit.types import DraftStep, Proposal, Verdict
from toolkit.verification import get
from toolkit.verification.chain_enumeration import PrefixTables

SETTLES = {"settles": True, "gain": 1.2, "gain_many": 1.1, "kept": 0.98, "kept_many": 0.9}


class Probabilities:
    """An estimator for tests: q(y_k) of the drawn token, and q's largest probability for the one after it."""

    def bind(self, pair: object) -> Probabilities:
        return self

    def drawn_probs(self, step: DraftStep) -> tuple[torch.Tensor, torch.Tensor]:
        return step.draft_prob, step.probs.max(-1).values


def bound(most: int = 4, **settings: Any) -> BatchRate:
    """Unless it is told otherwise, it asks in every round, and expects no gain of that."""
    known = {"gain": 1.0, "gain_many": 1.0, "settles": False} | settings
    policy = Bounded(BatchRate(Probabilities(), **known), 1, most).bind(None).policy
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
    policy = bound(most=4, cost_ratio=0.2, column_cost=0.1, first=0.6, later=0.5)
    live = torch.tensor([True, True])
    state, going = policy.begin(live, policy.init(2, live.device))
    gained = torch.tensor([0.0, 0.6, 0.9, 1.05, 1.125])
    rates = (2 + 2 * gained) / (1 + 0.3 * torch.arange(5))
    assert going.tolist() == [True, True] and rates.argmax() == 1
    torch.testing.assert_close(2 * state["plan"][:, PRICE + 3], 0.3 * rates.max().expand(2))
    for chosen in ((0.9, 0.5), (0.6, 0.5), (0.55, 0.5), (0.99, 0.01)):
        ahead = sum(
            p * max(p, 1 - p) for p in chosen
        )  # and half of that one token further, and so on: never worth more
        _, going = policy.step(step_of(1, *chosen), state)
        assert going.tolist() == [ahead > float(rates.max()) * 0.3] * 2


def test_rows_that_have_stopped_count_for_nothing():
    policy = bound(cost_ratio=0.2, first=0.6, later=0.5)
    state, _ = policy.begin(torch.tensor([True, True]), policy.init(2, torch.device("cpu")))
    assert policy.step(step_of(1, 0.9, 0.9), state)[1].tolist() == [True, True]
    assert policy.step(step_of(1, 0.9, 0.45, live=[False, True]), state)[1].tolist() == [False, False]


@pytest.mark.parametrize("live", [[True, False], [False, True]])
def test_a_free_slot_does_not_bring_an_older_threshold(live):
    """Rows that do not draft keep their state in a round: the batch's threshold must not be theirs."""
    policy, marks = bound(cost_ratio=0.2, first=0.6, later=0.5), torch.tensor(live)
    old, _ = policy.begin(marks, policy.init(2, marks.device))
    for chosen in (0.9, 0.45):
        new, going = policy.step(step_of(1, chosen, chosen, live=live), old)
        state = frozen(new, old, marks)
        assert going.tolist() == [chosen > 0.8] * 2
        assert policy.step(step_of(2, 0.7, 0.7, live=live), state)[1].tolist() == [chosen > 0.8] * 2


def test_a_batch_drafts_nothing_where_drafting_does_not_pay():
    live = torch.ones(8, dtype=torch.bool)
    for column, expected in ((0.0, True), (2.0, False)):
        policy = bound(cost_ratio=0.2, column_cost=column)
        assert policy.begin(live, policy.init(8, live.device))[1].tolist() == [expected] * 8


def test_what_the_policy_itself_takes_counts_for_rounds_that_draft(tmp_path):
    """A head that takes as long as a draft forward doubles what drafting costs; plain decoding asks no head."""
    rules = {"mine": RuleSeconds((1.0, 4.0), (0.02, 0.08), (0.1, 0.2))}
    costs = str(replace(LoadCost.ratio(0.2), rules=rules).save(tmp_path / "costs.json"))
    free, charged = (bound(4, costs=costs, own=own) for own in (None, "mine"))
    one = torch.ones(1, dtype=torch.bool)
    assert free._known(1, one.device).cost == pytest.approx([1, 1.2, 1.4, 1.6, 1.8])
    assert charged._known(1, one.device).cost == pytest.approx([1] + [1 + 0.02 + 0.3 * depth for depth in range(1, 5)])
    assert charged._known(4, one.device).cost == pytest.approx([1] + [1 + 0.08 + 0.4 * depth for depth in range(1, 5)])
    for policy, expected in ((free, True), (charged, False)):
        policy = replace(policy, first=0.25, later=0.25, known={})
        assert policy.begin(one, policy.init(1, one.device))[1].tolist() == [expected]
    with pytest.raises(InputError, match=r"^policy.own: expected an entry of .*costs.json's `rules`, mine; got head$"):
        bound(4, costs=costs, own="head")
    with pytest.raises(InputError, match=r"^policy.own: .* the cost table's `rules`, which has none; got mine$"):
        bound(4, own="mine")


def test_it_looks_behind_a_dear_first_column():
    """The target's second column doubles its forward, further ones are free: one step ahead never pays, four do."""
    seconds = torch.ones(1, 21, 1, dtype=torch.float64).numpy()
    seconds[:, 1:] = 2.0
    target = CostGrid((1.0,), tuple(float(w) for w in range(1, 22)), (0.0,), seconds)
    draft = CostGrid((1.0,), (1.0,), (0.0,), torch.full((1, 1, 1), 0.05, dtype=torch.float64).numpy())
    policy = replace(bound(most=8, first=0.9, later=0.9), table=LoadCost(draft, target, "test"))
    live = torch.ones(1, dtype=torch.bool)
    assert (1 + 0.9) / 2.05 < 1  # one drafted token makes it slower than plain decoding
    assert policy.begin(live, policy.init(1, live.device))[1].tolist() == [True]


def test_running_acceptance_counts_first_and_later_tokens():
    policy = bound(memory=10.0)
    live = torch.tensor([True, True, False])
    state, _ = policy.begin(live, policy.init(3, live.device))
    state = policy.observe(*judged([4, 4, 0], [2, 0, 0]), state)
    firsts, laters = [FIRST, FIRST_TRIED], [LATER, LATER_TRIED]
    assert state["seen"][:, firsts].tolist() == [[1, 1], [0, 1], [0, 0]]
    assert state["seen"][:, laters].tolist() == [[1, 2], [0, 0], [0, 0]]
    state = policy.observe(*judged([4, 4, 0], [4, 1, 0]), state)
    torch.testing.assert_close(state["seen"][0, laters], torch.tensor([0.9 + 3, 0.9 * 2 + 3]))
    assert state["seen"][2, laters].tolist() == [0, 0]


@pytest.mark.parametrize(
    "settings",
    [
        {"cost_ratio": 0.2, "first": 0.6, "later": 0.5, "memory": 3.0},
        {"cost_ratio": 0.3, "column_cost": 0.02, "first": 0.9, "later": 0.3, "memory": 1.5},
        {"cost_ratio": 0.4, "column_cost": 0.2, "first": 0.7, "later": 0.8, "memory": 8.0},
        {"cost_ratio": 0.2, "first": 0.6, "later": 0.5, "memory": 3.0, "prompt": 9, "response": 5},
        {"cost_ratio": 0.4, "first": 0.6, "later": 0.5, "memory": 2.0, "made": [1.5, 1.9, 2.4]} | SETTLES,
        {"cost_ratio": 0.3, "first": 0.6, "later": 0.5, "memory": 3.0, "made": [1.6, 1.7, 1.8, 1.9, 2.0]},
        {"cost_ratio": 0.5, "first": 0.6, "later": 0.5, "memory": 1.5, "made": [2.0, 2.8]},
        {"cost_ratio": 0.2, "first": 0.5, "later": 0.9, "memory": 1.5, "made": [1.0], "rests": False},
        {
            "cost_ratio": 0.4,
            "column_cost": 0.2,
            "first": 0.7,
            "later": 0.8,
            "memory": 8.0,
            "gain": 1.6,
            "gain_many": 0.9,
        },
        {"cost_ratio": 0.4, "column_cost": 0.4, "first": 0.7, "later": 0.6, "memory": 8.0, "rests": False},
        {"cost_ratio": 0.3, "column_cost": 0.2, "first": 0.6, "later": 0.7, "memory": 2.0, "rests": False} | SETTLES,
        {"cost_ratio": 0.5, "column_cost": 0.02, "first": 0.6, "later": 0.7, "memory": 2.0}
        | SETTLES
        | {"kept_many": 1.0},
    ],
)
def test_round_after_round_it_is_its_definition(settings):
    rows, most, generator = 3, 4, torch.Generator().manual_seed(5)
    policy = bound(most, **settings)
    slow, state, seen, modes = SlowBatchRate(policy, rows), policy.init(rows, torch.device("cpu")), set(), set()
    random = lambda: torch.rand(rows, generator=generator)
    known = lambda slow: torch.tensor(slow.seen).transpose(1, 2).flatten(1)
    for number in range(240):
        if number % 5 == 4:  # a new text in a slot
            joined = number % rows
            slow.join(joined)
            state = with_fresh(policy, state, joined)
        live = (random() < (0.8 if number != 7 else 0.0)).tolist()
        state, going = policy.begin(torch.tensor(live), state)
        drafts = slow.begin(live)
        assert going.tolist() == [drafts and here for here in live]
        torch.testing.assert_close(state["seen"], known(slow), rtol=1e-4, atol=1e-4)
        if not going.any():
            modes |= {"rests"} if any(live) else set()
            slow.observe([0] * rows, [0] * rows)
            state = policy.observe(*judged([0] * rows, [0] * rows), state)
            continue
        assert policy.settled(state) == bool(slow.settled)
        modes.add("settles" if slow.settled else "asks")
        last = slow.price * sum(live) * (slow.cost[most] - slow.cost[most - 1])
        assert float(sum(live) * state["plan"][0, PRICE + most - 1]) == pytest.approx(last, rel=1e-4)
        for depth in range(1, most + 1):
            chosen = (1 - random() ** 3 / 2).tolist()  # at least 1/2: q's largest probability is the token's own
            drafting = [a and b for a, b in zip(live, (random() < 0.9).tolist(), strict=True)]
            state, going = policy.step(step_of(depth, *chosen, live=drafting), state)
            assert going.tolist() == [slow.step(depth, chosen, chosen, drafting)] * rows
            seen.add((depth, bool(going[0])))
        drafted = (random() * (most + 2)).long() * torch.tensor(live)  # more than is planned for: without bounds
        length = (drafted * random() * 1.5).long().clamp(max=drafted)
        slow.observe(drafted.tolist(), length.tolist())
        state = policy.observe(*judged(drafted.tolist(), length.tolist()), state)
        expected, absent = known(slow), ~torch.tensor(live)
        state["seen"][absent] = expected[absent]  # a slot that is not live is never read again before it is filled
        torch.testing.assert_close(state["seen"], expected, rtol=1e-4, atol=1e-4)
    assert {(1, True), (most, False)} <= seen and (most, True) not in seen
    expected = {"rests": policy.rests, "settles": policy.settles, "asks": True}
    assert modes == {mode for mode, allowed in expected.items() if allowed}
    assert (1, False) in seen or policy.settles


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


def test_costs_are_those_behind_the_given_context():
    seconds = torch.tensor([[[1.0, 3.0]]], dtype=torch.float64).numpy()
    table = LoadCost(*(CostGrid((1.0,), (1.0,), (0.0, 100.0), seconds) for _ in range(2)), "test")
    policy = replace(bound(most=2), table=table, context=50, known={})
    assert policy._known(1, torch.device("cpu")).cost == [1.0, 2.0, 3.0]
    longer = replace(policy, longest=98, known={})
    assert longer._known(1, torch.device("cpu")).cost == [1.0, 2.0, 3.0]
    assert longer._contexts(3) == pytest.approx(98 - 2 * 48 / 4), "three rows: as the mean maximum of three"
    assert longer._contexts(95) == pytest.approx(97)
    middle = replace(policy, context=None, known={})  # the middle of 0 and 100
    assert middle._known(1, torch.device("cpu")).cost == [1.0, 2.0, 3.0]


def test_a_batch_that_does_not_draft_keeps_to_it_and_forgets():
    policy = bound(memory=10.0, cost_ratio=5.0)
    live = torch.tensor([True, True])
    state = policy.observe(*judged([4, 4], [2, 0]), policy.init(2, live.device))
    free = replace(policy, known={}, table=LoadCost.ratio(0.001))  # would draft at once
    resting = state
    for number in range(RESTING + 1):
        resting, going = (free if number else policy).begin(live, resting)
        assert not going.any()
        resting = free.observe(*judged([0, 0], [0, 0]), resting)
    again, going = free.begin(live, resting)
    assert going.all()
    torch.testing.assert_close(again["seen"], 0.9 ** (RESTING + 1) * state["seen"])
    # a batch that gets smaller after one round of rest
    fewer, _ = free.begin(live[:1], {key: value[:1] for key, value in policy.begin(live, state)[0].items()})
    torch.testing.assert_close(fewer["seen"], 0.9 * state["seen"][:1])


def test_a_plan_is_for_as_many_rows_as_are_live():
    """Planned with one live row of three, kept when all three are: their mean must be as much, so they gain three times."""
    policy, live = bound(cost_ratio=0.2), torch.tensor([True, False, False])
    state, _ = policy.begin(live, policy.init(3, live.device))
    assert state["plan"][:, LEFT].tolist() == [HELD] * 3
    kept, going = policy.begin(torch.ones(3, dtype=torch.bool), state)
    assert going.all()
    torch.testing.assert_close(state["share"], torch.tensor([1.0, 0.0, 0.0]))
    torch.testing.assert_close(kept["share"], torch.full((3,), 1 / 3))
    fresh, _ = policy.begin(torch.ones(3, dtype=torch.bool), policy.init(3, live.device))
    torch.testing.assert_close(kept["plan"][:, PRICE:], fresh["plan"][:, PRICE:])


def test_no_plan_is_kept_that_was_made_without_a_live_row():
    policy, live = bound(cost_ratio=0.01), torch.ones(2, dtype=torch.bool)
    state, going = policy.begin(~live, policy.init(2, live.device))
    assert not going.any() and state["plan"][:, LEFT].tolist() == [0, 0]
    assert policy.begin(live, with_fresh(policy, state, 0))[1].all()


@pytest.mark.parametrize("ratio", [0.2, 5.0])
def test_a_new_text_in_a_slot_shares_the_plan_of_the_others(ratio):
    policy, live = bound(cost_ratio=ratio), torch.ones(3, dtype=torch.bool)
    state, planned = policy.begin(live, policy.init(3, live.device))
    joined = with_fresh(policy, state, 1)
    held = HELD if ratio < 1 else RESTING
    assert joined["plan"][:, LEFT].tolist() == [held, 0, held] and state["plan"][:, LEFT].tolist() == [held] * 3
    for key, value in policy.init(1, live.device).items():
        assert torch.equal(joined[key][1:2], value)
        assert torch.equal(joined[key][::2], state[key][::2])
    after, going = policy.begin(live, joined)
    assert torch.equal(going, planned) and going.tolist() == [ratio < 1] * 3
    assert torch.equal(after["plan"][:, LEFT + 1 :], state["plan"][:, LEFT + 1 :]), "the new row has it, too"
    first = with_fresh(policy, state, 0)
    assert policy.begin(live, first)[0]["plan"][:, LEFT].tolist() == [held - 1] * 3, "also where the first row is new"
    all_new = with_fresh(policy, with_fresh(policy, first, 1), 2)
    assert policy.begin(live, all_new)[0]["plan"][:, LEFT].tolist() == [held] * 3


def test_a_batch_settles_on_a_depth_where_asking_gains_too_little():
    """Then nothing is asked, and what is made teaches nothing about asking."""
    live, one = torch.ones(2, dtype=torch.bool), {"cost_ratio": 0.2, "first": 0.6, "later": 0.5, "settles": True}
    asks = bound(gain=1.1, gain_many=1.1, **one)
    assert not asks.settled(asks.begin(live, asks.init(2, live.device))[0])
    policy = bound(gain=1.0, gain_many=1.0, **one)
    state, going = policy.begin(live, policy.init(2, live.device))
    assert policy.settled(state) and going.all()
    best = 1 + max(range(4), key=lambda d: (1 + 0.6 * sum(0.5**j for j in range(d + 1))) / (1.2 + 0.2 * d))
    for depth in range(1, 4):
        kept, going = policy.step(step_of(depth, 0.9, 0.1), state)
        assert kept is state and going.tolist() == [depth < best] * 2
    after = policy.observe(*judged([best, best], [best, 0]), state)
    assert not policy.settled(after) and after["seen"][:, SPENT].tolist() == [0, 0]
    assert after["seen"][:, FIRST_TRIED].tolist() == [1, 1]
    assert not policy.settled(policy.observe(*judged([0, 0], [0, 0]), state)), "also behind a round without room"
    assert not policy.asking().settled(policy.asking().begin(live, policy.init(2, live.device))[0])


def test_a_recording_says_what_fixed_depths_make():
    """Of tokens accepted with .6 and .5, two are the best depth. On the recording long runs are more frequent: four are."""
    live, one = torch.ones(2, dtype=torch.bool), {"cost_ratio": 0.2, "first": 0.6, "later": 0.5, "settles": True}
    depths = []
    for made in (None, [1.6, 1.9, 2.05, 2.125], [1.6, 1.95, 2.3, 2.6], [1.6, 1.95]):
        policy = bound(made=made, **one)
        state, _ = policy.begin(live, policy.init(2, live.device))
        depths.append(int(state["settled"][0]))
        expected = made or [1.6, 1.9, 2.05, 2.125]
        beyond = [tokens - 1 - more for tokens, more in zip(expected, [0.6, 0.9, 1.05, 1.125], strict=False)]
        beyond += beyond[-1:] * (4 - len(beyond))
        assert policy._known(2, live.device).beyond.tolist() == pytest.approx(beyond, abs=1e-6)
        settled, asked = policy.expected(2)
        assert settled == asked
        assert settled[: len(expected)] == pytest.approx([t / (1.2 + 0.2 * d) for d, t in enumerate(expected)])
    assert depths == [2, 2, 4, 2]
    with pytest.raises(InputError, match=r"^policy.made: "):
        BatchRate(Probabilities(), made=[0.5])


def test_what_is_kept_of_the_expected_tokens_counts_against_plain_decoding():
    """Drafting is expected to make 1.6 / 1.5 as many tokens; less than .94 of them are made."""
    live = torch.ones(1, dtype=torch.bool)
    for kept, drafts in ((0.95, True), (0.93, False)):
        policy = bound(most=1, cost_ratio=0.5, first=0.6, kept=kept, settles=True)
        assert bool(policy.begin(live, policy.init(1, live.device))[1]) == drafts


def test_a_batch_with_fewer_slots_plans_anew():
    """In a batch of two slots drafting is too dear, in one of a single slot it is not."""
    seconds = torch.tensor([[[0.1]], [[10.0]]], dtype=torch.float64).numpy()
    draft = CostGrid((1.0, 2.0), (1.0,), (0.0,), seconds)
    policy = replace(bound(), table=replace(LoadCost.ratio(0.2), draft=draft), known={})
    both = torch.tensor([True, True])
    state, going = policy.begin(both, policy.init(2, both.device))
    assert not going.any()
    assert not policy.begin(torch.tensor([True, False]), state)[1].any()
    one = {key: value[:1] for key, value in state.items()}
    assert policy.begin(both[:1], one)[1].all()


def test_reading_prompts_counts_for_every_row():
    """A prompt of 31 tokens takes the draft 3.2: .4 per token of a response of 8, where drafting saves .25."""
    seconds = torch.tensor([[[0.2], [3.2]]], dtype=torch.float64).numpy()
    table = replace(LoadCost.ratio(0.2), draft=CostGrid((1.0,), (1.0, 31.0), (0.0,), seconds))
    policy = replace(bound(first=0.6, later=0.5), table=table, prompt=31, response=8)
    live = torch.tensor([True])
    state = policy.init(1, live.device)
    assert policy._known(1, live.device).reading == pytest.approx(0.4)
    assert not policy.begin(live, state)[1].any()
    assert replace(policy, response=80, known={}).begin(live, state)[1].all()
    assert replace(policy, response=None, known={}).begin(live, state)[1].all()
    two, dear = torch.tensor([True, True]), replace(policy, response=16, known={})
    assert dear.begin(live, state)[1].all(), "alone, a row reads its prompt within what drafting saves"
    assert not dear.begin(two, dear.init(2, two.device))[1].any(), "in a batch of two, every prompt holds up two rows"
    state = dear.init(2, two.device)
    state["seen"][:, SPENT] = 1e-9
    assert not dear.begin(two, state)[1].any(), "prompts that have been read are followed by others"


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
    policy = bound(most=2, cost_ratio=0.3, column_cost=0.2, first=0.6, later=0.6)
    state = policy.init(2, torch.device("cpu"))
    seen = set()
    for seed in range(4 if size == 2 else 2):
        rows = [PrefixTables(size, 2, 2 * seed), PrefixTables(size, 2, 2 * seed + 1)]
        error, lengths = coupled_error(policy, get(rule), rows, state)
        assert error < 1e-12
        seen |= lengths
    assert {1, 2} <= seen, "the policy never decided otherwise: the check shows nothing"


def test_the_enumeration_notices_a_rule_that_is_wrong():
    policy = bound(most=2, cost_ratio=0.3, column_cost=0.2, first=0.6, later=0.6)
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
