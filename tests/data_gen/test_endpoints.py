"""Responses from endpoints: right ones, and servers that are down, slow, busy, or say other things than were asked for."""

import json
import time
from collections import Counter
from email.utils import formatdate
from pathlib import Path

import pytest

from data_gen import responses
from data_gen.completions import CompletionRequest, Completions, NoAnswer
from data_gen.keys import EndpointKeys
from tests.data_gen.stub_target import FIELDS, Status, StubTarget, stub_target
from toolkit.config import compose
from toolkit.errors import InputError, StaleError
from toolkit.models.remote import LOADER, remote_pair
from toolkit.runs.stage import read_manifest
from toolkit.sampling import Sampling

COUNT = 11
QUICK = ["served.backoff=0", "served.seconds=20", "served.attempts=2", "served.concurrency=3"]


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{i}", "prompt": "the cat " * (1 + i % 3) + str(i), "answer": str(i)} for i in range(COUNT)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def stub(checkpoints, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with stub_target(str(checkpoints[0])) as target:
        yield target


def words(checkpoints, prompts_file: Path, folder: Path, addresses, *more: str) -> list[str]:
    target, draft = checkpoints
    return [
        f"pair.target={target}", f"pair.draft={draft}", "prompts=jsonl", f"prompts.path={prompts_file}", "shard_size=4",
        "sampling.max_new_tokens=6", f"paths.output_dir={folder}", f"endpoints=[{','.join(addresses)}]", "served.model=tiny",
        *QUICK, *more,
    ]  # fmt: skip


@pytest.fixture
def make(checkpoints, prompts_file, tmp_path, stub):
    def run(*more: str, addresses=None, folder: str = "out") -> Path:
        known = [stub.address] if addresses is None else addresses
        return responses.run(compose("responses", words(checkpoints, prompts_file, tmp_path / folder, known, *more)))

    return run


def rows_of(folder: Path) -> list[dict]:
    return list(responses.read_rows(folder, ("done", "failed", "skipped")))


def errors_of(folder: Path) -> list[str]:
    return [row["error"] for row in rows_of(folder) if row["error"]]


# -- servers that do as they are asked --------------------------------------------------------------------------------


def test_rows_are_those_of_decoding_here_with_the_servers_tokens(make, stub, checkpoints, tmp_path, caplog):
    caplog.set_level("INFO")  # as Hydra sets it
    folder = make()
    assert "HTTP Request" not in caplog.text, "a progress bar, and no line per request"
    rows = rows_of(folder)
    assert [row["row"] for row in rows] == list(range(COUNT)) and {row["status"] for row in rows} == {"done"}
    for row in rows:
        said = stub.response({"prompt": row["prompt_ids"], "max_tokens": 6})
        assert row["token_ids"] == said
        assert row["finish_reason"] == ("end" if said[-1] == 2 else "length")
        assert row["text"] == stub.tokenizer.decode(said, skip_special_tokens=True)
    assert {row["finish_reason"] for row in rows} == {"end", "length"}
    about, address = read_manifest(folder)["served"], f"{stub.address}/completions"
    assert about["by"] == {"tiny": COUNT} and about["ids"] == {"returned": COUNT}
    assert about["endpoint"] == {address: COUNT} and about["seeds"].startswith("the engine's own")
    assert about["fields"] == {address: "as its openapi.json lists them"}
    local = responses.run(
        compose("responses", [*words(checkpoints, tmp_path / "prompts.jsonl", tmp_path / "here", ()), "endpoints=[]"])
    )
    assert [list(row) for row in rows_of(local)] == [list(row) for row in rows]
    assert [row["prompt_ids"] for row in rows_of(local)] == [row["prompt_ids"] for row in rows]


def test_no_proxy_stands_in_front_of_this_machine(make, stub, monkeypatch):
    """One that cannot be used is one line where it would stand."""
    for name, proxy in (
        ("http_proxy", "http://127.0.0.1:9"),
        ("HTTP_PROXY", "http://127.0.0.1:9"),
        ("ALL_PROXY", "socks9://a:9"),
    ):
        monkeypatch.setenv(name, proxy)
    monkeypatch.delenv("no_proxy")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert {row["status"] for row in rows_of(make())} == {"done"}
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name)
    with pytest.raises(InputError, match="http://far.example/v1/completions: HTTP_PROXY, .*socks9"):
        make(addresses=["http://far.example/v1"], folder="far")


