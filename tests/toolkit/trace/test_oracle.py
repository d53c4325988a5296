"""The clairvoyant oracle against slow and obvious simulations."""

import random

import numpy as np
import pytest
import torch

from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.engine import TabularModel
from toolkit.errors import InputError
from toolkit.sampling import warp
from toolkit.trace.bounds import acceptance_probs, expected_counts

VOCAB, END, LIMIT = 4, 0, 9


@pytest.fixture(scope="module")
def pair():
    generator = torch.Generator().manual_seed(11)
    target, draft = (TabularModel.random(VOCAB, 1, generator, sharpness=1.2) for _ in range(2))
    return ModelPair(target=target, draft=draft, end_ids=(END,))


def walk(accepted, most=None):
    """Drafted tokens and rounds of an oracle that knows the acceptance draws: written as one would explain it."""
    drafted = rounds = position = 0
    while position < len(accepted):
        in_round = 0
        while position < len(accepted) - 1 and accepted[position] and (most is None or in_round < most):
            in_round, position = in_round + 1, position + 1
        drafted, rounds, position = drafted + in_round, rounds + 1, position + 1  # the target's own token
    return drafted, rounds


@pytest.mark.parametrize("most", [None, 0, 1, 2, 5])
def test_expected_counts_are_the_mean_over_draws(most):
    rng = np.random.default_rng(0)
    for length in (1, 2, 7, 13):
        probs = rng.random(length) ** 0.5
        walks = np.array([walk(rng.random(length) < probs, most) for _ in range(3000)])
        counts = expected_counts(probs, most)
        spread = walks.std(0) / 3000**0.5
        assert abs(counts["num_drafted"] - walks[:, 0].mean()) <= 5 * spread[0] + 1e-9
        assert abs(counts["num_target_calls"] - walks[:, 1].mean()) <= 5 * spread[1] + 1e-9
        assert counts["num_drafted"] + counts["num_target_calls"] == pytest.approx(counts["num_generated"])
        assert counts["num_discarded"] == 0


def test_certain_draws_need_no_expectation():
    for bits in range(2**6):
        accepted = [bits >> i & 1 for i in range(6)]
        for most in (None, 1, 2, 3):
            counts = expected_counts(np.array(accepted, dtype=float), most)
            assert (counts["num_drafted"], counts["num_target_calls"]) == walk(accepted, most)


def test_no_text_no_calls():
    assert expected_counts(np.zeros(0))["num_target_calls"] == 0
    with pytest.raises(InputError, match=r"oracle\.max_drafted"):
        expected_counts(np.ones(3), -1)


def test_the_oracle_of_texts_drawn_by_coupling(pair):
    """Draw texts with real drafts and acceptance draws, not with a_i: the oracle's mean counts must come out the same."""
    rng = random.Random(3)
    p, q = pair.target.probs.numpy(), pair.draft.probs.numpy()
    left = np.clip(p - q, 0, None)
    drawn = []
    for _ in range(3000):
        last, accepted = 1, []
        while len(accepted) < LIMIT and (not accepted or last != END):
            (token,) = rng.choices(range(VOCAB), q[last])
            accepted.append(rng.random() < p[last, token] / q[last, token])
            if not accepted[-1]:
                (token,) = rng.choices(range(VOCAB), left[last])
            last = token
        drawn.append(walk(accepted))
    sampling = Sampling(max_new_tokens=LIMIT)
    plain = decode(pair, [[1]] * 1000, config.method("autoregressive"), sampling, batch_size=250)
    sequences = [([1], generation.token_ids) for generation in plain]
    probs = acceptance_probs(pair, sequences, Sampling(), batch_size=64)
    expected = np.array([(c["num_drafted"], c["num_target_calls"]) for c in map(expected_counts, probs)])
    error = np.sqrt(np.var(drawn, axis=0) / len(drawn) + np.var(expected, axis=0) / len(expected))
    assert (np.abs(np.mean(drawn, axis=0) - expected.mean(0)) < 4.5 * error).all()


@pytest.fixture(scope="module")
def sequences(prompts):
    """Prompts and produced tokens of different lengths."""
    return [(prompt, prompts[i - 1][: 2 + i]) for i, prompt in enumerate(prompts[:5])]


@pytest.fixture(scope="module")
def single_logits(exact_pair, sequences):
    """Target and draft logits of every produced token, by a forward of its own without cache, padding or batch."""
    models = (exact_pair.target, exact_pair.draft)
    contexts = [
        [torch.tensor([[*prompt, *produced[:i]]]) for i in range(len(produced))] for prompt, produced in sequences
    ]
    return [[[model(context).logits[0, -1] for model in models] for context in each] for each in contexts]


@pytest.mark.parametrize("sampling", [
    Sampling(),
    Sampling(temperature=0.7, top_k=30, top_p=0.9),
    Sampling(repetition_penalty=1.4),
    Sampling(temperature=0),
])  # fmt: skip
def test_probabilities_are_those_of_single_forwards(exact_pair, sequences, single_logits, sampling):
    """Batched, padded passes against one forward per token, with everything that warping can do."""
    batched = acceptance_probs(exact_pair, sequences, sampling, batch_size=3)
    for (prompt, produced), logits, probs in zip(sequences, single_logits, batched, strict=True):
        assert len(probs) == len(produced)
        for i, token in enumerate(produced):
            seen = torch.zeros(97, dtype=torch.bool)
            seen[[*prompt, *produced[:i]]] = True
            p, q = (warp(row, sampling, seen)[token] for row in logits[i])
            expected = min(1.0, float(q / p)) if p > 0 else float(q > 0)
            assert probs[i] == pytest.approx(expected, abs=1e-9)


def test_equal_models_accept_everything_and_texts_may_be_empty(pair):
    twin = ModelPair(target=pair.target, draft=pair.target, end_ids=(END,))
    probs = acceptance_probs(twin, [([1], [2, 3, 1]), ([1], []), ([2, 2], [1])], Sampling())
    assert [c.tolist() for c in probs] == [[1, 1, 1], [], [1]]


def test_what_has_no_oracle_is_refused(pair, monkeypatch):
    with pytest.raises(InputError, match="needs a draft model"):
        acceptance_probs(ModelPair(target=pair.target), [([1], [2])], Sampling())
    monkeypatch.setattr(ModelPair, "max_length", 4)
    assert len(acceptance_probs(pair, [([1, 2], [2, 1])], Sampling())[0]) == 2
    with pytest.raises(InputError, match="a text of 5 tokens exceeds the draft's context of 4"):
        acceptance_probs(pair, [([1], [2]), ([1, 2, 3], [2, 1])], Sampling())


def test_the_draft_may_have_a_temperature_of_its_own(pair):
    text = ([1], [2, 3, 1])
    (probs,) = acceptance_probs(pair, [text], Sampling(temperature=0.8), 0.5)
    for prob, last, token in zip(probs, [1, 2, 3], text[1], strict=True):
        p, q = ((m.probs[last].log() / t).softmax(-1) for m, t in ((pair.target, 0.8), (pair.draft, 0.5)))
        assert prob == pytest.approx(min(1.0, float(q[token] / p[token])), abs=1e-9)
