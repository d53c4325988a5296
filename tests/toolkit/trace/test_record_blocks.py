"""Recordings of block drafts: every step against a slow forward, counts against live decoding, sweeps and heads on them."""

from dataclasses import replace

import pytest
import torch

from tests.toolkit.test_block_drafts import slow_logits
from tests.toolkit.trace.test_record_by_start import inverse, target_probs, texts_of
from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError
from toolkit.sampling import row_generator, warp
from toolkit.stopping import Bounded, Fixed
from toolkit.testing import ragged_prompts, tiny_llama
from toolkit.testing.blocks import tiny_block
from toolkit.trace import Trace, join
from toolkit.trace.bounds import at_price, best_fixed, true_probability
from toolkit.trace.record_by_start import depth_that_pays, recorder_of
from toolkit.trace.replay import by_starts, replay
from toolkit.trace.steps import Geometry, step_at
from toolkit.trace.store import Store

LENGTH = 9


def pair_of(kind, end_ids=(0, 5), **settings):
    """A target, and a draft near enough that some of its tokens are accepted."""
    target = tiny_llama(32, 3, 1, torch.float64)
    draft = tiny_block(target, kind, torch.arange(97), **settings)
    draft.lm_head.rows.weight.data *= 0.1
    target.lm_head.weight.data *= 0.3
    return ModelPair(target=target, draft=draft, end_ids=end_ids, costs="assumed")


def expected_steps(recorder, prompt, produced, row, start):
    """The chain from one start, step by step: token, q and min(1, p/q) of it, sum min(p, q); and its accepted tokens."""
    pair, sampling, steps, chain, run = recorder.pair, recorder.sampling, [], [], 0
    generator = row_generator(sampling.seed + 1_000_003 * (recorder.replicate + 1), row)
    draws = torch.rand(recorder.max_drafted, len(produced), 2, generator=generator, dtype=torch.float64)[:, start]
    text = [*prompt, *produced[:start]]
    for depth in range(recorder.max_drafted):
        position = start + depth
        if depth and (chain[-1] in pair.ends(sampling) or position >= sampling.max_new_tokens - 1):
            break
        logits = slow_logits(pair.target, pair.draft, text, chain)[depth]
        seen = torch.zeros(1, pair.vocab_size, dtype=torch.bool)
        seen[0, text + chain] = True
        q, p = warp(logits.unsqueeze(0), sampling, seen)[0], target_probs(pair, text + chain, sampling)
        token = inverse(q, draws[depth, 1])
        if run == depth and position < len(produced):
            accepted = bool(draws[depth, 0] < min(1.0, float(q[produced[position]] / p[produced[position]])))
            run += accepted
            token = produced[position] if accepted else inverse((q - p).clamp(min=0), draws[depth, 1])
        facts = float(q[token]), min(1.0, float(p[token] / q[token])), float(torch.minimum(p, q).sum())
        steps.append((token, *facts))
        chain.append(token)
    return steps, run


@pytest.mark.parametrize(("kind", "settings"), [("dflash", {"window": 3}), ("dspark", {})])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_every_step_of_a_recording(kind, settings, penalty):
    pair = pair_of(kind, **settings)
    sampling = Sampling(2.0, max_new_tokens=LENGTH, seed=4, top_k=60, repetition_penalty=penalty)
    sequences = [*texts_of(pair, 2, sampling), *texts_of(pair, 1, replace(sampling, seed=9), [[11]])]
    recorder = recorder_of(pair, sampling, 20, upper_bound=True, hidden=True)
    trace = recorder.record_all(sequences, range(3))
    assert trace.max_drafted == pair.draft.block_length
    assert trace.hidden.shape == (trace.num_steps, pair.draft.state_width)
    geometry, runs = Geometry.of(trace), []
    for row, (prompt, produced) in enumerate(sequences):
        for start in range(len(produced)):
            step = torch.tensor([int(trace.text_first[row]) + start])
            steps, run = expected_steps(recorder, prompt, produced, row, start)
            assert int(trace.run[step]) == run
            runs.append(run)
            for depth, (token, q, accepted, alpha) in enumerate(steps, start=1):
                index, exists = step_at(trace, geometry, step, depth)
                assert bool(exists) and int(trace.tokens[index]) == token
                for name, value in (("draft_prob", q), ("accept_prob", accepted), ("alpha", alpha)):
                    assert float(getattr(trace, name)[index]) == pytest.approx(value, abs=1e-4), name
            assert not bool(step_at(trace, geometry, step, len(steps) + 1)[1])
    assert min(runs) == 0 and max(runs) >= 2
    assert true_probability(trace, 0.1).rate > 0


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("method", ["speculative", "confidence", "adaedl", "svip"])
def test_replay_counts_what_greedy_decoding_counts(kind, method):
    """Every count, texts that end inside of blocks and length limits included."""
    pair, sampling = pair_of(kind, end_ids=(5, 60, 70, 80)), Sampling(temperature=0.0, max_new_tokens=24)
    pair.draft.lm_head.rows.weight.data.copy_(pair.target.lm_head.weight)
    method = config.method(method)
    live = decode(pair, [[7], *ragged_prompts(12)], method, sampling)
    trace = recorder_of(pair, sampling, 20).record([(g.prompt_ids, g.token_ids) for g in live], range(len(live)))
    replayed = replay(trace, method.bind(pair).policy)
    assert int(trace.run.sum()) > 0
    for name, values in replayed.counts.items():
        assert values.tolist() == [getattr(generation.counts, name) for generation in live], name


