"""How an input ended: refused in one line, accepted, with a traceback, or not within its limit."""

from __future__ import annotations

import io
import logging
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from toolkit.errors import InputError
from toolkit.lines import first_line, lines_of

WAITING = 8
REFUSED, ACCEPTED, TRACEBACK, HANG = "refused", "accepted", "traceback", "hang"


@dataclass(frozen=True)
class Outcome:
    """kind: one of the four; said: the line, or the error's name, its message and where it was raised."""

    kind: str
    said: str = ""


class _TooLong(BaseException):
    """The limit is over; no handler of ordinary errors keeps it."""


def outcome(run: Callable[[], object], seconds: float) -> Outcome:
    """What comes of a call: an InputError, or an exit with "error: ...", is a refusal if it is one line.

    So is Python's own TypeError for arguments that a signature does not have, raised by the call itself.
    """
    try:
        with _limited(seconds), quiet():
            return Outcome(ACCEPTED, str(run() or ""))
    except _TooLong:
        return Outcome(HANG, f"over {seconds:g} s")
    except InputError as error:
        return _line(str(error))
    except SystemExit as error:
        if error.code in (None, 0):
            return Outcome(ACCEPTED, "printed")
        text = str(error.code)
        return _line(text) if text.startswith("error: ") else Outcome(TRACEBACK, f"exit {text}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, TypeError) and frames[-1].filename.endswith("fuzz_calls.py") and "argument" in str(error):
            return Outcome(REFUSED, str(error))
        where = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames[:-5:-1])
        return Outcome(TRACEBACK, f"{type(error).__name__}: {first_line(error)[:200]} ({where})")


def _line(text: str) -> Outcome:
    if len(lines_of(text)) == 1:
        return Outcome(REFUSED, text)
    return Outcome(TRACEBACK, f"expected one line, got {text[:200]!r}")


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """So many seconds of this process's own time, and WAITING times as many by the clock: a busy machine makes no hang."""

    def stop(*_: Any) -> None:
        raise _TooLong

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, seconds), signal.SIGALRM: (signal.ITIMER_REAL, WAITING * seconds)}
    before = {number: signal.signal(number, stop) for number in timers}
    for timer, limit in timers.values():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing is printed, nothing is warned of.

    Hydra closes all handlers of logs when it begins, and absl's close the stream they write to, unless it is standard error
    at that moment. So handlers that write there get a stream of their own first.
    """
    for known in logging._handlerList:  # type: ignore[attr-defined]  # what logging.shutdown closes
        handler = known()
        if isinstance(handler, logging.StreamHandler) and vars(handler).get("stream") in (sys.stdout, sys.stderr):
            handler.setStream(io.StringIO())
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
