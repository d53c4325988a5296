"""Runs inside a confined process, on the standard library alone: `sandbox` hands this file's text to `python -c`.

Standard input holds one JSON object: a job, its arguments, limits, pipes. The process limits itself, says READY, and does it:

    program  runs the candidate once, then answers calls
    tests    runs the tests of a data set, in which the program's functions are stand-ins that call; writes the verdict
    query    runs one SQL query on one file, read-only; writes the rows

Calls and answers are lines of JSON: data of exactly the builtin types, with a tag on every container. So nothing that a program
defined (`__eq__`, `__hash__`, `__len__`) runs in the tests' process.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import json
import os
import re
import resource
import signal
import sqlite3
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from time import monotonic
from types import FunctionType, MethodType
from typing import Any, NoReturn
from urllib.parse import quote

READY = "ready"
LONGEST = 8 * 2**20  # bytes of an answer
CROSSES = "only None, numbers, text, bytes and lists, tuples, sets, dicts of them can cross"
MAKERS: dict[type, Callable[[Any], Any]] = {  # how a value is put together from its items
    list: list, tuple: tuple, set: set, frozenset: frozenset, deque: deque, bytes: bytes, bytearray: bytearray,
    complex: lambda parts: complex(*parts), range: lambda ends: range(*ends), type(iter([])): lambda items: iter(list(items)),
    dict: dict, OrderedDict: OrderedDict, Counter: lambda pairs: Counter(dict(pairs)),
    defaultdict: lambda pairs: defaultdict(None, pairs), type({}.keys()): lambda keys: dict.fromkeys(keys).keys(),
    type({}.values()): lambda values: dict(enumerate(values)).values(), type({}.items()): lambda pairs: dict(pairs).items(),
}  # fmt: skip
NAMED = {kind.__name__: make for kind, make in MAKERS.items()}
IMPORT = re.compile(r"^(?:import \w.*|from [\w.]+ import .*)$", re.MULTILINE)
# Seccomp's number of an architecture, and its calls that make processes and namespaces: clone, fork, vfork, clone3, unshare.
NEW = {"x86_64": (0xC000003E, (56, 57, 58, 435, 272)), "aarch64": (0xC00000B7, (220, 435, 97))}
READING = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
SIZES = {sqlite3.SQLITE_LIMIT_LENGTH: 200_000, sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
         sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000, sqlite3.SQLITE_LIMIT_ATTACHED: 0}  # fmt: skip


def main() -> None:
    """Do the job that standard input names. Standard error is a file of the starter's, standard output is thrown away."""
    task = json.load(sys.stdin)
    restrict(task["limits"])
    output = os.fdopen(os.dup(2), "w")
    print(READY, file=output, flush=True)
    os.dup2(1, 2)
    sys.set_int_max_str_digits(0)
    pipes: list[Any] = [os.fdopen(pipe, mode) for pipe, mode in zip(task["pipes"], ("rb", "wb"), strict=False)]
    if task["job"] == "program":
        output.close()
        program(*pipes, *task["arguments"])
    elif task["job"] == "tests":
        nonce, *arguments = task["arguments"]
        print(
            json.dumps([nonce, *(word[:500] for word in ProgramTester(*pipes).verdict(*arguments))]),
            file=output,
            flush=True,
        )
    else:
        print(json.dumps(pack(query(*task["arguments"]))), file=output)


def restrict(limits: dict[str, int]) -> None:
    """Take the limits, end with the starter, and let the kernel refuse new processes, which a limit does not for root."""
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    architecture, calls = NEW[os.uname().machine]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # instructions: (code, jump if true, jump if false, value)
    allow, refuse, kill = 0x7FFF0000, 0x50001, 0x80000000
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    lines += [(at_least, 0, 1, 1 << 30), (give, 0, 0, refuse)]  # the second set of numbers of x86_64
    lines += [line for call in calls for line in ((equal, 0, 1, call), (give, 0, 0, refuse))]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in [*lines, (give, 0, 0, allow)]))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines) + 1, ctypes.addressof(code)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    for arguments in ((1, signal.SIGKILL, 0), (38, 1, 0), (22, 2, ctypes.addressof(header))):
        if prctl(*arguments, 0, 0):  # killed with the parent, no new privileges, seccomp
            raise OSError(f"prctl {arguments[0]}: {os.strerror(ctypes.get_errno())}")


