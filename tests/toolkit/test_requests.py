"""Rows like requests to a chat service: tools, documents, options of the template, tool calls, and texts that go on."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest

from data_gen import responses, traces
from data_gen.texts import read_responses
from tests.data_gen.stub_target import stub_target
from toolkit import ModelPair, config
from toolkit.config import compose
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash
from toolkit.models.pair import TOY
from toolkit.models.prompts import READS, first_ids, read_jsonl
from toolkit.trace.store import read_traces

ROOT = Path(__file__).parents[2]
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\nYou may call one or more functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for document in documents or [] %}{{- 'Document ' + document.title + ': ' + document.text + '\\n' }}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": PARAMETERS}}]
DOCUMENTS = [{"title": "Paris", "text": "It is sunny."}]
ASK = [{"role": "user", "content": "Is it warm in Paris?"}]
BEGUN = [*ASK, {"role": "assistant", "content": "It is"}]
THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
GOING_ON = {"chat_template_kwargs": {"continue_final_message": True}}


def call_of(arguments):
    return {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def calling(content, arguments):
    """A conversation in which a tool was called and has answered."""
    call = {"role": "assistant", "content": content, "tool_calls": [call_of(arguments)]}
    return [*ASK, call, {"role": "tool", "tool_call_id": "c1", "content": "21"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The toy pair's checkpoints, with a template that reads tools."""
    root = tmp_path_factory.mktemp("qwen")
    for name in ("target", "draft"):
        shutil.copytree(TOY / name, root / name)
    pair = ModelPair.from_pretrained(root / "target", root / "draft")
    pair.tokenizer.chat_template = QWEN
    for name in ("target", "draft"):
        pair.tokenizer.save_pretrained(root / name)
    return root / "target", root / "draft"


@pytest.fixture(scope="module")
def pair(folders):
    return ModelPair.from_pretrained(*folders)


def read(folder: Path, *rows):
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": number, **row}) + "\n" for number, row in enumerate(rows)))
    return read_jsonl(path)


def expected(pair, messages, **options):
    options = {"add_generation_prompt": True, **options}
    return pair.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


# -- what the template reads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({}, {}),
        ({"tools": None, "chat_template_kwargs": None}, {}),
        ({"tools": TOOLS}, {"tools": TOOLS}),
        ({"documents": DOCUMENTS}, {"documents": DOCUMENTS}),
        (THINKING, {"enable_thinking": False}),
        ({"tools": TOOLS, **THINKING}, {"tools": TOOLS, "enable_thinking": False}),
    ],
)
def test_the_template_reads_what_a_row_says(row, options, pair, tmp_path):
    (prompt,) = read(tmp_path, {"messages": ASK, **row})
    assert pair.encode(prompt.content) == expected(pair, ASK, **options)
    assert (pair.encode(prompt.content) == pair.encode(ASK)) == (not options)


def test_options_of_a_row_go_before_those_of_the_command(folders, tmp_path):
    pair = ModelPair.from_pretrained(*folders, chat_template_options={"enable_thinking": True, "tools": TOOLS})
    own, plain = read(tmp_path, {"messages": ASK, **THINKING}, {"messages": ASK})
    assert pair.encode(own.content) == expected(pair, ASK, tools=TOOLS, enable_thinking=False)
    assert pair.encode(plain.content) == expected(pair, ASK, tools=TOOLS, enable_thinking=True)


@pytest.mark.parametrize("content", [None, "", "I look."])
@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
def test_tool_calls_of_a_log_are_read_as_a_server_reads_them(content, arguments, pair, tmp_path):
    """Null contents, one part of text, arguments as JSON: an API has them so, templates want text and objects."""
    part = [{"role": "user", "content": [{"type": "text", "text": ASK[0]["content"]}]}]
    logged = [*part, *calling(content, arguments)[1:]]
    (prompt,) = read(tmp_path, {"messages": logged, "tools": TOOLS})
    ids = expected(pair, calling(content or "", {"city": "Paris"}), tools=TOOLS)
    assert pair.encode(prompt.content) == pair.encode({"messages": logged, "tools": TOOLS}) == ids


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "Hi", "tools": TOOLS}, "expected messages beside tools, got a prompt"),
        ({"messages": ASK, "tools": "weather"}, "tools: expected a list of"),
        ({"messages": ASK, "documents": ["text"]}, "documents: expected a list of"),
        ({"messages": ASK, "chat_template_kwargs": [1]}, "chat_template_kwargs: expected"),
        ({"messages": ASK, "chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize: prompts are"),
        ({"messages": [{"role": "user", "content": None}]}, "null beside tool_calls alone"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "at most one part of text"),
        ({"messages": calling(None, "{")}, "expected JSON as the arguments of a tool call, got '{'"),
    ],
)
def test_another_form_is_one_line(row, words, tmp_path):
    with pytest.raises(InputError, match=f"prompts.jsonl, line 1: .*{re.escape(words)}") as caught:
        read(tmp_path, row)
    assert "\n" not in str(caught.value)


def test_an_option_that_the_template_does_not_read_is_warned_of(pair):
    with pytest.warns(RuntimeWarning, match="reads no option called thinking: it has no effect"):
        pair.encode({"messages": ASK, "tools": TOOLS, "chat_template_kwargs": {"thinking": True}})
    with pytest.raises(InputError, match="unknown argument 'tool': did you mean tools"):
        pair.encode({"messages": ASK, "tool": TOOLS})


