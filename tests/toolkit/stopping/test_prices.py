"""Cost tables that fall, used as they were measured: best lengths by brute force, and with equal prices the old decisions."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.toolkit.stopping.test_policies import step_of
from toolkit import config
from toolkit.acceptance import MatchEstimator
from toolkit.costs.load import LoadCost
from toolkit.costs.table import CostTable
from toolkit.stopping import BatchRate, BestSource, Bounded, LookupRate, Rate
from toolkit.stopping.planner import ahead, worth
from toolkit.stopping.prices import PriceTable
from toolkit.testing import table_pair
from toolkit.types import Match, Proposal, RoundCounts, Verdict

CPU = torch.device("cpu")
FALLING = CostTable(1, (1, 2, 3, 5, 9), (128, 512), ((0.060, 0.118, 0.149, 0.112, 0.122),) * 2, (0.012, 0.012))
STEEP = CostTable(1, (1, 2), (0,), ((1.0, 3.0),), (0.5,))  # nothing pays


def random_table(generator):
    widths = (1, 2, 3, 4, 6, 9)
    seconds = [1.0, *(1 + generator.random() for _ in widths[1:])]
    return CostTable(1, widths, (0,), (seconds,), (generator.random() * 0.3,))


class Given:
    """P(accepted) of copied tokens: the agreement itself."""

    def bind(self, pair):
        return self

    def prob(self, match, depth):
        return match.agreement


class Sure:
    """Of drawn tokens: y_k is accepted with .9, the one after it with .8."""

    def bind(self, pair):
        return self

    def drawn_probs(self, step):
        return torch.tensor([0.9]), torch.tensor([0.8])


def match_of(rows):
    """Matches whose agreement are these rows' probabilities, padded with zeros."""
    longest = max(map(len, rows))
    agreement = torch.tensor([[*row, *[0.0] * (longest - len(row))] for row in rows])
    return Match(torch.ones_like(agreement), torch.ones_like(agreement), agreement)


def test_copies_have_the_length_of_the_largest_sum_of_gains():
    generator = random.Random(0)
    for _ in range(60):
        table = random_table(generator)
        policy = LookupRate(Given(), costs=table, deepest=8).bind(None)
        rows = [[generator.random() ** 0.3 for _ in range(generator.randrange(9))] for _ in range(3)]
        rows[0] = rows[0] or [0.9]
        state = policy.init(3, CPU)
        state["tokens"] *= torch.tensor([0.8, 1.0, 1.5])
        rates = (state["tokens"] / state["cost"]).tolist()
        after, lengths = policy.plan(
            match_of(rows), torch.tensor([len(row) for row in rows]), torch.ones(len(rows), dtype=torch.bool), state
        )
        for row, rate, length, gain in zip(rows, rates, lengths.tolist(), after["gain"].tolist(), strict=True):
            survival, worth = 1.0, [0.0]
            tokens = 0.0
            for drafted, prob in enumerate(row, start=1):
                survival *= prob
                tokens += survival
                worth.append(tokens - rate * (table.target(drafted + 1, 0) - 1.0))
            assert worth[length] == pytest.approx(max(worth), abs=1e-5) and gain == pytest.approx(max(worth), abs=1e-5)


def test_with_equal_columns_copies_go_on_while_a_token_gains():
    """Bit for bit what deciding token by token, in float32, gives."""
    torch.manual_seed(0)
    rows, longest = 400, 12
    policy = LookupRate(MatchEstimator(), column_cost=0.07, deepest=longest).bind(None)
    match = Match(
        torch.randint(1, 20, (rows, 1)).float().expand(-1, longest),
        torch.randint(0, 5, (rows, longest)).float(),
        torch.rand(rows, longest) ** 0.1,
    )
    available = torch.randint(0, longest + 1, (rows,))
    state = policy.init(rows, CPU)
    state["tokens"] = state["tokens"] * (0.5 + torch.rand(rows))
    after, lengths = policy.plan(match, available, available >= 0, state)
    survival, going = torch.ones(rows), torch.ones(rows, dtype=torch.bool)
    gain, expected = torch.zeros(rows), torch.zeros(rows, dtype=torch.long)
    for depth in range(1, longest + 1):
        going = going & (available >= depth)
        column = Match(*(c[:, depth - 1] for c in (match.length, match.occurrences, match.agreement)))
        survival = survival * policy.estimator.prob(column, depth)
        price = state["tokens"] / state["cost"] * 0.07
        going = going & (survival > price)
        gain = gain + torch.where(going, survival - price, 0.0)
        expected += going
    assert torch.equal(lengths, expected) and len(set(expected.tolist())) > 5
    assert torch.allclose(after["gain"], gain, atol=1e-6)


