"""Programs that try to forge a verdict or to exhaust the machine. The tests and `benchmarks.evidence sandbox` run them all.

Each is a program and tests that PASS ONLY IF THE ATTEMPT WORKS: a wrong program that is judged right. Those that want out
are in `outside_escapes`.
"""

from __future__ import annotations

from dataclasses import dataclass

HONEST = "assert candidate(1, 2) == 3"  # what a wrong program must not pass
WRONG = "def candidate(a, b): return 0\n"


@dataclass(frozen=True)
class Escape:
    """program, and tests that pass if it works; stopped: by what; reason: a pattern of what the verdict must say."""

    name: str
    stopped: str
    program: str
    tests: str
    reason: str


def forging(name: str, stopped: str, program: str, reason: str, wrong: str = WRONG, tests: str = HONEST) -> Escape:
    """An attempt to be judged right."""
    return Escape(name, stopped, wrong + program, tests, reason)


LITERAL = "only exact builtin types cross"
ANSWERS = "the verdict is another process's; answers repeat the question's nonce"
LATE = "the clock: both processes are killed"
GONE = "a program that is gone has not answered"
CONTROL = "what ends loops never crosses: the call is a fault that stays one"
SWALLOWED = "an exception that no code of the tests handles is a fault"
COUNTED = "only what the tests define makes a test unsupported"
LOOP = "    def __getitem__(self, i):\n        {0}\nfor _ in Cases(): pass"

