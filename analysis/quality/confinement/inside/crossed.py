"""What becomes of an exception that a program raised: one that no code of the tests has handled is a fault.

The interpreter swallows some exceptions itself, with no `except` in sight. IndexError ends a loop over an object with
`__getitem__`. AttributeError makes `hasattr` false and leads from `__getattribute__` to `__getattr__`. TypeError in
`__len__` is no length for `list`. All of them are forgotten in `__del__`. A call there would skip the assertions behind
it.

An exception's traceback names the frames that it reached (in Python 3.11: up to the last with a handler). A frame keeps
the position of its last instruction. So the outermost frame tells. If it still runs, it has the exception in hand. If
it ended elsewhere than where the exception came through, it has handled it. Else the exception left it and reached no
handler: it was swallowed. No traceback at all means that a handler took it away, as `unittest` does.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType, TracebackType

CONTROL = (StopIteration, StopAsyncIteration, GeneratorExit)  # end loops, and are not errors: they never cross
BARE_RAISE = (dis.opmap["RAISE_VARARGS"], 0)


def swallowed(error: BaseException) -> bool:
    """Whether an exception that was raised has ended, and not by a handler: ask when nothing is being raised any more."""
    reached = error.__traceback__
    return reached is not None and not _runs(reached.tb_frame) and _left(reached)


def _runs(frame: FrameType) -> bool:
    running: FrameType | None = sys._getframe()
    while running is not None and running is not frame:
        running = running.f_back
    return running is frame


def _left(reached: TracebackType) -> bool:
    """Whether the frame ended by this exception: where it came through, or where it was raised again."""
    last, code = reached.tb_frame.f_lasti, reached.tb_frame.f_code.co_code
    if last == reached.tb_lasti:
        return True
    return 0 <= last < len(code) and (code[last] == dis.opmap["RERAISE"] or tuple(code[last : last + 2]) == BARE_RAISE)
