"""Judges: ratings read from what they say, a tiny model that is loaded here, and an endpoint that fails in every way."""

import json
import shutil
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers as hf

from analysis import quality
from analysis.quality.base import reasons, table
from analysis.quality.judge import REFERENCE, SINGLE, Judge, Template, rating_of
from data_gen import completions
from tests.data_gen.stub_target import drips, drops, says, sends, stalls, stub_judge
from toolkit.errors import InputError
from toolkit.models.prompts import Prompt
from toolkit.testing import tiny_tokenizer
from toolkit.types import Generation


def generations(texts):
    return [Generation(i, [1], [2], text) for i, text in enumerate(texts)]


def questions(count):
    return [Prompt(str(i), f"Question {i}?", f"reference {i}") for i in range(count)]


def judged(metric, texts):
    return metric.measure(questions(len(texts)), generations(texts))


def mean(metric, scores):
    return float(metric.value(table(metric, scores).sum(0)))


# -- what is asked and what is read -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reply, rating", [
    ("Good. Rating: [[8]]", 8), ("[[7.5]] because", 7.5), ("[[3]] or [[4]]", 3), ("[[10]]", 10), ("[[1]]", 1),
    ("Rating: 8", None), ("[8]", None), ("[[eight]]", None), ("[[0]]", None), ("[[11]]", None), ("[[-3]]", None),
    ("", None),
])  # fmt: skip
def test_a_rating_is_the_first_in_two_brackets(reply, rating):
    assert rating_of(reply)[0] == rating
    assert bool(rating_of(reply)[1]) == (rating is None)


def test_the_templates_places_are_filled_once(tmp_path):
    prompt = Prompt("1", "What is {answer}?", "{question} 42")
    text = Template.named("reference").filled(prompt, "It is {reference}.")
    filled = REFERENCE.replace("{question}", "What is {answer}?").replace("{answer}\n[", "It is {reference}.\n[")
    assert text == filled.replace("Reference Answer]\n{reference}", "Reference Answer]\n{question} 42")
    assert "[[rating]]" in SINGLE and '"Rating: [[5]]"' in SINGLE
    (tmp_path / "mine.txt").write_text("{question} but no more")
    with pytest.raises(InputError, match=r"lacks the placeholder \{answer\}"):
        Template.named(str(tmp_path / "mine.txt"))


def test_conversations_are_shown_whole():
    said = (("user", "Hi"), ("assistant", "Yes?"), ("user", "Why"))
    turns = tuple({"role": role, "content": text} for role, text in said)
    single = Template("t", "{question}|{answer}")
    assert single.filled(Prompt("1", messages=turns[:1]), "a") == "Hi|a"
    whole = "### User:\nHi\n\n### Assistant:\nYes?\n\n### User:\nWhy|a"
    assert single.filled(Prompt("1", messages=turns), "a") == whole
    tools, call = [{"function": {"name": "f"}}], {"function": {"name": "f", "arguments": {}}}
    asks = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]})
    shown = single.filled(Prompt("1", messages=asks, options={"tools": tools}), "a")
    assert shown == f"### Tools:\n{json.dumps(tools)}\n\n### User:\nHi\n\n### Assistant:\n{json.dumps([call])}|a"


