"""Counts of an engine, or of decoding here: read, checked, and turned into the draft length that they speak for."""

import json

import numpy as np
import pytest

from analysis import advise
from analysis.loads import observed
from analysis.loads.engine_counts import PositionCounts, read_counts
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import read_table
from toolkit import config
from toolkit import decode as decode_command
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError
from toolkit.metrics import request_counts
from toolkit.testing.blocks import block_pair


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


def detailed(drafted, accepted, longest, **changed):
    """An answer as `detailed` writes it."""
    counts = {
        "acceptance_histogram": [accepted.count(n) for n in range(longest + 1)],
        "num_spec_tokens": longest,
        "num_spec_steps": len(accepted),
        "num_draft_tokens": sum(drafted),
        "num_accepted_draft_tokens": sum(accepted),
        "per_step_accepted": accepted,
        "per_step_drafted": drafted,
    }
    return json.dumps({"metrics": {"speculative_decoding": counts | changed}})


def of_histograms(histograms):
    """Counts of rounds that all drafted K tokens, from how many accepted 0, 1, 2, ... [n, K + 1]."""
    histograms = np.array(histograms, dtype=float)
    reached = histograms[:, ::-1].cumsum(1)[:, ::-1]
    rounds = int(histograms.sum())
    return PositionCounts(reached[:, :-1], reached[:, 1:], rounds, rounds * (histograms.shape[1] - 1))


def chunk(kind, finish_reason):
    """A part of a streamed answer, which holds the counts so far."""
    return json.dumps({**json.loads(answer([3, 1])), "object": kind, "choices": [{"finish_reason": finish_reason}]})


def write(tmp_path, *lines):
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_example_of_the_engines_documentation(tmp_path):
    """mean_acceptance_length 1.2325581395348837 and draft_acceptance_rate 0.0775 of the page, from its histogram."""
    counts = read_counts(write(tmp_path, answer([39, 1, 0, 3]), "", '{"id": "no counts"}'))
    assert (counts.reached.tolist(), counts.accepted.tolist()) == ([[43.0, 4.0, 3.0]], [[4.0, 3.0, 3.0]])
    assert (counts.rounds, counts.drafted, counts.skipped) == (43, 129, 1)
    lengths = observed.by_length(counts, 0.1, Bootstrap(10))
    assert lengths.tokens_per_round.iloc[-1] == pytest.approx(1.2325581395348837)
    assert lengths.tokens_per_round.iloc[0] == lengths.throughput.iloc[0] == 1
    assert lengths.throughput.iloc[2] == pytest.approx((1 + 4 / 43 + 3 / 43) / 1.2)
    assert observed.sentence(lengths, counts, 0.1).startswith("Nothing is advised"), "one request shows no spread"


def test_positions_are_conditional_and_resampled_by_request():
    counts = of_histograms([[10, 20, 30], [20, 10, 10], [15, 15, 20]])
    positions = observed.by_position(counts, Bootstrap(4000))
    assert positions.rounds.tolist() == [150, 105]
    assert positions.accepted.tolist() == pytest.approx([0.7, 60 / 105])
    assert (positions.accepted_low < positions.accepted).all() and (positions.accepted < positions.accepted_high).all()
    few = of_histograms([[10, 20, 30], [20, 10, 10]])
    assert observed.by_position(few, Bootstrap(400)).accepted_low.isna().all(), "two requests show no spread"


def test_rounds_of_changing_length_count_where_they_drafted_a_position(tmp_path):
    """By hand: position 2 counts in the rounds of 2 and 3 tokens that accepted the first, position 3 in one of them."""
    drafted, accepted = [1, 1, 2, 2, 3, 3, 0], [1, 0, 2, 1, 3, 0, 0]
    counts = read_counts(write(tmp_path, detailed(drafted, accepted, 4), answer([3, 1, 0, 0, 0], num_draft_tokens=3)))
    assert counts.reached.tolist() == [[6, 3, 1, 0]] and counts.accepted.tolist() == [[4, 2, 1, 0]]
    assert (counts.rounds, counts.drafted, counts.skipped) == (7, 12, 1), (
        "a summary of such rounds cannot be told apart"
    )
    lengths = observed.by_length(counts, 0.1, Bootstrap(10))
    alive = np.cumprod([4 / 6, 2 / 3, 1 / 1])
    assert lengths.tokens_per_round[:4].tolist() == pytest.approx([1, *(1 + alive.cumsum())])
    assert np.isnan(lengths.tokens_per_round[4]), "position 4 was never drafted"
    assert any("detailed" in note for note in observed.notes_on(counts))


