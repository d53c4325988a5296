"""Block efficiency of greedy trees is what the ranks of the target's tokens say, round for round."""

from __future__ import annotations

import pytest

from benchmarks.greedy_trees import predicted_rounds, ranks
from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode

PROMPTS = ["Q: Join with dashes: door summer harbor.\nA:", "Q: What is 3 + 4?\nA:"]


@pytest.mark.parametrize(
    ("rank", "rounds"), [([0, 0, 0, 0], 1), ([1, 2, 0, 0], 2), ([5, 5, 5, 5], 4), ([0], 1), ([3, 1, 0, 9], 1)]
)
def test_rounds_end_where_a_token_is_not_among_the_children(rank, rounds):
    assert predicted_rounds(rank, (4, 2, 1), limit=64) == rounds


def test_nothing_is_drafted_at_the_last_position_of_the_limit():
    assert predicted_rounds([0, 0, 0, 0, 0], (1, 1, 1), limit=5) == 2
    assert predicted_rounds([0, 0, 0, 0], (1, 1, 1), limit=4) == 1
    assert predicted_rounds([0, 0, 0], (1, 1, 1), limit=3) == 1


@pytest.mark.parametrize("shape", ["1x1x1", "4x2x1"])
@pytest.mark.parametrize("name", ["mcsd", "specinfer"])
def test_decoding_takes_as_many_rounds_as_predicted(name, shape):
    pair, sampling = ModelPair.toy(), Sampling(max_new_tokens=24, temperature=0.0)
    drafted = decode(pair, PROMPTS, config.method(name, [f'proposer.k_config="{shape}"']), sampling)
    plain = decode(pair, PROMPTS, config.method("autoregressive", []), sampling)
    widths = tuple(map(int, shape.split("x")))
    for prompt, one, text in zip(PROMPTS, drafted, plain, strict=True):
        assert one.token_ids == text.token_ids
        rank = ranks(pair, pair.encode(prompt), text.token_ids).tolist()
        assert predicted_rounds(rank, widths, 24) == one.counts.num_target_calls
