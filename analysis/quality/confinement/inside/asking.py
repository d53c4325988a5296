"""The tests' end of the line to the program: stand-ins for its names, which send calls and take literal answers."""

from __future__ import annotations

import builtins
import secrets
from types import FunctionType, MethodType
from typing import Any

from analysis.quality.confinement.inside import crossed, frames, values
from analysis.quality.confinement.inside.values import Handle, StandIn

TESTS = "tests"  # the module of what the tests define
CANNOT_CROSS = "only None, numbers, text, bytes and lists, tuples, sets, dicts of them can"
Place = tuple[Any, ...]


class Fault(BaseException):
    """The program answered what no program may; tests cannot catch it away, since `Link.fault` keeps it."""


class Unsupported(BaseException):
    """The tests want what cannot be asked of another process: they pass a function or a class of their own, or its objects."""


class Link:
    """Asks the program. fault: what it did wrong first, if anything; ended: whether it is gone."""

    def __init__(self, questions: int, answers: int, entry_point: str | None):
        self.questions, self.answers, self.entry_point = questions, answers, entry_point
        self.fault, self.ended = "", False
        self.exceptions: dict[str, type[BaseException]] = {}
        self._raised: BaseException | None = None  # the last of the program's exceptions

    def describe(self, names: list[str]) -> dict[str, Any]:
        """Stand-ins or values for those of the names that the program has."""
        wanted = [*names, *([self.entry_point] if self.entry_point and self.entry_point not in names else [])]
        match self._ask("describe", wanted):
            case ("described", dict(found)):
                shown = {name: self._show(name, kind) for name, kind in found.items() if name in wanted}
            case other:
                self._value(other, False)  # raises what the program raised when it ran
                self.refuse("an answer that is none")
        return {name: value for name, value in shown.items() if value is not Ellipsis}

    def _show(self, name: str, kind: Any) -> Any:
        keep = name[:1].isupper() and name != self.entry_point  # the tests' text decides what may be a class
        match kind:
            case ("exception", [*bases]) if keep:
                self.exceptions[name] = _exception_class(name, bases)
                return self.exceptions[name]
            case ("callable",) | ("other", _) | ("exception", _):
                return self._function((name,), keep)
            case ("value", value):
                return value
        return ...

    def call(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any], keep: bool) -> Any:
        """What the program returns; raises what it raises, as far as that is a builtin or one of its own names."""
        return self._value(self._ask("call", place, args, kwargs, keep, handles=keep), keep)

    def get(self, handle: Handle, name: str) -> Any:
        """An attribute of an object that stayed there; its methods are stand-ins."""
        answer = self._ask("get", (handle, name), handles=True)
        try:
            return self._function((handle, name), keep=True) if answer == ("method",) else self._value(answer, True)
        except AttributeError:
            self._raised = None  # `hasattr` has its answer
            raise

    def set(self, handle: Handle, name: str, value: Any) -> None:
        """Change an attribute there."""
        self._value(self._ask("set", (handle, name), value), False)

    def refuse(self, why: str = f"an object was used as a value: {CANNOT_CROSS}") -> Any:
        """Raises Fault, and remembers it."""
        self.fault = self.fault or why
        raise Fault(self.fault)

    def settle(self) -> None:
        """The last exception of the program, if none of the tests' code has handled it, is a fault."""
        error, self._raised = self._raised, None
        if error is not None and crossed.swallowed(error):
            self.fault = self.fault or f"{type(error).__name__} where the tests did not handle it: {error}"

    def _function(self, place: Place, keep: bool) -> Any:
        return StandIn(place, lambda where, args, kwargs: self.call(where, args, kwargs, keep))

    def _ask(self, *question: Any, handles: bool = False) -> tuple[Any, ...]:
        self.settle()
        if self.fault:
            raise Fault(self.fault)
        nonce = secrets.token_hex(16)
        try:
            text = values.dumps((nonce, *question))
            frames.send(self.questions, text, frames.LONGEST_QUESTION)
        except (values.TooMuch, ValueError) as error:  # answers of the program, passed on, may be the reason
            self.refuse(f"the arguments are too large: {error}")
        except values.NotLiteral as error:
            if _is_of_the_tests(error.value):
                raise Unsupported(f"the tests pass {error}: {CANNOT_CROSS}") from None
            self.refuse(f"{error} was passed on: {CANNOT_CROSS}")  # it may have come from the program
        except frames.Ended:
            self._end()
        try:
            answer = values.loads(frames.receive(self.answers), self._handle if handles else None)
        except frames.TooLong as error:
            self.refuse(f"it answered with {error}")
        except frames.Ended:
            self._end()
        except values.Malformed:
            self.refuse("an answer that is none")
        if type(answer) is not tuple or len(answer) < 2 or answer[0] != nonce:
            self.refuse("an answer to no question")
        return answer[1:]

    def _handle(self, number: int | str) -> Handle:
        if not isinstance(number, int):
            raise values.Malformed("a name")
        return Handle(number, self)

    def _end(self) -> None:
        self.ended = True
        self.refuse("ended too soon")

    def _value(self, answer: tuple[Any, ...], keep: bool) -> Any:
        match answer:
            case ("value", found):
                return found
            case ("kept", found) if keep:
                return found
            case ("raised", [*names], str(text)):
                self._raised = self._exception(names, text)
                try:
                    raise self._raised
                except Exception:
                    raise  # raised twice, it has a traceback: see `crossed`
            case ("unfit", str(what)):
                self.refuse(f"returned {what}: {CANNOT_CROSS}")
        self.refuse("an answer that is none")

    def _exception(self, names: list[Any], text: str) -> BaseException:
        known = [str(name) for name in names]
        ours = next((self.exceptions[name] for name in known if name in self.exceptions), None)
        kind = ours or _builtin(known[:1]) or _exception_class(known[0] if known else "Exception", known)
        if not issubclass(kind, Exception) or issubclass(kind, crossed.CONTROL):
            self.refuse(f"{kind.__name__}: {text}")
        return kind(text)


def _is_of_the_tests(value: Any) -> bool:
    """Whether a value is a function or class of the tests' text, or an object of such a class: no answer makes one."""
    owner = value if isinstance(value, type | FunctionType | MethodType) else type(value)
    return getattr(owner, "__module__", None) == TESTS


def _builtin(names: list[str]) -> type[BaseException] | None:
    """The builtin exception of this name, if it is made of a text and says it as it is."""
    kind = getattr(builtins, names[0], None) if names else None
    if not isinstance(kind, type) or not issubclass(kind, Exception) or kind in (ModuleNotFoundError, ImportError):
        return None  # these two the tests themselves may raise: see `judge`
    try:
        return kind if str(kind("text")) == "text" else None
    except TypeError:
        return None


def _exception_class(name: str, bases: list[Any]) -> type[BaseException]:
    """A class of that name under the nearest builtin exception, which says its text as it came."""
    known = (getattr(builtins, base, None) for base in bases if type(base) is str)
    base: Any = next((one for one in known if isinstance(one, type) and issubclass(one, BaseException)), Exception)
    if issubclass(base, BaseExceptionGroup):
        base = Exception

    def initialise(self: BaseException, *args: Any) -> None:
        self.args = args

    def say(self: BaseException) -> str:
        return str((*self.args, "")[0])

    return type(name if name.isidentifier() else "Exception", (base,), {"__init__": initialise, "__str__": say})
