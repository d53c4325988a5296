"""Options of chat templates: from the config and from Python to the tokens, and into what names a stage's work."""

from __future__ import annotations

import warnings

import pytest
from hydra.utils import instantiate

from toolkit import ModelPair
from toolkit.config import compose, plain
from toolkit.config.identity import contents_of
from toolkit.errors import InputError
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