def test_replay_counts_are_distributed_as_those_of_sampling():
    pair, sampling = pair_of("dspark", end_ids=()), Sampling(max_new_tokens=12, seed=1)
    prompts = [ragged_prompts(3)[number % 3] for number in range(200)]
    live = decode(pair, prompts, config.method("speculative", ["policy.num_drafted=3"]), sampling, batch_size=50)
    trace = recorder_of(pair, sampling, 3).record([(g.prompt_ids, g.token_ids) for g in live], range(200))
    replayed = by_starts(trace, Bounded(Fixed(3), 3, 3))
    drafted = torch.tensor([generation.counts.num_drafted for generation in live]).double()
    difference = drafted - torch.from_numpy(replayed.counts["num_drafted"]).double()
    assert abs(float(difference.mean())) < 4 * float(difference.std()) / 200**0.5
    assert float(difference.std()) > 0, "the acceptance draws are its own"


def test_files_and_joins_know_that_a_round_costs_one_forward_pass(tmp_path):
    pair, sampling = pair_of("dspark"), Sampling(max_new_tokens=LENGTH, seed=4)
    recorder, sequences = recorder_of(pair, sampling, 20, upper_bound=True), texts_of(pair, 3, sampling)
    trace = join([recorder.record(sequences[:1], [0]), recorder.record(sequences[1:], [1, 2])])
    for other in (trace, Trace.load(trace.save(tmp_path / "trace.safetensors"))):
        assert other.blocks and other.max_drafted == 4
        replayed = by_starts(other, Bounded(Fixed(3), 1, 3))
        assert 0 < replayed.total.num_draft_calls <= replayed.total.num_target_calls < replayed.total.num_drafted
    assert best_fixed(trace, 0.2)[0] == 4


def test_the_upper_bound_pays_for_a_block_once_and_for_columns_by_position():
    """At any price about the best fixed length or more; where a block is too expensive, autoregressive decoding."""
    pair, sampling = pair_of("dspark"), Sampling(max_new_tokens=LENGTH, seed=4)
    trace = recorder_of(pair, sampling, 20, upper_bound=True).record(texts_of(pair, 3, sampling), [0, 1, 2])
    fixed = [by_starts(trace, Bounded(Fixed(k), min(k, 1), k)) for k in range(5)]
    for block, column in ((0.0, 0.0), (0.2, 0.0), (0.2, 0.05), (0.05, 0.2), (0.6, 0.1)):

        def rate(replayed, block=block, column=column):
            total = replayed.total
            spent = total.num_target_calls + block * total.num_draft_calls + column * total.num_drafted
            return total.num_generated / spent

        bound = true_probability(trace, block, columns=[column] * 4)
        assert bound.rate == pytest.approx(rate(bound.replayed)) and bound.rate >= 0.97 * max(map(rate, fixed))
    assert true_probability(trace, 3.0).replayed.total.num_drafted == 0
    assert true_probability(trace, 0.0).replayed.total.num_drafted == fixed[4].total.num_drafted
    assert at_price(trace, 1e-9).total == fixed[4].total


def test_the_depth_that_pays_is_at_most_a_block():
    pair, sampling = pair_of("dflash", end_ids=()), Sampling(temperature=0.0, max_new_tokens=12)
    sequences = texts_of(pair, 3, sampling)
    assert 1 <= depth_that_pays(pair, sequences, sampling) <= pair.draft.block_length


def test_a_stored_recording_replays_the_drafts_own_confidence_head(tmp_path):
    """The head reads states, so they come with the trace; counts equal live decoding's at T = 0."""
    pair, sampling = pair_of("dspark"), Sampling(0.0, max_new_tokens=LENGTH)
    method = config.method("block_draft_rate", ["policy.cost_ratio=.1", "policy.column_cost=.1"]).bind(pair)
    assert method.policy.policy.estimator.reads_hidden
    sequences = texts_of(pair, 3, sampling)
    trace = Store(tmp_path).trace(pair, sampling, sequences, pair.draft.block_length, states=True)
    replayed = replay(trace, method.policy)
    live = decode(pair, [prompt for prompt, _ in sequences], method, sampling, batch_size=2)
    drafted = sum(each.counts.num_drafted for each in live)
    assert 0 < drafted < pair.draft.block_length * sum(each.counts.num_target_calls for each in live), "it decides"
    for name in ("num_target_calls", "num_draft_calls", "num_drafted", "num_discarded"):
        assert replayed.counts[name].tolist() == [getattr(each.counts, name) for each in live], name
    with pytest.raises(InputError, match="hidden"):
        replay(Store(tmp_path).trace(pair, sampling, sequences, pair.draft.block_length), method.policy)
