"""Servers here that speak OpenAI's completions, of a tiny target and of a judge: they answer rightly, fail, stall or lie."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from toolkit.models.pair import load_tokenizer

Say = Callable[[BaseHTTPRequestHandler], None]
Change = Callable[[dict[str, Any], dict[str, Any]], Any]  # the request and a right answer -> what is said instead
FIELDS = (
    "model", "prompt", "max_tokens", "n", "stream", "seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "stop", "stop_token_ids", "skip_special_tokens", "ignore_eos", "min_tokens", "presence_penalty", "frequency_penalty",
    "return_token_ids",
)  # fmt: skip


class Status(Exception):
    """An answer with another status."""

    def __init__(self, code: int, body: str = "", **headers: str):
        super().__init__(code)
        self.code, self.body, self.headers = code, body, headers


class StubTarget:
    """Says the tokens `response(request)`, end of text last.

    change    what is said instead of the right answer; may raise Status, or OSError to hang up
    fields    that openapi.json lists; (): there is none
    requests  bodies that came, with the moment; headers likewise
    """

    def __init__(self, folder: str, model: str, end: int):
        self.tokenizer, self.model, self.end = load_tokenizer(folder), model, end
        self.change: Change = lambda request, answer: answer
        self.fields: tuple[str, ...] = FIELDS
        self.serves = model
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.moments: list[float] = []
        self.most_at_once = self._at_once = 0
        self.over = threading.Event()  # lets stalled answers go
        self.lock = threading.Lock()
        self.address = ""

    def response(self, request: dict[str, Any]) -> list[int]:
        """A function of the prompt and the length alone."""
        basis = (
            request["prompt"] if isinstance(request["prompt"], list) else self.tokenizer(request["prompt"]).input_ids
        )
        words = [3 + (7 * sum(basis) + 5 * i) % 20 for i in range(4 + sum(basis) % 3)]
        ids = self.tokenizer(self.tokenizer.decode(words), add_special_tokens=False).input_ids
        return [*ids, self.end][: request["max_tokens"]]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """As vLLM says it."""
        ids, prompt = self.response(request), request["prompt"]
        read = prompt if isinstance(prompt, list) else self.tokenizer(prompt).input_ids
        choice: dict[str, Any] = {
            "index": 0,
            "text": self.tokenizer.decode(ids, skip_special_tokens=True),
            "finish_reason": "stop" if ids[-1] == self.end else "length",
        }
        if request.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": read}
        usage = {"prompt_tokens": len(read), "completion_tokens": len(ids)}
        return {"model": request["model"], "choices": [choice], "usage": usage}

    def post(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.requests.append(body)
            self.headers.append(dict(handler.headers))
            self.moments.append(time.monotonic())
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            try:
                said = self.change(body, self.answer(body))
            finally:  # before the answer leaves: who has it may ask again at once
                with self.lock:
                    self._at_once -= 1
            send(handler, 200, said if isinstance(said, bytes) else json.dumps(said).encode())
        except Status as status:
            send(handler, status.code, status.body.encode(), **status.headers)
        except OSError:
            handler.close_connection = True

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/v1/models":
            send(handler, 200, json.dumps({"data": [{"id": self.serves}]}).encode())
        elif handler.path == "/openapi.json" and self.fields:
            schema = {"$ref": "#/components/schemas/CompletionRequest"}
            post = {"requestBody": {"content": {"application/json": {"schema": schema}}}}
            known = {"CompletionRequest": {"properties": {key: {} for key in self.fields}}}
            told = {"paths": {"/v1/completions": {"post": post}}, "components": {"schemas": known}}
            send(handler, 200, json.dumps(told).encode())
        else:
            send(handler, 404, b"")


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    """One whole answer."""
    try:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
    except OSError:
        handler.close_connection = True  # the client has gone


@contextmanager
def stub_target(folder: str, model: str = "tiny", end: int = 2) -> Iterator[StubTarget]:
    """A running server; `address` is its base."""
    stub = StubTarget(folder, model, end)
    with served(stub):
        yield stub


@contextmanager
def served(stub: Any) -> Iterator[None]:
    """A server whose requests the stub answers by its `post` and `get`; its `address` is set, at the end its `over`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            stub.post(self)

        def do_GET(self) -> None:
            stub.get(self)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub.address = f"http://127.0.0.1:{server.server_address[1]}/v1"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield
    finally:
        stub.over.set()
        server.shutdown()
        server.server_close()


# -- a judge ----------------------------------------------------------------------------------------------------------


class StubJudge:
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
def stub_judge() -> Iterator[StubJudge]:
    stub = StubJudge()
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


def stalls(stub: StubJudge) -> Say:
    """Says nothing until the test is over."""
    return lambda handler: (stub.over.wait(60), drops(handler))[1]


def drips(stub: StubJudge) -> Say:
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