def test_bounds_hold_for_what_is_planned():
    table = replace(FALLING, target_seconds=((1.0, 3.0, 5.0, 9.0, 17.0),) * 2)
    state = LookupRate(Given(), costs=table).bind(None).init(3, CPU)
    match, available = match_of([[0.9] * 6, [0.9] * 6, [0.9]]), torch.tensor([6, 0, 1])
    for least in (0, 2):
        bounded = Bounded(LookupRate(Given(), costs=table), least, 4).bind(None)
        assert bounded.plan(match, available, available >= 0, state)[1].tolist() == [least, 0, min(least, 1)]
    free = Bounded(LookupRate(Given(), column_cost=0.0), 0, 4).bind(None)
    assert free.plan(match, available, available >= 0, state)[1].tolist() == [4, 0, 1]


def pays_slowly(prices, probability, acceptance, rate, depth):
    """Over every number of further tokens."""
    worth, gain = [], 0.0
    for number, column in enumerate(prices.columns[0, depth:].tolist()):
        gain += probability * acceptance**number - rate * (float(prices.forward) + column)
        worth.append(gain)
    return max(worth) > 0


def prices_of(table, context=None):
    """The prices of one row."""
    prices = PriceTable.of(LoadCost.of([table]), 1, 8, furthest=3)
    return prices.at(None if context is None else torch.tensor([float(context)]))


def test_prices_are_those_of_a_rows_own_context():
    """Linear between the table's contexts; beyond them the last slope goes on, unless it falls; in the middle if not known."""
    table = CostTable(
        1, (1, 2, 4), (100, 200, 400), ((1.0, 1.5, 1.2), (1.0, 2.5, 1.1), (2.0, 3.0, 5.0)), (0.1, 0.3, 0.2)
    )
    contexts = [0, 100, 130, 200, 399, 400, 700]
    rows = PriceTable.of(LoadCost.of([table]), 1, 8, furthest=3).at(torch.tensor(contexts).float())
    for row, context in enumerate(contexts):
        plain = table.target(1, context)
        columns = [(table.target(k + 1, context) - table.target(k, context)) / plain for k in range(1, 9)]
        assert rows.columns[row].tolist() == pytest.approx(columns, abs=1e-5)
        assert float(rows.forward[row]) == pytest.approx(table.draft(context) / plain, abs=1e-6)
        assert rows.read(torch.full((7,), 5))[row] == pytest.approx(table.target(6, context) / plain - 1, abs=1e-5)
        behind = table.draft(context) / plain * (table.target(3, context) / plain - 1)
        if context in table.contexts:  # a draft's widths are the target's, as shares, at these
            assert rows.catching_up(torch.full((7,), 2))[row] == pytest.approx(behind, abs=1e-5)
    assert torch.allclose(prices_of(table).columns, prices_of(table, 200).columns, atol=1e-6)


def test_further_tokens_pay_if_some_number_of_them_does():
    generator, seen = random.Random(1), set()
    for _ in range(300):
        prices = prices_of(random_table(generator))
        depth = generator.randrange(8)
        numbers = [generator.random() for _ in range(3)]
        numbers[2] += 0.5
        expected = pays_slowly(prices, *numbers, depth)
        seen.add((expected, pays_slowly(replace(prices, columns=prices.columns[:, : depth + 1]), *numbers, depth)))
        probability, acceptance, rate = (torch.tensor([number]) for number in numbers)
        gains = ahead(probability, acceptance, 8 - depth)
        assert bool(worth(gains, prices.tokens[:, depth:], rate) > 0) == expected
    assert (True, False) in seen  # a token that is a loss is paid for by those after it


def test_a_round_pays_for_its_columns_down_to_the_deepest():
    prices = prices_of(FALLING)
    expected = [FALLING.target(1 + drafted, 0) / FALLING.target(1, 0) - 1 for drafted in range(9)]
    assert prices.read(torch.arange(9)).tolist() == pytest.approx(expected, abs=1e-5)


