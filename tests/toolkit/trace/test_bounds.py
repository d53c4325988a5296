"""Upper bounds on table models: their order, the fixed point, and the oracle's closed form against its acceptance draws."""

import pytest
import torch

from toolkit import ModelPair, metrics
from toolkit.engine.tabular import TabularModel
from toolkit.errors import InputError
from toolkit.sampling import Sampling, row_generator
from toolkit.stopping import Bounded, Confidence, Fixed, Rate
from toolkit.trace import bounds as upper_bound
from toolkit.trace.record import Recorder
from toolkit.trace.replay import replay

V, LENGTH = 4, 60


@pytest.fixture(scope="module")
def made():
    generator = torch.Generator().manual_seed(5)
    target = TabularModel.random(V, 1, generator, sharpness=2.0)
    noise = torch.randn(V, V, generator=generator, dtype=torch.float64)
    draft = TabularModel((target.probs.log() + 1.0 * noise).softmax(-1))
    pair = ModelPair(target=target, draft=draft, end_ids=())
    sequences = []
    for row in range(100):
        text, rng = [1], row_generator(11, row)
        for _ in range(LENGTH):
            text.append(int(torch.multinomial(target.probs[text[-1]], 1, generator=rng)))
        sequences.append(([1], text[1:]))
    return pair, sequences


@pytest.fixture(scope="module")
def trace(made):
    pair, sequences = made
    return Recorder(pair, Sampling(max_new_tokens=LENGTH), 8, upper_bound=True).record(sequences, range(len(sequences)))


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
    spread = float((trace.text_accept_prob * (1 - trace.text_accept_prob))[free].sum().sqrt())
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


def test_the_rate_rule_that_knows_p_and_q_is_the_true_probability_policy(trace, made):
    solved = upper_bound.solve_policy(trace, Rate(Perfect(made[0])), 0.2)
    assert solved.rate == pytest.approx(upper_bound.true_probability(trace, 0.2, min_drafted=1).rate, rel=1e-6)
    again = replay(trace, Bounded(Rate(Perfect(made[0]), cost_ratio=0.2, rate=solved.price), 1, 8))
    assert metrics.throughput(again.total, 0.2) == pytest.approx(solved.rate, rel=1e-6)
    tracked = replay(trace, Bounded(Rate(Perfect(made[0]), cost_ratio=0.2), 1, 8))
    assert metrics.throughput(tracked.total, 0.2) > 0.97 * solved.rate


def test_a_trace_without_the_targets_distributions_is_refused(made):
    pair, sequences = made
    blind = Recorder(pair, Sampling(max_new_tokens=LENGTH), 8).record(sequences[:2], range(2))
    with pytest.raises(InputError, match="upper_bound=true"):
        upper_bound.true_probability(blind, 0.2)


def test_at_the_price_of_its_fixed_point_it_is_the_true_probability_policy(trace):
    solved = upper_bound.true_probability(trace, 0.2)
    again = upper_bound.at_price(trace, solved.price * 0.2)
    assert again.total == solved.replayed.total
    rates = [metrics.throughput(upper_bound.at_price(trace, p / 20).total, 0.2) for p in range(1, 20)]
    assert solved.rate <= max(rates) * 1.001, "the best price is at least as good as what one step of look-ahead says"
