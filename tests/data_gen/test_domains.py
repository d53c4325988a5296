"""The toy domains: deterministic, disjoint splits, checkable answers, frozen prompts."""

import ast
import json
import random
import re

import pytest

from data_gen.domains import DOMAINS, SPLITS, code, get, instruct, split_of
from data_gen.held_out import COUNTS, FOLDER, freeze, load_frozen

COUNT = 300


@pytest.mark.parametrize("domain", DOMAINS)
def test_examples_are_deterministic(domain):
    first, again = (get(domain).examples("train", COUNT, seed=1) for _ in range(2))
    assert first == again
    assert first != get(domain).examples("train", COUNT, seed=2)
    if domain != "code":
        assert get(domain).examples("train", 10, seed=1) == first[:10]
    assert len({example.id for example in first}) == len({example.prompt for example in first}) == COUNT


@pytest.mark.parametrize("domain", DOMAINS)
def test_splits_share_no_prompt(domain):
    prompts = {split: {e.prompt for e in get(domain).examples(split, 2000)} for split in SPLITS}
    assert all(len(of_split) >= COUNT for of_split in prompts.values())
    assert prompts["train"].isdisjoint(prompts["dev"] | prompts["test"])
    assert prompts["dev"].isdisjoint(prompts["test"])


@pytest.mark.parametrize("domain", DOMAINS)
def test_reference_responses_are_correct(domain):
    assert all(get(domain).is_correct(e.response, e.answer) for e in get(domain).examples("dev", COUNT))


@pytest.mark.parametrize("domain", ["instruct", "math"])
def test_other_responses_are_not_correct(domain):
    for example in get(domain).examples("dev", COUNT):
        assert not get(domain).is_correct(example.response.rstrip(".") + "0", example.answer)
        assert not get(domain).is_correct(example.response[: len(example.response) // 2], example.answer)
        assert not get(domain).is_correct("", example.answer)


@pytest.mark.parametrize("task", instruct.TASKS, ids=lambda task: task.requests.split()[0])
def test_every_kind_of_task_can_be_checked(task):
    for seed in range(20):
        requests, lead_ins, answer = instruct.drawn(task, random.Random(seed))
        assert all(request[-1] in ".?" or request[-1].isalpha() for request in requests)
        assert answer
        assert ":" not in "".join(lead_ins) + answer
        assert all(instruct.is_correct(f" {lead_in}: {answer}.", answer) for lead_in in lead_ins)


def test_math_steps_are_true():
    for example in get("math").examples("train", COUNT):
        equations = re.findall(r"([\d +*-]*\d) = (\d+)", example.response)
        assert 2 <= len(equations) <= 8
        assert all(eval(left) == int(right) for left, right in equations)
        assert int(example.answer) >= 0


def test_code_is_split_by_module():
    for split in SPLITS:
        modules = {code.module_of(example) for example in code.examples(split, 5000)}
        assert len(modules) > 10
        assert {split_of(module) for module in modules} == {split}


def test_code_prompt_and_response_make_the_function():
    for example in code.examples("dev", 400):
        function = ast.parse(example.prompt + example.response).body[0]
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function) is not None
        assert len(example.prompt) + len(example.response) <= code.MAX_CHARACTERS
    assert not code.is_correct("\n    return (", None)


@pytest.mark.parametrize("split", COUNTS)
@pytest.mark.parametrize("domain", DOMAINS)
def test_frozen_prompts_load_and_are_held_out(domain, split):
    rows = [json.loads(line) for line in (FOLDER / f"{domain}-{split}.jsonl").read_text().splitlines()]
    assert len(rows) == COUNTS[split]
    assert all({"id", "prompt"} <= row.keys() <= {"id", "prompt", "answer", "response"} for row in rows)
    frozen = load_frozen(domain, split)
    assert len({example.id for example in frozen}) == COUNTS[split]
    assert all(get(domain).is_correct(e.response, e.answer) for e in frozen)
    if domain == "code":
        assert {split_of(code.module_of(example)) for example in frozen} == {split}
    else:
        assert {split_of(example.prompt) for example in frozen} == {split}


def test_generated_frozen_prompts_are_those_of_the_domains(tmp_path):
    freeze(tmp_path, {"dev": 20})
    for domain in ("instruct", "math"):
        assert load_frozen(domain, "dev", tmp_path) == load_frozen(domain, "dev")[:20]
    for unknown in (lambda: load_frozen("math", "train"), lambda: get("poetry"), lambda: get("math").examples("x", 1)):
        with pytest.raises((KeyError, ValueError), match="no frozen prompts|known domains: |known splits: "):
            unknown()
