"""The loop: exact, batched, counted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.methods import at_temperatures, one_of_each, others_slow
from toolkit import ModelPair, config, generate
from toolkit.decoding import Method, Sampling, TreeProposer, decode
from toolkit.engine import TabularModel
from toolkit.engine.device import Gate
from toolkit.errors import DecodingError, InputError
from toolkit.stopping import Confidence, Fixed, Heuristic
from toolkit.testing import output_pvalue
from toolkit.verification import get

METHODS = config.choices("method")  # the pairs come with heads for those that need one
CHAINS = [name for name in METHODS if config.method(name).proposer.__class__.__name__ == "ChainProposer"]
COUPLED = [name for name in METHODS if config.method(name).couples_rows]
BEAMS = [name for name in METHODS if config.method(name).beams is not None]  # their distributions: test_beams.py
LENGTH = 9  # tokens of a text: several rounds of every method
RUNS = 5000  # of a chi-square test: a residual of p is seen with p < 1e-6
LOSSLESS = [name for name in METHODS if config.method(name).rule.lossless and name not in BEAMS]


@pytest.fixture(scope="module")
def sampled(exact_pair, prompts):
    """Decodes all prompts in batches of three by a method with these overrides, once for all tests."""

    def decoded(name, *overrides):
        return decode(
            exact_pair, prompts, config.method(name, overrides), Sampling(max_new_tokens=LENGTH), batch_size=3
        )

    return cache(decoded)


def assert_same(generations, others):
    """Equal texts in equal rounds."""
    for one, other in zip(generations, others, strict=True):
        assert (one.token_ids, one.beams, one.counts) == (other.token_ids, other.beams, other.counts)
        rounds = [[(r.num_drafted, r.num_accepted) for r in generation.rounds] for generation in (one, other)]
        assert rounds[0] == rounds[1]


@pytest.mark.parametrize(("name", "temperature"), at_temperatures(METHODS))
def test_a_row_does_not_depend_on_its_neighbours(name, temperature, exact_pair, prompts, sampled):
    """Alone, in threes and all in reverse order: the same tokens and rounds, exactly. Coupled rows: in equal batches."""
    method, sampling = config.method(name), Sampling(temperature=temperature, max_new_tokens=LENGTH)
    together = sampled(name) if temperature else decode(exact_pair, prompts, method, sampling, batch_size=3)
    if name in COUPLED:
        assert_same(decode(exact_pair, prompts, method, sampling, batch_size=3), together)
        return
    assert_same(decode(exact_pair, prompts[4:6], method, sampling, batch_size=1, row_ids=[4, 5]), together[4:6])
    rows = range(len(prompts))[::-1]
    assert_same(decode(exact_pair, prompts[::-1], method, sampling, batch_size=7, row_ids=rows)[::-1], together)


ONE_OF_A_KIND = ("speculative", "specdec_pp", "block_budget", "mcsd", "mtad", "dsbd", "prompt_lookup")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *((name, ()) if name in ONE_OF_A_KIND else pytest.param(name, (), marks=pytest.mark.slow) for name in METHODS),
        *((name, ("max_drafted=2",)) for name in ("specinfer", "mtad", "block")),
    ],
)
def test_launching_ahead_of_the_answers_changes_nothing(name, overrides, exact_pair, prompts, sampled, monkeypatch):
    """As on a GPU, where the host learns a step later that every row has stopped; also at the method's limit."""
    expected = sampled(name, *overrides)
    for module in ("chain", "tree", "beam_chain", "forest"):
        monkeypatch.setattr(f"toolkit.decoding.proposers.{module}.Gate", lambda device: Gate(device, ahead=1))
    method, sampling = config.method(name, overrides), Sampling(max_new_tokens=LENGTH)
    assert_same(decode(exact_pair, prompts, method, sampling, batch_size=3), expected)


@pytest.mark.parametrize("name", ["speculative", "mtad_head", "speculative_beam", "dsbd_head"])
def test_of_several_drafts_the_first_one_drafts_alone(name, exact_pair, prompts, sampled):
    several = replace(exact_pair, draft=None, drafts=[exact_pair.draft, exact_pair.target])
    assert_same(
        decode(several, prompts, config.method(name), Sampling(max_new_tokens=LENGTH), batch_size=3), sampled(name)
    )


