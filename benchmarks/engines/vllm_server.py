"""A vLLM server in an environment of its own, asked one question at a time; every answer is kept as it comes.

    answers = serve(python, target, ask, config, temperature...)

An answer file holds vLLM's own answers, one JSON object per line, so `analysis.advise responses=` reads it. A server that ends
early leaves the answers that it gave; the next call asks the rest.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from benchmarks.evidence import ROOT
from toolkit.errors import InputError
from toolkit.files.atomic import write_text
from toolkit.files.text import lines_of

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
}
FLAGS = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8", "--no-enable-prefix-caching",
    "--per-request-spec-decode-metrics", "detailed",
)  # fmt: skip
STARTS, ANSWERS = 3600, 1800  # seconds that a server may take to start, and an answer: on cores that others use, too


@dataclass(frozen=True)
class Server:
    """A running server: its address, and the process."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        """What it answers. Raises InputError once it has ended."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=ANSWERS) as answer:
                return str(answer.read().decode("utf-8"))
        except (URLError, OSError) as error:
            if self.process.poll() is None and not isinstance(error, ConnectionError):
                raise InputError(f"{self.url}{path}: {error}; its log is {self.log}") from None
            raise InputError(f"vLLM has ended: {last_error(self.log)}; its log is {self.log}") from None


@contextmanager
def started(python: Path, target: str, options: Sequence[str], log: Path) -> Iterator[Server]:
    """A server of `target` with further options, ended on leaving. Raises InputError if it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(Path(__file__).with_name("start_vllm.py"))
    words = [str(python), script, "--model", target, "--served-model-name", "target"]
    words += ["--host", "127.0.0.1", "--port", str(port), *FLAGS, *options]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as file:
        process = subprocess.Popen(words, env=environment, stdout=file, stderr=file, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        ends = monotonic() + STARTS
        while not _healthy(server):
            if process.poll() is not None:
                raise InputError(f"vLLM did not start: {last_error(log)}; its log is {log}")
            if monotonic() > ends:
                raise InputError(f"vLLM did not start in {STARTS // 60} minutes; its log is {log}")
            sleep(1)
        yield server
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):  # its engine and its workers, too, which outlive a server that was killed
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _healthy(server: Server) -> bool:
    try:
        with urlopen(f"{server.url}/health", timeout=5):
            return True
    except (URLError, OSError):
        return False


def last_error(log: Path) -> str:
    """The last line of a log that names an error, or its last line."""
    lines = [line.strip() for line in lines_of(log.read_text("utf-8", errors="replace")) if line.strip()]
    errors = [line for line in lines if "Error" in line and "WARNING" not in line]
    return (errors or lines or ["nothing was written"])[-1]


def answers_of(path: Path) -> list[dict[str, Any]]:
    """The answers that a file holds; a last line that was cut off does not count."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text("utf-8").rpartition("\n")
    return [json.loads(line) for line in lines_of(whole) if line]


def ask(
    server: Server,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    max_tokens: int,
    path: Path,
    grammars: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """Ask what `path` has no answer to yet, and add each answer as it comes. Returns the /metrics page after every answer.

    grammars  JSON schemas of the answers, one per prompt; (): texts are free
    Raises InputError for a server that ends.
    """
    answers, pages = answers_of(path), []
    write_text(path, "".join(json.dumps(answer) + "\n" for answer in answers))
    for number, prompt in enumerate(prompts):
        if number < len(answers):
            continue
        body = {
            "model": "target", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": temperature,
            "seed": number, "return_token_ids": True, "top_p": 1.0, "top_k": 0,
        }  # fmt: skip
        if grammars:
            body["structured_outputs"] = {"json": grammars[number]}
        answer = server.get("/v1/completions", body)
        with path.open("a", encoding="utf-8") as file:
            file.write(answer.strip() + "\n")
        pages.append(server.get("/metrics"))
        print(f"  {path.stem}: {number + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    return pages