def test_every_field_of_the_sampling_is_sent(make, stub):
    make(
        "sampling.temperature=.7", "sampling.top_p=.9", "sampling.top_k=5", "sampling.min_p=.05",
        "sampling.repetition_penalty=1.1", "sampling.stop=[zz]",
    )  # fmt: skip
    for body in stub.requests:
        sent = {name: body[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")}
        assert sent == {
            "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1, "stop": ["zz"],
        }  # fmt: skip
        assert (body["model"], body["max_tokens"], body["n"], body["stream"]) == ("tiny", 6, 1, False)
        assert body["stop_token_ids"] == [2] and body["return_token_ids"] is True and body["ignore_eos"] is False
    assert len({body["seed"] for body in stub.requests}) == COUNT


def test_seeds_belong_to_rows_and_neutral_values_are_sent_in_the_engines_words(make, stub):
    seeds = []
    for engine, every in (("vllm", 0), ("sglang", -1)):
        make(f"served.engine={engine}", folder=engine)
        assert all((body["top_k"], body["top_p"], body["min_p"]) == (every, 1, 0) for body in stub.requests)
        seeds.append({str(body["prompt"]): body["seed"] for body in stub.requests})
        stub.requests.clear()
    assert seeds[0] == seeds[1]
    folder = make("served.request={seed: null}", folder="unseeded")
    assert all("seed" not in body for body in stub.requests)
    assert "without a seed" in read_manifest(folder)["served"]["seeds"]


def test_stop_strings_end_a_response_with_the_token_that_completes_them(make, stub):
    spelt = stub.tokenizer("cat sat on", add_special_tokens=False).input_ids
    stub.response = lambda request: spelt  # type: ignore[method-assign]
    stub.change = lambda request, answer: {**answer, "choices": [{**answer["choices"][0], "finish_reason": "stop"}]}
    folder = make("sampling.stop=['on']", "sampling.max_new_tokens=30")
    assert {(row["finish_reason"], row["text"]) for row in rows_of(folder)} == {("stop", "cat sat ")}
    assert rows_of(folder)[0]["token_ids"] == spelt


def test_an_end_that_the_engine_cuts_off_is_put_back_if_it_is_named(make, stub):
    def cut(request, answer):
        choice = answer["choices"][0]
        if choice["token_ids"][-1] == 2:
            choice |= {"token_ids": choice["token_ids"][:-1], "matched_stop": 2}
            answer["usage"]["completion_tokens"] -= 1
        return answer

    stub.change = cut
    whole = [stub.response({"prompt": row["prompt_ids"], "max_tokens": 6}) for row in rows_of(make())]
    assert [row["token_ids"] for row in rows_of(make())] == whole


def test_the_key_goes_into_the_header_and_nowhere_else(make, stub, monkeypatch):
    monkeypatch.setenv("THE_KEY", "sk-secret")
    folder = make("served.key_variable=THE_KEY")
    assert {headers["Authorization"] for headers in stub.headers} == {"Bearer sk-secret"}
    assert not any("sk-secret" in path.read_text() for path in folder.rglob("*") if path.is_file())
    with pytest.raises(InputError, match="served.key_variable: expected .* NO_SUCH_KEY, it is not set"):
        make("served.key_variable=NO_SUCH_KEY", folder="other")


def test_many_are_asked_at_once_and_no_more(make, stub):
    stub.change = lambda request, answer: (time.sleep(0.05), answer)[1]
    make("served.concurrency=4")
    assert 2 <= stub.most_at_once <= 4


def test_no_more_requests_per_minute_than_allowed(make, stub):
    make("served.requests_per_minute=1200", "served.concurrency=8")
    gaps = sorted(stub.moments)
    assert 0.05 * (COUNT - 1) * 0.9 <= gaps[-1] - gaps[0] < 15


def test_tries_that_fail_are_counted_among_the_requests_per_minute(make, stub):
    faults = iter([status(503)] * 6)
    stub.change = lambda request, answer: next(faults, lambda *_: answer)(request, answer)
    make("served.requests_per_minute=1200", "served.concurrency=8", "served.attempts=8")
    assert len(stub.moments) >= COUNT + 6
    assert max(stub.moments) - min(stub.moments) >= 0.05 * (COUNT + 5) * 0.9


# -- what names the folder --------------------------------------------------------------------------------------------


def test_the_model_and_the_sampling_name_the_folder_and_no_address_does(make, stub, checkpoints, capsys):
    folder = make()
    with stub_target(str(checkpoints[0])) as other:
        assert make("served.concurrency=1", addresses=[other.address]) == folder and not other.requests
    assert "finished before" in capsys.readouterr().out
    with pytest.raises(StaleError, match="served_as.model was 'tiny', is 'large'"):
        make("served.model=large")
    with pytest.raises(StaleError, match="served_as"):
        make(addresses=())
    with pytest.raises(InputError, match="served.model: expected what the endpoints call the target, got null"):
        make("served.model=null")


# -- servers that fail ------------------------------------------------------------------------------------------------


def status(code: int, body: str = "", **headers: str):
    def fault(request, answer):
        raise Status(code, body, **headers)

    return fault


def down(stub: StubTarget) -> None:
    """From now on nothing is answered."""

    def hang_up(handler) -> None:
        handler.close_connection = True

    stub.post = stub.get = hang_up  # type: ignore[method-assign]


def test_an_endpoint_that_is_down_is_left_out_with_one_line(make, stub, capsys):
    folder = make(addresses=["http://127.0.0.1:9/v1", stub.address])
    assert Counter(row["status"] for row in rows_of(folder)) == {"done": COUNT}
    said = [line for line in capsys.readouterr().err.split("\n") if "left out" in line]
    assert len(said) == 1 and "http://127.0.0.1:9/v1/completions is left out: the endpoint is out of reach" in said[0]


def test_what_came_before_an_endpoint_went_down_is_not_asked_again(make, stub, checkpoints, tmp_path):
    def nine(request, answer):  # two rows are left: it answers no plain request either, so they do not fail
        if len(stub.requests) > 9:
            down(stub)
            raise OSError
        return answer

    stub.change = nine
    with pytest.raises(InputError, match="no endpoint is left"):
        make("served.concurrency=1")
    kept = [path for path in (tmp_path / "out").rglob("*.jsonl") if path.parent.name == "rows"]
    assert (tmp_path / "out" / "shard-00000.jsonl").exists() and len(kept) == 3
    with kept[-1].open("a") as file:
        file.write('{"kept": {"row": ')  # as a kill leaves it
    with stub_target(str(checkpoints[0])) as other:
        folder = make(addresses=[other.address])
        assert len(other.requests) == COUNT - 9
        said = [other.response({"prompt": row["prompt_ids"], "max_tokens": 6}) for row in rows_of(folder)]
    assert [row["token_ids"] for row in rows_of(folder)] == said
    assert not (folder / "rows").exists()
    assert len(read_manifest(folder)["served"]["endpoint"]) == 2


def test_the_rows_of_an_endpoint_that_goes_down_go_to_the_others(make, stub, checkpoints, capsys):
    with stub_target(str(checkpoints[0])) as other:
        stub.change = lambda request, answer: (down(stub), (_ for _ in ()).throw(OSError()))[1]
        folder = make(addresses=[stub.address, other.address])
        assert len(other.requests) == COUNT
        assert Counter(row["status"] for row in rows_of(folder)) == {"done": COUNT}
        assert capsys.readouterr().err.count("is left out") == 1
        with stub_target(str(checkpoints[0])) as third:
            other.requests.clear()
            for one in (other, third):
                one.change = lambda request, answer: (time.sleep(0.02), answer)[1]
            folder = make(addresses=[other.address, third.address], folder="shared")
            assert len(other.requests) + len(third.requests) == COUNT and other.requests and third.requests
            assert sum(read_manifest(folder)["served"]["endpoint"].values()) == COUNT


def test_an_endpoint_that_is_left_out_costs_a_row_no_turn(make, stub, checkpoints):
    """The row that the first one took fails once at the second one, and is asked again."""
    stub.change = status(401)
    with stub_target(str(checkpoints[0])) as other:

        def change(request, answer):
            time.sleep(0.05)
            taken = [body["prompt"] for body in stub.requests]
            if request["prompt"] in taken and sum(body["prompt"] in taken for body in other.requests) == 1:
                raise Status(500)
            return answer

        other.change = change
        folder = make("served.attempts=1", "served.concurrency=1", addresses=[stub.address, other.address])
        assert len(stub.requests) == 1 and len(other.requests) == COUNT + 1
    assert Counter(row["status"] for row in rows_of(folder)) == {"done": COUNT}


def test_an_endpoint_that_stalls_is_left_and_its_rows_are_not_lost(make, stub, checkpoints):
    with stub_target(str(checkpoints[0])) as other:
        stub.change = lambda request, answer: (stub.over.wait(30), answer)[1]
        folder = make("served.seconds=.3", "served.concurrency=5", addresses=[stub.address, other.address])
    assert Counter(row["status"] for row in rows_of(folder)) == {"done": COUNT}


@pytest.mark.parametrize(
    "header", [lambda: "0.3", lambda: formatdate(time.time() + 3, usegmt=True)], ids=["seconds", "date"]
)
def test_all_threads_wait_as_long_as_the_server_asks(make, stub, header):
    """Dates are whole seconds, so three of them are at least two."""
    faults = iter([lambda *_: status(429, Retry_After=header())(0, 0)])
    stub.change = lambda request, answer: next(faults, lambda *_: answer)(request, answer)
    make("served.concurrency=1", "served.attempts=4")
    assert 0.3 <= stub.moments[1] - stub.moments[0] < 30


def test_one_refused_row_fails_alone_in_the_servers_words(make, stub):
    long = json.dumps({"error": {"message": "maximum context length is 5"}})
    stub.change = lambda request, answer: status(400, long)(0, 0) if len(request["prompt"]) > 5 else answer
    folder = make("prompts.limit=7")
    assert set(errors_of(folder)) == {"the endpoint refuses it: HTTP 400 Bad Request (maximum context length is 5)"}
    assert 0 < len(errors_of(folder)) < 7


def test_an_answer_that_is_under_way_when_the_last_endpoint_is_left_out_is_kept(make, stub, checkpoints):
    """The first request is answered after the second one has shown that the key is wrong."""

    def change(request, answer):
        if request is not stub.requests[0]:
            raise Status(401)
        time.sleep(0.5)
        return answer

    stub.change = change
    with pytest.raises(InputError, match="no endpoint is left"):
        make("served.concurrency=2", "prompts.limit=4")
    first = stub.requests[0]["prompt"]
    with stub_target(str(checkpoints[0])) as other:
        make("prompts.limit=4", addresses=[other.address])
        assert len(other.requests) == 3 and first not in [body["prompt"] for body in other.requests]


@pytest.mark.parametrize("code", [401, 302])
def test_a_wrong_key_or_address_ends_it_at_once(make, stub, code):
    stub.change = status(code)
    with pytest.raises(InputError, match=f"answers HTTP {code}.*expected endpoints and served.key_variable"):
        make("served.concurrency=1")
    assert len(stub.requests) == 1


def test_another_model_than_the_one_asked_for_is_no_target(make, stub):
    stub.serves = "other"
    with pytest.raises(InputError, match="it serves other: expected served.model=tiny"):
        make()
    assert not stub.requests


def test_a_field_that_a_server_does_not_know_is_refused_where_it_matters(make, stub):
    stub.fields = tuple(name for name in FIELDS if name != "min_p")
    with pytest.raises(InputError, match="it does not know min_p"):
        make("sampling.min_p=.1")
    folder = make(folder="neutral")
    assert all("min_p" not in body for body in stub.requests)
    assert [*read_manifest(folder)["served"]["fields"].values()] == [
        "as its openapi.json lists them, min_p left out (neutral)"
    ]
    stub.fields = ()
    told = read_manifest(make(folder="silent"))["served"]["fields"]
    assert "may have been ignored" in next(iter(told.values()))


@pytest.mark.parametrize(("more", "message"), [
    (["served.engine=openai", "sampling.top_k=3"], "sampling.top_k: engine=openai knows no top_k"),
    (
        ["+served.request.top_p=null", "sampling.top_p=.5"],
        "served.request.top_p: said by model, prompts and sampling",
    ),
    (["served.request.seed=1"], "served.request.seed: every row has one"),
    (["endpoints=['http://a:b@host/v1']"], "expected an address without a password"),
])  # fmt: skip
def test_what_cannot_be_asked_is_refused_at_once(make, stub, more, message):
    with pytest.raises(InputError, match=message) as caught:
        make(*more)
    assert "a:b" not in str(caught.value) and not stub.requests


# -- servers that lie -------------------------------------------------------------------------------------------------


def choice(**changes):
    """The right answer with a choice that says other things; functions change what was right."""

    def lie(request, answer):
        right = answer["choices"][0]
        told = {name: value(right[name]) if callable(value) else value for name, value in changes.items()}
        ids = told.get("token_ids", right["token_ids"])
        usage = {**answer["usage"], "completion_tokens": len(ids)}
        return {**answer, "choices": [{**right, **told}], "usage": usage}

    return lie


LIES = {
    "too many tokens": (choice(token_ids=[5] * 7), "it returns 7 tokens, asked for were 1 to 6"),
    "none": (choice(token_ids=[]), "it returns 0 tokens"),
    "outside the vocabulary": (choice(token_ids=[5, 10**6]), r"it returns the token 1000000: expected ids in \[0, "),
    "negative": (choice(token_ids=[-1, 2]), "it returns the token -1"),
    "truth": (choice(token_ids=[True, 2]), "it returns the token True"),
    "another prompt": (choice(prompt_token_ids=[4, 4]), "it has read another prompt"),
    "a longer prompt": (lambda request, answer: {**answer, "usage": {"prompt_tokens": 99}}, "it has read 99 tokens"),
    "miscounted": (lambda request, answer: {**answer, "usage": {"completion_tokens": 1}}, "says that there are 1"),
    "two choices": (lambda request, answer: {**answer, "choices": answer["choices"] * 2}, "expected one choice"),
    "no choice": (lambda request, answer: {"object": "list"}, "expected one choice"),
    "a list": (lambda request, answer: [answer], "expected one choice"),
    "another model": (lambda request, answer: {**answer, "model": "small"}, "it answers as small, asked for was tiny"),
    "aborted": (choice(finish_reason="abort"), "its finish_reason is 'abort'"),
    "goes on": (choice(token_ids=[5, 2, 5], finish_reason="length"), "it goes on after an end of text, token 2 of 3"),
    "short": (choice(token_ids=[5, 6], finish_reason="length"), "it ends for its length after 2 tokens, asked for were 6"),
    "an end beyond the length": (
        choice(token_ids=[5] * 6, finish_reason="stop", matched_stop=2), "it stops at the token 5, which ends no text"),
    "another end": (choice(token_ids=[5, 6], finish_reason="stop"), "it stops at the token 6, which ends no text"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LIES)
def test_an_answer_to_something_else_is_not_believed(checkpoints, stub, kind):
    lie, reason = LIES[kind]
    pair = remote_pair({"_target_": LOADER, "target": str(checkpoints[0])})
    completions = Completions(stub.address, EndpointKeys(model="tiny"), pair, Sampling(max_new_tokens=6))
    ids = stub.tokenizer("the cat 0").input_ids
    request = {"model": "tiny", "prompt": ids, "max_tokens": 6, "return_token_ids": True}
    question = CompletionRequest(0, ids, 6)
    assert completions.read(stub.answer(request), question).token_ids == stub.response(request)
    with pytest.raises(NoAnswer, match=reason):
        completions.read(lie(request, stub.answer(request)), question)


def test_a_row_that_is_lied_about_fails_alone_after_two_turns(make, stub):
    wrong = stub.tokenizer("the cat 0").input_ids
    lie = LIES["negative"][0]
    stub.change = lambda request, answer: lie(request, answer) if request["prompt"] == wrong else answer
    folder = make()
    assert Counter(row["status"] for row in rows_of(folder)) == {"done": COUNT - 1, "failed": 1}
    assert "it returns the token -1" in rows_of(folder)[0]["error"]
    assert sum(body["prompt"] == wrong for body in stub.requests) == 2  # each turn once: the answer came


def test_an_endpoint_that_always_lies_is_left_out(make, stub):
    stub.change = LIES["another model"][0]
    with pytest.raises(InputError, match="5 questions in a row got no answer, the last one: it answers as small"):
        make("served.concurrency=1")
    assert len(stub.requests) == 5


# -- servers that return texts alone ----------------------------------------------------------------------------------


def text_alone(request, answer):
    right = answer["choices"][0]
    return {**answer, "choices": [{name: right[name] for name in ("index", "text", "finish_reason")}]}


def test_texts_are_encoded_again_and_those_of_other_tokens_dropped_and_counted(make, stub):
    """The stub spells "the" letter by letter for one prompt: the same text, other tokens."""
    spelt = [stub.tokenizer(letter, add_special_tokens=False).input_ids[0] for letter in "the"]
    odd = stub.tokenizer("the cat 0").input_ids
    usual = stub.response
    stub.response = lambda request: [*spelt, 2] if request["prompt"] == odd else usual(request)  # type: ignore[method-assign]
    stub.change = text_alone
    folder = make()
    (dropped,), rows = responses.read_rows(folder, ("skipped",)), list(responses.read_rows(folder))
    assert [row["token_ids"] for row in rows] == [usual({"prompt": r["prompt_ids"], "max_tokens": 6}) for r in rows]
    assert dropped["row"] == 0 and "does not round-trip" in dropped["error"]
    assert read_manifest(folder)["served"]["ids"] == {"encoded again": COUNT - 1, "does not round-trip": 1}
    assert read_manifest(folder)["rows"]["skipped"] == 1


def test_a_stop_string_that_is_not_shown_is_not_guessed(make, stub):
    stub.change = text_alone
    folder = make("sampling.stop=[zz]")
    ended = [row for row in rows_of(folder) if row["error"]]
    assert ended and all("which token has ended the text is not said" in row["error"] for row in ended)
    assert {row["finish_reason"] for row in rows_of(folder) if not row["error"]} <= {"length", "stop"}


def test_log_probabilities_may_say_the_tokens(make, stub):
    def change(request, answer):
        right = answer["choices"][0]
        named = [f"token_id:{one}" for one in right["token_ids"]]
        return {**answer, "choices": [{**text_alone(request, answer)["choices"][0], "logprobs": {"tokens": named}}]}

    stub.change = change
    stub.fields = (*FIELDS, "logprobs", "return_tokens_as_token_ids")
    folder = make("served.request={logprobs:0,return_tokens_as_token_ids:true}")
    assert read_manifest(folder)["served"]["ids"] == {"returned": COUNT}
    assert stub.requests[0]["return_tokens_as_token_ids"] is True


def test_an_engine_that_takes_texts_is_asked_in_its_words(make, stub):
    stub.fields, stub.change = (), text_alone
    folder = make("served.engine=transformers", "sampling.temperature=.5", "sampling.top_k=7")
    assert Counter(row["status"] for row in rows_of(folder)) == {"done": COUNT}
    body = stub.requests[0]
    assert isinstance(body["prompt"], str)
    assert set(body) == {"model", "prompt", "max_tokens", "seed", "generation_config"}
    assert json.loads(body["generation_config"]) == {
        "do_sample": True, "max_new_tokens": 6, "temperature": 0.5, "top_k": 7, "top_p": 1.0, "repetition_penalty": 1.0,
        "eos_token_id": [2], "pad_token_id": 2,
    }  # fmt: skip