@pytest.fixture(scope="module")
def greedy_texts(exact_pair, prompts):
    """The target's own texts under a repetition penalty, by transformers."""
    settings = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.2, "eos_token_id": 5}
    sequences = [exact_pair.target.generate(torch.tensor([prompt]), **settings)[0].tolist() for prompt in prompts]
    return [text[len(prompt) :] for prompt, text in zip(prompts, sequences, strict=True)]


@pytest.mark.parametrize("name", others_slow(LOSSLESS))
def test_greedy_output_is_the_targets_own(name, exact_pair, prompts, greedy_texts):
    sampling = Sampling(temperature=0, max_new_tokens=12, repetition_penalty=1.2)
    generations = decode(exact_pair, prompts, config.method(name), sampling, batch_size=4)
    assert [generation.token_ids for generation in generations] == greedy_texts


@pytest.mark.parametrize("name", others_slow(METHODS))
def test_counts(name, exact_pair, prompts, sampled):
    """In every round drafted + 1 = produced + discarded, end of text and length limit inside accepted runs included."""
    short = [Sampling(max_new_tokens=limit) for limit in (1, 2)] if name in one_of_each() else []
    runs = {s.max_new_tokens: decode(exact_pair, prompts, config.method(name), s, batch_size=7) for s in short}
    for limit, generation in ((limit, each) for limit, run in {**runs, LENGTH: sampled(name)}.items() for each in run):
        counts, rounds = generation.counts, generation.rounds
        assert len(generation.token_ids) == counts.num_generated <= limit
        assert (generation.finish_reason == "end") == (generation.token_ids[-1] == 5)
        assert generation.finish_reason == "end" or counts.num_generated == limit
        assert counts.num_drafted + counts.num_target_calls == counts.num_generated + counts.num_discarded
        assert sum(r.num_produced for r in rounds) == counts.num_generated
        assert name in BEAMS or all(r.num_produced == r.num_accepted + 1 for r in rounds[:-1])
        assert all(0 <= r.num_accepted <= r.num_drafted and r.num_produced <= r.num_accepted + 1 for r in rounds)
        assert 5 not in generation.token_ids[:-1]
        if name in CHAINS and not config.method(name).policy.reads:
            assert counts.num_draft_calls == counts.num_drafted


ENDING_INSIDE = [
    name for name in LOSSLESS if name not in ("autoregressive", "prompt_lookup", "lookup_rate", "batch_lookup_rate")
]


@pytest.mark.parametrize("name", others_slow(ENDING_INSIDE))
def test_counts_where_a_drafted_token_ends_the_text(name, table_pair):
    """One token of three ends a text: the end is often a draft that was accepted, and no further token is drawn then."""
    inside, sampling = 0, Sampling(max_new_tokens=6, seed=4)
    for generation in decode(table_pair, [[0, 1]] * 60, config.method(name), sampling, batch_size=60):
        counts, rounds = generation.counts, generation.rounds
        assert 2 not in generation.token_ids[:-1]
        assert counts.num_drafted + counts.num_target_calls == counts.num_generated + counts.num_discarded
        assert sum(r.num_produced for r in rounds) == counts.num_generated == len(generation.token_ids)
        assert all(r.num_produced == r.num_accepted + 1 for r in rounds[:-1])
        last = rounds[-1]
        assert last.num_produced in (last.num_accepted, last.num_accepted + 1)
        if last.num_produced == last.num_accepted:
            assert generation.token_ids[-1] == 2  # only an end of text takes the place of the extra token
            inside += 1
    assert inside >= 3


TREES = {name for name in METHODS if isinstance(config.method(name).proposer, TreeProposer)}
OF_OUTPUTS = one_of_each() - TREES | {"specinfer"}  # the other trees are tried in tests/toolkit/test_trees.py, too


@pytest.mark.parametrize("name", others_slow(LOSSLESS, OF_OUTPUTS))
def test_whole_outputs_follow_the_targets_distribution(name, table_pair):
    """In a large batch; alone, too, where the rows of a batch decide together (other rows are equal alone, see above)."""
    level = 0.001 / (2 * len(LOSSLESS))  # Bonferroni over the tests of this function
    assert output_pvalue(table_pair, config.method(name), RUNS, batch_size=RUNS) > level
    assert name not in COUPLED or output_pvalue(table_pair, config.method(name), 300, batch_size=1) > level