def test_lengths_that_draws_decide_are_no_bias(tmp_path):
    """Rounds of 1 to 4 tokens, whatever the draft showed, against the same rounds had all of them drafted 4."""
    generator = np.random.default_rng(0)
    wanted = generator.geometric(0.35, 40_000) - 1
    drafted = generator.integers(1, 5, len(wanted))
    cut = detailed(drafted.tolist(), np.minimum(wanted, drafted).tolist(), 4)
    whole = detailed([4] * len(wanted), np.minimum(wanted, 4).tolist(), 4)
    adaptive, fixed = (
        observed.by_length(read_counts(write(tmp_path, line)), 0.1, Bootstrap(2)).tokens_per_round
        for line in (cut, whole)
    )
    assert adaptive.tolist() == pytest.approx(fixed.tolist(), rel=0.01)


def scrape(drafts, drafted, accepted, model="m"):
    """A page of counters, of two engines that did the same."""
    lines = ["# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.", "python_gc_objects_total 3.0"]
    for engine in "01":
        labels = f'engine="{engine}",model_name="{model}"'
        lines += [f"vllm:spec_decode_num_drafts_total{{{labels}}} {drafts / 2}"]
        lines += [f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {drafted / 2}"]
        lines += [f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {sum(accepted) / 2}"]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{at}"}} {count / 2}'
            for at, count in enumerate(accepted)
        ]
    return lines


def test_counters_of_a_server_are_sums_without_intervals(tmp_path, capsys):
    path = write(tmp_path, *scrape(1000, 3000, [800, 600, 400]))
    counts = read_counts(path)
    assert counts.whole_server and not counts.bounded
    lengths = observed.by_length(counts, 0.1, Bootstrap(10))
    assert lengths.tokens_per_round.tolist() == pytest.approx([1, 1.8, 2.4, 2.8])
    assert lengths.throughput_low.isna().all()
    folder = advise.run(config.compose("advise", [f"responses={path}", "cost_ratio=.1", f"paths.root_dir={tmp_path}"]))
    assert "Draft 3 tokens" in capsys.readouterr().out and "no intervals" in (folder / "observed.md").read_text()
    words = [f"responses={path}", "cost_ratio=.5", f"paths.root_dir={tmp_path}"]
    for blocks, costs in ((False, [1, 1.5, 2, 2.5]), (True, [1, 1.5, 1.5, 1.5])):
        folder = advise.run(config.compose("advise", [*words, f"blocks={blocks}"]))
        throughput = np.array([1, 1.8, 2.4, 2.8]) / costs
        assert read_table(folder, "lengths").throughput.tolist() == pytest.approx(throughput.tolist())
        best = f"Draft {3 if blocks else 1} token"
        out = capsys.readouterr().out
        assert best in out and f"in rounds of 3 tokens: {2.8 / costs[3]:.2f}" in out, out
    bounds = read_counts(write(tmp_path, *scrape(1000, 2000, [800, 600, 400])))
    assert bounds.bounded
    text = observed.sentence(observed.by_length(bounds, 0.1, Bootstrap(10)), bounds, 0.1)
    assert "at least 2.15 times" in text, text
    nothing = observed.sentence(observed.by_length(bounds, 3, Bootstrap(10)), bounds, 3)
    assert nothing.startswith("Nothing is advised") and "detailed" in nothing


@pytest.mark.parametrize("prefix", ["vllm:", "llamacpp:", "ray_vllm:", "ray_vllm_", "vllm_", ""])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_counters_have_any_prefix(tmp_path, prefix, end):
    """By hand: two engines of 500 rounds each; with and without HELP lines."""
    path = tmp_path / "page.txt"
    page = scrape(1000, 3000, [800, 600, 400])
    for lines in (page, [line for line in page if line[0] != "#"]):
        path.write_bytes(end.join(lines).replace("vllm:", prefix).encode())
        counts = read_counts(path)
        assert counts.reached.tolist() == [[1000, 800, 600]] and counts.accepted.tolist() == [[800, 600, 400]]
        assert (counts.rounds, counts.drafted, counts.whole_server) == (1000, 3000, True)


