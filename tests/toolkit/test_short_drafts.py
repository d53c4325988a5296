"""A draft that reads shorter texts than the target: rows go on without it."""

from __future__ import annotations

import pytest
import torch

from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError
from toolkit.testing import FAMILIES, llama_pair, output_pvalue
from toolkit.trace.record import Recorder

LIMIT = 24


@pytest.fixture(scope="module")
def pair():
    """The draft has learned positions, and no state for a later one."""
    target = llama_pair().target
    torch.manual_seed(1)
    model_class, config_class, settings = FAMILIES["gpt2"]
    draft = model_class(
        config_class(**{**settings, "vocab_size": 97, "n_positions": LIMIT, "n_embd": 16, "n_layer": 1})
    )
    return ModelPair(target=target, draft=draft.double().eval(), end_ids=())


def lengths(generation):
    """Length of the text before each round, and how many tokens the round drafted in a row."""
    length = len(generation.prompt_ids)
    for record in generation.rounds:
        yield length, record.num_drafted
        length += record.num_produced


def test_where_no_draft_is_read_its_limit_is_none(pair):
    prompts, sampling = [[7] * (LIMIT + 9), [8, 9]], Sampling(max_new_tokens=12)
    for name in ("autoregressive", "prompt_lookup", "beam_sampling"):
        both = [decode(p, prompts, config.method(name), sampling) for p in (pair, ModelPair(pair.target, end_ids=()))]
        assert [(g.error, g.token_ids, g.beams) for g in both[0]] == [(g.error, g.token_ids, g.beams) for g in both[1]]
        assert both[0][0].error is None


@pytest.mark.parametrize(
    "name", ["speculative", "block", "confidence", "specinfer", "mcsd", "batch_rate_confidence", "best_source"]
)
def test_rows_draft_up_to_the_limit_and_go_on_without(name, pair):
    prompts = [[7] * 19, [8] * 22, [7] * (LIMIT + 9), [9] * 17]
    method = config.method(name)
    plain = decode(pair, prompts, config.method("autoregressive"), Sampling(temperature=0, max_new_tokens=16))
    greedy = decode(pair, prompts, method, Sampling(temperature=0, max_new_tokens=16), batch_size=3)
    assert [g.token_ids for g in greedy] == [g.token_ids for g in plain]
    drawn = decode(pair, prompts, method, Sampling(max_new_tokens=16), batch_size=3)
    for generations in (greedy, drawn):
        rounds = [entry for g in generations for entry in lengths(g)]
        assert any(drafted for length, drafted in rounds if length <= LIMIT)
        assert not any(drafted for length, drafted in rounds if length > LIMIT)
    if not method.couples_rows:
        alone = decode(pair, prompts, method, Sampling(max_new_tokens=16), batch_size=1)
        assert [g.token_ids for g in alone] == [g.token_ids for g in drawn]


def test_the_drafts_last_position_is_used_and_none_after_it(pair):
    """A draft reads the text and all drafted tokens but the last one."""
    method = config.method("speculative", ["policy.num_drafted=6"])
    for generation in decode(
        pair,
        [[7] * n for n in (LIMIT - 7, LIMIT - 2, LIMIT, LIMIT + 1, LIMIT + 2)],
        method,
        Sampling(max_new_tokens=12),
    ):
        for length, drafted in lengths(generation):
            assert drafted == max(0, min(6, LIMIT - length + 1)) or length + drafted == len(generation.prompt_ids) + 11


@pytest.mark.parametrize("name", ["speculative", "specinfer", "speculative_beam", "dsbd"])
def test_outputs_follow_the_target_across_the_limit(name, table_pair, monkeypatch):
    """The draft's limit lies within the texts."""
    monkeypatch.setattr("toolkit.decoding.batch.max_positions", lambda model: 3 if model is table_pair.draft else 2**31)
    if config.method(name).beams is None:
        assert output_pvalue(table_pair, config.method(name), 4000) > 1e-3
    else:
        generations = decode(table_pair, [[0, 1]] * 50, config.method(name), Sampling(max_new_tokens=8))
        rounds = [entry for g in generations for entry in lengths(g)]
        assert any(drafted for length, drafted in rounds if length <= 3)
        assert not any(drafted for length, drafted in rounds if length > 3)


def test_it_is_said_whose_limit_it_is(pair):
    (generation,) = decode(pair, [[7] * 250], config.method("speculative"), Sampling(max_new_tokens=10))
    assert "250 tokens and max_new_tokens=10 exceed the target's context of 256" in generation.error
    with pytest.raises(InputError, match=f"response 0 and max_new_tokens=9 exceed the draft's context of {LIMIT}"):
        Recorder(pair, Sampling(max_new_tokens=9), 3).record([([7] * 20, [8] * 9)], [0])
