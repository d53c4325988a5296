"""Honest programs of all kinds pass through the two processes; limits, walls, refusals. The attacks: `tests/benchmarks`."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from analysis.quality import sandbox
from analysis.quality.confinement import Confinement, files, launch, mechanisms
from analysis.quality.confinement.inside import seccomp, values
from analysis.quality.sandbox import Limits, Tests, run
from toolkit.errors import InputError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confinement is Linux's")
SHORT = Limits(seconds=5.0, memory=256)

LITERALS = [
    None, True, False, 0, -1, 10**400, 1.5, -0.0, math.inf, 0.1 + 0.2, 5e-324, 1 + 2j, "", "é\ud800\x00\n", b"\x00\xff",
    bytearray(b"x"), [], [[], [1, "a"]], (), (1, (2,)), {}, {1: [2], (1, 2): {3}, "1": None}, set(), {1, "a", (2,)},
    frozenset({1}), range(1, 9, 2), range(10**20),
]  # fmt: skip


@pytest.mark.parametrize(
    "value", LITERALS, ids=[f"{place}-{type(value).__name__}" for place, value in enumerate(LITERALS)]
)
def test_literal_values_cross_exactly(value):
    found = values.loads(values.dumps(value))
    assert found == value and type(found) is type(value) and repr(found) == repr(value)


def test_values_of_the_standard_library_and_nan_cross():
    import collections

    for value in (
        collections.Counter("aab"), collections.OrderedDict([(2, 1), (1, 2)]), collections.deque([1, 2]),
        collections.defaultdict(None, {1: [2]}),
    ):  # fmt: skip
        found = values.loads(values.dumps(value))
        assert found == value and type(found) is type(value)
    assert math.isnan(values.loads(values.dumps(math.nan)))
    assert list(values.loads(values.dumps(i * i for i in range(4)))) == [0, 1, 4, 9]
    assert math.copysign(1, values.loads(values.dumps(-0.0))) == -1


def test_what_is_not_exactly_literal_does_not_cross():
    class Text(str):
        def __eq__(self, other):
            return True

        __hash__ = str.__hash__

    for value in (Text("x"), object(), print, math, [Text("x")], {Text("x"): 1}, {1: object()}, Exception(), slice(1)):
        with pytest.raises(values.NotLiteral, match="a value of type"):
            values.dumps(value)
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(values.TooMuch, match="nested deeper than 100"):
        values.dumps(endless)
    with pytest.raises(values.TooMuch, match="too many items"):
        values.dumps(iter(int, 1) if type(iter(int, 1)) in values.ITERATORS else (1 for _ in iter(int, 1)))


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"1", b"{}", b"[]", b"[1]", b'["x"]', b'["i"]', b'["i",1]', b'["i","x"]', b'["f","1","2"]', b'["h",0]',
     b'["d",[1]]', b'["S",["l"]]', b'["d",[["l"],null]]', b"[" * 10**6, b'["l",' * 200 + b"null" + b"]" * 200, b"9" * 10**4,
     b'["r","0","1","0"]', b"\xff"],
    ids=lambda text: repr(text)[:20],
)  # fmt: skip
def test_text_of_no_honest_process_is_refused(text):
    with pytest.raises(values.Malformed):
        values.loads(text)


HONEST = {
    "numbers": ("def f(x): return x / 3", "assert f(1) == 1 / 3 and f(x=6) == 2.0 and abs(f(2) - .6667) < 1e-3"),
    "lists": ("def f(x): return sorted(x)", "assert f([3, 1]) == [1, 3] and f(()) == []"),
    "a tuple is no list": ("def f(x): return (x,)", "assert f(1) == (1,) and f(1) != [1]"),
    "sets and dicts": ("def f(x): return {x: {x}}", "assert f('a') == {'a': {'a'}}"),
    "nan": ("def f(): return float('nan')", "import math\nassert math.isnan(f())"),
    "big": ("def f(n): return 7 ** n", "assert f(9999) == 7 ** 9999"),
    "a generator": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]\nassert f(3) != [0, 1, 2]"),
    "zip, map": ("def f(n): return zip(n, map(str, n))", "assert dict(f([1])) == {1: '1'}"),
    "a counter": (
        "from collections import Counter\ndef f(x): return Counter(x)",
        "assert f('aab') == {'a': 2, 'b': 1}",
    ),
    "None": ("def f(): pass", "assert f() is None"),
    "a builtin exception": (
        "def f(x): return 1 / x",
        "try:\n    f(0)\n    assert False\nexcept ZeroDivisionError as e:\n    assert str(e) == 'division by zero'",
    ),
    "an exception of its own": (
        "class Bad(ValueError): pass\ndef f(x): raise Bad('no', x)",
        "try:\n    f(0)\n    assert False\nexcept Bad as e:\n    assert '0' in str(e) and isinstance(e, ValueError)",
    ),
    "an exception with many arguments": (
        "def f(): raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'why')",
        "try:\n    f()\nexcept UnicodeDecodeError as e:\n    assert 'why' in str(e)",
    ),
    "imports of the standard library": (
        "import bisect, calendar, collections, ctypes, datetime, decimal, fractions, hashlib, heapq, itertools, json, math, "
        "random, re, sqlite3, statistics, string, typing, zlib, lzma, bz2, ssl\n"
        "def f(x): return hashlib.md5(zlib.compress(lzma.compress(bz2.compress(x.encode())))).hexdigest()[:0] + x",
        "assert f('x') == 'x'",
    ),
    "state between calls": (
        "n = []\ndef f(x):\n    n.append(x)\n    return n",
        "assert f(1) == [1] and f(2) == [1, 2]",
    ),
    "output": ("def f(x):\n    print('here' * 9999)\n    return x", "assert f(1) == 1"),
    "the time": (
        "import time, datetime\ndef f(): return time.time() > 0 and datetime.datetime.now().year",
        "assert f() > 2000",
    ),
    "random numbers": (
        "import random, secrets\ndef f(): return random.random() + secrets.randbelow(1)",
        "assert 0 <= f() < 1",
    ),
    "a long text": ("def f(n): return 'x' * n", "assert len(f(2 * 10**6)) == 2 * 10**6"),
    "deep recursion": ("def f(n): return n and 1 + f(n - 1)", "assert f(900) == 900"),
    "functions of its own as arguments": (
        "def twice(f, x): return f(f(x))\ndef more(x): return x + 1\nclass Less(int): pass",
        "assert twice(more, 1) == 3 and twice(f=more, x=0) == 2",
    ),
    "exceptions that the tests handle in all ways": (
        "def f(*x): raise IndexError('no')",
        "import contextlib, unittest\nwith contextlib.suppress(LookupError): f()\n"
        "t = unittest.TestCase()\nt.assertRaises(IndexError, f, 1)\nwith t.assertRaisesRegex(IndexError, 'no'): f()\n"
        "@contextlib.contextmanager\ndef caught():\n    try: yield\n    except IndexError: pass\n"
        "def other(error):\n    try: f()\n    except IndexError as e: raise error from e\n"
        "def last():\n    try: f()\n    finally: return 2\n"
        "class Zero:\n    def __getitem__(self, i):\n        try: return f(i)\n        except IndexError: return 0\n"
        "def rest(n):\n    for i in range(n):\n        try: f(i)\n        except IndexError: yield i\n"
        "for _ in range(2):\n"
        "    with caught(): f()\n"
        "    for action in (lambda: other(ValueError), lambda: list(map(f, [1])), lambda: sorted([2, 1], key=f)):\n"
        "        try:\n            action()\n            assert False\n        except (ValueError, IndexError): pass\n"
        "    assert last() == 2 and Zero()[1] == 0 and list(rest(2)) == [0, 1]",
    ),
    "an attribute that is not there": (
        "class P: x = 1",
        "p = P()\nassert hasattr(p, 'x') and not hasattr(p, 'y') and getattr(p, 'z', 2) == 2",
    ),
    "views of a dict": (
        "def f(x): return x",
        "d = {1: [2]}\nassert f(d.keys()) == {1} and list(f(d.values())) == [[2]] and list(f(d.items())) == [(1, [2])]",
    ),
    "iterators of all kinds": (
        "from itertools import chain\n"
        "def f(x): return chain(x, iter('é'), reversed(range(2)), iter(b'a'), iter({1: 2}.values()))",
        "assert list(f(iter('é'))) == ['é', 'é', 1, 0, 97, 2]",
    ),
    "a method of a class": (
        "class Stack:\n    def __init__(self): self.x = []\n"
        "    def push(self, y): self.x.append(y); return self\n"
        "    def all(self): return self.x",
        "s = Stack()\ns.push(1)\ns.push(2)\nassert s.all() == [1, 2]\nassert s.x == [1, 2]",
    ),
}


@pytest.mark.parametrize("code, tests", HONEST.values(), ids=HONEST.keys())
def test_honest_programs_pass(code, tests):
    assert run(code, Tests(tests), SHORT) == sandbox.Verdict(sandbox.PASSED)


@pytest.mark.parametrize(
    "passed",
    ["lambda: 1", "own", "Own", "Own()", "Own().method", "[Own()]", "collections.namedtuple('Pair', 'a b')(1, 2)"],
)
def test_only_what_the_tests_define_is_unsupported(passed):
    given = "import collections\ndef own(): pass\nclass Own:\n    def method(self): pass\n"
    verdict = run("def f(x): pass", Tests(f"{given}f({passed})"), SHORT)
    assert verdict.kind == sandbox.UNSUPPORTED and verdict.reason.startswith("the tests pass a value of type ")
    assert run("def f(x): pass", Tests("f(len)"), SHORT).reason.startswith(
        "a value of type builtin_function_or_method was"
    )


@pytest.mark.slow
def test_nothing_outlives_the_one_who_asked():
    """Its starter is killed: so is a program that would sleep for an hour."""
    program = "import time\ntime.sleep(3600)"
    code = (
        "import sys, os\nfrom analysis.quality.confinement import launch\nfrom analysis.quality.sandbox import *\n"
        "begin = launch.subprocess.Popen\n"
        "def tell(*words, **options):\n    process = begin(*words, **options)\n"
        "    print(process.pid, flush=True)\n    return process\n"
        "walls = chosen()\nlaunch.subprocess.Popen = tell\n"
        f"run({program!r}, Tests('f()'), Limits(3000.0), walls)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as asking:
        sessions = [int(asking.stdout.readline()) for _ in range(2)]
        asking.kill()
    deadline = time.monotonic() + 30
    while any(map(alive, sessions)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, sessions))


def alive(number):
    """Whether a process still runs, and does not just wait to be reaped."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_arguments_are_copies():
    code = "def f(x):\n    x.append(1)\n    return x"
    assert run(code, Tests("x = []\nassert f(x) == [1] and x == []"), SHORT).kind == sandbox.PASSED