class Uncrossable(TypeError):
    """A value that cannot cross."""

    def __init__(self, value: Any):
        super().__init__(f"a value of type {type(value).__name__}: {CROSSES}")
        self.value = value


def pack(value: Any, functions: dict[Any, str] | None = None) -> Any:
    """The value for JSON. `functions` names those that stay in the other process. Raises Uncrossable."""
    kind, items = type(value), value
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is FunctionType and functions and value in functions:
        return ["function", functions[value]]
    if kind in (dict, OrderedDict, Counter, defaultdict):
        items = value.items()
    elif kind is complex:
        items = value.real, value.imag
    elif kind is range:
        items = value.start, value.stop, value.step
    elif kind not in MAKERS:
        if not isinstance(value, Iterator):
            raise Uncrossable(value)
        kind = type(iter([]))
    return [kind.__name__, *(pack(item, functions) for item in items)]


def unpack(value: Any, functions: dict[str, Any]) -> Any:
    """The value again, made of nothing but builtin types, and functions by their names."""
    if type(value) is not list:
        return value
    tag, *items = value
    return functions[items[0]] if tag == "function" else NAMED[tag](unpack(item, functions) for item in items)


def program(questions: Any, answers: Any, source: str) -> None:
    """Run the program, then answer every (name, args, kwargs) by what its function returns or raises."""
    names: dict[str, Any] = {"__name__": "program"}

    def call(question: Any) -> Any:
        name, args, kwargs = unpack(question, names)
        return eval(name, names)(*args, **kwargs)

    def reply(action: Callable[..., Any], *args: Any) -> dict[str, Any]:
        try:
            return {"value": pack(action(*args))}
        except BaseException as error:
            return {"raised": [kind.__name__ for kind in type(error).__mro__], "text": str(error)[:500]}

    answers.write(b"\n")
    answers.flush()
    start = reply(lambda: exec(compile(source, "program.py", "exec"), names))
    for line in questions:
        answer = start if "raised" in start else reply(call, json.loads(line))
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


class Fault(BaseException):
    """The program did what no program may. `ProgramTester.fault` keeps it, so tests cannot catch it away."""


class Unsupported(BaseException):
    """The tests need more of the program than functions of data."""


