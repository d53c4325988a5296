"""Values that cross between processes: literal data of exactly the builtin types, as JSON with a tag on everything.

    null true false "text"                          themselves
    ["i", "-ff"] ["f", "0x1.8p+1"] ["c", re, im]    int (hexadecimal: no limit of digits), float (all bits, nan too), complex
    ["b", "00ff"] ["r", a, b, c]                    bytes, range
    ["l", ...] ["t", ...] ["S", ...] ["F", ...]     list, tuple, set, frozenset
    ["d", [key, value], ...]                        dict; Counter, defaultdict, OrderedDict and deque have tags like it
    ["I", ...]                                      an iterator: it was read to its end before it crossed
    ["K", ...] ["V", ...] ["E", [key, value], ...]  keys, values and items of a dict
    ["h", 3] ["h", "name"]                          what stays where it is: an object (`Handle`), a function (`StandIn`)

A type is looked up by identity, so a subclass never crosses: nothing that a program defined (`__eq__`, `__hash__`, `__len__`)
runs on the other side. Numbers of items, depth and length are limited on both sides. Standard library only: it also runs
inside confined processes.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

DEEPEST = 100  # levels of nesting
MOST_ITEMS = 500_000  # in one message
SEQUENCES: dict[type, str] = {list: "l", tuple: "t", set: "S", frozenset: "F", deque: "q"}
MAPPINGS: dict[type, str] = {dict: "d", Counter: "C", OrderedDict: "O", defaultdict: "D"}
_ORDERED: OrderedDict[Any, Any] = OrderedDict()
VIEWS: dict[type, str] = {
    type({}.keys()): "K", type({}.values()): "V", type({}.items()): "E",
    type(_ORDERED.keys()): "K", type(_ORDERED.values()): "V", type(_ORDERED.items()): "E",
}  # fmt: skip
_EXAMPLES: tuple[Any, ...] = (
    (i for i in range(0)), map(abs, ()), zip(()), filter(None, ()), enumerate(()), reversed([]), reversed(()),
    reversed(range(0)), reversed(range(10**30)), reversed({}), reversed({}.values()), reversed({}.items()),
    reversed(_ORDERED), reversed(deque()), iter([]), iter(()), iter({}), iter({}.values()), iter({}.items()),
    iter(_ORDERED), iter(deque()), iter(set()), iter(range(0)), iter(range(10**30)), iter("e"), iter("é"), iter(b""),
    iter(bytearray()), iter(memoryview(b"")), iter(int, 0),
)  # fmt: skip
ITERATORS: frozenset[type] = frozenset(
    [*(type(one) for one in _EXAMPLES), *(kind for kind in vars(itertools).values() if hasattr(kind, "__next__"))]
)


class NotLiteral(Exception):
    """A value that cannot cross; the text says what it is, `value` is it."""

    def __init__(self, text: str, value: Any = None):
        super().__init__(text)
        self.value = value


class TooMuch(NotLiteral):
    """Literal, but too large or too deep."""


class Malformed(Exception):
    """Text that no honest process sends."""


class Handle:
    """An object that stayed in the other process: it can be passed back there, and asked for its attributes.

    Everything else that a caller may try, comparing above all, goes to `refuse`, which raises.
    """

    __slots__ = ("_ask", "number")

    def __init__(self, number: int, ask: Any = None):
        object.__setattr__(self, "number", number)
        object.__setattr__(self, "_ask", ask)

    def __getattr__(self, name: str) -> Any:
        return self._ask.get(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask.set(self, name, value)

    def _refuse(self, *_: Any) -> Any:
        return self._ask.refuse()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = __len__ = __iter__ = _refuse  # type: ignore[assignment]
    __contains__ = __getitem__ = __add__ = __radd__ = __sub__ = __mul__ = __call__ = __str__ = __repr__ = _refuse
    __int__ = __float__ = __index__ = __enter__ = __next__ = _refuse


class StandIn:
    """A function that stayed in the other process: calling it asks there. place: a name, or a handle and attributes."""

    def __init__(self, place: tuple[Any, ...], call: Callable[..., Any]):
        self.place, self.call, self.__name__ = place, call, str(place[-1]) if type(place[-1]) is str else ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.place, args, kwargs)


def dumps(value: Any, keep: Callable[[Any], int] | None = None, most: int = MOST_ITEMS) -> bytes:
    """A value as ASCII. `keep` gives numbers to objects that stay here; without it they raise NotLiteral."""
    return json.dumps(_pack(value, [most], 0, keep), separators=(",", ":")).encode("ascii")


def loads(text: bytes, handle: Callable[[int | str], Any] | None = None, most: int = MOST_ITEMS) -> Any:
    """The value again, made of nothing but builtin types. `handle` turns numbers and names into objects. Raises Malformed."""
    try:
        return _unpack(json.loads(text), [most], 0, handle)
    except Malformed:
        raise
    except (ValueError, TypeError, IndexError, OverflowError, RecursionError, MemoryError) as error:
        raise Malformed(type(error).__name__) from None


# -- out --------------------------------------------------------------------------------------------------------------


def _pack(value: Any, left: list[int], depth: int, keep: Callable[[Any], int] | None) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise TooMuch("too many items")
    if depth > DEEPEST:
        raise TooMuch(f"something nested deeper than {DEEPEST} levels")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    scalar = _scalar(value, kind)
    if scalar is not None:
        return scalar

    def inner(one: Any) -> Any:
        return _pack(one, left, depth + 1, keep)

    if kind in SEQUENCES:
        return [SEQUENCES[kind], *(inner(one) for one in value)]
    if kind in MAPPINGS:
        return [MAPPINGS[kind], *([inner(key), inner(one)] for key, one in value.items())]
    if kind in VIEWS:
        pairs = ([inner(key), inner(one)] for key, one in value) if VIEWS[kind] == "E" else map(inner, value)
        return [VIEWS[kind], *pairs]
    if kind in ITERATORS:
        return ["I", *(inner(one) for one in islice(value, left[0] + 1))]
    if kind is Handle:
        return ["h", value.number]
    if kind is StandIn and len(value.place) == 1:
        return ["h", value.place[0]]
    if keep is None:
        raise NotLiteral(f"a value of type {str(kind.__name__)[:80]}", value)
    return ["h", keep(value)]


def _scalar(value: Any, kind: type) -> list[Any] | None:
    if kind is int:
        return ["i", format(value, "x")]
    if kind is float:
        return ["f", value.hex()]
    if kind is complex:
        return ["c", value.real.hex(), value.imag.hex()]
    if kind is bytes or kind is bytearray:
        return ["b" if kind is bytes else "B", value.hex()]
    if kind is range:
        return ["r", *(format(one, "x") for one in (value.start, value.stop, value.step))]
    return None


# -- in ---------------------------------------------------------------------------------------------------------------


def _unpack(value: Any, left: list[int], depth: int, handle: Callable[[int | str], Any] | None) -> Any:
    left[0] -= 1
    if left[0] < 0 or depth > DEEPEST:
        raise Malformed("too many items or too deep")
    if value is None or value is True or value is False or type(value) is str:
        return value
    if type(value) is not list or not value or type(value[0]) is not str:
        raise Malformed("no tag")
    tag, *parts = value
    if tag in READERS:
        return READERS[tag](*parts)
    if tag == "h" and handle is not None and len(parts) == 1 and type(parts[0]) in (int, str):
        return handle(parts[0])
    if tag in PAIRS:
        pairs = ((_unpack(k, left, depth + 1, handle), _unpack(v, left, depth + 1, handle)) for k, v in parts)
        return PAIRS[tag](pairs)
    if tag in MAKERS:
        return MAKERS[tag](_unpack(one, left, depth + 1, handle) for one in parts)
    raise Malformed("unknown tag")


def _integer(text: str) -> int:
    return int(text, 16)


def _float(text: str) -> float:
    return float.fromhex(text)


def _defaultdict(pairs: Iterator[tuple[Any, Any]]) -> defaultdict[Any, Any]:
    return defaultdict(None, pairs)


READERS: dict[str, Callable[..., Any]] = {
    "i": _integer,
    "f": _float,
    "c": lambda real, imag: complex(_float(real), _float(imag)),
    "b": bytes.fromhex,
    "B": bytearray.fromhex,
    "r": lambda a, b, c: range(_integer(a), _integer(b), _integer(c)),
}
PAIRS: dict[str, Callable[[Any], Any]] = {
    "d": dict,
    "C": lambda pairs: Counter(dict(pairs)),
    "O": OrderedDict,
    "D": _defaultdict,
    "E": lambda pairs: dict(pairs).items(),
}
MAKERS: dict[str, Callable[[Any], Any]] = {
    "l": list,
    "t": tuple,
    "S": set,
    "F": frozenset,
    "q": deque,
    "K": lambda items: dict.fromkeys(items).keys(),
    "V": lambda items: dict(enumerate(items)).values(),
    "I": lambda items: iter(list(items)),
}
