"""Counts of a serving engine: read, checked, and turned into the draft length that they speak for."""

import json

import numpy as np
import pytest

from analysis import advise
from analysis.loads import observed
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import read_table
from toolkit import config
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError


def answer(histogram, **changed):
    rounds, width = sum(histogram), len(histogram) - 1
    counts = {
        "acceptance_histogram": histogram,
        "num_spec_tokens": width,
        "num_spec_steps": rounds,
        "num_draft_tokens": rounds * width,
        "num_accepted_draft_tokens": sum(j * count for j, count in enumerate(histogram)),
    }
    return json.dumps({"id": "x", "choices": [], "metrics": {"speculative_decoding": {**counts, **changed}}})


def chunk(kind, finish_reason):
    """A part of a streamed answer, which holds the counts so far."""
    return json.dumps({**json.loads(answer([3, 1])), "object": kind, "choices": [{"finish_reason": finish_reason}]})


def write(tmp_path, *lines):
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_example_of_the_engines_documentation(tmp_path):
    """mean_acceptance_length 1.2325581395348837 and draft_acceptance_rate 0.0775 of the page, from its histogram."""
    histograms, skipped = observed.read_histograms(write(tmp_path, answer([39, 1, 0, 3]), "", '{"id": "no counts"}'))
    assert (histograms.tolist(), skipped) == ([[39.0, 1.0, 0.0, 3.0]], 1)
    lengths = observed.by_length(histograms, 0.1, Bootstrap(10))
    assert lengths.tokens_per_round.iloc[-1] == pytest.approx(1.2325581395348837)
    assert lengths.tokens_per_round.iloc[0] == lengths.throughput.iloc[0] == 1
    assert lengths.throughput.iloc[2] == pytest.approx((1 + 4 / 43 + 3 / 43) / 1.2)
    assert observed.sentence(lengths).startswith("Nothing is advised"), "one request shows no spread"


def test_positions_are_conditional_and_resampled_by_request():
    histograms = np.array([[10.0, 20, 30], [20, 10, 10], [15, 15, 20]])
    positions = observed.by_position(histograms, Bootstrap(4000))
    assert positions.rounds.tolist() == [150, 105]
    assert positions.accepted.tolist() == pytest.approx([0.7, 60 / 105])
    assert (positions.accepted_low < positions.accepted).all() and (positions.accepted < positions.accepted_high).all()
    assert observed.by_position(histograms[:2], Bootstrap(400)).accepted_low.isna().all(), "two requests show no spread"


def test_shorter_drafts_are_predicted_from_longer_ones(table_pair):
    """Rounds of 6 decoded by this package, said as the engine says them, against rounds of 1, 2 and 3 decoded."""
    pair = type(table_pair)(target=table_pair.target, draft=table_pair.draft, end_ids=())

    def rounds_of(length):
        method, sampling = config.method("speculative", [f"policy.num_drafted={length}"]), Sampling(max_new_tokens=60)
        found = [g.rounds for g in decode(pair, [[0, 1]] * 400, method, sampling, batch_size=400)]
        return [[r for r in rounds if r.num_drafted == length] for rounds in found]

    histograms = np.array([[sum(r.num_accepted == j for r in rounds) for j in range(7)] for rounds in rounds_of(6)])
    lengths = observed.by_length(histograms.astype(float), 0.2, Bootstrap(50))
    for length in (1, 2, 3):
        produced = [r.num_accepted + 1 for rounds in rounds_of(length) for r in rounds]
        assert lengths.tokens_per_round[length] == pytest.approx(np.mean(produced), rel=0.04)


def test_the_command_ends_with_a_sentence_and_finds_its_work_finished(tmp_path, capsys):
    generator = np.random.default_rng(0)
    lines = [answer([int(n) for n in generator.multinomial(40, [0.1, 0.1, 0.1, 0.1, 0.6])]) for _ in range(30)]
    path = write(tmp_path, *lines)
    cfg = config.compose("advise", [f"responses={path}", "cost_ratio=.05", f"paths.root_dir={tmp_path}"])
    folder = advise.run(cfg)
    assert folder.name.startswith("advise-")
    first = capsys.readouterr().out
    assert "Draft 4 tokens (the longest that was served: serve a longer one to see further): " in first
    assert read_table(folder, "lengths").num_drafted.tolist() == [0, 1, 2, 3, 4]
    assert "Accepted, given that all tokens before it were" in (folder / "observed.md").read_text()
    stamp = (folder / "observed.md").stat().st_mtime_ns
    assert advise.run(cfg) == folder
    assert (folder / "observed.md").stat().st_mtime_ns == stamp


@pytest.mark.parametrize(("line", "words"), [
    ("[1]", "line 2: expected a JSON object, got list"),
    (answer([3, 1], num_spec_steps=9), "line 2: acceptance_histogram says 4 rounds and 1 accepted tokens"),
    (answer([3, 1, 1]), "num_spec_tokens is 2, 1 before: split the file by it"),
    (answer([3, 1], acceptance_histogram=[3, 1, 0, 0]), "acceptance_histogram has 4 entries"),
    (answer([3, 1], num_spec_tokens=True), "expected numbers of at least 0: num_spec_tokens"),
    ('data: {"object": "chat.completion.chunk"}', "line 2: expected whole answers, .* ask with stream=false"),
    ("data: [DONE]", "line 2: expected whole answers"),
    (chunk("chat.completion.chunk", "stop"), "line 2: expected whole answers"),
    (chunk("text_completion", None), "line 2: expected whole answers"),
])  # fmt: skip
def test_counts_that_cannot_be_are_refused_with_their_line(tmp_path, line, words):
    with pytest.raises(InputError, match=words):
        observed.read_histograms(write(tmp_path, answer([1, 2]), line))


def test_rounds_of_changing_length_are_left_out(tmp_path):
    path = write(tmp_path, answer([1, 2]), answer([3, 1], num_draft_tokens=3))
    assert observed.read_histograms(path)[1] == 1
    with pytest.raises(InputError, match=r"none of 1 lines has counts .* \(no counts\); start vLLM"):
        observed.read_histograms(write(tmp_path, '{"choices": []}'))
    with pytest.raises(InputError, match="none of 2 lines .*num_spec_tokens=0: nothing was drafted"):
        observed.read_histograms(write(tmp_path, answer([7]), answer([9])))
    with pytest.raises(InputError, match="expected a file of responses at .*, found none"):
        observed.read_histograms(tmp_path / "none.jsonl")


def test_requests_without_rounds_are_left_out(tmp_path):
    histograms, skipped = observed.read_histograms(write(tmp_path, answer([0, 0, 0]), answer([1, 2, 9])))
    assert (len(histograms), skipped) == (1, 1)
    lengths = observed.by_length(histograms, 0.1, Bootstrap(20))
    assert lengths[["tokens_per_round", "throughput"]].notna().all(axis=None)
    assert lengths.throughput_low.isna().all(), "one request shows no spread"
    assert observed.sentence(lengths).startswith("Nothing is advised: so few requests show no spread")


def test_the_best_of_the_lengths_that_surely_pay_is_advised():
    """Two requests of twelve accept everything: four tokens look best, but one token is what pays beyond its interval."""
    histograms = np.array([[26.0, 14, 0, 0, 0]] * 10 + [[0.0, 0, 0, 0, 40]] * 2)
    lengths = observed.by_length(histograms, 0.1, Bootstrap(2000))
    assert lengths.throughput_low[1] > 1
    assert observed.sentence(lengths).startswith("Draft ")