def test_something_confines_here_and_stops_everything_it_should():
    walls = mechanisms.chosen()
    assert mechanisms.problem(walls, mechanisms.STOPPED) == ""
    assert "seccomp" in walls.layers and len(walls.layers) >= 2
    assert mechanisms.problem(Confinement(()), mechanisms.STOPPED).startswith(" does not stop files")


@pytest.mark.parametrize("name", ["bubblewrap", "namespaces", "landlock", "seccomp"])
def test_a_mechanism_that_cannot_be_entered_says_why(name):
    said = mechanisms.problem(Confinement((name,)))
    assert "\n" not in said and (said == "" or len(said) > 5)


def test_without_confinement_nothing_is_run(monkeypatch):
    mechanisms.chosen.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(mechanisms, "problem", lambda walls, stopped=(): "not allowed here")
            with pytest.raises(InputError, match="no confinement works here .*install bubblewrap") as caught:
                mechanisms.chosen()
            assert "\n" not in str(caught.value)
            patch.setattr(sys, "platform", "darwin")
            with pytest.raises(InputError, match="needs Linux, this is darwin: use a container"):
                mechanisms.chosen()
        with monkeypatch.context() as patch:
            patch.setattr(
                mechanisms, "problem", lambda walls, stopped=(): "" if walls.layers == ("landlock",) else "no"
            )
            with pytest.raises(InputError, match="no confinement works here"):  # the network would be open
                mechanisms.chosen()
    finally:
        mechanisms.chosen.cache_clear()