# -- which prompt it is -----------------------------------------------------------------------------------------------


def test_options_are_part_of_a_prompt_and_others_keep_their_hash(tmp_path):
    hello = [{"role": "user", "content": "the cat"}]
    longer = [{**hello[0], "name": "A"}, {"role": "assistant", "content": "sat"}]
    others = [{"messages": hello, **own} for own in ({"tools": TOOLS}, {"tools": TOOLS[:0]}, THINKING)]
    prompts = read(tmp_path, {"prompt": "the cat"}, {"messages": hello}, {"messages": longer}, *others, others[0])
    hashes = [content_hash(prompt.content) for prompt in prompts]
    assert hashes[:3] == ["18dd0539f972", "33090fe74448", "d4a51afbeb71"]
    assert len(set(hashes)) == 6 and hashes[-1] == hashes[3]
    assert first_ids(prompts) == ["0", "1", "2", "3", "4", "5", "3"]


def test_responses_and_recordings_are_of_the_prompts_with_their_tools(folders, pair, tmp_path):
    rows = [{"messages": ASK, "tools": TOOLS}, {"messages": ASK}, {"messages": calling(None, "{}"), "tools": TOOLS}]
    prompts = read(tmp_path, *rows)
    ids = [expected(pair, ASK, tools=TOOLS), expected(pair, ASK), expected(pair, calling("", {}), tools=TOOLS)]
    words = [f"pair.target={folders[0]}", f"pair.draft={folders[1]}", f"paths.root_dir={tmp_path}"]
    read_prompts = [*words, "prompts=jsonl", f"prompts.path={tmp_path}/prompts.jsonl", "sampling.max_new_tokens=4"]
    folder = responses.run(compose("responses", read_prompts))
    assert [row["prompt_ids"] for row in read_responses(folder).rows] == ids
    recording = traces.run(compose("traces", [*words, f'responses="{folder}"']))
    assert sorted(read_traces(recording).prompt_lengths.tolist()) == sorted(map(len, ids))
    generations = decode(pair, [p.content for p in prompts], config.method("speculative"), Sampling(max_new_tokens=4))
    assert [generation.prompt_ids for generation in generations] == ids
    prompts = read(tmp_path, {**rows[0], "tools": TOOLS * 2}, *rows[1:])
    assert responses.run(compose("responses", read_prompts)) != folder


def test_an_endpoint_is_sent_the_ids_of_the_tools(folders, pair, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    read(tmp_path, {"messages": ASK, "tools": TOOLS})
    with stub_target(str(folders[0])) as stub:
        words = [
            f"pair.target={folders[0]}",
            "pair.draft=null",
            "prompts=jsonl",
            f"prompts.path={tmp_path}/prompts.jsonl",
        ]
        words += [f"endpoints=[{stub.address}]", "served.model=tiny", f"paths.root_dir={tmp_path}"]
        responses.run(compose("responses", [*words, "sampling.max_new_tokens=4"]))
    assert expected(pair, ASK, tools=TOOLS) in [request["prompt"] for request in stub.requests]


# -- what nothing reads -----------------------------------------------------------------------------------------------


def test_keys_that_nothing_reads_are_named_once_with_their_counts(tmp_path):
    row = {"messages": ASK, "tools": TOOLS, "category": "weather", "model": "m"}
    with pytest.warns(RuntimeWarning) as caught:
        prompts = read(tmp_path, row, {**row, "tool_choice": "auto"}, {"prompt": "Hi"})
    (warning,) = caught
    assert str(warning.message).endswith("rows they are): model (2), tool_choice (1)")
    assert prompts[1].extra == {"category": "weather", "model": "m", "tool_choice": "auto"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(tmp_path, *({"prompt": "Hi", name: "x"} for name in READS))


def test_the_list_of_keys_that_are_read_is_whole():
    """A data set of the hub alone can bring a "prompt" beside the prompt's own text."""
    paths = [path for package in ("toolkit", "data_gen", "analysis") for path in (ROOT / package).rglob("*.py")]
    reads = re.compile(r'(?:\bextra\.get\(|prompt\.extra\[)"(\w+)"')
    keys = {key for path in paths for key in reads.findall(path.read_text())}
    assert keys == {*READS, "prompt"}


# -- a conversation that ends with the assistant's turn ---------------------------------------------------------------


def test_a_last_turn_of_the_assistant_is_gone_on_with(folders, pair, tmp_path):
    going_on = ModelPair.from_pretrained(*folders, chat_template_options={"continue_final_message": True})
    wanted = expected(pair, BEGUN, add_generation_prompt=False, continue_final_message=True)
    assert going_on.encode(BEGUN) == wanted
    assert pair.text(wanted).endswith("It is")
    for other in (ASK, calling("I look.", {})[:2]):  # a file may hold all kinds
        assert going_on.encode(other) == pair.encode(other)
    (row,) = read(tmp_path, {"messages": BEGUN, **GOING_ON})
    assert pair.encode(row.content) == wanted
    assert pair.encode(BEGUN) == expected(pair, BEGUN)  # off by default


def test_going_on_is_said_by_the_config_and_is_no_option_of_the_template(folders):
    words = [f"pair.target={folders[0]}", f"pair.draft={folders[1]}"]
    cfg = compose("decode", [*words, "+pair.chat_template_options.continue_final_message=true"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        going_on = config.instantiate(cfg.pair)
    assert going_on.text(going_on.encode(BEGUN)).endswith("It is")
