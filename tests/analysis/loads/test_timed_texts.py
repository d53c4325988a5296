"""Lengths of the prompts behind which rounds are timed."""

from __future__ import annotations

from analysis.loads.timed_texts import filled, of_length, texts_of
from toolkit import ModelPair
from toolkit.decoding import Sampling


def test_where_no_longer_text_fits_costs_are_timed_behind_the_prompts_only():
    pair = ModelPair.toy()
    for left, expected in ((100, {"near", "far"}), (16, {"near", "far"}), (15, {"near"}), (-5, {"near"})):
        texts = texts_of(pair, [[5] * (pair.max_length - 11 - left)], Sampling(), room=11)
        assert set(texts) == expected
        assert max(map(len, texts.get("far", [[]]))) <= pair.max_length - 11


def test_near_texts_have_their_middle_at_a_quarter_of_a_longest_response():
    """Responses are short as a rule, and their first tokens take the least time."""
    pair, prompt = ModelPair.toy(), [5] * 9
    for longest, expected in ((96, [9, 105]), (200, [9 + 50 - 32, 209])):
        texts = texts_of(pair, [prompt], Sampling(max_new_tokens=longest), room=11)
        assert [len(one) for (one,) in texts.values()] == expected


def test_a_batch_takes_prompts_of_evenly_spread_lengths():
    prompts = [[5] * length for length in (9, 1, 8, 2, 7, 3, 6, 4, 5)]
    assert [len(one) for one in filled(1, prompts)] == [5]
    assert [len(one) for one in filled(3, prompts)] == [2, 5, 8]
    assert [len(one) for one in filled(4, prompts[:2])] == [1, 1, 9, 9], "few prompts are repeated"


def test_prompts_are_cut_to_their_last_tokens_or_repeated():
    assert of_length([1, 2, 3], 2) == [2, 3]
    assert of_length([1, 2, 3], 7) == [3, 1, 2, 3, 1, 2, 3]
