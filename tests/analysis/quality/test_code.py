"""pass@k against enumeration, and through real processes on records of HumanEval's and MBPP's shape."""

import re
import sys
from itertools import combinations

import pytest

from analysis import quality
from analysis.quality import sandbox
from analysis.quality.base import table
from analysis.quality.code import PassAtK, checks_of, pass_at_k, program
from analysis.quality.sandbox import Limits
from toolkit.errors import InputError
from toolkit.models.prompts import Prompt
from toolkit.types import Generation

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are Linux's")
SHORT = Limits(seconds=5.0, memory=256)
QUESTION = 'from typing import List\n\n\ndef add(a: int, b: int) -> int:\n    """Sum."""\n'
TEST = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n"


def problem(id="humaneval-test-00000", prompt=QUESTION, **extra):
    return Prompt(id, prompt, extra={"entry_point": "add", "test": TEST, **extra})


def judged(text, prompt):
    """Why a response failed; "" if it passed."""
    verdict = sandbox.run(program(text, prompt), checks_of(prompt), SHORT)
    assert (verdict.kind == sandbox.PASSED) == (verdict.reason == "")
    return verdict.reason


# -- the estimator ----------------------------------------------------------------------------------------------------


def test_it_is_the_share_of_subsets_with_a_program_that_passes():
    for n in range(1, 8):
        for passed in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations(range(n), k))
                share = sum(min(subset) < passed for subset in subsets) / len(subsets)
                assert pass_at_k(n, passed, k) == pytest.approx(share, abs=1e-15)
    assert pass_at_k(2000, 1, 100) == pytest.approx(0.05, rel=1e-12)
    for n, passed, k in ((3, 4, 1), (3, 1, 4)):
        with pytest.raises(InputError, match="0 <= passed <= n and 1 <= k <= n"):
            pass_at_k(n, passed, k)


def test_code_is_not_run_unless_allowed(monkeypatch):
    monkeypatch.setattr(sandbox, "run", lambda *_: pytest.fail("code was run"))
    for allowed in (False, None, "yes", 1):
        with pytest.raises(InputError, match="say allow_code_execution=true") as caught:
            PassAtK(allow_code_execution=allowed)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="allow_code_execution=true"):
        quality.get("pass_at_k")


@linux
@pytest.mark.parametrize("k, value", [(1, (1 / 2 + 1) / 2), (2, 1)])
def test_texts_that_were_not_decoded_are_left_out(k, value):
    """By hand. p: one of the two programs passes, a third was not decoded; q: its only program passes; r has none."""
    prompts = [problem(name) for name in "pppqqrr"]
    answers = [Generation(i, [1], [2], "    return a + b\n") for i in range(7)]
    answers[1].text = "    return a - b\n"
    for row in (2, 4, 5, 6):
        answers[row].error = "not a number"
    metric = PassAtK(k=k, allow_code_execution=True, seconds=5)
    scores = metric.measure(prompts, answers)
    assert metric.value(table(metric, scores).sum(0)) == pytest.approx(value)
    reasons = quality.base.reasons([score for score in scores if score.counts is None])
    few = {"fewer than 2 texts were decoded": 1} if k == 2 else {}
    assert reasons == {"decoding failed: not a number": 4} | few


@linux
def test_every_generation_holds_its_part_of_the_prompt():
    good, bad = "    return a + b\n", "    return a - b\n"
    prompts = [problem("p")] * 3 + [problem("q")] * 2 + [Prompt("r", "No tests")] * 2 + [problem("s")] * 2
    texts = [good, bad, bad, bad, bad, good, good, good, good]
    answers = [Generation(i, [1], [2], text) for i, text in enumerate(texts)]
    answers[-1].error = "not a number"
    metric = PassAtK(k=2, allow_code_execution=True, seconds=5)
    scores = metric.measure(prompts, answers)
    assert [score.reason for score in scores[:4]] == ["", *["AssertionError: "] * 3]
    assert [score.counts is None for score in scores] == [False] * 5 + [True] * 4
    by_prompt = table(metric, scores)[:3].sum(0), table(metric, scores)[3:5].sum(0)
    assert by_prompt[0] == pytest.approx((2 / 3, 1)) and by_prompt[1] == pytest.approx((0, 1))
    assert metric.value(table(metric, scores).sum(0)) == pytest.approx((2 / 3 + 0) / 2)
    assert metric.label == "pass@2"
    with pytest.raises(InputError, match="pass@2 needs 2 generations of every prompt, got 1 of p"):
        metric.measure(prompts[:1], answers[:1])


# -- from response to program -----------------------------------------------------------------------------------------

RESPONSES = {
    "a completion": "    return a + b\n",
    "one that goes on": "    return a + b\n\n\ndef other():\n    broken(\n",
    "a whole function": "def add(a: int, b: int) -> int:\n    return sum([a, b])\n",
    "one that needs the question's imports": "def add(a, b):\n    c: List[int] = list([a, b])\n    List\n    return sum(c)",
    "a fence": "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds.",
    "a completion that closes the question's fence": "    return a + b\n```\nIt adds `a` and `b`.\n",
    "a main block": "def add(a, b):\n    return a + b\n\nif __name__ == '__main__':\n    print(input())\n",
}


