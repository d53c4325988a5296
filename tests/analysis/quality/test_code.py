"""pass@k against enumeration; programs that misbehave are stopped and reported, one by one, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from itertools import combinations
from pathlib import Path

import pytest

from analysis import quality
from analysis.quality import sandbox
from analysis.quality.base import table
from analysis.quality.code import PassAtK, pass_at_k, program
from analysis.quality.sandbox import Limits
from toolkit.errors import InputError
from toolkit.prompts import Prompt
from toolkit.types import Generation

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are Linux's")
SHORT = Limits(seconds=2.0, memory=256, file_size=1)
QUESTION = 'from typing import List\n\n\ndef add(a: int, b: int) -> int:\n    """Sum."""\n'
TEST = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n"


def problem(id="humaneval-test-00000", prompt=QUESTION, **extra):
    return Prompt(id, prompt, extra={"entry_point": "add", "test": TEST, **extra})


# -- the estimator ----------------------------------------------------------------------------------------------------


def test_it_is_the_share_of_subsets_with_a_program_that_passes():
    for n in range(1, 8):
        for passed in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations(range(n), k))
                share = sum(min(subset) < passed for subset in subsets) / len(subsets)
                assert pass_at_k(n, passed, k) == pytest.approx(share, abs=1e-15)
    assert pass_at_k(2000, 1, 100) == pytest.approx(0.05, rel=1e-12)


@pytest.mark.parametrize("n, passed, k", [(3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0)])
def test_counts_that_cannot_be_are_refused(n, passed, k):
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
    with pytest.raises(InputError, match="k: expected at least 1, got 0"):
        PassAtK(k=0, allow_code_execution=True)
    with pytest.raises(InputError, match="memory of at least 64 MiB"):
        PassAtK(allow_code_execution=True, memory=1)


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
    assert [score.counts is None for score in scores] == [False] * 5 + [True] * 2 + [False] * 2
    by_prompt = table(metric, scores)[:3].sum(0), table(metric, scores)[3:5].sum(0)
    assert by_prompt[0] == pytest.approx((2 / 3, 1)) and by_prompt[1] == pytest.approx((0, 1))
    assert metric.value(table(metric, scores).sum(0)) == pytest.approx((2 / 3 + 0 + 1) / 3)
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
    "a fence that is cut off": "```python\ndef add(a, b):\n    return a + b\n",
    "a completion that closes the question's fence": "    return a + b\n```\nIt adds `a` and `b`.\n",
    "a main block": "def add(a, b):\n    return a + b\n\nif __name__ == '__main__':\n    print(input())\n",
}


@linux
@pytest.mark.parametrize("text", RESPONSES.values(), ids=RESPONSES.keys())
def test_right_responses_pass_in_any_dress(text):
    wrapped = f"Create a Python script for this problem:\n{QUESTION}\n\n### Response:"
    beside = {"prompt": QUESTION, "entry_point": "add", "test": TEST}  # as `extra` of conf/prompts/humaneval.yaml
    assert sandbox.run(program(text, Prompt("1", wrapped, extra=beside)), SHORT) == ""
    assert sandbox.run(program(text, problem()), SHORT) == ""


@linux
@pytest.mark.parametrize(
    "text, reason",
    [
        ("    return a * b\n", "AssertionError: "),
        ("    return (\n", "SyntaxError: "),
        ("    return undefined\n", "NameError: name 'undefined' is not defined"),
        ("    return 1 / 0\n", "ZeroDivisionError: division by zero"),
        ("    return add(a, b)\n", "RecursionError: "),
        ("", "IndentationError: |AssertionError: "),
        ("\x00", "(SyntaxError|ValueError): "),
        ("    return '\ud800'\n", "AssertionError: "),
    ],
)
def test_wrong_responses_fail_with_a_reason(text, reason):
    assert re.match(reason, sandbox.run(program(text, problem()), SHORT))


# -- attacks ----------------------------------------------------------------------------------------------------------

ATTACKS = {
    "leave early": ("import sys; sys.exit(0)", "SystemExit: 0"),
    "leave without a word": ("import os; os._exit(0)", "ended too soon, with exit code 0"),
    "become something else": ("import os; os.execv('/bin/true', ['true'])", "BlockingIOError|ended too soon"),
    "fork": ("import os; os.fork()", "BlockingIOError: "),
    "fork as a shell": ("import subprocess; subprocess.run(['sleep', '60'])", "BlockingIOError: "),
    "threads": ("import threading; threading.Thread(target=print).start()", "RuntimeError: can't start new thread"),
    "memory": ("x = bytearray(2**30)", "MemoryError: "),
    "memory bit by bit": ("x = []\nwhile True: x.append(bytearray(2**20))", "MemoryError: "),
    "a big file": ("with open('big', 'wb') as file: file.write(bytes(2**21))", "OSError: .*File too large"),
    "many files at once": ("x = [open(str(i), 'w') for i in range(99)]", "OSError: .*Too many open files"),
    "stdin": ("input()", "EOFError: "),
    "other people's files": ("open('/etc/written-by-a-test', 'w')", "PermissionError: "),
    "more rights": ("import os; os.setuid(0)", "PermissionError: "),
    "higher limits": ("import resource; resource.setrlimit(resource.RLIMIT_NPROC, (9, 9))", "ValueError: "),
    "crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended too soon, by SIGSEGV"),
}


@linux
@pytest.mark.parametrize("code, reason", ATTACKS.values(), ids=ATTACKS.keys())
def test_attacks_are_stopped_and_named(code, reason):
    if "setuid" in code and os.geteuid() != 0:
        code = code.replace("setuid(0)", "setuid(1)")
    found = sandbox.run(code, SHORT)
    assert re.match(reason, found), found


@linux
@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(60)", "print('x' * 2**20)\nwhile True: print()"]
)
def test_what_hangs_is_killed(code):
    started = time.monotonic()
    assert sandbox.run(code, Limits(seconds=0.5, memory=256)) == "killed after 0.5 s"
    assert time.monotonic() - started < 5


@linux
def test_cpu_time_is_limited_even_if_nobody_watches():
    code = "import resource; print(resource)\nassert resource.getrlimit(resource.RLIMIT_CPU) == (3, 3)"
    assert sandbox.run(code, SHORT) == ""


@linux
def test_should_the_limit_on_processes_not_hold_the_group_is_killed(monkeypatch):
    kernel = {name: value for name, value in SHORT.for_kernel().items() if name != "RLIMIT_NPROC"}
    monkeypatch.setattr(Limits, "for_kernel", lambda self: kernel)
    groups = []
    start = sandbox._start
    monkeypatch.setattr(sandbox, "_start", lambda *given: groups.append(start(*given)) or groups[-1])
    child = (
        "import os, time\nreader, writer = os.pipe()\nif os.fork() == 0:\n    os.write(writer, b'x'), time.sleep(30)\n"
    )
    assert sandbox.run(child + "os.read(reader, 1)", SHORT) == ""
    deadline = time.monotonic() + 5
    while alive(groups[0].pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(groups[0].pid)


def alive(group):
    """Processes of a group that still run: (state, parent, group) follow the name in parentheses."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(path)
    return found