def test_timestamps_exemplars_and_times_of_creation_are_no_counts(tmp_path):
    """An OpenMetrics page: a value, a timestamp and an exemplar, whose labels and value look like more of them."""
    exemplar = '1760000000.5 # {trace_id="a } 7 b",engine="9"} 31.0 1760000001.25'
    series = {
        "drafts_total": 10, "drafts_created": 1.76e9, "draft_tokens_total": 20, "draft_tokens_created": 1.76e9,
        'accepted_tokens_per_pos_total{position="0"}': 8, 'accepted_tokens_per_pos_created{position="0"}': 1.76e9,
        'accepted_tokens_per_pos_total{position="1"}': "5e+00",
    }  # fmt: skip
    lines = ["# TYPE vllm:spec_decode_num_drafts counter", "# UNIT vllm:spec_decode_num_drafts rounds"]
    lines += [f"vllm:spec_decode_num_{name} {value} {exemplar}" for name, value in series.items()]
    counts = read_counts(write(tmp_path, *lines, "# EOF"))
    assert counts.reached.tolist() == [[10, 8]] and counts.accepted.tolist() == [[8, 5]] and counts.drafted == 20


def test_labels_may_hold_anything(tmp_path):
    lines = scrape(1000, 3000, [800, 600, 400], model=r"a \"b\",position=\"9\"} 7 \\ # {c}")
    assert read_counts(write(tmp_path, *lines)).accepted.tolist() == [[800, 600, 400]]


@pytest.mark.parametrize("later", [
    scrape(1500, 4500, [1000, 700, 500]),  # a second scrape
    scrape(10, 20, [8, 6]),  # the server was started again with K = 2
    [line + " 1760000000" for line in scrape(1000, 3000, [800, 600, 400])],
    ["vllm:spec_decode_num_drafts_total{model_name='m',engine='1'} 7".replace("'", '"')],
])  # fmt: skip
def test_a_series_that_comes_twice_is_refused(tmp_path, later):
    first = scrape(1000, 3000, [800, 600, 400])
    with pytest.raises(InputError, match=r"spec_decode_num_drafts_total .*twice.*differences"):
        read_counts(write(tmp_path, *first, *later))


@pytest.mark.parametrize("lines", [
    ["# TYPE sglang:spec_accept_length gauge", 'sglang:spec_accept_length{model_name="m"} 2.8'],
    ["llamacpp:tokens_predicted_total 3469", "llamacpp:n_decode_total 543"],
    ['vllm:generation_tokens_total{engine="0",model_name="m"} 7'],
    ["vllm:spec_decode_num_drafts_created 1.76e9", "other_spec_decode_num_drafts 3"],
    ["HTTP/1.1 404 Not Found"],
])  # fmt: skip
def test_pages_without_counters_of_drafts_are_named(tmp_path, lines):
    with pytest.raises(InputError, match="page .*spec_decode_num_drafts_total.* got none; "):
        read_counts(write(tmp_path, *lines))


def test_a_broken_counter_is_refused_with_its_line(tmp_path):
    lines = scrape(1000, 3000, [800, 600, 400])
    lines[2] = lines[2].replace("500.0", "5OO.0")
    with pytest.raises(InputError, match="line 3: expected a series"):
        read_counts(write(tmp_path, *lines))


@pytest.mark.parametrize("lines", [
    scrape(1000, 3000, [800, 900, 400]), scrape(1000, 3001, [800, 600, 400]), scrape(0, 0, [0, 0]),
    [line for line in scrape(10, 30, [8, 6, 4]) if 'position="1"' not in line],
    [*scrape(1000, 3000, [800, 600, 400]), *scrape(10, 30, [8, 6, 4], model="other")],
    [*scrape(1000, 3000, [800, 600, 400]), *[line.replace("vllm:", "ray_vllm:") for line in scrape(10, 30, [8, 6, 4])]],
    ["vllm:spec_decode_num_drafts_total NaN"], [line.replace("500.0", "+Inf") for line in scrape(1000, 1000, [1000])],
    ["llamacpp:spec_decode_num_drafts_total 9", "llamacpp:spec_decode_num_draft_tokens_total 27"],
])  # fmt: skip
def test_counters_that_do_not_fit_each_other_are_refused(tmp_path, lines):
    with pytest.raises(InputError, match="expected (the )?counters"):
        read_counts(write(tmp_path, *lines))