@linux
@pytest.mark.parametrize("text", RESPONSES.values(), ids=RESPONSES.keys())
def test_right_responses_pass_in_any_dress(text):
    wrapped = f"Create a Python script for this problem:\n{QUESTION}\n\n### Response:"
    beside = {"prompt": QUESTION, "entry_point": "add", "test": TEST}  # as `extra` of conf/prompts/humaneval.yaml
    assert judged(text, Prompt("1", wrapped, extra=beside)) == ""
    assert judged(text, problem()) == ""


@linux
@pytest.mark.parametrize("text, reason", [
    ("    return a * b\n", "AssertionError: "),
    ("    return (\n", "SyntaxError: "),
    ("    return undefined\n", "NameError: name 'undefined' is not defined"),
    ("", "IndentationError: |AssertionError: "),
    ("\x00", "(SyntaxError|ValueError): "),
    ("    return '\ud800'\n", "AssertionError: "),
])  # fmt: skip
def test_wrong_responses_fail_with_a_reason(text, reason):
    assert re.match(reason, judged(text, problem()))


# -- records of data sets ---------------------------------------------------------------------------------------------

POLY = (
    "import math\n\n\ndef poly(xs: list, x: float):\n    return sum([c * math.pow(x, i) for i, c in enumerate(xs)])\n\n\n"
    'def find_zero(xs: list):\n    """A zero of poly."""\n'
)
CHECK = """

METADATA = {'author': 'jt', 'dataset': 'test'}


def check(candidate):
    import copy
    for coeffs in ([1, 2], [-6, 11, -6, 1]):
        assert math.fabs(poly(coeffs, candidate(copy.deepcopy(coeffs)))) < 1e-4

"""
BISECT = (
    "    low, high = -100.0, 100.3\n    while high - low > 1e-12:\n        middle = (low + high) / 2\n"
    "        if poly(xs, low) * poly(xs, middle) <= 0:\n            high = middle\n        else:\n            low = middle\n"
    "    return low\n"
)


@linux
def test_a_record_of_humaneval_with_helpers():
    prompt = Prompt("HumanEval/32", POLY, extra={"entry_point": "find_zero", "test": CHECK})
    assert judged(BISECT, prompt) == ""
    assert judged("    return 0.5\n", prompt).startswith("AssertionError")
    forged = (
        "```python\nimport math\nmath.fabs = abs = lambda x: 0\npoly = lambda *a: 0\ndef find_zero(xs): return 0\n```"
    )
    assert judged(forged, prompt).startswith("AssertionError")


MBPP = {
    "test_list": [
        "assert max_chain_length([(5, 24), (15, 25), (27, 40), (50, 60)], 4) == 3",
        "assert math.isclose(mean([1, 2]), 1.5)",
    ],
    "test_setup_code": "import math",
}
CHAIN = """```python
import math
def mean(values):
    return sum(values) / len(values)
def max_chain_length(arr, n):
    longest = [1] * n
    for i in range(1, n):
        for j in range(i):
            if arr[i][0] > arr[j][1] and longest[i] < longest[j] + 1:
                longest[i] = longest[j] + 1
    return max(longest)
```"""


@linux
@pytest.mark.parametrize("setup", ["import math", ""])
def test_a_record_of_mbpp_with_other_functions(setup):
    prompt = Prompt("mbpp/1", "Write a function to find the longest chain.", extra={**MBPP, "test_setup_code": setup})
    assert judged(CHAIN, prompt) == ""
    assert judged(CHAIN.replace("[1] * n", "[2] * n"), prompt).startswith("AssertionError")
    assert judged(CHAIN.replace("def mean", "def means"), prompt) == "NameError: name 'mean' is not defined"
    equal = CHAIN.replace("return max(longest)", "return type('E', (), {'__eq__': lambda s, o: True})()")
    assert judged(equal, prompt).startswith("returned a value of type E")


@linux
def test_tests_that_no_program_can_be_asked_are_no_fault_of_the_program():
    metric = PassAtK(allow_code_execution=True)
    for tests, words in (
        (["assert apply(lambda x: x, 1) == 1"], "the tests pass a value of type function"),
        (["import numpy_of_nowhere"], "the tests need what is not here: No module named 'numpy_of_nowhere'"),
        (["assert ("], "the tests are not Python"),
        (["assert apply(abs, Pair(1, 2)) == 1"], "the tests make objects of the program's class Pair"),
    ):
        prompt = Prompt("1", "Apply it.", extra={"test_list": tests})
        (score,) = metric.measure([prompt], [Generation(0, [1], [2], "def apply(f, x): return f(x)")])
        assert score.counts is None and score.reason.startswith(words)


@linux
def test_what_a_program_says_never_takes_its_prompt_out_of_the_count():
    metric = PassAtK(allow_code_execution=True, seconds=5)
    prompt = Prompt("1", "Add.", extra={"test_list": ["assert add(1, add(1, 1)) == 3"]})
    for text in (
        "import numpy_of_nowhere",
        "def add(a, b): raise ModuleNotFoundError('x')",
        "def add(a, b): return lambda: 3",
        "def add(a, b): return ['x' * 1000] * 8000 if b == 1 else 3 / 0",
        "def add(a, b):\n    x = []\n    for _ in range(98): x = [x]\n    return x if b == 1 else 3 / 0",
        "class add:\n    def __init__(self, *a): pass",
        "class add(Exception): pass",
    ):
        (score,) = metric.measure([prompt], [Generation(0, [1], [2], text)])
        assert score.counts == (0, 1) and score.reason, text
