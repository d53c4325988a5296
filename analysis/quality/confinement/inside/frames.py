"""Messages over a pipe: four bytes of length, then that many bytes."""

from __future__ import annotations

import os
import select
import struct
from time import monotonic

HEAD = struct.Struct(">I")
LONGEST = 8 * 2**20  # bytes of an answer
LONGEST_QUESTION = 64 * 2**20  # may hold several answers


class Ended(Exception):
    """The other side closed its end, or sent what is no message."""


class TooLong(Ended):
    """A message is longer than is read."""


class Late(Exception):
    """No whole message came in time."""


def send(pipe: int, message: bytes, longest: int = LONGEST) -> None:
    """Write one message whole. Raises Ended if the reader is gone, ValueError if it is too long."""
    if len(message) > longest:
        raise ValueError(f"more than {longest // 2**20} MiB")
    rest = memoryview(HEAD.pack(len(message)) + message)
    try:
        while rest:
            rest = rest[os.write(pipe, rest) :]
    except BrokenPipeError:
        raise Ended("nobody reads") from None


def receive(pipe: int, longest: int = LONGEST, deadline: float | None = None) -> bytes:
    """Read one message. Raises Ended at the pipe's end and for a length above `longest`, Late after the deadline."""
    (length,) = HEAD.unpack(_exactly(pipe, HEAD.size, deadline))
    if length > longest:
        raise TooLong(f"more than {longest // 2**20} MiB")
    return _exactly(pipe, length, deadline)


def readable(pipe: int, seconds: float) -> bool:
    """Whether something, or the end, can be read within so many seconds."""
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    return bool(waiting.poll(max(seconds, 0) * 1000))


def _exactly(pipe: int, count: int, deadline: float | None) -> bytes:
    found = bytearray()
    while len(found) < count:
        if deadline is not None and not readable(pipe, deadline - monotonic()):
            raise Late
        some = os.read(pipe, min(count - len(found), 2**16))
        if not some:
            raise Ended("the pipe was closed")
        found += some
    return bytes(found)
