"""The job of the process that runs a data set's tests: the program is elsewhere, its names are stand-ins that ask there.

payload     question: code that the data set gives beforehand (its imports and helpers stay the data set's own).
            tests: code whose end means that the program passed. entry_point: the function under test, or None
verdict     ["passed"], ["failed", why], ["unsupported", why] or ["ended"], as JSON, into a pipe that only this process has

Whatever the program answers is literal data of builtin types, so no code of the program runs here. A program that answers
wrongly has failed, even if the tests catch all exceptions. So has one whose exceptions are swallowed by the interpreter and
not handled by the tests (`crossed`). The verdict "unsupported" depends on nothing that a program says. It is for a test
that passes functions or objects of classes that it defines, or imports what is not there.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
from typing import Any

from analysis.quality.confinement.inside.asking import TESTS, Fault, Link, Unsupported

MODULES = frozenset(
    [
        "bisect",
        "cmath",
        "collections",
        "copy",
        "datetime",
        "decimal",
        "fractions",
        "functools",
        "heapq",
        "itertools",
        "json",
        "math",
        "operator",
        "random",
        "re",
        "statistics",
        "string",
        "sys",
        "typing",
    ]
)
IMPORT = re.compile(r"^(?:import \w.*|from [\w.]+ import .*)$", re.MULTILINE)
MOST = 500  # characters of a reason


def run(payload: dict[str, Any], questions: int, answers: int, verdict: int) -> None:
    """Run the tests and write the verdict."""
    link = Link(questions, answers, payload["entry_point"])
    found = judge(link, payload["question"], payload["tests"], payload["entry_point"])
    os.write(verdict, json.dumps([word[:MOST] for word in found]).encode("ascii"))


def judge(link: Link, question: str, tests: str, entry_point: str | None) -> list[str]:
    """The verdict in words."""
    try:
        tree = ast.parse(tests)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return ["unsupported", f"the tests are not Python: {error}"]
    try:
        namespace = _given(question, entry_point)
        wanted = free_names(tree) - set(namespace) - set(dir(builtins))
        namespace |= {name: __import__(name) for name in wanted & MODULES & _bases(tree)}
        for name, value in link.describe(sorted(wanted - set(namespace))).items():
            namespace[name] = value
        exec(compile(tree, "tests.py", "exec"), namespace)
    except BaseException as error:
        return _explain(link, error)
    link.settle()
    return ["failed", link.fault] if link.fault else ["passed"]


def _given(question: str, entry_point: str | None) -> dict[str, Any]:
    """What the data set's own code defines, without the function under test."""
    namespace: dict[str, Any] = {"__name__": TESTS, "__builtins__": builtins}
    for code in (question, "\n".join(IMPORT.findall(question))):
        try:
            exec(compile(code, "question.py", "exec"), namespace)
            break
        except Exception:  # a question need not be a whole program; then its imports count
            continue
    namespace.pop(entry_point or "", None)
    return namespace


def free_names(tree: ast.AST) -> set[str]:
    """Names that a text reads and does not itself define at its top level."""
    body = tree.body if isinstance(tree, ast.Module) else []
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    return read - defined


def _bases(tree: ast.AST) -> set[str]:
    """Names with an attribute behind them: math.isclose."""
    found = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.id for node in found if isinstance(node, ast.Name)}


def _explain(link: Link, error: BaseException) -> list[str]:
    if isinstance(error, Unsupported):
        return ["unsupported", str(error)]
    if link.ended:
        return ["ended"]
    if link.fault or isinstance(error, Fault):
        return ["failed", link.fault or str(error)]
    if type(error) is ModuleNotFoundError:  # not one of the program's: those are of a subclass
        return ["unsupported", f"the tests need what is not here: {error}"]
    try:
        return ["failed", f"{type(error).__name__}: {error}"]
    except BaseException:
        return ["failed", type(error).__name__]