def test_the_sequence_test_catches_a_wrong_rule(table_pair):
    """Negative control: residual p instead of norm((p - q)+) is off by a little, and is seen."""
    from toolkit.verification.rules.rejection import Rejection

    class Wrong(Rejection):
        def accept(self, target_probs, draft_probs, tokens, num_drafted, uniforms):
            length, _ = super().accept(target_probs, draft_probs, tokens, num_drafted, uniforms)
            return length, target_probs[torch.arange(len(length)), length]

    assert output_pvalue(table_pair, Method("wrong", Fixed(3), Wrong()), RUNS, batch_size=RUNS) < 1e-6


def test_the_draft_may_have_its_own_temperature(table_pair):
    for temperature in (0.0, 2.0):
        method = Method("own", Fixed(3), get("rejection"), draft_temperature=temperature)
        assert output_pvalue(table_pair, method, RUNS, batch_size=RUNS) > 0.0005


def test_a_draft_equal_to_the_target_is_always_accepted(table_pair):
    pair = ModelPair(target=table_pair.target, draft=table_pair.target, end_ids=())
    for generation in decode(
        pair, [[0], [1, 1]], Method("same", Fixed(3), get("rejection")), Sampling(max_new_tokens=20)
    ):
        assert all(r.num_accepted == r.num_drafted and r.bonus for r in generation.rounds)
        assert [r.num_drafted for r in generation.rounds] == [3, 3, 3, 3, 3]


def test_nothing_is_drafted_behind_an_end_of_text(table_pair):
    draft = TabularModel(torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64))
    pair = ModelPair(target=table_pair.target, draft=draft, end_ids=(2,))
    for generation in decode(pair, [[0]] * 20, Method("end", Fixed(4), get("rejection")), Sampling(max_new_tokens=9)):
        assert all(r.num_drafted <= 1 for r in generation.rounds)


def test_stop_strings_end_a_text_before_them(toy_prompt):
    pair, prompt = toy_prompt
    sampling = Sampling(temperature=0, max_new_tokens=40)
    method = config.method("speculative", ["policy.num_drafted=6"])
    (whole,) = decode(pair, [prompt], method, sampling)
    middle = whole.text[len(whole.text) // 2 :][:3]
    (cut,) = decode(pair, [prompt], method, Sampling(temperature=0, max_new_tokens=40, stop=(middle,)))
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(middle)]
    assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids
    assert middle in pair.text(cut.token_ids)
    assert middle not in pair.text(cut.token_ids[:-1])


def test_state_of_a_policy_starts_afresh_with_every_prompt(exact_pair, prompts):
    method = Method("heuristic", Heuristic(num_drafted=3), get("rejection"))
    alone = [
        decode(exact_pair, [p], method, Sampling(max_new_tokens=20), row_ids=[i])[0] for i, p in enumerate(prompts)
    ]
    queued = decode(exact_pair, prompts, method, Sampling(max_new_tokens=20), batch_size=2)
    assert [g.token_ids for g in alone] == [g.token_ids for g in queued]
    lengths = [[[r.num_drafted for r in g.rounds] for g in generations] for generations in (alone, queued)]
    assert lengths[0] == lengths[1]  # a state that goes on would change how far is drafted, not what is written
    assert all(drafted[0] == 3 for drafted in lengths[1])
    assert any(len(set(drafted)) > 2 for drafted in lengths[1])


def test_bad_rows_are_named_and_the_others_finish(exact_pair):
    prompts = [[7, 8], [], [9] * 300, [4, 200], [6]]
    generations = decode(exact_pair, prompts, config.method("speculative"), Sampling(max_new_tokens=5))
    errors = [generation.error for generation in generations]
    assert errors[0] is None
    assert errors[4] is None
    assert errors[1] == "prompt 1 is empty: expected at least one token"
    assert errors[2].startswith("prompt 2: 300 tokens and max_new_tokens=5 exceed the target's context of 256")
    assert errors[3] == "prompt 3: expected token ids in [0, 97), got 4..200"
    with pytest.raises(DecodingError, match="3 of 5 prompts failed: prompt 1 is empty") as caught:
        generate(exact_pair, prompts, "speculative", max_new_tokens=5)
    assert [g.error for g in caught.value.generations] == errors


