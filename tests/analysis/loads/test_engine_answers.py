"""Engines that are started or asked: programs that stand for xllamacpp and for a server, with known prices."""

import json
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pandas as pd
import pytest

from analysis import timing
from analysis.loads.engine_answers import ask_xllamacpp
from analysis.loads.engine_counts import rounds_of
from analysis.loads.streamed import streamed_text
from toolkit import config
from toolkit.costs.load import LoadCost
from toolkit.errors import InputError

gguf = pytest.importorskip("gguf")

# Rounds of .1 s, .05 s more where they draft, .02 s per drafted token, .01 s per copied one; half of a round is accepted.
FAKE = """
import os, types
ns = types.SimpleNamespace
class common_speculative_type:
    COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE, COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE = "draft", "lookup"
class CommonParams:
    def __init__(self):
        self.model, self.cpuparams = ns(path=""), ns()
        draft = ns(mparams=ns(path=""), n_max=3, p_min=0.5)
        self.speculative = ns(types=[], draft=draft, ngram_simple=ns(size_n=12, size_m=48))
class Server:
    def __init__(self, params):
        assert os.path.exists(params.model.path)
        self.params, self.count = params, 0
        print("loading", params.model.path)
        if params.speculative.types == ["draft"]:
            assert os.path.exists(params.speculative.draft.mparams.path) and params.speculative.draft.p_min == 0
    def handle_completions(self, request, receive=None):
        if receive is not None:
            assert request["stream"] and request["timings_per_token"]
            for number, letter in enumerate("so"):
                receive({"choices": [{"text": letter}], "timings": {"predicted_n": number + 1, "draft_n": 2 * number}})
            return None
        self.count += 1
        if self.count == int(os.environ.get("DIES", 0)):
            raise RuntimeError("out of memory")
        speculative = self.params.speculative
        source = "".join(speculative.types)
        k = {"": 0, "draft": speculative.draft.n_max, "lookup": speculative.ngram_simple.size_m}[source]
        rounds, number = 20 + self.count + k, len(str(request["prompt"]))
        drafted = 0 if not k else k * rounds - self.count
        seconds = 0.1 * rounds + (0.05 * min(rounds, drafted) + 0.02 * drafted if source == "draft" else 0.01 * drafted)
        accepted = drafted // 2
        timings = {"predicted_n": rounds + accepted + 1, "predicted_ms": 1e3 * seconds, "prompt_n": number}
        timings |= {"prompt_ms": number * (3 if source == "draft" else 2)}
        timings |= {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
        return {"model": self.params.model.path, "timings": timings, "choices": [{"text": "so", "finish_reason": "length"}]}
    def handle_chat_completions(self, request, receive=None):
        return self.handle_completions({**request, "prompt": request["messages"]}, receive)
"""


def prompts(folder, count=4):
    lines = [{"id": n, "prompt": "x" * (10 + 7 * n)} for n in range(count - 1)]
    lines.append({"id": "chat", "messages": [{"role": "user", "content": "hello"}]})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [f"prompts.path={folder / 'prompts.jsonl'}", "prompts=jsonl", "sampling.max_new_tokens=16", "track=false"]


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Overrides of a probe with the fake engine, and two GGUF files."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "xllamacpp.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    for name in ("target", "draft"):
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "llama")
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    pair = [f"pair.{name}={tmp_path / name}.gguf" for name in ("target", "draft")]
    return [
        "engine=xllamacpp",
        *pair,
        *prompts(tmp_path),
        "requests=3",
        "num_drafted=[1,4]",
        f"paths.root_dir={tmp_path}",
    ]


def test_llamacpp_is_started_at_every_k_and_priced(words, tmp_path, capsys):
    folder = timing.run(config.compose("timing", words))
    printed = " ".join(capsys.readouterr().out.split())  # lines are wrapped, by the length of the processor's name
    assert "started 4 times (alone, K1, K4, lookup) for 12 answers of at most 16 tokens" in printed
    assert "costs of llama.cpp, target.gguf (Q4_K_M), " in printed and ", 3 threads: 12 answers" in printed
    prices = pd.read_csv(folder / "engine.csv").set_index("price").seconds
    expected = {"round": 0.1, "drafting round": 0.05, "drafted token": 0.02, "column": 0.01, "prompt token": 0.002}
    assert {name: prices[name] for name in expected} == pytest.approx(expected, rel=0.05)
    assert LoadCost.load(folder / "costs.json").engine.widest == 9  # copies of eight


