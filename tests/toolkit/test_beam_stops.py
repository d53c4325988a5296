"""Stop strings with several beams: a beam that completes one ends there, as with an end of text."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.methods import others_slow
from tests.toolkit.test_beams import BEAMS, CASES, beam_distribution, method, p_value, sampled
from toolkit import config
from toolkit.decoding import Sampling, decode

FIRST = ord("a")


class Letters:
    """A tokenizer with one letter per token."""

    def __init__(self, size):
        self.size = size

    def __call__(self, text):
        return SimpleNamespace(input_ids=[ord(letter) - FIRST for letter in text])

    def get_vocab(self):
        return {chr(FIRST + token): token for token in range(self.size)}

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(chr(FIRST + token) for token in token_ids)


def lettered(pair, *end_ids):
    return replace(pair, tokenizer=Letters(pair.vocab_size), end_ids=end_ids, draft=None, drafts=pair.drafts)


def letters(*tokens):
    return Letters(0).decode(tokens)


@pytest.mark.parametrize("name", ["beam_sampling", "beam_search", "mtjd", "mtjd_top"])
def test_without_drafts_a_stop_string_of_one_token_is_an_end_of_text(name, exact_pair, prompts):
    """The same draws, so the same beams, scores and rounds, token for token."""
    built, sampling = config.method(name, ["beams.num_beams=3"]), Sampling(max_new_tokens=24, seed=3, temperature=0.7)
    tokens = [t for g in decode(lettered(exact_pair), prompts, built, sampling) for t in g.token_ids[2:-2]]
    common = max(set(tokens), key=tokens.count)
    ended = decode(lettered(exact_pair, common), prompts, built, sampling, batch_size=3)
    stopped = decode(lettered(exact_pair), prompts, built, replace(sampling, stop=(letters(common),)), batch_size=3)
    assert [g.beams for g in stopped] == [g.beams for g in ended]
    assert [g.scores for g in stopped] == [g.scores for g in ended]
    assert [[r.widths for r in g.rounds] for g in stopped] == [[r.widths for r in g.rounds] for g in ended]
    assert any(g.finish_reason == "end" for g in ended)
    assert [g.finish_reason.replace("stop", "end") for g in stopped] == [g.finish_reason for g in ended]


def test_beam_search_looks_as_far_as_it_must(exact_pair, prompts):
    """Nine of ten tokens stop a text: living beams are found far down the list, as among ends of text."""
    many = [token for token in range(exact_pair.vocab_size) if token % 10]
    built, sampling = config.method("beam_search", ["beams.num_beams=2"]), Sampling(max_new_tokens=8, seed=1)
    ended = decode(lettered(exact_pair, *many), prompts, built, sampling, batch_size=4)
    stopped = decode(
        lettered(exact_pair), prompts, built, replace(sampling, stop=tuple(map(letters, many))), batch_size=4
    )
    assert [(g.beams, g.scores) for g in stopped] == [(g.beams, g.scores) for g in ended]
    assert max(len(beam) for g in ended for beam in g.beams) > 1


FAST = ("speculative", "adaptive_width")


@pytest.mark.parametrize("name", others_slow([*CASES], FAST))
def test_beams_that_stop_follow_plain_beam_sampling(name, table_pair):
    """Chi-square over all multisets of beams of at most 3 tokens that end with two tokens in a row, or with one."""
    built, stop = CASES[name], (1, 0)
    sampling = Sampling(max_new_tokens=3, seed=4, temperature=0.9)
    distribution = beam_distribution(table_pair.target, [0, 1], built.beams.num_beams, 3, 2, sampling, stop)
    assert abs(sum(distribution.values()) - 1) < 1e-9
    pair = lettered(table_pair, 2)
    seen = sampled(pair, built, 6000, 3, replace(sampling, stop=(letters(*stop),)), 3000)
    assert p_value(seen, distribution) > 0.001 / len(CASES)


def test_the_test_tells_stopping_from_going_on(table_pair):
    """Negative control: texts that go on behind the stop string are seen."""
    sampling = Sampling(max_new_tokens=3, seed=4, temperature=0.9)
    distribution = beam_distribution(table_pair.target, [0, 1], 2, 3, 2, sampling, (1, 0))
    seen = sampled(lettered(table_pair, 2), CASES["speculative"], 3000, 3, sampling, 3000)
    assert p_value(seen, distribution) < 1e-6


@pytest.mark.parametrize("name", others_slow(BEAMS))
def test_every_method_stops_where_the_string_is_complete(name, exact_pair, prompts):
    built, sampling = config.method(name), Sampling(max_new_tokens=16, seed=2)
    tokens = [t for g in decode(lettered(exact_pair), prompts, built, sampling) for t in g.token_ids[2:-2]]
    stop = letters(max(set(tokens), key=tokens.count))
    generations = decode(lettered(exact_pair), prompts, built, replace(sampling, stop=(stop,)), batch_size=3)
    assert any(g.finish_reason == "stop" for g in generations)
    for generation in generations:
        for beam in generation.beams:
            assert stop not in letters(*beam[:-1])
        whole = letters(*generation.token_ids)
        assert generation.text == whole.removesuffix(stop)
        assert generation.finish_reason == ("stop" if whole.endswith(stop) else "length")
        counts = generation.counts
        assert counts.num_generated == len(generation.token_ids)
        assert counts.num_drafted + counts.num_target_calls == counts.num_generated + counts.num_discarded


def test_one_beam_stops_as_one_text_does(exact_pair, prompts):
    sampling = Sampling(max_new_tokens=20, temperature=0)
    sequences = decode(lettered(exact_pair), prompts, config.method("autoregressive"), sampling)
    stop = letters(*sequences[0].token_ids[6:8])
    for built in (method(1), method(1, drafted=1), method(1, selection="top")):
        generations = decode(lettered(exact_pair), prompts, built, replace(sampling, stop=(stop,)))
        plain = decode(lettered(exact_pair), prompts, config.method("autoregressive"), replace(sampling, stop=(stop,)))
        assert [(g.token_ids, g.text, g.finish_reason) for g in generations] == [
            (g.token_ids, g.text, g.finish_reason) for g in plain
        ]
        assert plain[0].finish_reason == "stop"


def test_without_a_tokenizer_nothing_is_searched(exact_pair):
    built, sampling = config.method("dsbd"), Sampling(max_new_tokens=8)
    plain, stopped = (decode(exact_pair, [[7]], built, s)[0] for s in (sampling, replace(sampling, stop=("a",))))
    assert plain.beams == stopped.beams