FORGING = (
    forging(
        "write PASSED to every descriptor and leave",
        ANSWERS,
        "import os\nfor f in range(3, 64):\n    try: os.write(f, b'passed')\n    except OSError: pass\nos._exit(0)",
        "an answer that is none|it answered with|ended too soon|an answer to no question",
    ),
    forging(
        "write the verdict's JSON to every descriptor and leave",
        ANSWERS,
        "import os, struct\nm = b'[\"passed\"]'\nfor f in range(64):\n    for t in (m, struct.pack('>I', len(m)) + m):\n"
        "        try: os.write(f, t)\n        except OSError: pass\nos._exit(0)",
        "an answer|it answered with|ended too soon",
    ),
    forging(
        "answers before questions",
        ANSWERS,
        "import os, json\nfrom analysis.quality.confinement.inside import frames, values\n"
        "m = values.dumps(('0' * 32, 'value', 3))\nfor f in range(3, 64):\n"
        "    try: [frames.send(f, m) for _ in range(9)]\n    except OSError: pass",
        "an answer to no question",
    ),
    forging(
        "an answer with the question's nonce, then silence",
        LATE,
        "import json\nfrom analysis.quality.confinement.inside import frames, values\nold = frames.receive\n"
        "def answer(pipe, *rest):\n    while True: pass\nframes.receive = answer",
        "killed after",
    ),
    forging(
        "a question is answered by a verdict",
        ANSWERS,
        "from analysis.quality.confinement.inside import program\nprogram._answer = lambda *a: ('passed',)",
        "an answer that is none|an answer",
    ),
    forging("os._exit(0)", GONE, "import os; os._exit(0)", "ended too soon, with exit code 0"),
    forging(
        "os._exit(0) within the call",
        GONE,
        "import os\ndef candidate(a, b): os._exit(0)",
        "ended too soon, with exit code 0",
    ),
    forging("sys.exit(0)", "what a program raises is raised in the tests", "import sys; sys.exit(0)", "SystemExit: 0"),
    forging(
        "SystemExit that tests catch",
        "a fault stays one, whatever the tests catch",
        "def candidate(a, b): raise SystemExit",
        "SystemExit",
        tests="try:\n    candidate(1, 2)\nexcept BaseException:\n    pass",
    ),
    *(
        forging(
            f"{error} {where}",
            CONTROL,
            f"class Own({error}): pass\ndef candidate(a, b): raise {error if where != 'of its own' else 'Own'}",
            f"{error}|Own",
            tests=tests,
        )
        for error, where, tests in (
            ("StopIteration", "in zip", "for a, b in zip(map(candidate, [1], [2]), [3]): assert a == b"),
            ("StopIteration", "in all", "assert all(map(lambda c: candidate(*c[:2]) == c[2], [(1, 2, 3)]))"),
            ("StopIteration", "in filter", "assert not list(filter(lambda c: candidate(1, 2) != c, [3]))"),
            (
                "StopIteration",
                "of its own",
                "class Own: pass\nassert not any(map(lambda c: candidate(1, c) != 3, [2]))",
            ),
            ("StopIteration", "that tests catch", "try: assert candidate(1, 2) == 3\nexcept Exception: pass"),
            ("StopAsyncIteration", "that tests catch", "try: assert candidate(1, 2) == 3\nexcept Exception: pass"),
            ("GeneratorExit", "that tests catch", "try: assert candidate(1, 2) == 3\nexcept BaseException: pass"),
        )
    ),
    *(
        forging(
            f"{error} swallowed by {where}",
            SWALLOWED,
            f"def candidate(a, b): raise {error}",
            f"{error} where the tests did not handle it",
            tests="class Cases:\n" + tests,
        )
        for error, where, tests in (
            ("IndexError", "a loop", LOOP.format("assert candidate(1, 2) == 3")),
            ("IndexError", "a loop behind finally", LOOP.format("try: candidate(1, 2)\n        finally: pass")),
            (
                "IndexError",
                "a loop behind raise",
                LOOP.format("try: candidate(1, 2)\n        except IndexError: raise"),
            ),
            (
                "AttributeError",
                "hasattr",
                "    x = property(lambda self: candidate(1, 2))\nassert not hasattr(Cases(), 'x')",
            ),
            (
                "AttributeError",
                "__getattr__",
                "    x = property(lambda self: candidate(1, 2))\n"
                "    def __getattr__(self, name): return 3\nassert Cases().x == 3",
            ),
            (
                "TypeError",
                "list",
                "    def __len__(self): return candidate(1, 2)\n    def __iter__(self): return iter('')\nlist(Cases())",
            ),
            ("ValueError", "__del__", "    def __del__(self): assert candidate(1, 2) == 3\nCases()"),
        )
    ),
    *(
        forging(
            f"{what}: out of the count",
            COUNTED,
            f"def candidate(a, b): return {value}",
            reason,
            tests=f"assert candidate({passed}, 2) == 3",
        )
        for what, value, passed, reason in (
            ("an iterator of text that is not ASCII", "'\u00e9'", "iter(candidate(1, 2))", "AssertionError"),
            ("an iterator of a long range", "range(2 ** 70)", "iter(candidate(1, 2))", "the arguments are too large"),
            (
                "an ordered dict's view",
                "__import__('collections').OrderedDict(a=1)",
                "candidate(1, 2).keys()",
                "Assert",
            ),
            ("a dict's view", "{1: 2}", "candidate(1, 2).items()", "AssertionError"),
            ("a method of its value", "[]", "candidate(1, 2).append", "a value of type builtin_function_or_method was"),
            ("the type of its value", "[]", "type(candidate(1, 2))", "a value of type type was passed on"),
        )
    ),
    forging("close the pipes", GONE, "import os\nos.closerange(3, 99)", "ended too soon"),
    forging(
        "other builtins",
        "the tests' builtins are their own",
        "import builtins\nfor n in ('abs', 'all', 'any', 'sorted', 'set', 'sum'):\n"
        "    setattr(builtins, n, lambda *a, **k: True)\ncandidate = lambda a, b: 0",
        "AssertionError",
        tests="assert abs(candidate(1, 2)) == 3 and len([1]) == 1",
    ),
    forging(
        "names of the data set's helpers",
        "the tests take helpers from the data set",
        "check = lambda f: None\nabs = lambda x: 3\nimport os as math",
        "AssertionError",
        tests="def check(f):\n    assert abs(f(1, 2)) == 3 and math.sqrt(4) == 2\ncheck(candidate)",
    ),
    forging(
        "other modules in sys.modules",
        "no code of the program runs in the tests",
        "import sys, types\nm = types.ModuleType('math')\nm.isclose = lambda *a, **k: True\nsys.modules['math'] = m",
        "AssertionError",
        tests="import math\nassert math.isclose(candidate(1, 2), 3)",
    ),
    forging(
        "__eq__ that is always true",
        LITERAL,
        "class Equal:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "def candidate(a, b): return Equal()",
        "returned a value of type Equal",
    ),
    forging(
        "__eq__ inside a list",
        LITERAL,
        "class Equal:\n    def __eq__(self, other): return True\ndef candidate(a, b): return [Equal()]",
        "returned a value of type Equal",
        tests="assert candidate(1, 2) == [3]",
    ),
    forging(
        "a subclass of str",
        LITERAL,
        "class Text(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
        "def candidate(a, b): return Text('x')",
        "returned a value of type Text",
    ),
    forging(
        "a subclass of int that lies about its class",
        LITERAL,
        "class Number(int):\n    __class__ = int\n    def __eq__(self, other): return True\n"
        "def candidate(a, b): return Number(0)",
        "returned a value of type Number",
    ),
    forging(
        "a class as the function, its objects as results",
        LITERAL,
        "class candidate:\n    def __init__(self, *a): pass\n    def __eq__(self, other): return True",
        "returned a value of type candidate",
    ),
    forging(
        "a method that agrees with everything",
        LITERAL,
        "class Set(set):\n    def issubset(self, other): return True\ndef candidate(a, b): return Set([9])",
        "returned a value of type Set",
        tests="assert candidate(1, 2).issubset({3})",
    ),
    forging(
        "an object of a class that tests may make",
        "objects cannot be compared, only asked for attributes",
        "class Point:\n    def __init__(self, *a): pass\n    def __eq__(self, other): return True",
        "an object was used as a value",
        tests="assert Point(1) == Point(1)",
    ),
    forging(
        "an exception as the function, its objects as arguments: out of the count",
        "what came from the program never makes a test unsupported",
        "class candidate(Exception): pass",
        "returned a value of type candidate",
        tests="assert candidate(1, candidate(1, 1)) == 3",
    ),
    forging(
        "an exception of a class that tests may make, passed on: out of the count",
        "what came from the program never makes a test unsupported",
        "class Point(Exception): pass",
        "a value of type Point was passed on",
        tests="assert candidate(Point(1), 2) == 3",
    ),
    forging(
        "a method where tests pass a value: out of the count",
        "what came from the program never makes a test unsupported",
        "class Point:\n    def __init__(self, *a): pass\n    def x(self): pass",
        "a value of type StandIn was passed on",
        tests="assert candidate(Point(1).x, 2) == 3",
    ),
    forging(
        "__reduce__ for an unpickler",
        LITERAL + "; nothing is unpickled",
        "class Bomb:\n    def __reduce__(self): return (print, ('x',))\ndef candidate(a, b): return Bomb()",
        "returned a value of type Bomb",
    ),
    forging(
        "frames, gc and inspect for the tests",
        "the tests are in another process",
        "import gc, inspect, sys\ndef candidate(a, b):\n"
        "    texts = [str(o) for o in gc.get_objects() if isinstance(o, (str, list))]\n"
        "    names = [f.frame.f_code.co_filename for f in inspect.stack()]\n"
        "    return 3 if any('candidate(1, 2) ==' in t for t in texts) or 'tests.py' in names else 0",
        "AssertionError",
    ),
    forging(
        "trace functions",
        "the tests are in another process",
        "import sys\ndef tracer(frame, event, arg):\n    frame.f_globals['candidate'] = lambda a, b: 3\n    return tracer\n"
        "sys.settrace(tracer)\ndef candidate(a, b): return 0",
        "AssertionError",
    ),
    forging(
        "a handler for every signal",
        LATE,
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, lambda *a: None)\n    except Exception: pass\n"
        "def candidate(a, b):\n    while True: pass",
        "killed after",
    ),
    forging(
        "__repr__ and __eq__ without an end",
        LITERAL,
        "class Slow:\n    def __eq__(self, other):\n        while True: pass\n    __repr__ = __str__ = __hash__ = __eq__\n"
        "def candidate(a, b): return Slow()",
        "returned a value of type Slow",
    ),
    forging(
        "an exception whose text has no end",
        LATE,
        "class Slow(Exception):\n    def __str__(self):\n        while True: pass\ndef candidate(a, b): raise Slow",
        "killed after",
    ),
    forging(
        "the atexit of the interpreter",
        GONE,
        "import atexit, os\natexit.register(lambda: os.write(4, b'passed'))\nraise SystemExit",
        "SystemExit",
    ),
)