@linux
def test_nothing_of_ours_is_there(monkeypatch):
    monkeypatch.setenv("API_KEY", "secret-of-mine")
    code = "import os\nassert 'secret' not in str(os.environ), 'leaked'\nassert len(os.environ) < 8, os.environ"
    assert sandbox.run(code, SHORT) == ""
    assert sandbox.run("import numpy", SHORT).startswith("ModuleNotFoundError: ")
    opened = "import os\nheld = set(os.listdir('/proc/self/fd'))\nassert len(held) <= 6, held"
    with open(__file__):
        assert sandbox.run(opened, SHORT) == ""


@linux
def test_its_folder_is_its_own_and_gone_afterwards(monkeypatch):
    made: list[Path] = []
    start = sandbox._start
    monkeypatch.setattr(sandbox, "_start", lambda folder, *rest: made.append(folder) or start(folder, *rest))
    code = "import os\nopen('x', 'w').write('y')\nassert sorted(os.listdir()) == ['program.py', 'x'], os.listdir()"
    assert [sandbox.run(code, SHORT) for _ in range(2)] == ["", ""]
    assert made[0] != made[1] and not any(folder.exists() for folder in made)


@linux
def test_an_interpreter_that_cannot_run_is_no_failure_of_the_code(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(InputError, match="could not start /nowhere/python"):
        PassAtK(allow_code_execution=True)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InputError, match="an empty program does not pass with these limits"):
        PassAtK(allow_code_execution=True)
    monkeypatch.setattr(sys, "platform", "plan9")
    with pytest.raises(InputError, match="needs Linux, this is plan9"):
        PassAtK(allow_code_execution=True)