# -- our own output goes round ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [["speculative", "method.policy.num_drafted=5"], ["confidence"]])
def test_what_decode_writes_is_read_back_as_the_same_advice(tmp_path, method, capsys):
    """Against the lines' own rounds, counted the slow way; and the sentence against that of the counts in memory."""
    words = [f"method={method[0]}", *method[1:], "prompts=toy_math", "prompts.limit=20", "sampling.max_new_tokens=24"]
    decoded = decode_command.run(config.compose("decode", [*words, f"paths.root_dir={tmp_path}"]))
    path = decoded / "generations.jsonl"
    rounds = [
        [(r["num_drafted"], r["num_accepted"]) for r in json.loads(line)["rounds"] if r["num_drafted"]]
        for line in path.read_text().splitlines()
    ]
    every = [pair for text in rounds for pair in text]
    assert len({drafted for drafted, _ in every}) > 1, "lengths change, at the texts' ends at least"
    capsys.readouterr()
    folder = advise.run(config.compose("advise", [f"responses={path}", "cost_ratio=.05", f"paths.root_dir={tmp_path}"]))
    lengths, positions = read_table(folder, "lengths"), read_table(folder, "positions")
    alive = 1.0
    for j in range(1, len(positions) + 1):
        at = [accepted >= j for drafted, accepted in every if drafted >= j and accepted >= j - 1]
        assert positions.rounds[j - 1] == len(at)
        if alive:
            alive *= np.mean(at) if at else np.nan
        grown = lengths.tokens_per_round[j] - lengths.tokens_per_round[j - 1]
        assert grown == pytest.approx(alive, nan_ok=True, abs=1e-12)
    counts = read_counts(path)
    assert (counts.rounds, counts.drafted) == (len(every), sum(drafted for drafted, _ in every))
    assert len(counts.reached) == len(rounds)
    assert observed.sentence(lengths, counts, 0.05) in capsys.readouterr().out


def of_decode(drafted, accepted, calls, longest=3):
    """A line of generations.jsonl. calls: draft forward passes of each round."""
    names = ("num_drafted", "num_accepted", "num_draft_calls")
    rounds = [dict(zip(names, numbers, strict=True)) for numbers in zip(drafted, accepted, calls, strict=True)]
    return json.dumps({**json.loads(detailed(drafted, accepted, longest)), "rounds": rounds})


def advised(path, *words):
    """The output folder of advice from a file at c = .2."""
    words = [f"responses={path}", "cost_ratio=.2", f"paths.root_dir={path.parent}", *words]
    return advise.run(config.compose("advise", words))


@pytest.mark.parametrize(("calls", "cost", "blocks_cost"), [
    ([1, 1, 1, 1], 1.2, 1.2), ([3, 3, 3, 3], 1.6, None), ([4, 3, 3, 3], 1.6, None), ([0, 0, 0, 0], 1.0, None),
    (None, 1.6, 1.2),
])  # fmt: skip
def test_rounds_pay_the_draft_forward_passes_that_the_file_counts(tmp_path, capsys, calls, cost, blocks_cost):
    """By hand: 3, 3, 2 and 0 of 3 drafted tokens are accepted, so 3 tokens a round; of a block, a chain, copies, an engine."""
    drafted, accepted = [3, 3, 3, 3], [3, 3, 2, 0]
    line = detailed(drafted, accepted, 3) if calls is None else of_decode(drafted, accepted, calls)
    path = write(tmp_path, *[line] * 3)
    folder = advised(path)
    throughput = read_table(folder, "lengths").throughput
    assert throughput.iloc[-1] == pytest.approx(3 / cost) and throughput[0] == 1
    assert f"in rounds of 3 tokens: {3 / cost:.2f}." in capsys.readouterr().out
    if blocks_cost is None:
        with pytest.raises(InputError, match=f"blocks=true: .* counts {max(calls)} draft"):
            advised(path, "blocks=true")
    else:
        blocks = read_table(advised(path, "blocks=true"), "lengths")
        assert blocks.throughput.iloc[-1] == pytest.approx(3 / blocks_cost)


def test_rounds_of_two_sources_are_one_line(tmp_path):
    """Copied rounds pay no draft forward pass, and the lengths of both together would be priced as one."""
    path = write(tmp_path, *[of_decode([3, 3, 3, 3], [3, 3, 2, 0], [0, 3, 0, 3])] * 3)
    with pytest.raises(InputError, match="expected rounds of one source; some copied tokens"):
        advised(path)


def test_rounds_of_one_token_do_not_say_whether_they_are_blocks(tmp_path):
    """By hand: both rounds accept their token, and P(2 accepted) is 0 of 0 rounds."""
    path = write(tmp_path, *[of_decode([1, 1], [1, 1], [1, 1])] * 3)
    for words in ([], ["blocks=true"]):
        assert read_table(advised(path, *words), "lengths").throughput[1] == pytest.approx(2 / 1.2)


