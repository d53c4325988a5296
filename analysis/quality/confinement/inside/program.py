"""The job of the process that holds the candidate program: run it once, then answer questions about it, nothing else.

Question and answer are messages (`frames`) of literal values (`values`): (nonce, what, ...) and (nonce, how, ...). The answer
carries the question's nonce, so that nothing written in advance is an answer.

    describe  names               -> described {name: kind, ...}    kinds: see `_kind`
    call      place, args, kwargs, keep -> value x
    get       place               -> value x, or method
    set       place, x            -> value None

A place is (object, attribute, ...): a name of the program's top level or a handle. `keep` lets objects stay here and a handle
cross. Anything may be answered by (raised, names of the exception's classes, text) or (unfit, what cannot cross).
"""

from __future__ import annotations

import builtins
from functools import reduce
from types import ModuleType
from typing import Any

from analysis.quality.confinement.inside import frames, values

LONGEST_TEXT = 500  # characters of an exception's text
Answer = tuple[Any, ...]


def run(source: str, questions: int, answers: int) -> None:
    """Run the program, then answer until no more questions come."""
    namespace: dict[str, Any] = {"__name__": "program", "__builtins__": builtins}
    failure = _guarded(lambda: _load(source, namespace))
    objects: list[Any] = []
    while True:
        try:
            text = frames.receive(questions, frames.LONGEST_QUESTION)
        except frames.Ended:
            return
        nonce, *question = values.loads(text, lambda key: objects[key] if isinstance(key, int) else namespace[key])
        reply = failure or _guarded(lambda asked=question: _answer(namespace, objects, *asked))  # type: ignore[misc]
        frames.send(answers, _message(nonce, reply, objects))


def _load(source: str, namespace: dict[str, Any]) -> Answer:
    exec(compile(source, "program.py", "exec"), namespace)
    return ()


def _message(nonce: str, reply: Answer, objects: list[Any]) -> bytes:
    """The answer as text; what it holds may raise when it is read to its end (iterators)."""

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    handles = keep if reply[0] == "kept" else None
    written = _guarded(lambda: (values.dumps((nonce, *reply), handles),))
    if isinstance(written[0], bytes) and len(written[0]) <= frames.LONGEST:
        return written[0]
    if isinstance(written[0], bytes):
        written = ("unfit", f"a value of more than {frames.LONGEST // 2**20} MiB")
    return values.dumps((nonce, *written))


def _guarded(action: Any) -> Answer:
    """What an action returns; or what it raised, as an answer."""
    try:
        found: Answer = action()
        return found
    except values.NotLiteral as error:
        return ("unfit", str(error))
    except BaseException as error:
        names = [kind.__name__[:80] for kind in type(error).__mro__]
        return ("raised", names, _text(error))


def _text(error: BaseException) -> str:
    try:
        text = str(error)
        return text[:LONGEST_TEXT] if type(text) is str else ""
    except BaseException:
        return ""


def _answer(namespace: dict[str, Any], objects: list[Any], what: str, *asked: Any) -> Answer:
    if what == "describe":
        return ("described", {name: _kind(namespace[name]) for name in asked[0] if name in namespace})
    first, *attributes = asked[0]
    place = namespace[first] if type(first) is str else first
    if what == "call":
        return ("kept" if asked[3] else "value", reduce(getattr, attributes, place)(*asked[1], **asked[2]))
    place = reduce(getattr, attributes[:-1], place)
    if what == "set":
        setattr(place, attributes[-1], asked[1])
        return ("value", None)
    found = getattr(place, attributes[-1])
    return ("method",) if callable(found) else ("kept", found)


def _kind(value: Any) -> tuple[Any, ...]:
    """How a name of the program's top level is shown: its value if that is literal, else what can be done with it."""
    if isinstance(value, type) and issubclass(value, BaseException):
        return ("exception", [kind.__name__ for kind in value.__mro__])
    if callable(value):
        return ("callable",)
    if type(value) is ModuleType:
        return ("module",)
    try:
        values.dumps(value)
    except Exception:
        return ("other", str(type(value).__name__)[:80])
    return ("module",) if type(value) in values.ITERATORS else ("value", value)