def test_distributions_that_are_not_numbers_end_their_row_only(table_pair):
    """State 8 (tokens 2 2) of the target's table is broken; one prompt starts there."""
    broken = TabularModel(table_pair.target.probs.clone())
    broken.probs[8] = torch.nan
    pair = ModelPair(target=broken, draft=table_pair.draft, end_ids=())
    method = Method("plain", Fixed(2), get("rejection"))
    good, bad = decode(pair, [[0, 0], [2, 2]], method, Sampling(max_new_tokens=1))
    assert good.error is None
    assert len(good.token_ids) == 1
    assert bad.error == "prompt 1: the models' distributions hold values that are not numbers"
    assert bad.token_ids == []


def test_methods_are_checked_when_they_are_built(exact_pair):
    with pytest.raises(InputError, match="unknown method 'speculativ': did you mean speculative"):
        generate(exact_pair, [[7]], "speculativ")
    with pytest.raises(InputError, match="needs a draft model, the pair has none"):
        decode(ModelPair(target=exact_pair.target), [[7]], Method("x", Confidence(), get("rejection")), Sampling())
    with pytest.raises(InputError, match="batch_size: expected at least 1, got 0"):
        generate(exact_pair, [[7]], "speculative", batch_size=0)
    with pytest.raises(InputError, match="top_k must be at most the vocabulary size 97, got 98"):
        generate(exact_pair, [[7]], "speculative", top_k=98)


def test_memory_does_not_grow_over_many_prompts(exact_pair, prompts):
    from toolkit.engine.hf import HFSession

    sizes = []
    original = HFSession._forward

    def spy(self, *args):
        sizes.append(self.cache_bytes)
        return original(self, *args)

    HFSession._forward = spy
    try:
        decode(exact_pair, prompts * 10, config.method("speculative"), Sampling(max_new_tokens=4), batch_size=4)
    finally:
        HFSession._forward = original
    assert len(set(sizes)) <= 2 * (1 + 3)  # nothing yet, and the buffers of 4, 2 and 1 slots, for two models


@pytest.mark.parametrize("name", ["autoregressive", "speculative", "mcsd", "beam_sampling", "mtjd"])
def test_prompt_and_response_together_have_a_limit(name, exact_pair, prompts):
    """A row's text is what it is with max_new_tokens cut to the room its prompt leaves."""
    total, method = max(map(len, prompts)) + 6, config.method(name)
    sampling = Sampling(max_new_tokens=9, max_length=total, seed=2)
    together = decode(exact_pair, prompts, method, sampling, batch_size=2)
    for row, generation in enumerate(together):
        room = min(9, total - len(prompts[row]))
        assert len(generation.token_ids) <= room
        alone = Sampling(max_new_tokens=room, seed=2)
        (expected,) = decode(exact_pair, [prompts[row]], method, alone, row_ids=[row])
        assert generation.token_ids == expected.token_ids and generation.finish_reason == expected.finish_reason
    assert any(g.finish_reason == "length" and len(g.prompt_ids) + len(g.token_ids) == total for g in together)


def test_prompts_are_cut_at_the_front_on_request(exact_pair, prompts):
    cut = Sampling(max_new_tokens=6, keep_prompt_tokens=3)
    generations = decode(exact_pair, prompts, config.method("speculative"), cut)
    plain = decode(
        exact_pair, [prompt[-3:] for prompt in prompts], config.method("speculative"), Sampling(max_new_tokens=6)
    )
    assert [(g.prompt_ids, g.token_ids) for g in generations] == [(g.prompt_ids, g.token_ids) for g in plain]
    (full,) = decode(exact_pair, [[1] * 9], config.method("speculative"), Sampling(max_length=9))
    assert full.error is not None and "9 tokens leave no room below max_length=9" in full.error
    with pytest.raises(InputError, match="max_length: expected"):
        Sampling(max_length=1)


def test_the_longest_prompts_come_first(table_pair):
    """Prompts that are read together are padded to the longest; the answers are in the order of the prompts all the same."""
    prompts, finished = [[0] * length for length in (2, 5, 1, 4, 3)], []
    generations = decode(
        table_pair, prompts, config.method("autoregressive"), Sampling(max_new_tokens=2), batch_size=1,
        on_finish=lambda generation: finished.append(len(generation.prompt_ids)),
    )  # fmt: skip
    assert finished == [5, 4, 3, 2, 1]
    assert [len(generation.prompt_ids) for generation in generations] == [2, 5, 1, 4, 3]
