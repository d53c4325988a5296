"""A server on this machine that speaks OpenAI's chat completions, or fails to in a way one asks for."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.data_gen.stub_target import send, served

Say = Callable[[BaseHTTPRequestHandler], None]


class Stub:
    """answers  what is done with each request, in order; the last one stays. requests: bodies and headers that came."""

    address: str

    def __init__(self) -> None:
        self.answers: list[Say] = [says("Rating: [[7]]")]
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.over = threading.Event()  # lets stalled answers go
        self._lock = threading.Lock()

    def post(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.requests.append((body, {**dict(handler.headers), "path": handler.path}))
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        handler.question = body["messages"][-1]["content"]  # type: ignore[attr-defined]
        answer(handler)


@contextmanager
def stub_judge() -> Iterator[Stub]:
    stub = Stub()
    with served(stub):
        yield stub


def sends(status: int, body: bytes, **headers: str) -> Say:
    """An answer with this status and body."""
    return lambda handler: send(handler, status, body, **headers)


def says(text: Any, model: str = "stub-1") -> Say:
    """A completion."""
    choices = [{"message": {"role": "assistant", "content": text}}]
    return sends(200, json.dumps({"model": model, "system_fingerprint": "fp_9", "choices": choices}).encode())


def drops(handler: BaseHTTPRequestHandler) -> None:
    """Hangs up without a word."""
    handler.close_connection = True


def stalls(stub: Stub) -> Say:
    """Says nothing until the test is over."""
    return lambda handler: (stub.over.wait(60), drops(handler))[1]


def drips(stub: Stub) -> Say:
    """Promises much and sends byte by byte, each well within the time that silence is allowed."""

    def say(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        while not stub.over.wait(0.05):
            try:
                handler.wfile.write(b" ")
            except OSError:
                return

    return say