def rounds(policy, state, drafted, accepted, count=1):
    for _ in range(count):
        tokens = torch.zeros(1, drafted, dtype=torch.long)
        proposal = Proposal(tokens, tokens.unsqueeze(2).float(), torch.tensor([drafted]), torch.tensor([drafted]))
        state = policy.observe(proposal, Verdict(None, torch.tensor([accepted]), None, None, None), state)
    return state


def test_rate_with_a_table_begins_plainly_where_no_number_of_tokens_pays():
    live = torch.tensor([True])
    policy = Rate(Sure(), costs=FALLING, acceptance=0.95, deepest=8).bind(None)
    state = policy.init(1, CPU)
    assert bool(policy.begin(live, state)[1])  # nine tokens are read as fast as two
    state = rounds(policy, state, 4, 0, 12)
    assert float(state["verified"]) == 12 and float(state["accepted"]) == 0
    assert float(state["cost"]) == pytest.approx(20 + 12 * (0.112 + 4 * 0.012) / 0.060, rel=1e-5)
    assert not bool(policy.begin(live, state)[1])
    for steep in (Rate, BestSource):
        policy = steep(Sure(), *([Given()] if steep is BestSource else []), costs=STEEP).bind(None)
        assert not bool(policy.begin(live, policy.init(1, CPU))[1])
    assert bool(Rate(Sure()).bind(None).begin(live, {})[1])


def test_rate_scales_down_an_estimator_that_promises_more_than_the_text_accepts():
    even = CostTable(1, (1, 2, 9), (0,), ((1.0, 1.1, 1.8),), (0.2,))  # .3 for a token, times a rate of 1.2

    def goes_on_after(accepted, count):
        policy = Rate(Sure(), costs=even, rate=1.2, deepest=8).bind(None)
        state = policy.init(1, CPU)
        for _ in range(count + 1):
            state, go_on = policy.step(step_of([0.5, 0.5], 1), state)
            last, state = bool(go_on), rounds(policy, state, 1, accepted)
        return last

    assert goes_on_after(1, 0)
    assert goes_on_after(1, 30)
    assert not goes_on_after(0, 30)


@pytest.mark.parametrize("kind", [Rate, BestSource, BatchRate])
def test_a_draft_goes_on_past_a_column_that_costs_more_than_it_brings(kind):
    """With 118 ms for two tokens and 112 for five, a second token alone never pays; four of them do."""
    copies = [Given()] if kind is BestSource else []
    for costs, expected in (
        (FALLING, True),
        (replace(FALLING, target_seconds=((0.06, 0.12, 0.18, 0.36, 0.72),) * 2), False),
    ):
        policy = kind(Sure(), *copies, costs=costs, acceptance=0.95, deepest=8).bind(None)
        live = torch.tensor([True])
        state, _ = policy.begin(live, policy.init(1, CPU))
        step = step_of([0.5, 0.5], 1)
        step.live = live
        _, go_on = policy.step(step, state)
        assert bool(go_on) == expected


@pytest.mark.parametrize("name", ["rate", "best_source", "tree_rate"])
def test_a_text_that_rejected_drafts_is_drafted_for_again(name):
    """Three rejected rounds stop it at dear columns; some rounds later, which showed nothing, it begins again."""
    words = ["policy.costs=published/nemotron-30b-a3b:.1", "max_drafted=6"]
    words += ["policy.max_nodes=7"] if name == "tree_rate" else []
    policy, live = config.method(name, words).bind(table_pair()).policy, torch.tensor([True])
    state = policy.init(1, torch.device("cpu"))
    if name == "best_source":
        state = {**state, "gain": torch.tensor([0.0])}
    rejected, nothing = (RoundCounts(*(torch.tensor([n]) for n in counts)) for counts in ((4, 4, 0), (0, 0, 0)))
    assert bool(policy.begin(live, state)[1])
    for _ in range(3):
        state = policy.observe(
            rejected, rejected, {**state, "depth": torch.tensor([1.0])} if name == "tree_rate" else state
        )
    assert not bool(policy.begin(live, state)[1])
    waited = 0
    while not bool(policy.begin(live, state)[1]) and waited < 100:
        state, waited = policy.observe(nothing, nothing, state), waited + 1
    assert 1 < waited < 60
