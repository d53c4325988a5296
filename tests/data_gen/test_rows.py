"""Rows of data sets as they come: nulls, parts, and texts where lists are expected."""

from __future__ import annotations

import json

import pytest

from data_gen.prompts import HubPrompts
from data_gen.templates import NullValueError, render
from toolkit.errors import InputError


def load(tmp_path, rows, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return HubPrompts("n", data_files=str(path), cache_dir=tmp_path / "cache", **options).load()


def user(content):
    return {"role": "user", "content": content}


REPLY = {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize(
    ("options", "nothing", "something", "expected"),
    [
        ({"turns": "turns"}, {"turns": None}, {"turns": ["a", None, "b"]}, "a"),
        ({"turns": "turns"}, {"turns": [None, "b"]}, {"turns": ["a"]}, "a"),
        ({"turns": "turns"}, {"turns": [user(None), REPLY]}, {"turns": [user("a"), REPLY]}, "a"),
        ({"turns": "turns"}, {"turns": [None, REPLY]}, {"turns": [user("a"), REPLY]}, "a"),
        ({"template": "Q: {{ question }}"}, {"question": None}, {"question": "a"}, "Q: a"),
        ({"template": "Q: {{ question|trim }}"}, {"question": None}, {"question": " a "}, "Q: a"),
        ({"template": "Q: {{ x.y[0] ~ '?' }}"}, {"x": {"y": [None]}}, {"x": {"y": ["a"]}}, "Q: a?"),
    ],
)
def test_rows_with_a_null_are_passed_over_and_counted(tmp_path, options, nothing, something, expected):
    with pytest.warns(RuntimeWarning, match=r"n \(test\): 2 of 3 rows ask nothing"):
        (prompt,) = load(tmp_path, [nothing, something, nothing], **options)
    assert (prompt.id, prompt.prompt) == ("n-test-00001", expected)


def test_a_null_answer_is_none(tmp_path):
    rows = [{"q": "a", "reply": None}, {"q": "b", "reply": "B"}]
    prompts = load(tmp_path, rows, template="{{ q }}", answer="{{ reply }}")
    assert [(prompt.prompt, prompt.answer) for prompt in prompts] == [("a", None), ("b", "B")]


def test_a_template_may_ask_whether_a_field_is_null():
    row = {"q": "a", "context": None, "more": {"x": None, "y": 1}}
    assert render("{{ q }}{% if context %} in {{ context }}{% endif %}", row) == "a"
    assert render("{{ q }}{{ '' if context is none else context }}{{ '!' if context == none }}", row) == "a!"
    assert render("{{ context|default('-', true) }}{{ more|tojson }}", row) == '-{"x": null, "y": 1}'
    with pytest.raises(NullValueError):
        render("{{ context.lower() }}", row)


def test_parts_of_text_are_one_text(tmp_path):
    parts = [{"type": "text", "text": "Good"}, {"type": "text", "text": " day"}]
    (prompt,) = load(tmp_path, [{"turns": [user(parts), REPLY]}], turns="turns")
    assert (prompt.prompt, prompt.answer) == ("Good day", "Hello")


@pytest.mark.parametrize(
    ("turns", "problem"),
    [
        ("What is it?", "expected a list of turns, got 'What is it?'"),
        ({"role": ["user"], "content": ["a"]}, "expected a list of turns, got {"),
        (
            [user([{"type": "image", "text": None}]), REPLY],
            "expected the content of a turn as text, or as parts of text",
        ),
        ([user(7), REPLY], "expected the content of a turn as text, or as parts of text, got 7"),
        ([{"role": None, "content": "a"}, REPLY], "expected turns with role and content, or from and value"),
    ],
)
def test_what_is_no_list_of_turns_is_named_with_its_row(tmp_path, turns, problem):
    with pytest.raises(InputError) as caught:
        load(tmp_path, [{"turns": turns}], turns="turns")
    assert str(caught.value).startswith(f"n (test), row 0: {problem}")
    assert "\n" not in str(caught.value)