@pytest.mark.parametrize(("kind", "most_calls"), [("chain", 4), ("block", 1), ("copies", 0)])
def test_what_drafted_is_seen_in_decoded_rounds(tmp_path, table_pair, kind, most_calls):
    chain = type(table_pair)(target=table_pair.target, draft=table_pair.draft, end_ids=())
    method = (
        config.method("prompt_lookup") if kind == "copies" else config.method("speculative", ["policy.num_drafted=4"])
    )
    pair = block_pair(4) if kind == "block" else chain
    texts = decode(pair, [[0, 1, 0, 1]] * 5, method, Sampling(max_new_tokens=20))
    lines = [
        {"metrics": {"speculative_decoding": request_counts(text.rounds, 10)}, "rounds": [vars(r) for r in text.rounds]}
        for text in texts
    ]
    assert read_counts(write(tmp_path, *map(json.dumps, lines))).most_calls == most_calls


def test_methods_whose_rounds_are_no_chains_have_no_counts(tmp_path):
    for method in ("autoregressive", "specinfer"):
        words = [f"method={method}", "prompts=toy_math", "prompts.limit=2", "sampling.max_new_tokens=6"]
        folder = decode_command.run(config.compose("decode", [*words, f"paths.root_dir={tmp_path}"]))
        with pytest.raises(InputError, match="none of 2 lines has counts .*no counts"):
            read_counts(folder / "generations.jsonl")


def test_shorter_drafts_are_predicted_from_longer_ones(table_pair):
    """Rounds of 6 decoded by this package, said as the engine says them, against rounds of 1, 2 and 3 decoded."""
    pair = type(table_pair)(target=table_pair.target, draft=table_pair.draft, end_ids=())

    def rounds_of(length):
        method, sampling = config.method("speculative", [f"policy.num_drafted={length}"]), Sampling(max_new_tokens=60)
        texts = [g.rounds for g in decode(pair, [[0, 1]] * 400, method, sampling, batch_size=400)]
        return [[r for r in rounds if r.num_drafted == length] for rounds in texts]

    counts = of_histograms([[sum(r.num_accepted == j for r in rounds) for j in range(7)] for rounds in rounds_of(6)])
    lengths = observed.by_length(counts, 0.2, Bootstrap(50))
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
    assert "Draft 4 tokens (the longest that was counted: let the server draft more to see further): " in first
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
        read_counts(write(tmp_path, answer([1, 2]), line))


@pytest.mark.parametrize("changed", [
    {"per_step_drafted": [2, 2, 2]}, {"per_step_drafted": [2, 3]}, {"per_step_accepted": [2, 1]}, {"per_step_drafted": None},
    {"per_step_drafted": [1, 3]}, {"per_step_accepted": [1.0, 0]},
])  # fmt: skip
def test_steps_that_contradict_the_totals_are_refused(tmp_path, changed):
    assert read_counts(write(tmp_path, detailed([2, 2], [1, 0], 2))).reached.tolist() == [[2, 1]]
    with pytest.raises(
        InputError, match="line 1: .*(expected .* in every step|per_step_accepted and per_step_drafted)"
    ):
        read_counts(write(tmp_path, detailed([2, 2], [1, 0], 2, **changed)))


def test_a_file_without_usable_counts_names_the_flag(tmp_path):
    flag = "start vLLM with a draft and --per-request-spec-decode-metrics detailed"
    for reason, *lines in (
        ("no counts", '{"choices": []}'),
        ("num_spec_tokens=0: nothing was drafted", answer([7]), answer([9])),
        ("no rounds", answer([0, 0, 0])),
        ("rounds of changing length, by `summary`", answer([3, 1], num_draft_tokens=3)),
    ):
        with pytest.raises(InputError, match=f"none of {len(lines)} lines has counts .*{reason}.*{flag}"):
            read_counts(write(tmp_path, *lines))
    with pytest.raises(InputError, match="expected a file of responses at .*, found none"):
        read_counts(tmp_path / "none.jsonl")


def test_the_best_of_the_lengths_that_surely_pay_is_advised():
    """Two requests of twelve accept everything: four tokens look best, but one token is what pays beyond its interval."""
    counts = of_histograms([[26, 14, 0, 0, 0]] * 10 + [[0, 0, 0, 0, 40]] * 2)
    lengths = observed.by_length(counts, 0.1, Bootstrap(2000))
    assert lengths.throughput_low[1] > 1
    assert observed.sentence(lengths, counts, 0.1).startswith("Draft ")