def test_scratch_files_where_programs_may_read_are_refused_for_what_they_are(monkeypatch, tmp_path):
    library = os.path.dirname(os.path.realpath(os.__file__))
    (tmp_path / "link").symlink_to(library)
    mechanisms.chosen.cache_clear()
    try:
        for place in (library, f"{library}/json", str(tmp_path / "link")):
            monkeypatch.setattr(mechanisms.tempfile, "tempdir", place)
            with pytest.raises(InputError, match="expected a TMPDIR that confined code cannot read, got /") as caught:
                mechanisms.chosen()
            assert str(caught.value).endswith("set TMPDIR elsewhere") and "bubblewrap" not in str(caught.value)
    finally:
        mechanisms.chosen.cache_clear()
    readable = files.Readable(("/a",), hidden=("/a/hidden",))
    assert readable.tree_of("/a/b") == "/a" == readable.tree_of("/a/hiddenness")
    assert readable.tree_of("/ab") is None and readable.tree_of("/a/hidden/b") is None


def test_an_interpreter_that_cannot_run_is_no_failure_of_the_code(monkeypatch):
    walls = mechanisms.chosen()
    monkeypatch.setattr(launch, "interpreter", lambda: "/bin/false")
    with pytest.raises(InputError, match="could not confine a process to run code"):
        run("", Tests("pass"), SHORT, walls)
    monkeypatch.setattr(launch, "interpreter", lambda: "/nowhere/python")
    with pytest.raises(InputError, match="could not (start|confine)"):
        run("", Tests("pass"), SHORT, walls)


