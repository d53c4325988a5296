"""What a checkpoint says about drawing: named where it is not followed, followed where that is asked for."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import GenerationConfig

from data_gen import responses
from data_gen.texts import read_responses
from toolkit import ModelPair, generate
from toolkit.config import compose
from toolkit.models.generation_config import resolved
from toolkit.sampling import Sampling, warp

SAID = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.3}


@pytest.fixture
def pair(checkpoints):
    return ModelPair.from_pretrained(*checkpoints)


def tokens(pair, **options):
    return [g.token_ids for g in generate(pair, ["the cat", "a dog"], "speculative", max_new_tokens=12, **options)]


def test_what_is_not_followed_is_named_once(pair):
    plain = tokens(pair)
    pair.target.generation_config = GenerationConfig(**SAID, suppress_tokens=[7], eos_token_id=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert tokens(pair) == tokens(pair) == plain
    (message,) = [str(warning.message) for warning in caught]
    assert "temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.3, suppress_tokens=[7]" in message


def test_greedy_decoding_is_not_warned_of_settings_for_draws(pair):
    pair.target.generation_config = GenerationConfig(**SAID, eos_token_id=2)
    with pytest.warns(RuntimeWarning, match=r"it says repetition_penalty=1.3 \("):
        tokens(pair, temperature=0.0)


def test_what_agrees_or_changes_nothing_is_not_named(pair):
    same = {name: value for name, value in SAID.items() if name != "do_sample"}
    pair.target.generation_config = GenerationConfig(**SAID, min_length=0, typical_p=1.0, bad_words_ids=[])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens(pair, **same)
        tokens(pair, generation_config=True)


@pytest.mark.parametrize(
    ("stored", "same"),
    [
        (SAID, {name: value for name, value in SAID.items() if name != "do_sample"}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"stop_strings": ["at"]}, {"stop": ["at"]}),
    ],
)
def test_the_switch_follows_it(stored, same, pair):
    plain, wanted = tokens(pair), tokens(pair, **same)
    pair.target.generation_config = GenerationConfig(**stored, eos_token_id=2)
    assert tokens(pair, generation_config=True) == wanted != plain


def test_what_it_cannot_follow_is_named_even_then(pair):
    pair.target.generation_config = GenerationConfig(no_repeat_ngram_size=3, top_k=5)
    with pytest.warns(RuntimeWarning, match="it says no_repeat_ngram_size=3 "):
        assert resolved(Sampling(generation_config=True), pair.target) == Sampling(top_k=5)


def test_nothing_is_warped_before_it_is_settled():
    with pytest.raises(AssertionError):
        warp(torch.zeros(4), Sampling(generation_config=True))


def test_responses_say_how_they_were_drawn(pair, tmp_path):
    GenerationConfig(**SAID, eos_token_id=2).save_pretrained(tmp_path / "target")
    for part in (pair.target, pair.tokenizer):
        part.save_pretrained(tmp_path / "target")
    GenerationConfig(**SAID, eos_token_id=2).save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"id": 1, "prompt": "the cat"}\n')
    words = [f"pair.target={tmp_path / 'target'}", "pair.draft=null", f"prompts.path={tmp_path / 'prompts.jsonl'}"]
    words += [f"paths.output_dir={tmp_path / 'out'}", "sampling.generation_config=true", "sampling.max_new_tokens=4"]
    sampling = read_responses(responses.run(compose("responses", words))).sampling
    assert sampling == Sampling(0.7, 20, 0.8, 0.0, 1.3, 4)
