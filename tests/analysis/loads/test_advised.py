"""The printed line decodes as advised: every value of the pair, the sampling and the prompts is read back as it was."""

from __future__ import annotations

import shlex

import pytest
from omegaconf import OmegaConf

from analysis import advise
from analysis.loads.advised import next_line
from analysis.loads.choosing import unlike_plain
from tests.analysis.loads.test_commands import table_of
from toolkit import ModelPair, config

ODD = ['mine, the "first" one', "a=b(c)", "données", "123", "true", "1e5", "~x#", "c:\\d\\", "${x}", "[a]"]


def read_back(line):
    assert line.startswith("next: python -m toolkit.decode ")
    return config.compose("decode", shlex.split(line)[4:])


@pytest.mark.parametrize("name", ODD)
def test_a_line_is_read_back_as_it_was_written(name):
    asked = config.compose("advise", [
        f"pair.target={config.quoted(name)}", "pair.dtype=bfloat16", f"prompts.path={config.quoted(name)}",
        "prompts.limit=7", "sampling.temperature=0", "pair.chat_template_options={thinking: false}",
        config.override("sampling.stop", ["\n\n", "é", name]),
    ])  # fmt: skip
    overrides = [config.override("method.policy.acceptance", 0.7), config.override("head", name)]
    cfg = read_back(next_line(asked, ["method=batch_rate", *overrides], name, 4))
    assert (cfg.pair.target, cfg.pair.draft, cfg.pair.dtype, cfg.prompts.path, cfg.head) == (
        name,
        name,
        "bfloat16",
        name,
        name,
    )
    assert cfg.batch_size == 4 and cfg.prompts.limit == 7 and cfg.sampling.temperature == 0
    assert config.plain(cfg.sampling) == config.plain(asked.sampling)
    assert config.plain(cfg.pair.chat_template_options) == {"thinking": False}
    assert cfg.method.policy.acceptance == 0.7


@pytest.mark.parametrize("words", [
    ["prompts=toy_code", "prompts.split=dev"],
    ["prompts=gsm8k", "prompts.limit=40"],
    ["prompts=hub", "prompts.name=mine", "prompts.data_files=rows.csv", "prompts.template='{{ a }}'", "+prompts.limits.test=9"],
    ["prompts=jsonl", "prompts.path=mine.jsonl", "prompts.split=train", "prompts.shares.dev=.2"],
])  # fmt: skip
def test_the_same_prompts_are_asked(words):
    asked = config.compose("advise", words)
    same = read_back(next_line(asked, ["method=tail"], "toy/draft", 1))
    assert config.plain(same.prompts) == config.plain(asked.prompts)


def test_prompts_that_no_choice_describes_are_left_to_the_user():
    asked = config.compose("advise")
    OmegaConf.set_struct(asked, False)
    asked.prompts = {"name": "mine"}
    assert next_line(asked, ["method=tail"], "toy/draft", 1).endswith("prompts.path=FILE.jsonl batch_size=1")


def test_drafts_of_one_name_are_told_apart():
    """As two heads of one draft are compared; tables that disagree are still spoken of."""
    pair = ModelPair.toy()
    pair.drafts = (pair.draft, pair.draft)
    names = advise._names(config.compose("advise", ["pair.draft=[toy/draft,toy/draft]"]), pair)
    assert names == ["toy/draft (0)", "toy/draft (1)"]
    twice = table_of(autoregressive=1.0, rate=1.2).assign(method="autoregressive", tokens_per_second=[10.0, 20.0])
    assert "10 tokens/s with d's, 20 tokens/s with d's" in unlike_plain(twice)
    assert unlike_plain(twice[twice.method == "rate"]) is None