class ProgramTester:
    """Runs tests and asks the program. fault: what it did wrong first, if anything."""

    def __init__(self, answers: Any, questions: Any):
        self.answers, self.questions, self.fault = answers, questions, ""
        self.functions: dict[Any, str] = {}

    def verdict(self, seconds: float, question: str, tests: str, entry_point: str | None) -> list[str]:
        """The verdict in words. "unsupported" depends on nothing that a program says."""
        self.answers.readline(LONGEST)  # the program is ready
        try:
            tree = ast.parse(tests)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return ["unsupported", f"the tests are not Python: {error}"]
        signal.signal(signal.SIGALRM, lambda *_: self.refuse(f"killed after {seconds:g} s"))
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            exec(compile(tree, "tests.py", "exec"), self.namespace(question, tree, entry_point))
        except Unsupported as error:
            return ["unsupported", str(error)]
        except BaseException as error:
            if type(error) is ModuleNotFoundError:  # not one of the program's: those are of a subclass
                return ["unsupported", f"the tests need what is not here: {error}"]
            return ["failed", self.fault or f"{type(error).__name__}: {error}"]
        return ["failed", self.fault] if self.fault else ["passed", ""]

    def namespace(self, question: str, tree: ast.AST, entry_point: str | None) -> dict[str, Any]:
        """What the tests' names mean: the data set's own code first, then modules, then the program."""
        namespace: dict[str, Any] = {"__name__": "tests"}
        for code in (question, "\n".join(IMPORT.findall(question))):
            try:
                exec(compile(code, "question.py", "exec"), namespace)
                break
            except Exception:  # a question need not be a whole program; then its imports count
                continue
        namespace.pop(entry_point or "", None)
        nodes = list(ast.walk(tree))
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        own |= {(node.asname or node.name).split(".")[0] for node in nodes if isinstance(node, ast.alias)}
        names = {node.id for node in nodes if isinstance(node, ast.Name)} - {*namespace, *dir(builtins), *own}
        bases = {
            node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        namespace |= {name: __import__(name) for name in names & bases & sys.stdlib_module_names}
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        functions = {node.func.id for node in calls if isinstance(node.func, ast.Name)} & names
        if classes := {name for name in functions - {entry_point} if name[0].isupper()}:
            raise Unsupported(f"the tests make objects of the program's class {min(classes)}")
        passed = [
            *(node for call in calls for node in call.args),
            *(word.value for call in calls for word in call.keywords),
        ]
        functions |= {node.id for node in passed if isinstance(node, ast.Name)} & names
        self.ask("bool", (), {})  # a program that does not run fails even tests that call nothing
        return namespace | {name: self.stand_in(name) for name in functions - set(namespace)}

    def stand_in(self, name: str) -> Callable[..., Any]:
        """A function that calls the program's."""
        function = lambda *args, **kwargs: self.ask(name, args, kwargs)
        self.functions[function] = name
        return function

    def refuse(self, reason: str) -> NoReturn:
        """Raises Fault, and remembers it."""
        self.fault = self.fault or reason
        raise Fault(self.fault)

    def ask(self, *question: Any) -> Any:
        """What the program returns; raises what it raises, as far as that is an ordinary exception."""
        if self.fault:
            raise Fault(self.fault)
        try:
            self.questions.write(json.dumps(pack(question, self.functions)).encode() + b"\n")
            self.questions.flush()
            line = self.answers.readline(LONGEST)
        except Uncrossable as error:
            owner = error.value if isinstance(error.value, type | FunctionType | MethodType) else type(error.value)
            if getattr(owner, "__module__", None) == "tests":  # no answer of the program makes such a value
                raise Unsupported(f"the tests pass {error}") from None
            self.refuse(f"{error} was passed on")
        except BrokenPipeError:
            self.refuse("ended too soon")
        if not line.endswith(b"\n"):
            self.refuse(f"answered with more than {LONGEST // 2**20} MiB" if len(line) == LONGEST else "ended too soon")
        try:
            answer = json.loads(line)
            if "value" in answer:
                return unpack(answer["value"], {})
            names, text = answer["raised"], str(answer["text"])
            kinds = [kind for name in names if isinstance(kind := getattr(builtins, name, None), type)]
            own = {"__init__": lambda *_: None, "__str__": lambda _: text, "__module__": "program"}
            raised = type(names[0], (kinds[0],), own)(text)
        except Exception:
            self.refuse("an unreadable answer")
        if names[0] == "Uncrossable":
            self.refuse(f"returned {text}")
        if not isinstance(raised, Exception) or isinstance(raised, StopIteration | StopAsyncIteration):
            self.refuse(f"{names[0]}: {text}")  # these end loops, and would skip the assertions in them
        raise raised


def query(path: str, sql: str, seconds: float, max_rows: int) -> tuple[list[Any] | None, str]:
    """The rows of one query on one SQLite file, which stays as it is; or None, and why."""
    deadline = monotonic() + seconds
    try:
        connection = sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True, isolation_level=None)
        connection.execute("PRAGMA temp_store = MEMORY")  # sorting: nothing can be written here
        for limit, value in SIZES.items():
            connection.setlimit(limit, value)
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")  # some of Spider's texts are not UTF-8
        connection.set_progress_handler(lambda: monotonic() > deadline, 1000)
        connection.set_authorizer(authorise)
        cursor = connection.execute(sql)
        rows = cursor.fetchmany(max_rows + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        text = (str(error).strip() or type(error).__name__).split("\n")[0]
        if "interrupted" in text:
            return None, f"killed after {seconds:g} s"
        denied = "authoriz" in text or "prohibited" in text
        return None, f"refused, only reading is allowed: {text}" if denied else f"failed: {text}"
    if cursor.description is None:
        return None, "not a query"
    return (rows, "") if len(rows) <= max_rows else (None, f"more than {max_rows} rows")


def authorise(action: int, _: str | None, name: str | None, *__: str | None) -> int:
    """SQLite asks this for everything that a statement would do, before it does anything."""
    denied = action not in READING or name in ("load_extension", "fts3_tokenizer")
    return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK


if __name__ == "__main__":
    main()
