"""Ceilings on table models: their order, the fixed point, and the oracle's closed form against its coins."""

import pytest
import torch

from analysis import ceilings
from analysis.replay import replay
from data_gen.recording import Recorder
from toolkit import ModelPair, metrics
from toolkit.errors import InputError
from toolkit.sampling import Sampling, row_generator
from toolkit.session.tabular import TabularModel
from toolkit.stopping import Bounded, Confidence, Fixed

V, LENGTH = 4, 60


@pytest.fixture(scope="module")
def made():
    generator = torch.Generator().manual_seed(5)
    target = TabularModel.random(V, 1, generator, sharpness=2.0)
    noise = torch.randn(V, V, generator=generator, dtype=torch.float64)
    draft = TabularModel((target.probs.log() + 1.0 * noise).softmax(-1))
    pair = ModelPair(target=target, draft=draft, end_ids=())
    texts = []
    for row in range(150):
        text, rng = [1], row_generator(11, row)
        for _ in range(LENGTH):
            text.append(int(torch.multinomial(target.probs[text[-1]], 1, generator=rng)))
        texts.append(([1], text[1:]))
    return pair, texts


@pytest.fixture(scope="module")
def trace(made):
    pair, texts = made
    return Recorder(pair, Sampling(max_new_tokens=LENGTH), 8, ceiling=True).record(texts, range(len(texts)))


def rate_of(counts, cost_ratio):
    return sum(c["num_generated"] for c in counts) / sum(
        cost_ratio * c["num_draft_calls"] + c["num_target_calls"] for c in counts
    )


@pytest.mark.parametrize("cost_ratio", [0.05, 0.2, 0.5])
def test_order_of_the_ceilings(trace, cost_ratio):
    _, best = ceilings.best_fixed(trace, cost_ratio)
    known = ceilings.true_probability(trace, cost_ratio)
    fixed = metrics.throughput(best.total, cost_ratio)
    clairvoyant = rate_of(ceilings.oracle(trace), cost_ratio)
    per_text = ceilings.best_fixed_per_text(trace, cost_ratio)
    with_hindsight = per_text["num_generated"].sum() / (
        cost_ratio * per_text["num_draft_calls"].sum() + per_text["num_target_calls"].sum()
    )
    assert fixed <= known.rate < clairvoyant
    assert fixed <= with_hindsight < clairvoyant
    assert known.rate == pytest.approx(metrics.throughput(known.replayed.total, cost_ratio))
    confident = [
        metrics.throughput(replay(trace, Bounded(Confidence(t), 1, 8)).total, cost_ratio) for t in (0.2, 0.4, 0.6, 0.8)
    ]
    assert max(confident) <= known.rate * 1.01


def test_fixed_zero_is_plain_decoding(trace):
    total = ceilings.fixed(trace, 0)[0].total
    assert (total.num_drafted, total.num_target_calls, total.num_generated) == (0, 150 * LENGTH, 150 * LENGTH)


def test_oracle_agrees_with_the_coins(trace):
    expected = sum(counts["num_drafted"] for counts in ceilings.oracle(trace))
    free = torch.ones(trace.num_positions, dtype=torch.bool)
    free[trace.text_first[1:] - 1] = False
    tossed = int((trace.accepted & free).sum())
    spread = float((trace.chance * (1 - trace.chance))[free].sum().sqrt())
    assert abs(tossed - expected) < 4 * spread


def test_a_costly_draft_is_not_used_and_a_free_one_is_used_up(trace):
    assert ceilings.true_probability(trace, 1.5).replayed.total.num_drafted == 0
    free = ceilings.true_probability(trace, 0.0).replayed.total
    assert free.num_target_calls == replay(trace, Bounded(Fixed(8), 1, 8)).total.num_target_calls


def test_a_trace_without_the_targets_laws_is_refused(made):
    pair, texts = made
    blind = Recorder(pair, Sampling(max_new_tokens=LENGTH), 8).record(texts[:2], range(2))
    with pytest.raises(InputError, match="ceiling=true"):
        ceilings.true_probability(blind, 0.2)
