"""Progress in tokens: what is counted round by round, and what is expected of rows that go on."""

from __future__ import annotations

import pytest

from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.runs.token_bar import TokenBar


@pytest.mark.parametrize("name", ["autoregressive", "speculative", "prompt_lookup", "mtad"])
def test_rounds_add_up_to_the_tokens(name):
    counts = []
    prompts = [[5, 6, 7, 5, 6], [8, 9], [5, 6, 7] * 3]
    found = decode(
        ModelPair.toy(), prompts, config.method(name), Sampling(max_new_tokens=9), batch_size=2, on_round=counts.append
    )
    assert sum(counts) == sum(generation.counts.num_generated for generation in found)
    assert len(counts) > 2 and counts[0] > 0, "from the first round on"


def test_what_is_left_is_estimated_from_the_rows_that_have_ended(capsys):
    with TokenBar("rows", 10, 100) as bar:
        assert bar.expected == 1000
        bar.tokens(60)
        assert bar.expected == 1000, "nothing has ended: any row may become the longest"
        bar.row()
        bar.row()
        assert bar.expected == pytest.approx(60 + 8 * 30), "60 tokens, two ends: a row ends after 30 on average"
        bar.skip(3)
        assert bar.expected == pytest.approx(60 + 5 * 30)
        for _ in range(5):
            bar.count(40)
        assert bar.expected == bar.made == 260
    assert "rows: 10 rows of at most 100 tokens, 1,000 in all" in capsys.readouterr().err
