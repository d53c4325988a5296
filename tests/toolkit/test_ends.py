"""What ends a response: stop strings that are special tokens, end ids of a call, of a pair, and of its files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from data_gen.recording import Recorder
from data_gen.remote.requests import Asked, Requests
from toolkit import ModelPair, config, generate
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError
from toolkit.testing import ragged_prompts, tiny_llama, tiny_tokenizer

METHODS = ("autoregressive", "speculative", "mcsd", "prompt_lookup", "beam_sampling", "dsbd")


@pytest.fixture(scope="module")
def pair():
    """A pair without ends, whose tokenizer hides many tokens that often come."""
    tokenizer = tiny_tokenizer()
    target, draft = (tiny_llama(size, 2, seed, torch.float32, len(tokenizer)) for seed, size in enumerate((16, 16)))
    plain = ModelPair(target=target, draft=draft, tokenizer=tokenizer, end_ids=())
    texts = decode(plain, ragged_prompts(4), config.method("autoregressive"), Sampling(max_new_tokens=20, seed=3))
    tokens = [token for text in texts for token in text.token_ids[4:]]
    often = sorted(set(tokens), key=tokens.count)[-60:]
    often = [
        token for token in often if not tokenizer.convert_ids_to_tokens(token).isascii()
    ]  # no text says their names
    tokenizer.add_special_tokens({"additional_special_tokens": tokenizer.convert_ids_to_tokens(often)})
    return plain


@pytest.fixture(scope="module")
def special(pair):
    """Their texts and ids."""
    return {str(token): index for index, token in pair.tokenizer.added_tokens_decoder.items() if index > 2}


@pytest.mark.parametrize("name", METHODS)
def test_a_stop_string_that_is_a_special_token_ends_by_its_id(name, pair, special):
    method, sampling, ids = config.method(name), Sampling(max_new_tokens=20, seed=3), tuple(special.values())
    ended = decode(replace(pair, draft=None, end_ids=ids), ragged_prompts(4), method, sampling)
    assert any(g.token_ids[-1] in ids for g in ended)
    for further in ({"stop": tuple(special)}, {"end_ids": ids}):
        generations = decode(pair, ragged_prompts(4), method, replace(sampling, **further))
        assert [(g.token_ids, g.text, g.finish_reason) for g in generations] == [
            (g.token_ids, g.text, g.finish_reason) for g in ended
        ]


def test_end_ids_of_a_call_stand_beside_those_of_the_pair(pair, special):
    (text, token), *_ = special.items()
    both = replace(pair, draft=None, end_ids=(7,))
    assert both.ends(Sampling(end_ids=(9, 7), stop=("a", text))) == (7, 9, token)
    one, other = (
        generate(pair, ragged_prompts(3), "speculative", max_new_tokens=20, seed=3, **options)
        for options in ({"end_ids": [token]}, {"stop": text})
    )
    assert [g.token_ids for g in one] == [g.token_ids for g in other]
    with pytest.raises(InputError, match=r"end_ids: expected token ids below the vocabulary size .*, got \(5000,\)"):
        generate(pair, ["a"], "speculative", end_ids=[5000])


def test_a_special_token_within_a_stop_string_is_refused(pair, special):
    with pytest.raises(InputError, match="stop: expected text or a special token alone, got .*: texts do not show"):
        generate(pair, ["a"], "autoregressive", stop=f"{next(iter(special))}\n")


def test_all_ends_that_the_files_name_are_ends(checkpoints):
    pair = ModelPair.from_pretrained(*checkpoints)
    assert pair.end_ids == (2,)
    pair.tokenizer.eos_token = "<|pad|>"
    pair.target.generation_config.eos_token_id = [2, 1]
    assert ModelPair(target=pair.target, tokenizer=pair.tokenizer).end_ids == (2, 1, 0)
    assert ModelPair.from_pretrained(*checkpoints, end_ids=[5, 6]).end_ids == (5, 6)


def test_recordings_and_endpoints_know_the_ends(pair, special):
    (text, token), *_ = special.items()
    sampling, ids = Sampling(max_new_tokens=8, end_ids=(9,), stop=(text,)), [4, token, 9]
    for produced in ([4, token], [4, 9]):
        Recorder(pair, sampling, 3).check(type("Text", (), {"row": 0, "prompt": [7], "produced": produced})())
    with pytest.raises(InputError, match="response 0 goes on after an end of text"):
        Recorder(pair, sampling, 3).record([([7], ids)], [0])
    requests = Requests("vllm", "target", pair, sampling, {})
    assert requests.body(Asked(0, [7], 8))["stop_token_ids"] == [9, token]
    with pytest.raises(InputError, match=r"engine=openai knows no end_ids"):
        Requests("openai", "target", pair, Sampling(end_ids=(9,)), {})
