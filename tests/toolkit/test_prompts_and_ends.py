"""Prompts and ends: chat templates and their options, what a checkpoint says about sampling, and what ends a response."""

from __future__ import annotations

import json
import warnings
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime

import pytest
import torch
from hydra.utils import instantiate
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig

from data_gen import responses
from data_gen.completions import Completions
from data_gen.keys import EndpointKeys
from data_gen.texts import read_responses
from toolkit import ModelPair, config, generate
from toolkit.config import compose, plain
from toolkit.config.identity import contents_of
from toolkit.decode import run as decode_command
from toolkit.decoding import Sampling, decode
from toolkit.errors import DecodingError, InputError
from toolkit.models.generation_config import resolved
from toolkit.sampling import warp
from toolkit.testing import ragged_prompts, save_checkpoint, tiny_llama, tiny_model, tiny_tokenizer
from toolkit.trace.record import Recorder


@contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# -- chat templates ---------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %} and it{% endif %}{% if add_generation_prompt %} a{% endif %}"
)
HELLO = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def templated(tmp_path_factory):
    """Target and draft whose tokenizers have a template that reads an option."""
    root = tmp_path_factory.mktemp("chat")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    folders = [save_checkpoint(root / name, 16, seed) for seed, name in enumerate(("target", "draft"))]
    for folder in folders:
        tokenizer.save_pretrained(folder)
    return folders


def test_options_reach_the_template(templated):
    plain_pair = ModelPair.from_pretrained(*templated)
    pair = ModelPair.from_pretrained(*templated, chat_template_options={"enable_thinking": False})
    assert plain_pair.text(plain_pair.encode(HELLO)) == "the cat a"
    assert pair.text(pair.encode(HELLO)) == "the cat and it a"
    assert pair.encode("the cat") == plain_pair.encode("the cat")  # plain text passes no template


def test_the_config_says_them_and_names_the_work_by_them(templated):
    words = [f"pair.target={templated[0]}", f"pair.draft={templated[1]}"]
    without = compose("decode", words)
    inside = compose("decode", [*words, "pair.chat_template_options={enable_thinking: false}"])
    single = compose("decode", [*words, "+pair.chat_template_options.enable_thinking=false"])
    assert inside == single
    pair = instantiate(inside.pair)
    assert pair.text(pair.encode(HELLO)) == "the cat and it a"
    assert contents_of(plain(inside)).identity["pair"] != contents_of(plain(without)).identity["pair"]


def test_options_that_do_nothing_are_warned_of_and_those_of_the_call_refused(templated):
    load = lambda **options: ModelPair.from_pretrained(*templated, chat_template_options=options)
    with pytest.warns(RuntimeWarning, match="reads no option called enable_thinkin: it has no effect") as caught:
        load(enable_thinking=False, enable_thinkin=1)
    assert len(caught) == 1
    with no_warnings():
        load(enable_thinking=True)
    with pytest.raises(InputError, match="chat_template_options.tokenize: prompts are encoded"):
        load(tokenize=False)


def test_plain_text_for_a_chat_model_has_a_hint(templated, tmp_path, capsys):
    """Of decoded prompts and of responses; not where messages, or texts that were formatted by hand, are among them."""
    words = [f"pair.target={templated[0]}", f"pair.draft={templated[1]}", "sampling.max_new_tokens=2", "prompts=jsonl"]

    def hints(name, row):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": name, **row}) + "\n")
        options = [*words, f"prompts.path={tmp_path}/{name}.jsonl", f"paths.root_dir={tmp_path}"]
        decode_command(compose("decode", [*options, "method=speculative"]))
        responses.run(compose("responses", options))
        return capsys.readouterr().err.count("hint: this tokenizer has a chat template")

    assert hints("plain", {"prompt": "the cat"}) == 2
    assert hints("chat", {"messages": HELLO}) == hints("by_hand", {"prompt": "[INST] the cat [/INST]"}) == 0


