"""Upper bounds on table models: their order, the fixed point, and the oracle's closed form against its acceptance draws."""

import numpy as np
import pytest
import torch

from analysis.replay import dynamic_program, upper_bound
from analysis.replay.policies import replay
from data_gen.recording import Recorder
from toolkit import ModelPair, metrics
from toolkit.engine.tabular import TabularModel
from toolkit.errors import InputError
from toolkit.sampling import Sampling, row_generator
from toolkit.stopping import Bounded, Confidence, Fixed, Rate
from toolkit.trace.rounds import Geometry

V, LENGTH = 4, 60


@pytest.fixture(scope="module")
def made():
    generator = torch.Generator().manual_seed(5)
    target = TabularModel.random(V, 1, generator, sharpness=2.0)
    noise = torch.randn(V, V, generator=generator, dtype=torch.float64)
    draft = TabularModel((target.probs.log() + 1.0 * noise).softmax(-1))
    pair = ModelPair(target=target, draft=draft, end_ids=())
    texts = []
    for row in range(100):
        text, rng = [1], row_generator(11, row)
        for _ in range(LENGTH):
            text.append(int(torch.multinomial(target.probs[text[-1]], 1, generator=rng)))
        texts.append(([1], text[1:]))
    return pair, texts


@pytest.fixture(scope="module")
def trace(made):
    pair, texts = made
    return Recorder(pair, Sampling(max_new_tokens=LENGTH), 8, upper_bound=True).record(texts, range(len(texts)))


@pytest.mark.parametrize("cost_ratio", [0.05, 0.2, 0.5])
def test_order_of_the_upper_bounds(trace, cost_ratio):
    _, best = upper_bound.best_fixed(trace, cost_ratio)
    known = upper_bound.true_probability(trace, cost_ratio)
    fixed = metrics.throughput(best.total, cost_ratio)
    told = upper_bound.oracle(trace)
    cost = sum(cost_ratio * counts["num_draft_calls"] + counts["num_target_calls"] for counts in told)
    assert fixed <= known.rate < sum(counts["num_generated"] for counts in told) / cost
    assert known.rate == pytest.approx(metrics.throughput(known.replayed.total, cost_ratio))
    for level in (0.2, 0.4, 0.6, 0.8):
        confident = replay(trace, Bounded(Confidence(level), 1, 8)).total
        assert metrics.throughput(confident, cost_ratio) <= known.rate * 1.01


def test_oracle_agrees_with_the_draws(trace):
    expected = sum(counts["num_drafted"] for counts in upper_bound.oracle(trace))
    free = torch.ones(trace.num_positions, dtype=torch.bool)
    free[trace.text_first[1:] - 1] = False
    tossed = int((trace.accepted & free).sum())
    spread = float((trace.chance * (1 - trace.chance))[free].sum().sqrt())
    assert abs(tossed - expected) < 4 * spread


def test_a_costly_draft_is_not_used_and_a_free_one_is_used_up(trace):
    assert upper_bound.true_probability(trace, 1.5).replayed.total.num_drafted == 0
    free = upper_bound.true_probability(trace, 0.0).replayed.total
    assert free.num_target_calls == replay(trace, Bounded(Fixed(8), 1, 8)).total.num_target_calls


class Perfect:
    """Knows p and q of the table models: the probability of the drawn token, and of the one after it."""

    def __init__(self, pair):
        p, q = pair.target.probs, pair.draft.probs
        self.alpha = torch.minimum(p, q).sum(-1).float()

    def bind(self, pair):
        return self

    def drawn_probs(self, step):
        return step.trace.accept_prob[step.index], self.alpha[step.tokens]


class Blind:
    """Says the same of every token."""

    def drawn_probs(self, step):
        return torch.full((len(step.index),), 0.7), torch.full((len(step.index),), 0.7)


def test_the_rate_rule_that_knows_p_and_q_is_the_true_probability_policy(trace, made):
    solved = upper_bound.solve_policy(trace, Rate(Perfect(made[0])), 0.2)
    assert solved.rate == pytest.approx(upper_bound.true_probability(trace, 0.2, min_drafted=1).rate, rel=1e-6)
    again = replay(trace, Bounded(Rate(Perfect(made[0]), cost_ratio=0.2, rate=solved.price), 1, 8))
    assert metrics.throughput(again.total, 0.2) == pytest.approx(solved.rate, rel=1e-6)
    tracked = replay(trace, Bounded(Rate(Perfect(made[0]), cost_ratio=0.2), 1, 8))
    assert metrics.throughput(tracked.total, 0.2) > 0.97 * solved.rate


