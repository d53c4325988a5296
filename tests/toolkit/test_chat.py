"""Options of chat templates: from the config and from Python to the tokens, and into what names a stage's work."""

from __future__ import annotations

import warnings
from datetime import datetime

import pytest
from hydra.utils import instantiate

from toolkit import ModelPair, generate
from toolkit.config import compose, plain
from toolkit.config.identity import contents_of
from toolkit.errors import DecodingError, InputError
from toolkit.testing import save_checkpoint, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %} and it{% endif %}{% if add_generation_prompt %} a{% endif %}"
)
HELLO = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Target and draft whose tokenizers have a template that reads an option."""
    root = tmp_path_factory.mktemp("chat")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    folders = [save_checkpoint(root / name, 16, seed) for seed, name in enumerate(("target", "draft"))]
    for folder in folders:
        tokenizer.save_pretrained(folder)
    return folders


def test_options_reach_the_template(checkpoints):
    plainly = ModelPair.from_pretrained(*checkpoints)
    told = ModelPair.from_pretrained(*checkpoints, chat_template_options={"enable_thinking": False})
    assert plainly.text(plainly.encode(HELLO)) == "the cat a"
    assert told.text(told.encode(HELLO)) == "the cat and it a"
    assert told.encode("the cat") == plainly.encode("the cat")  # plain text passes no template


def test_the_config_says_them_and_names_the_work_by_them(checkpoints):
    words = [f"pair.target={checkpoints[0]}", f"pair.draft={checkpoints[1]}"]
    without = compose("decode", words)
    inside = compose("decode", [*words, "pair.chat_template_options={enable_thinking: false}"])
    single = compose("decode", [*words, "+pair.chat_template_options.enable_thinking=false"])
    assert inside == single
    pair = instantiate(inside.pair)
    assert pair.text(pair.encode(HELLO)) == "the cat and it a"
    assert contents_of(plain(inside)).identity["pair"] != contents_of(plain(without)).identity["pair"]


def test_options_that_a_template_does_not_read_are_warned_of(checkpoints):
    with pytest.warns(RuntimeWarning, match="reads no option called enable_thinkin: it has no effect") as caught:
        ModelPair.from_pretrained(*checkpoints, chat_template_options={"enable_thinking": False, "enable_thinkin": 1})
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ModelPair.from_pretrained(*checkpoints, chat_template_options={"enable_thinking": True})


def test_options_of_the_call_itself_are_refused(checkpoints):
    with pytest.raises(InputError, match="chat_template_options.tokenize: prompts are encoded"):
        ModelPair.from_pretrained(*checkpoints, chat_template_options={"tokenize": False})


def test_a_date_in_the_template_is_warned_of(checkpoints):
    pair = ModelPair.from_pretrained(*checkpoints)
    pair.tokenizer.chat_template = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ date_string }} {{ messages[0]['content'] }}"
    )
    with pytest.warns(RuntimeWarning, match="the chat template writes today's date, so prompts differ from day to day"):
        text = pair.text(pair.encode(HELLO))
    assert text == f"{datetime.now():%d %b %Y} the cat"
    pair.chat_template_options = {"date_string": "26 Jul 2024"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pair.text(pair.encode(HELLO)) == "26 Jul 2024 the cat"


@pytest.fixture
def started(checkpoints):
    """A pair whose tokenizer puts a start of text in front."""
    from tokenizers.processors import TemplateProcessing

    pair = ModelPair.from_pretrained(*checkpoints)
    pair.tokenizer.bos_token = "<|begin|>"
    pair.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 1)]
    )
    return pair


def test_a_start_of_text_that_comes_twice_is_warned_of(started):
    started.tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ids = started.encode(HELLO)
        assert ids == started.encode("the cat") and ids[0] == 1 != ids[1]
    with pytest.warns(RuntimeWarning, match=r"the prompt begins with <\|begin\|> twice"):
        assert started.encode("<|begin|>the cat") == [1, *ids]
    started.tokenizer.chat_template = "{{ bos_token }}<|begin|>{{ messages[0]['content'] }}"
    with pytest.warns(RuntimeWarning, match=r"the prompt begins with <\|begin\|> twice"):
        assert started.encode(HELLO) == [1, *ids]


def test_an_empty_prompt_is_decoded_from_the_start_of_text(started, checkpoints):
    (generation,) = generate(started, [""], "speculative", max_new_tokens=4)
    assert generation.prompt_ids == [1] and generation.token_ids
    with pytest.raises(DecodingError, match="prompt 0 is empty: expected at least one token"):
        generate(ModelPair.from_pretrained(*checkpoints), [""], "speculative")