def test_a_date_in_the_template_is_warned_of(templated):
    pair = ModelPair.from_pretrained(*templated)
    pair.tokenizer.chat_template = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ date_string }} {{ messages[0]['content'] }}"
    )
    with pytest.warns(RuntimeWarning, match="the chat template writes today's date, so prompts differ from day to day"):
        text = pair.text(pair.encode(HELLO))
    assert text == f"{datetime.now():%d %b %Y} the cat"
    pair.chat_template_options = {"date_string": "26 Jul 2024"}
    with no_warnings():
        assert pair.text(pair.encode(HELLO)) == "26 Jul 2024 the cat"


@pytest.fixture
def started(templated):
    """A pair whose tokenizer puts a start of text in front."""
    pair = ModelPair.from_pretrained(*templated)
    pair.tokenizer.bos_token = "<|begin|>"
    pair.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 1)]
    )
    return pair


def test_a_start_of_text_that_comes_twice_is_warned_of(started):
    started.tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    with no_warnings():
        ids = started.encode(HELLO)
        assert ids == started.encode("the cat") and ids[0] == 1 != ids[1]
    with pytest.warns(RuntimeWarning, match=r"the prompt begins with <\|begin\|> twice"):
        assert started.encode("<|begin|>the cat") == [1, *ids]
    started.tokenizer.chat_template = "{{ bos_token }}<|begin|>{{ messages[0]['content'] }}"
    with pytest.warns(RuntimeWarning, match=r"the prompt begins with <\|begin\|> twice"):
        assert started.encode(HELLO) == [1, *ids]


def test_an_empty_prompt_is_decoded_from_the_start_of_text(started, templated):
    (generation,) = generate(started, [""], "speculative", max_new_tokens=4)
    assert generation.prompt_ids == [1] and generation.token_ids
    with pytest.raises(DecodingError, match="prompt 0 is empty: expected at least one token"):
        generate(ModelPair.from_pretrained(*templated), [""], "speculative")


# -- what a checkpoint says about sampling ----------------------------------------------------------------------------------

STORED = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.3}


@pytest.fixture
def loaded(checkpoints):
    return ModelPair.from_pretrained(*checkpoints)


SAME = {name: value for name, value in STORED.items() if name != "do_sample"}


def tokens(pair, **options):
    return [g.token_ids for g in generate(pair, ["the cat", "a dog"], "speculative", max_new_tokens=12, **options)]


def test_what_is_not_followed_is_named_once(loaded):
    plain_tokens = tokens(loaded)
    loaded.target.generation_config = GenerationConfig(**STORED, suppress_tokens=[7], eos_token_id=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert tokens(loaded) == tokens(loaded) == plain_tokens
    (message,) = [str(warning.message) for warning in caught]
    assert "temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.3, suppress_tokens=[7]" in message


def test_what_agrees_or_changes_nothing_is_not_named(loaded):
    loaded.target.generation_config = GenerationConfig(**STORED, min_length=0, typical_p=1.0, bad_words_ids=[])
    with no_warnings():
        tokens(loaded, **SAME)
        tokens(loaded, generation_config=True)
    with pytest.warns(RuntimeWarning, match=r"it says repetition_penalty=1.3 \("):
        tokens(loaded, temperature=0.0)


@pytest.mark.parametrize(
    ("stored", "same"),
    [(STORED, SAME), ({"do_sample": False}, {"temperature": 0.0}), ({"stop_strings": ["at"]}, {"stop": ["at"]})],
)
def test_the_switch_follows_it(stored, same, loaded):
    plain_tokens, wanted = tokens(loaded), tokens(loaded, **same)
    loaded.target.generation_config = GenerationConfig(**stored, eos_token_id=2)
    assert tokens(loaded, generation_config=True) == wanted != plain_tokens


def test_what_it_cannot_follow_is_named_even_then(loaded):
    loaded.target.generation_config = GenerationConfig(no_repeat_ngram_size=3, top_k=5)
    with pytest.warns(RuntimeWarning, match="it says no_repeat_ngram_size=3 "):
        assert resolved(Sampling(generation_config=True), loaded.target) == Sampling(top_k=5)
    with pytest.raises(AssertionError):  # nothing is warped before it is settled
        warp(torch.zeros(4), Sampling(generation_config=True))


def test_responses_say_how_they_were_drawn(loaded, tmp_path):
    for part in (loaded.target, loaded.tokenizer, GenerationConfig(**STORED, eos_token_id=2)):
        part.save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"id": 1, "prompt": "the cat"}\n')
    words = [f"pair.target={tmp_path / 'target'}", "pair.draft=null", f"prompts.path={tmp_path / 'prompts.jsonl'}"]
    words += [f"paths.output_dir={tmp_path / 'out'}", "sampling.generation_config=true", "sampling.max_new_tokens=4"]
    sampling = read_responses(responses.run(compose("responses", words))).sampling
    assert sampling == Sampling(0.7, 20, 0.8, 0.0, 1.3, 4)


