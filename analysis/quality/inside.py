"""Runs inside a confined process, on the standard library alone: `sandbox` hands this file's text to `python -c`.

Standard input holds a job. `program` answers calls; `tests` calls it by stand-ins and writes the verdict; `query` writes rows.
Calls and answers are lines of JSON: data of exactly the builtin types, with a tag on every container. So nothing that a program
defined (`__eq__`, `__hash__`, `__len__`) runs in the tests' process.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import resource
import signal
import socket
import sqlite3
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
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
READING = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
SIZES = {sqlite3.SQLITE_LIMIT_LENGTH: 200_000, sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
         sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000, sqlite3.SQLITE_LIMIT_ATTACHED: 0}  # fmt: skip


def main() -> None:
    """Do the job. Standard error is a file of the starter's, standard output is thrown away."""
    task = json.load(sys.stdin)
    for name, value in task["limits"].items():
        hard = resource.getrlimit(number := getattr(resource, name))[1]
        value = min(value, hard) if hard >= 0 else value
        resource.setrlimit(number, (value, value))
    output = os.fdopen(os.dup(2), "w")
    print(READY, file=output, flush=True)
    os.dup2(1, 2)
    sys.set_int_max_str_digits(0)
    channel = None if task["channel"] is None else socket.socket(fileno=task["channel"]).makefile("rwb")
    if task["job"] == "program":
        output.close()
        program(channel, *task["arguments"])
    elif task["job"] == "tests":
        nonce, *arguments = task["arguments"]
        words = [word[:500] for word in ProgramTester(channel).verdict(*arguments)]
        print(json.dumps([nonce, *words]), file=output, flush=True)
    else:
        print(json.dumps(pack(query(*task["arguments"]))), file=output)


class Uncrossable(TypeError):
    """A value that cannot cross."""

    def __str__(self) -> str:
        return f"a value of type {type(self.args[0]).__name__}: {CROSSES}"


def pack(value: Any) -> Any:
    """The value for JSON. Raises Uncrossable."""
    kind, items = type(value), value
    if value is None or kind in (bool, int, float, str):
        return value
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
    return [kind.__name__, *(pack(item) for item in items)]


def unpack(value: Any) -> Any:
    return NAMED[value[0]](map(unpack, value[1:])) if type(value) is list else value


def program(channel: Any, source: str) -> None:
    """Run the program, then answer every (name, args, kwargs) by what its function returns or raises."""
    names: dict[str, Any] = {"__name__": "program"}

    def reply(line: bytes) -> dict[str, Any]:
        try:
            if not line:
                exec(compile(source, "program.py", "exec"), names)
                return {}
            name, args, kwargs = unpack(json.loads(line))
            return {"value": pack(eval(name, names)(*args, **kwargs))}
        except BaseException as error:
            return {"raised": [kind.__name__ for kind in type(error).__mro__], "text": str(error)[:500]}

    channel.write(b"\n")
    channel.flush()
    start = reply(b"")
    for line in channel:
        answer = start if "raised" in start else reply(line)
        channel.write(json.dumps(answer).encode() + b"\n")
        channel.flush()


class Stop(BaseException):
    """Ends the tests. `ProgramTester.ended` keeps why, so tests cannot catch it away."""


class ProgramTester:
    """Runs tests and asks the program. ended: the verdict of what ended them first, if anything."""

    def __init__(self, channel: Any):
        self.channel, self.ended = channel, list[str]()

    def verdict(self, seconds: float, question: str, tests: str, entry_point: str | None) -> list[str]:
        self.channel.readline(LONGEST)  # the program is ready
        try:
            tree = ast.parse(tests)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return ["unsupported", f"the tests are not Python: {error}"]
        signal.signal(signal.SIGALRM, lambda *_: self.stop("failed", f"killed after {seconds:g} s"))
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            exec(compile(tree, "tests.py", "exec"), self.namespace(question, tree, entry_point))
        except BaseException as error:
            if type(error) is ModuleNotFoundError:  # not one of the program's: those are of a subclass
                return ["unsupported", f"the tests need what is not here: {error}"]
            return self.ended or ["failed", f"{type(error).__name__}: {error}"]
        return self.ended or ["passed", ""]

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
        own |= {*namespace, *dir(builtins)}
        free = lambda parts: {part.id for part in parts if isinstance(part, ast.Name)} - own
        bases = free(node.value for node in nodes if isinstance(node, ast.Attribute))
        called = free(node.func for node in nodes if isinstance(node, ast.Call))
        if classes := {name for name in called - {entry_point} if name[0].isupper()}:
            self.stop("unsupported", f"the tests make objects of the program's class {min(classes)}")
        self.ask("bool")  # a program that does not run fails even tests that call nothing
        namespace |= {name: __import__(name) for name in bases & sys.stdlib_module_names}
        return namespace | {name: partial(self.ask, name) for name in free(nodes) - set(namespace)}

    def stop(self, kind: str, reason: str) -> NoReturn:
        """Raises Stop, and remembers the verdict."""
        self.ended = self.ended or [kind, reason]
        raise Stop(reason)

    def ask(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """What the program returns; raises what it raises, as far as that is an ordinary exception."""
        if self.ended:
            raise Stop
        line = b""
        try:
            self.channel.write(json.dumps(pack((name, args, kwargs))).encode() + b"\n")
            self.channel.flush()
            line = self.channel.readline(LONGEST)
        except Uncrossable as error:
            (value,) = error.args
            owner = value if isinstance(value, type | FunctionType | MethodType) else type(value)
            if isinstance(value, partial) or getattr(owner, "__module__", None) == "tests":  # of no program's answer
                self.stop("unsupported", f"the tests pass {error}")
            self.stop("failed", f"{error} was passed on")
        except ConnectionError:
            pass
        if not line.endswith(b"\n"):
            long = f"answered with more than {LONGEST // 2**20} MiB"
            self.stop("failed", long if len(line) >= LONGEST else "ended too soon")
        try:
            answer = json.loads(line)
            if "value" in answer:
                return unpack(answer["value"])
            names, text = answer["raised"], str(answer["text"])
            kinds = [kind for name in names if isinstance(kind := getattr(builtins, name, None), type)]
            own = {"__init__": lambda *_: None, "__str__": lambda _: text, "__module__": "program"}
            raised = type(names[0], (kinds[0],), own)(text)
        except Exception:
            self.stop("failed", "an unreadable answer")
        if names[0] == "Uncrossable":
            self.stop("failed", f"returned {text}")
        if not isinstance(raised, Exception) or isinstance(raised, StopIteration | StopAsyncIteration):
            self.stop("failed", f"{names[0]}: {text}")  # these end loops, and would skip the assertions in them
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
