"""The dynamic program against one that is written for one start at a time, with means in place of boosted trees."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analysis.replay import dynamic_program, upper_bound
from analysis.replay.dynamic_program import Seen
from tests.analysis.replay.plain import MOST, Text, same, small_trace, while_
from toolkit import metrics
from toolkit.trace.rounds import Geometry
from toolkit.trace.step import RecordedStep


@pytest.fixture(scope="module")
def trace():
    return small_trace(count=120, upper_bound=True)


@pytest.fixture(scope="module")
def geometry(trace):
    return Geometry.of(trace)


class Preread:
    """Says of the drawn token its draft probability, of the next one half of that."""

    def drawn_probs(self, step):
        return step.token_prob, step.token_prob / 2


class Acceptance:
    """Has read all but the newest token."""

    def read_prob(self, step):
        return step.token_prob


@pytest.fixture(scope="module")
def seen(trace, geometry):
    return dynamic_program.head_inputs(trace, geometry, Preread(), MOST)


def texts_of(trace):
    return [Text(trace, number) for number in range(trace.num_texts)]


@pytest.mark.parametrize("kind", [Preread, Acceptance])
def test_what_a_policy_has_seen_of_a_head(trace, geometry, kind):
    found = dynamic_program.head_inputs(trace, geometry, kind(), 3)
    assert found.inputs.shape == (3, trace.num_positions, 4) and found.inputs.dtype == np.float64
    for text in texts_of(trace)[:20]:
        for start in range(text.first, text.end):
            steps, survival = text.visited(start), 1.0
            assert int(found.possible[start]) == min(len(steps), text.room(start), 3)
            for depth, step in enumerate(steps[:3], start=1):
                said = float(trace.token_prob[step])
                newest = said if kind is Preread or depth > 1 else 1.0
                following = said / 2 if kind is Preread else said
                survival *= newest
                known = [survival, newest, following, survival * following]
                assert found.inputs[depth - 1, start].tolist() == pytest.approx(known, rel=1e-5)
    assert np.array_equal(found.survival, found.inputs[:, :, 0]) and np.array_equal(found.worth, found.inputs[:, :, 3])


def mean_of(calls=None):
    def fitted(inputs, value, fit, use):
        if calls is not None:
            calls.append((inputs, value, fit, use))
        return np.full(int(use.sum()), value[fit].mean())

    return fitted


def slowly(trace, seen, fold, folds, price, least=50):
    """Tokens drafted and Q, from the deepest token backwards."""
    texts = texts_of(trace)
    where = [(text, start) for text in texts for start in range(text.first, text.end)]
    most, possible = len(seen.inputs), seen.possible.tolist()
    length, worth = [min(p, most) for p in possible], np.full((most, len(where)), np.nan)
    earned = [0.0] * len(where)
    for k in range(most - 1, 0, -1):
        value, on = [0.0] * len(where), [False] * len(where)
        for i, (text, start) in enumerate(where):
            tokens = [min(min(n, text.run(start)) + 1, text.end - start) for n in (k, k + 1)]
            value[i] = tokens[1] - tokens[0] - price + earned[i]
        for held in range(folds):
            use = [i for i in range(len(where)) if possible[i] > k and fold[i] == held]
            fit = [i for i in range(len(where)) if possible[i] > k and fold[i] != held]
            if len(fit) < least or not use:
                continue
            surplus = np.mean([value[i] - (seen.worth[k - 1, i] - price) for i in fit])
            for i in use:
                worth[k - 1, i] = seen.worth[k - 1, i] - price + surplus
                on[i] = worth[k - 1, i] > 0
        for i in range(len(where)):
            earned[i] = value[i] if on[i] else 0.0
            if possible[i] > k and not on[i]:
                length[i] = k
    return length, worth


@pytest.mark.parametrize("price", [0.1, 0.3])
def test_values_are_worked_out_backwards(trace, geometry, seen, monkeypatch, price):
    monkeypatch.setattr(dynamic_program, "_fitted", mean_of())
    text, fold_of = dynamic_program._folds(trace, 3)
    fold = fold_of[text].numpy()
    lengths, worth = dynamic_program._decide(geometry, seen, fold, 3, price)
    known, known_worth = slowly(trace, seen, fold, 3, price)
    assert lengths.tolist() == known and len(set(known)) > 1
    np.testing.assert_allclose(worth, known_worth, atol=1e-9)
    values = dynamic_program.stopping_values(trace, seen, price / 2, 2.0, folds=3)
    assert values.price == pytest.approx(price) and np.array_equal(values.survival, seen.survival)
    np.testing.assert_allclose(values.worth, known_worth, atol=1e-9)


def test_functions_are_fitted_to_other_texts_than_they_decide(trace, geometry, seen, monkeypatch):
    calls = []
    monkeypatch.setattr(dynamic_program, "_fitted", mean_of(calls))
    text, fold_of = dynamic_program._folds(trace, 10)
    dynamic_program.stopping_values(trace, seen, 0.2, 1.0)
    held_out = set()
    for inputs, value, fit, use in calls:
        assert inputs.shape == (trace.num_positions, 4) and value.shape == fit.shape == use.shape
        texts = [set(text[torch.from_numpy(chosen)].tolist()) for chosen in (fit, use)]
        (fold,) = set(fold_of[list(texts[1])].tolist())
        assert not texts[0] & texts[1]
        held_out.add(fold)
    assert held_out == set(range(10))  # unless told otherwise


def test_too_few_states_are_not_fitted(trace, geometry, seen, monkeypatch):
    """At least 50; where nothing is known a round stops."""
    monkeypatch.setattr(dynamic_program, "_fitted", lambda inputs, value, fit, use: np.full(int(use.sum()), 9.0))
    for count, goes_on in ((49, False), (50, True)):
        possible, fold = torch.ones(trace.num_positions, dtype=torch.long), np.zeros(trace.num_positions, dtype=int)
        possible[: count + 1], fold[count] = 2, 1
        found, worth = dynamic_program._decide(geometry, Seen(seen.inputs[:2], possible), fold, 2, 0.1)
        assert int(found[count]) == (2 if goes_on else 1) and np.isnan(worth[0, count]) == (not goes_on)
        assert found[count + 1 :].tolist() == [1] * (trace.num_positions - count - 1)


def test_boosted_trees_find_what_depends_on_the_inputs():
    generator = np.random.default_rng(0)
    inputs = generator.random((4000, 4))
    value = np.where(inputs[:, 0] > 0.5, 1.0, -1.0) + 0.1 * generator.standard_normal(4000)
    fit = np.arange(4000) < 3000
    found = dynamic_program._fitted(inputs, value, fit, ~fit)
    assert found.shape == (1000,) and np.abs(found - np.sign(inputs[~fit, 0] - 0.5)).mean() < 0.1
    value[~fit] = 1e6  # not looked at
    assert np.array_equal(found, dynamic_program._fitted(inputs, value, fit, ~fit))


def test_policies_without_foresight_stop_at_prices_and_levels(trace, seen):
    by_price, by_level = dynamic_program._simple(seen, 0.4)
    assert len(by_price) == len(dynamic_program.PRICES) == 95 and len(by_level) == len(dynamic_program.LEVELS) == 49
    for found, scores, levels in (
        (by_price, seen.worth, 0.4 * dynamic_program.PRICES),
        (by_level, seen.survival, torch.tensor(dynamic_program.LEVELS)),
    ):
        for row in (0, 20, 40):
            for start in range(0, trace.num_positions, 7):
                length, most = 0, min(int(seen.possible[start]), MOST)
                while length < most:
                    length += 1
                    if scores[length - 1, start] < float(levels[row]):
                        break
                assert int(found[row, start]) == length


def test_each_text_is_played_by_what_is_cheapest_on_the_others(trace, geometry):
    fold_of = torch.arange(trace.num_texts) % 3
    candidates = torch.stack([torch.minimum(torch.tensor(k % 6), geometry.room) for k in range(60)])
    chosen = dynamic_program._cheapest_elsewhere(trace, geometry, candidates, fold_of, 0.3)
    costs = np.stack([each.cost(0.3) for each in upper_bound.fixed(trace).values()])
    for fold in range(3):
        best = costs[:, (fold_of != fold).numpy()].sum(1).argmin()
        assert set((chosen[fold_of == fold] % 6).tolist()) == {best}


def test_the_best_policy_is_the_cheapest_of_all_that_were_tried(trace, geometry, seen, monkeypatch):
    tried, rates = [], []
    monkeypatch.setattr(dynamic_program, "_fitted", mean_of())
    decide, cheapest = dynamic_program._decide, dynamic_program._cheapest_elsewhere

    def watched(geometry, seen, fold, folds, price):
        rates.append(price / 0.2)
        return decide(geometry, seen, fold, folds, price)

    def chosen(trace, geometry, candidates, *rest):
        tried.append(candidates)
        return torch.zeros_like(cheapest(trace, geometry, candidates, *rest)) + len(rates) - 1

    monkeypatch.setattr(dynamic_program, "_decide", watched)
    monkeypatch.setattr(dynamic_program, "_cheapest_elsewhere", chosen)
    solved = dynamic_program.best_policy(trace, seen, 0.2, folds=3)
    assert rates[0] == 1.0 and 1 < len(rates) <= 6 and len(tried[0]) == len(rates) + 95 + 49
    last = tried[0][len(rates) - 1]
    same(solved.replayed, trace, lambda text, start: (int(last[start]),) * 2)
    assert solved.rate == pytest.approx(metrics.throughput(solved.replayed.total, 0.2))
    for row, following in enumerate(rates[1:]):  # each rate is what the policy before has reached
        replayed = dynamic_program._played(trace, geometry, tried[0][row])
        assert following == pytest.approx(metrics.throughput(replayed.total, 0.2))
    assert solved.price == pytest.approx(rates[-1], abs=2e-3)
    rates.clear()
    dynamic_program.best_policy(trace, seen, 0.2, folds=3, rounds=1)
    assert len(rates) == 1


# -- the bounds beside it ---------------------------------------------------------------------------------------------


def test_the_true_worth_of_the_next_draft(trace, geometry):
    worth, possible = upper_bound.known_worth(trace, geometry)
    assert worth.shape == (MOST + 1, trace.num_positions)
    for text in texts_of(trace)[:30]:
        for start in range(text.first, text.end):
            steps = text.visited(start)[: text.room(start)][:MOST]
            assert int(possible[start]) == len(steps)
            survival = 1.0
            for depth, step in enumerate(steps):
                assert float(worth[depth, start]) == pytest.approx(survival * float(trace.alpha[step]), abs=1e-6)
                survival *= float(trace.accept_prob[step])
            assert worth[len(steps) :, start].tolist() == [0.0] * (MOST + 1 - len(steps))


@pytest.mark.parametrize("least", [0, 1, 2])
def test_drafting_on_while_it_is_worth_its_price(trace, geometry, least):
    worth, _ = upper_bound.known_worth(trace, geometry)

    def draft(text, start):
        most, count = min(text.room(start), len(text.visited(start)), MOST), 0
        while count < most and (count < least or float(worth[count, start]) >= 0.3):
            count += 1
        return count, count

    same(upper_bound.at_price(trace, 0.3, least), trace, draft)
    if least == 0:
        assert upper_bound.at_price(trace, 0.3).total == upper_bound.at_price(trace, 0.3, 0).total


def test_the_best_price_that_is_met_counts(trace, monkeypatch):
    """Starts at the rate 1, goes on from what was reached, ends when that stays, keeps the best; the start only if told."""
    met = []

    def played(trace, geometry, worth, possible, price, least):
        met.append((price, least))
        return SimpleNamespace(total=next(reached))

    monkeypatch.setattr(upper_bound, "play", played)
    monkeypatch.setattr(metrics, "throughput", lambda total, cost_ratio: total)
    reached = iter([2.0, 3.0, 2.5, 2.5 + 1e-10, 9.0])
    solved = upper_bound.solve(trace, None, None, None, 0.1, 2)
    assert [price for price, _ in met] == pytest.approx([0.1, 0.2, 0.3, 0.25]) and {least for _, least in met} == {2}
    assert (solved.rate, solved.price, solved.replayed.total) == (3.0, 2.0, 3.0)
    for start_counts, rate in ((True, 2.5), (False, 2.0)):
        reached = iter([2.5, 2.0, 2.0])
        assert upper_bound.solve(trace, None, None, None, 0.5, start_counts=start_counts).rate == rate


def test_the_score_of_a_policy_is_the_worth_of_its_next_token(trace):
    class Half:
        limit, reads, uses_history = MOST, False, False

        def init(self, num_rows, device):
            return {}

        def score(self, step: RecordedStep, state):
            return state, step.token_prob

    for least in (1, 2):
        solved = upper_bound.solve_policy(trace, Half(), 0.2, least)
        level = solved.price * 0.2
        goes_on = (trace.token_prob >= level).tolist()
        same(solved.replayed, trace, while_(trace, goes_on.__getitem__, least))
    totals = [upper_bound.solve_policy(trace, Half(), 0.2, *least).replayed.total for least in ((), (1,))]
    assert totals[0] == totals[1]


def test_the_best_fixed_number_and_the_oracle_of_each_text(trace):
    found = {k: metrics.throughput(each.total, 0.3) for k, each in upper_bound.fixed(trace).items()}
    best, replayed = upper_bound.best_fixed(trace, 0.3)
    assert list(found) == list(range(MOST + 1)) and found[best] == max(found.values())
    assert replayed.total == upper_bound.fixed(trace)[best].total
    assert list(upper_bound.fixed(trace, 2)) == [0, 1, 2] and upper_bound.best_fixed(trace, 0.0, 2)[0] == 2
    for most in (None, 2):
        told = upper_bound.oracle(trace, most)
        for text, counts in zip(texts_of(trace), told, strict=True):
            probs = trace.chance[text.first : text.end].double().numpy()
            assert counts == pytest.approx(upper_bound.expected_counts(probs, most))