EXHAUSTING = (
    forging("an endless loop", LATE, "while True: pass", "killed after"),
    forging("a long sleep", LATE, "import time\ntime.sleep(3600)", "killed after"),
    forging("a memory bomb", "limit on memory", "x = []\nwhile True: x.append(bytearray(2**20))", "MemoryError"),
    forging("huge output", "output is thrown away", "for _ in range(4000): print('x' * 10000)", "AssertionError"),
    forging(
        "a huge answer",
        "limit on answers",
        "def candidate(a, b): return 'x' * (9 * 2**20)",
        "returned a value of more than 8 MiB",
    ),
    forging(
        "a wide answer", "limit on answers", "def candidate(a, b): return [[]] * 600_000", "returned too many items"
    ),
    forging(
        "an answer that doubles with every level",
        "limit on answers",
        "def candidate(a, b):\n    x = []\n    for _ in range(60): x = [x, x]\n    return x",
        "returned too many items",
    ),
    forging(
        "an endless generator",
        "limit on answers",
        "def candidate(a, b):\n    while True: yield 1",
        "returned too many items",
    ),
    forging(
        "an answer inside itself",
        "limit on depth",
        "def candidate(a, b):\n    x = []\n    x.append(x)\n    return x",
        "returned something nested deeper than 100 levels",
    ),
    forging(
        "JSON too deep for a parser",
        ANSWERS,
        "from analysis.quality.confinement.inside import values\nvalues.dumps = lambda *a, **k: b'[' * 4_000_000",
        "an answer that is none",
    ),
    forging(
        "a length that is not kept",
        "limit on answers",
        "import os\nfor f in range(3, 64):\n    try: os.write(f, b'\\xff' * 4)\n    except OSError: pass",
        "it answered with more than 8 MiB",
    ),
    forging(
        "a huge number in text",
        ANSWERS,
        "from analysis.quality.confinement.inside import values\nvalues.dumps = lambda *a, **k: b'9' * 5_000_000",
        "an answer that is none",
    ),
    forging(
        "endless recursion",
        "the interpreter's own limit",
        "def candidate(a, b): return candidate(a, b)",
        "RecursionError",
    ),
    forging("a crash of the interpreter", GONE, "import ctypes\nctypes.string_at(0)", "ended too soon, by SIGSEGV"),
    forging(
        "a fork bomb",
        "seccomp: no new processes",
        "import os\nwhile True: os.fork()",
        "PermissionError|BlockingIOError",
    ),
    forging(
        "a fork that outlives",
        "seccomp: no new processes",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)",
        "PermissionError|BlockingIOError",
    ),
    forging(
        "threads",
        "seccomp: no new threads",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "RuntimeError: can't start new thread",
    ),
)