# -- ends -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    """A pair without ends, whose tokenizer hides many tokens that often come."""
    tokenizer = tiny_tokenizer()
    target, draft = (tiny_llama(size, 2, seed, torch.float32, len(tokenizer)) for seed, size in enumerate((16, 16)))
    unended = ModelPair(target=target, draft=draft, tokenizer=tokenizer, end_ids=())
    texts = decode(unended, ragged_prompts(4), config.method("autoregressive"), Sampling(max_new_tokens=20, seed=3))
    tokens = [token for text in texts for token in text.token_ids[4:]]
    often = sorted(set(tokens), key=tokens.count)[-60:]
    often = [token for token in often if not tokenizer.convert_ids_to_tokens(token).isascii()]  # no text names them
    tokenizer.add_special_tokens({"additional_special_tokens": tokenizer.convert_ids_to_tokens(often)})
    return unended


@pytest.fixture(scope="module")
def special(pair):
    """Their texts and ids."""
    return {str(token): index for index, token in pair.tokenizer.added_tokens_decoder.items() if index > 2}


@pytest.mark.parametrize("name", ["autoregressive", "mcsd", "prompt_lookup", "beam_sampling", "dsbd"])
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
    with pytest.raises(InputError, match="stop: expected text or a special token alone, got .*: texts do not show"):
        generate(pair, ["a"], "autoregressive", stop=f"{text}\n")


def test_all_ends_that_the_files_name_are_ends(checkpoints):
    pair = ModelPair.from_pretrained(*checkpoints)
    assert pair.end_ids == (2,)
    pair.tokenizer.eos_token = "<|pad|>"
    pair.target.generation_config.eos_token_id = [2, 1]
    assert ModelPair(target=pair.target, tokenizer=pair.tokenizer).end_ids == (2, 1, 0)
    assert ModelPair.from_pretrained(*checkpoints, end_ids=[5, 6]).end_ids == (5, 6)
    model = tiny_model("llama")
    for stored, expected in ((torch.tensor([5, 7]), (5, 7)), (torch.tensor(5), (5,))):
        model.generation_config.eos_token_id = stored
        assert ModelPair(target=model).end_ids == expected


def test_recordings_and_endpoints_know_the_ends(pair, special):
    (text, token), *_ = special.items()
    sampling, ids = Sampling(max_new_tokens=8, end_ids=(9,), stop=(text,)), [4, token, 9]
    for produced in ([4, token], [4, 9]):
        Recorder(pair, sampling, 3).check(type("Text", (), {"row": 0, "prompt": [7], "produced": produced})())
    with pytest.raises(InputError, match="response 0 goes on after an end of text"):
        Recorder(pair, sampling, 3).record([([7], ids)], [0])
    address = "http://127.0.0.1:9/v1"
    assert Completions(address, EndpointKeys(model="target"), pair, sampling).fields["stop_token_ids"] == [9, token]
    with pytest.raises(InputError, match=r"engine=openai knows no end_ids"):
        Completions(address, EndpointKeys(model="target", engine="openai"), pair, Sampling(end_ids=(9,)))
