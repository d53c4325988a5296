"""Prompts files: what is read, and one line per mistake."""

import json

import pytest

from toolkit.errors import InputError
from toolkit.models.prompts import Prompt, read_jsonl


@pytest.fixture
def file(tmp_path):
    def write(*lines):
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        return path

    return write


def test_prompts_are_read_in_order(file):
    messages = [{"role": "user", "content": "Hi"}]
    path = file({"id": 7, "prompt": "a\u2028b"}, "", {"id": "x", "messages": messages, "answer": 42, "kind": "chat"})
    first, second = read_jsonl(path)
    assert first == Prompt("7", "a\u2028b")
    assert first.content == "a\u2028b"
    assert second == Prompt("x", None, "42", tuple(messages), {"kind": "chat"})
    assert second.content == messages


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": 1, "prompt": "a"', r"line 2: expected JSON, got Expecting ',' delimiter at column 24"),
        (["a"], r'line 2: expected an object like {"id": 1, "prompt": "..."}, got list'),
        ({"prompt": "a"}, "line 2: expected an id, got none"),
        ({"id": [1], "prompt": "a"}, r"line 2: expected a number or a string as id, got \[1\]"),
        ({"id": "0", "prompt": "a"}, "line 2: the id '0' was used before; ids must differ"),
        ({"id": 1, "prompt": " "}, "line 2: expected a prompt, got an empty one"),
        ({"id": 1, "prompt": 5}, "line 2: expected text as prompt, got int"),
        ({"id": 1}, "line 2: expected either a prompt or messages, got neither"),
        (
            {"id": 1, "prompt": "a", "messages": [{"role": "user", "content": "a"}]},
            "line 2: expected either a prompt or messages, got both",
        ),
        ({"id": 1, "messages": []}, "line 2: expected messages, got an empty list"),
        ({"id": 1, "messages": ["a"]}, "line 2: expected messages as a list of"),
        ({"id": 1, "messages": [{"role": "user"}]}, "line 2: expected messages as a list of"),
    ],
)
def test_a_mistake_names_its_line(file, line, message):
    path = file({"id": 0, "prompt": "fine"}, line)
    with pytest.raises(InputError, match=message) as caught:
        read_jsonl(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"expected a prompts file at .*none\.jsonl, found none"):
        read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="found a folder"):
        read_jsonl(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": 1, "prompt": "caf\xe9"}\n')
    with pytest.raises(InputError, match="expected UTF-8 text"):
        read_jsonl(tmp_path / "latin.jsonl")