def test_streamed_answers_keep_their_prompts_and_their_rounds(words, tmp_path):
    messages = [{"role": "user", "content": "hello"}]
    settings = {"model": str(tmp_path / "target.gguf"), "source": "none", "num_drafted": 2, "max_tokens": 4}
    path = tmp_path / "answers.jsonl"
    asked = ask_xllamacpp(
        sys.executable, {**settings, "temperature": 0.0, "stream": True}, [[1, 2], "so", messages], path
    )
    assert [answer.get("prompt_token_ids") or answer.get("prompt") or answer["messages"] for answer in asked] == [
        [1, 2],
        "so",
        messages,
    ]
    assert [rounds_of(answer) for answer in asked] == [(2, [2], [0])] * 3
    assert all(streamed_text(answer["stream"]) == "so" and answer["timings"]["draft_n"] == 2 for answer in asked)


def test_what_an_engine_answered_before_it_ended_is_kept(words, monkeypatch, tmp_path):
    monkeypatch.setenv("DIES", "3")  # the warm-up, one answer, and the end
    with pytest.raises(InputError, match="xllamacpp ended with 1: RuntimeError: out of memory"):
        timing.run(config.compose("timing", words))
    monkeypatch.setenv("DIES", "0")
    (kept,) = tmp_path.rglob("alone.jsonl")
    with kept.open("a") as file:
        file.write(kept.read_text()[:40])  # an answer that was cut short
    folder = timing.run(config.compose("timing", words))
    lines = (folder / "answers" / "alone.jsonl").read_text().split("\n")[:-1]
    counts = [json.loads(line)["timings"]["prompt_n"] for line in lines]
    assert counts == [10, 17, 24], "each prompt once, in order"
    assert timing.run(config.compose("timing", words)) == folder, "found finished"


def test_wrong_engines_are_one_line(words, monkeypatch, tmp_path):
    with pytest.raises(InputError, match=r"expected pair.target=FILE.gguf, got toy/target"):
        timing.run(config.compose("timing", ["engine=xllamacpp", "pair.target=toy/target"]))
    with pytest.raises(InputError, match="requests of at least 2"):
        timing.run(config.compose("timing", [*words, "requests=1"]))
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(InputError, match=r"No module named 'xllamacpp'; engine_python=PATH"):
        timing.run(config.compose("timing", words))


@contextmanager
def server(answer):
    """A server whose answers are `answer(path, body)`; yields its address and the requests."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            self.reply({"data": [{"id": "big"}]})

        def do_POST(self):
            requests.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.reply(answer(*requests[-1]))

        def reply(self, value):
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", requests
    finally:
        http.shutdown()
        http.server_close()


def test_a_server_is_asked_start_by_start_and_priced(tmp_path):
    """Messages and texts go to their own addresses, the first request only warms up, and seconds come from the asker."""
    files = []
    for source, k in (("none", 0), ("draft", 2), ("draft", 4)):

        def answer(path, body, k=k):
            number = len(str(body.get("prompt") or body["messages"]))
            rounds = 10 + number % 7
            counts = {
                "num_spec_tokens": k, "num_spec_steps": rounds, "num_draft_tokens": k * rounds,
                "num_accepted_draft_tokens": 0, "acceptance_histogram": [rounds],
            }  # fmt: skip
            usage = {"completion_tokens": rounds + 1, "prompt_tokens": number}
            return {"model": "big", "usage": usage, "metrics": {"speculative_decoding": counts if k else None}}

        with server(answer) as (url, requests):
            options = [f"engine={url}", f"source={source}", f"num_drafted=[{max(k, 1)}]", f"paths.root_dir={tmp_path}"]
            folder = timing.run(config.compose("timing", [*prompts(tmp_path), *options, "requests=4"]))
        assert [path for path, _ in requests] == ["/v1/completions"] * 4 + ["/v1/chat/completions"]
        assert {body["model"] for _, body in requests} == {"big"} and requests[-1][1]["max_tokens"] == 16
        files.append(folder / "answers.jsonl")
        lines = [json.loads(line) for line in files[-1].read_text().split("\n")[:-1]]
        assert len(lines) == 4 and all(line["source"] == source and line["seconds"] > 0 for line in lines)
        assert all("processor" in line for line in lines), "it is this machine's"
    with pytest.raises(InputError, match=r"num_drafted=\[K\] that the server was started with"):
        timing.run(config.compose("timing", [*prompts(tmp_path), *options, "num_drafted=[1,2]"]))
    gone = [*prompts(tmp_path), *options, "num_drafted=[3]"]
    with pytest.raises(InputError, match="is out of reach"):
        timing.run(config.compose("timing", gone))