@pytest.mark.parametrize("options, message", [
    ({"model": "m", "base_url": "http://a:b@host/v1"}, "expected an address without a password"),
    ({"model": "m", "base_url": "http://host/v1", "key_variable": "NO_SUCH_KEY"}, "NO_SUCH_KEY, it is not set"),
    ({"model": "toy/target", "template": "double"}, "template: expected single or reference, or a text file"),
    ({"model": "./no/such/folder"}, "expected a model folder at ./no/such/folder, found none"),
])  # fmt: skip
def test_what_cannot_judge_is_refused_at_once(options, message, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(InputError, match=message.replace(".", r"\.")) as caught:
        quality.get("judge", **options)
    assert "\n" not in str(caught.value) and "a:b" not in str(caught.value)


# -- a model that is loaded here --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    """A checkpoint that looks at the last token alone: after "z" it ends, after anything else it says [[7]]."""
    tokenizer = tiny_tokenizer("[[7]] " * 5)
    size = -(-len(tokenizer) // 8) * 8
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=size, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config)
    rates, ends, seven, closed = (tokenizer(text).input_ids[0] for text in ("[[", "z", "7", "]]"))
    then = {rates: seven, seven: closed, closed: 2, ends: 2}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(torch.eye(size)[: len(tokenizer)])
        for token in range(len(tokenizer)):
            model.lm_head.weight[then.get(token, rates), token] = 1
    folder = tmp_path_factory.mktemp("seven")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def answer_last(tmp_path):
    (tmp_path / "template.txt").write_text("{question}\n{answer}")
    return str(tmp_path / "template.txt")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_model_judges_greedily_and_silence_is_no_zero(seven, answer_last, batch_size):
    metric = Judge(seven, template=answer_last, max_tokens=8, batch_size=batch_size)
    scores = judged(metric, ["good", "bad z", "fine", "good", "z"])
    assert [score.counts for score in scores] == [(7, 1), None, (7, 1), (7, 1), None]
    assert reasons(scores) == {"the judge gave no rating": 2}
    assert mean(metric, scores) == 7
    for words in (str(seven), "weights ", "3 of 5 different answers rated"):
        assert words in metric.provenance


def test_what_the_judge_cannot_read_is_said(seven, answer_last):
    metric = Judge(seven, template=answer_last, max_tokens=8)
    scores = judged(metric, ["long " * 3000, "good"])
    assert scores[0].counts is None and "the judge could not read it: " in scores[0].reason
    assert scores[1].counts == (7, 1)


def test_judgements_are_kept_and_belong_to_their_judge(seven, answer_last, tmp_path, monkeypatch):
    options = {"template": answer_last, "max_tokens": 8, "kept": tmp_path / "kept"}
    first = judged(Judge(seven, **options), ["good", "z"])
    assert len(list((tmp_path / "kept").glob("*.json"))) == 2
    metric = Judge(seven, **options)
    monkeypatch.setattr(metric.judge, "ask", lambda questions: pytest.fail("asked again"))
    assert judged(metric, ["good", "z"]) == first
    assert f"2 judgements read from {tmp_path / 'kept'}" in metric.provenance
    judged(Judge(seven, **{**options, "max_tokens": 4}), ["good"])  # another way of asking
    assert len(list((tmp_path / "kept").glob("*.json"))) == 3


def test_a_judge_with_another_configuration_or_chat_template_judges_again(seven, answer_last, tmp_path):
    folder = tmp_path / "judge"
    shutil.copytree(seven, folder)
    config = json.loads((folder / "config.json").read_text())
    changes = {"config.json": json.dumps({**config, "rms_norm_eps": 0.01}), "chat_template.jinja": "{{ messages }}"}
    for number, (name, text) in enumerate([("README.md", ""), *changes.items()], start=1):
        (folder / name).write_text(text)
        judged(Judge(str(folder), template=answer_last, max_tokens=8, kept=tmp_path / "kept"), ["good"])
        assert len(list((tmp_path / "kept").glob("*.json"))) == number


# -- an endpoint ------------------------------------------------------------------------------------------------------


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with stub_judge() as judge:
        yield judge


def asking(stub, **options):
    return Judge("gpt", stub.address, **{"backoff": 0, "workers": 1, "retries": 2, "seconds": 20, **options})


def test_an_endpoint_is_asked_as_openai_documents(stub, monkeypatch):
    monkeypatch.setenv("THE_KEY", "sk-secret\n")
    metric = asking(stub, key_variable="THE_KEY", request={"seed": 3, "max_tokens": None, "max_completion_tokens": 99})
    assert judged(metric, ["an answer"])[0].counts == (7, 1)
    ((body, headers),) = stub.requests
    messages = body.pop("messages")
    assert body == {"model": "gpt", "temperature": 0, "seed": 3, "max_completion_tokens": 99}
    assert headers["path"] == "/v1/chat/completions" and headers["Authorization"] == "Bearer sk-secret"
    assert [turn["role"] for turn in messages] == ["system", "user"]
    assert messages[1]["content"] == SINGLE.replace("{question}", "Question 0?").replace("{answer}", "an answer")
    about = metric.provenance
    assert f"gpt at {stub.address}/chat/completions (temperature 0, " in about and "sk-secret" not in about
    assert "an endpoint need not answer twice alike" in about and "answered as stub-1 fp_9" in about


def by_number(handler):
    """Rates the answer 'number N' with N."""
    says(f"[[{handler.question.partition('number ')[2].split()[0]}]]")(handler)


def test_equal_answers_to_a_prompt_are_rated_once(stub):
    stub.answers = [by_number]
    metric = asking(stub, workers=4)
    twice = [questions(2)[i] for i in (0, 1, 0, 1)]
    scores = metric.measure(twice, generations(["number 3", "number 4", "number 3", "number 5"]))
    assert [score.counts[0] for score in scores] == [3, 4, 3, 5] and len(stub.requests) == 3
    assert metric.measure(twice[:1], generations(["number 3"])) == scores[:1] and len(stub.requests) == 3


def test_after_a_fault_it_is_asked_again(stub):
    nonsense = [
        sends(200, b"<html>busy</html>"),
        says(None),
        sends(500, b"oops"),
        sends(429, b"", Retry_After="0"),
        drops,
    ]
    stub.answers = [*nonsense, says("[[6]]")]
    assert judged(asking(stub, retries=5), ["a"])[0].counts == (6, 1)
    assert len(stub.requests) == 6


def test_without_any_reply_there_is_no_score(stub):
    stub.answers = [drops, drops, drops, says("[[6]]")]
    metric = asking(stub)
    scores = judged(metric, ["a", "b"])
    assert [score.counts for score in scores] == [None, (6, 1)] and mean(metric, scores) == 6
    assert scores[0].reason.startswith("the judge") and "\n" not in scores[0].reason


@pytest.mark.parametrize("kind", [stalls, drips])
def test_a_server_that_stalls_is_left(stub, kind):
    stub.answers = [kind(stub), kind(stub), says("[[6]]")]
    scores = judged(asking(stub, seconds=0.4, retries=0), ["a", "b", "c"])
    assert [score.counts for score in scores] == [None, None, (6, 1)]
    assert reasons(scores) == {"the judge did not answer in time": 2}


def test_waits_double_and_the_server_may_ask_for_more_or_less(stub, monkeypatch):
    monkeypatch.setattr(completions, "LONGEST_WAIT", 0.6)
    moments, doings = [], [drops, sends(429, b"", Retry_After="0.3"), drops, sends(503, b"", Retry_After="9999")]
    doings += [sends(503, b"", Retry_After="0"), says("[[6]]")]
    stub.answers = [lambda handler, do=do: (moments.append(time.monotonic()), do(handler)) for do in doings]
    assert judged(asking(stub, retries=5, backoff=0.1), ["a"])[0].counts == (6, 1)
    waits = [after - before for before, after in pairwise(moments)]
    assert all(0 <= wait - least < 0.25 for wait, least in zip(waits, [0.1, 0.3, 0.4, 0.6, 0], strict=True)), waits


@pytest.mark.parametrize("status", [401, 302])
def test_a_wrong_key_or_address_ends_it_at_once(stub, status, monkeypatch):
    monkeypatch.setenv("THE_KEY", "sk-secret")
    stub.answers = [sends(status, b"", Location=f"{stub.address}/elsewhere")]
    with pytest.raises(InputError, match=f"answers HTTP {status}") as caught:
        judged(asking(stub, key_variable="THE_KEY"), ["a", "b"])
    assert "sk-secret" not in str(caught.value) and len(stub.requests) <= 2  # the second may be on its way
    assert all(headers["path"] == "/v1/chat/completions" for _, headers in stub.requests)


def test_one_refused_question_is_left_out(stub):
    stub.answers = [says("[[6]]"), sends(400, b"too long")] + [sends(400, b"")] * 8 + [says("[[8]]")]
    scores = judged(asking(stub), [f"{i}" for i in range(11)])
    assert [score.counts for score in scores] == [(6, 1), *[None] * 9, (8, 1)]
    assert reasons(scores) == {"the judge refuses it: HTTP 400 Bad Request": 9}
    assert len(stub.requests) == 11  # nothing is asked again


def test_a_judge_that_answers_now_and_then_is_not_given_up(stub):
    stub.answers = ([sends(500, b"")] * (completions.GIVE_UP - 1) + [says("[[6]]")]) * 3
    scores = judged(asking(stub, retries=0), [f"{i}" for i in range(3 * completions.GIVE_UP)])
    assert [score.counts for score in scores].count((6, 1)) == 3


@pytest.mark.parametrize("answer", [sends(400, b""), sends(500, b"")])
def test_a_judge_that_never_answers_is_given_up(stub, answer, tmp_path):
    stub.answers = [answer]
    with pytest.raises(InputError, match=f"{completions.GIVE_UP} questions in a row got no answer"):
        judged(asking(stub, retries=1), [f"{i}" for i in range(50)])
    assert len(stub.requests) <= 2 * (completions.GIVE_UP + 1)


def test_what_was_answered_before_a_failure_is_kept(stub, tmp_path):
    stub.answers = [says("[[6]]"), says("[[8]]"), sends(401, b"")]
    with pytest.raises(InputError):
        judged(asking(stub, kept=tmp_path), ["a", "b", "c"])
    texts = [json.loads(path.read_text())["reply"] for path in tmp_path.glob("*.json")]
    assert sorted(texts) == ["[[6]]", "[[8]]"]
    stub.answers, stub.requests = [says("[[10]]")], []
    scores = judged(asking(stub, kept=tmp_path), ["a", "b", "c"])
    assert [score.counts[0] for score in scores] == [6, 8, 10] and len(stub.requests) == 1


def test_nobody_is_asked_about_what_cannot_be_rated(stub):
    failed = generations(["a"])
    failed[0].error = "broke"
    metric = asking(stub, template="reference")
    assert metric.measure([Prompt("1", "Q", "r")], failed)[0].reason == "decoding failed: broke"
    assert metric.measure([Prompt("1", "Q")], generations(["a"]))[0].reason == "no reference answer is known"
    assert stub.requests == [] and np.isnan(mean(metric, metric.measure([Prompt("1", "Q")], generations(["a"]))))
