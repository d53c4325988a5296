"""Rows that join a batch are read together, without much padding, and decode as they do alone."""

from __future__ import annotations

import pytest

from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.decoding.batch import PADDING, PREFILL, TOGETHER, read_together
from toolkit.engine import Session


def test_groups_by_hand():
    assert read_together([]) == []
    assert read_together([50, 20, 60]) == [[0, 1, 2]], "30 and 20 tokens of padding are cheaper than a forward pass"
    assert read_together([500, 20, 21, 510]) == [[1, 2], [0, 3]]
    assert read_together([100, 100 + PADDING]) == [[0, 1]] and read_together([100, 101 + PADDING]) == [[0], [1]]
    assert read_together([TOGETHER // 2] * 3) == [[0, 1], [2]], "memory stays flat"
    assert read_together([2 * TOGETHER, 2 * TOGETHER]) == [[0], [1]], "a row is read whole"


@pytest.mark.parametrize("name", ["autoregressive", "speculative"])
def test_long_and_short_prompts_are_read_apart_and_decode_as_alone(name, monkeypatch):
    read = []
    extend = Session.extend

    def noted(session, tokens, **options):
        read.append(tuple(tokens.shape))
        return extend(session, tokens, **options)

    monkeypatch.setattr(Session, "extend", noted)
    pair, sampling, method = ModelPair.toy(), Sampling(0.0, max_new_tokens=8), config.method(name)
    prompts = [list(range(5, 5 + length)) for length in (200, 12, 205, 14, 210, 11)]
    alone = [decode(pair, [prompt], method, sampling)[0].token_ids for prompt in prompts]
    read.clear()
    together = decode(pair, prompts, method, sampling, batch_size=6)
    wide = [shape for shape in read if shape[1] >= PREFILL]
    models = 1 if name == "autoregressive" else 2
    assert sorted(wide) == sorted([(3, 13), (3, 209)] * models), "two forward passes of three rows per model"
    assert [generation.token_ids for generation in together] == alone
