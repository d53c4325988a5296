"""Rounds out of the running sums of a streamed answer, beside the rounds of which the stream was made."""

import json
import random

import pytest

from analysis.loads.engine_counts import read_counts, rounds_of
from analysis.loads.streamed import streamed_rounds, streamed_text
from toolkit.errors import InputError


def chunks_of(rounds, hidden=()):
    """What a server sends of rounds (drafted, accepted): a chunk per token but the hidden ones, and one at the end."""
    size, drafted, accepted, chunks = 1, 0, 0, [(1, 0, 0)]
    for more, kept in rounds:
        drafted, accepted = drafted + more, accepted + kept
        for _ in range(kept + 1):
            size += 1
            chunks.append((size, drafted, accepted))
    chunks = [chunk for number, chunk in enumerate(chunks) if number not in hidden] + chunks[-1:]
    names = ("predicted_n", "draft_n", "draft_n_accepted")
    return [
        {"content": "", "timings": {name: value for name, value in zip(names, chunk, strict=True) if value}}
        for chunk in chunks
    ]


def test_rounds_come_back_from_the_sums():
    generator, role = random.Random(0), [{"choices": [{"delta": {"role": "assistant"}}]}]
    for _ in range(200):
        lengths = [generator.choice([0, 1, 3]) for _ in range(12)]
        rounds = [(drafted, generator.randint(0, drafted)) for drafted in lengths]
        width, drafted, accepted = rounds_of({"stream": role + chunks_of(rounds), "num_drafted": 4})
        assert width == 4 and list(zip(drafted, accepted, strict=True)) == rounds


def test_a_hidden_token_is_no_matter_but_where_a_round_begins():
    rounds = [(3, 2), (3, 0), (3, 3)]  # tokens 1 to 3, 4 and 5 to 8
    assert streamed_rounds(chunks_of(rounds, hidden=[2, 3, 6])) == (3, [3, 3, 3], [2, 0, 3])
    for first in (1, 4, 5):
        assert "hides where a round begins" in streamed_rounds(chunks_of(rounds, hidden=[first]))
    assert "hides where a round begins" in streamed_rounds(chunks_of(rounds, hidden=[3, 4, 5]))


def test_a_last_round_may_be_cut_short():
    assert streamed_rounds(chunks_of([(3, 1), (3, 3)])[:-3]) == (3, [3, 3], [1, 3])


def test_counts_are_by_position(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"num_drafted": 3, "stream": chunks_of([(3, 1), (0, 0), (2, 2)])}) + "\n")
    counts = read_counts(path)
    assert (counts.rounds, counts.drafted) == (3, 5)
    assert counts.reached.tolist() == [[2, 2, 0]] and counts.accepted.tolist() == [[2, 1, 0]]


def test_streams_without_k_have_that_of_the_longest_round(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"stream": chunks_of([(size, 1)] * 3)}) + "\n" for size in (2, 4, 3)))
    counts = read_counts(path)
    assert counts.longest == 4 and counts.drafted == 27 and counts.reached.sum(0).tolist() == [9, 9, 0, 0]


def test_a_stream_that_drafted_nothing_has_no_rounds():
    assert streamed_rounds(chunks_of([(0, 0)] * 5)) == "no rounds"


EARLY = [  # the second round begins before the first one's four tokens are there
    {"timings": {"predicted_n": size, "draft_n": drafted, "draft_n_accepted": accepted}}
    for size, drafted, accepted in ((1, 0, 0), (2, 3, 3), (3, 6, 3))
]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([{"content": "x"}], "with `timings`: ask llama.cpp with timings_per_token=true"),
        ({"timings": {}}, "with `timings`"),
        (["timings"], "with `timings`"),
        ([{"timings": {"draft_n": 3}}], "with `timings`"),
        ([{"timings": {"predicted_n": float("inf")}}], "with `timings`"),
        (None, "with `timings`"),
        ([*chunks_of([(3, 1)]), *chunks_of([(3, 1)])], r"sums that grow, got \(1, 0, 0\) after \(3, 3, 1\)"),
        (chunks_of([(2, 3)]), "draft_n_accepted to grow by at most"),
        (EARLY, r"begin after the tokens of the one before, got \(3, 6, 3\)"),
    ],
)
def test_faulty_streams_are_one_line(chunks, message):
    with pytest.raises(InputError, match=message):
        streamed_rounds(chunks)


def test_texts_of_all_three_addresses_are_joined():
    plain = [{"content": "a"}, {"content": "b"}, {"content": ""}]
    texts = [{"choices": [{"text": each["content"]}]} for each in plain]
    chat = [{"choices": [{"delta": {"role": "assistant", "content": None}}]}]
    chat += [{"choices": [{"delta": {"content": each["content"]}}]} for each in plain] + [{"choices": []}]
    assert {streamed_text(chunks) for chunks in (plain, texts, chat)} == {"ab"}