def test_descriptors_and_processes_are_given_back():
    before = set(os.listdir("/proc/self/fd"))
    for code in ("def f(): pass", "import os; os._exit(1)", "def f(:"):
        run(code, Tests("f()"), SHORT)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("given", [{"seconds": 0}, {"memory": 1}])
def test_limits_that_cannot_be_are_refused(given):
    with pytest.raises(InputError, match="expected seconds above 0 and memory of at least 64 MiB"):
        Limits(**given)


def decide(lines, architecture, number, arguments=(0, 0, 0, 0, 0, 0)):
    """What the filter answers, by a machine as the kernel's."""
    known = number.to_bytes(4, "little") + architecture.to_bytes(4, "little") + bytes(8)
    known += b"".join(one.to_bytes(8, "little") for one in arguments)
    place, loaded = 0, 0
    while True:
        code, yes, no, value = lines[place]
        if code == seccomp.RETURN:
            return value
        if code == seccomp.LOAD:
            loaded = int.from_bytes(known[value : value + 4], "little")
        else:
            place += yes if (loaded == value if code == seccomp.EQUAL else loaded & value) else no
        place += 1


@pytest.mark.parametrize("name", ["x86_64", "aarch64"])
def test_the_filter_lets_through_what_is_listed_and_nothing_else(name):
    from analysis.quality.confinement.inside import kernel

    lines, column, machine = seccomp.program(name), list(kernel.ARCHITECTURES).index(name), kernel.ARCHITECTURES[name]
    listed = {numbers[column] for numbers in seccomp.ALLOWED.values()} - {None}
    special = {
        numbers[column] for numbers in (seccomp.OPEN, seccomp.OPENAT, seccomp.FCNTL, seccomp.IOCTL, seccomp.LIMITS)
    }
    assert not listed & special
    for number in set(range(600)) - special:
        assert (decide(lines, machine, number) == seccomp.ALLOW) == (number in listed)
    assert decide(lines, 0x40000003, 0) == seccomp.KILL
    openat, limits, fcntl = seccomp.OPENAT[column], seccomp.LIMITS[column], seccomp.FCNTL[column]
    assert decide(lines, machine, openat, (0, 0, os.O_CLOEXEC, 0, 0, 0)) == seccomp.ALLOW
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_TMPFILE | os.O_RDWR):
        assert decide(lines, machine, openat, (0, 0, flags, 0, 0, 0)) == seccomp.FAIL | 13
    assert decide(lines, machine, limits, (0, 7, 0, 1, 0, 0)) == seccomp.ALLOW
    for arguments in ((1, 7, 0, 1, 0, 0), (0, 7, 1, 1, 0, 0), (0, 7, 1 << 32, 1, 0, 0)):
        assert decide(lines, machine, limits, arguments) == seccomp.FAIL | 1
    assert decide(lines, machine, fcntl, (3, 1, 0, 0, 0, 0)) == seccomp.ALLOW
    for command in (8, 10, 15, 1031):
        assert decide(lines, machine, fcntl, (3, command, 0, 0, 0, 0)) == seccomp.FAIL | 1