@pytest.fixture(scope="module")
def known(trace, made):
    """What a head that knows p and q has seen, and the best policy that sees it."""
    seen = dynamic_program.head_inputs(trace, Geometry.of(trace), Perfect(made[0]), 8)
    return seen, dynamic_program.best_policy(trace, seen, 0.2, folds=4)


def test_the_worth_of_a_heads_information(trace, known):
    """With all there is to know, what one-step look-ahead reaches or a little more; with nothing, a fixed K."""
    _, solved = known
    assert solved.rate > 0.995 * upper_bound.true_probability(trace, 0.2, min_drafted=1).rate
    blind = dynamic_program.head_inputs(trace, Geometry.of(trace), Blind(), 8)
    nothing = dynamic_program.best_policy(trace, blind, 0.2, folds=4)
    best = metrics.throughput(upper_bound.best_fixed(trace, 0.2)[1].total, 0.2)
    assert nothing.rate == pytest.approx(best, rel=0.02)
    assert nothing.rate < 0.97 * solved.rate


def test_the_value_of_drafting_on_and_the_threshold_that_follows(trace, known):
    """Where the head knows p and q, worth falls with P(some rejection), and the best policy drafts on where it is above 0."""
    seen, solved = known
    values = dynamic_program.stopping_values(trace, seen, 0.2, solved.price, folds=4)
    assert values.price == pytest.approx(0.2 * solved.price)
    assert np.isnan(values.worth[1])[seen.possible.numpy() <= 2].all()
    lines = values.table(1)
    assert sum(line["states"] for line in lines) == (~np.isnan(values.worth[0])).sum()
    assert lines[0]["worth"] > lines[-1]["worth"] and lines[0]["goes on"] == 1.0
    assert 0 < values.threshold(1) < 1
    dear = dynamic_program.stopping_values(trace, seen, 0.2, 10 * solved.price, folds=4)
    assert dear.threshold(1) <= values.threshold(1)


def test_values_are_read_off_their_states():
    worth = np.array([[0.5, 0.1, -0.2, np.nan, -0.4]])
    values = dynamic_program.Values(0.3, np.array([[1.0, 0.8, 0.6, 0.5, 0.1]]), worth)
    assert values.threshold(1) == pytest.approx(0.2)
    assert values.table(1, num_bins=2) == [
        {"k": 1.0, "from": 0.0, "to": 0.5, "states": 3.0, "worth": pytest.approx(0.4 / 3), "goes on": pytest.approx(2 / 3)},
        {"k": 1.0, "from": 0.5, "to": 1.0, "states": 1.0, "worth": -0.4, "goes on": 0.0},
    ]  # fmt: skip
    assert dynamic_program.Values(0.3, values.survival, -np.abs(worth)).threshold(1) == 0.0
    both = dynamic_program.Values(
        0.3, np.concatenate([values.survival[:, ::-1], values.survival]), np.concatenate([-worth, worth])
    )
    assert both.threshold(2) == values.threshold(1) != both.threshold(1)
    assert [{**line, "k": 1.0} for line in both.table(2, num_bins=2)] == values.table(1, num_bins=2)
    assert both.table(2, num_bins=2)[0]["k"] == 2.0 and len(values.table(1)) == 3


def test_a_trace_without_the_targets_distributions_is_refused(made):
    pair, texts = made
    blind = Recorder(pair, Sampling(max_new_tokens=LENGTH), 8).record(texts[:2], range(2))
    with pytest.raises(InputError, match="upper_bound=true"):
        upper_bound.true_probability(blind, 0.2)


def test_at_the_price_of_its_fixed_point_it_is_the_true_probability_policy(trace):
    solved = upper_bound.true_probability(trace, 0.2)
    again = upper_bound.at_price(trace, solved.price * 0.2)
    assert again.total == solved.replayed.total
    rates = [metrics.throughput(upper_bound.at_price(trace, p / 20).total, 0.2) for p in range(1, 20)]
    assert solved.rate <= max(rates) * 1.001, "the best price is at least as good as what one step of look-ahead says"
