"""Answers of a serving engine, with counts and seconds, for `analysis.loads.engine_costs`; no model is loaded here.

    engine=xllamacpp     llama.cpp is started in processes of its own: alone, once per K, and with its own lookup; then priced
    engine=http://...    a server that runs is asked, and its answers are kept: K is what it was started with

Prompts are encoded by the engine. Answers are kept as they come, so that the same line goes on after an interruption.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from tqdm.auto import tqdm

from analysis import keys
from analysis.loads.engine_costs import UNREAD, price_files
from data_gen.completions import LOCAL, Endpoint, NoAnswer, reason_of
from data_gen.keys import EndpointKeys
from toolkit.config import instantiate, plain
from toolkit.errors import InputError
from toolkit.files import journal
from toolkit.files.atomic import write_text
from toolkit.files.machine import processor
from toolkit.files.shards import is_gguf
from toolkit.models.prompts import without_grammars
from toolkit.runs.stage import open_stage, prompt_files

SCRIPT = Path(__file__).with_name("ask_xllamacpp.py")
LOOKUP = {"source": "lookup", "ngram": [2, 8]}  # of a probe: copies come often, and are as long as drafts
LONGEST_HEADER = 2**26  # bytes of a GGUF file that are searched


def probe_xllamacpp(cfg: keys.Timing) -> Path:
    """Ask llama.cpp at every K, and price its answers; returns the output folder."""
    target, draft = (plain(cfg.pair).get(name) for name in ("target", "draft"))
    for name, file in (("target", target), ("draft", draft)):
        if (name == "target" or draft) and not (is_gguf(str(file)) and Path(file).is_file()):
            raise InputError(f"engine=xllamacpp: expected pair.{name}=FILE.gguf, got {file}")
    prompts, sampling = _prompts(cfg), plain(cfg.sampling)
    stage = open_stage("timing", cfg, inputs=prompt_files(cfg), ignore=(*UNREAD, "source"))
    servers: dict[str, dict[str, Any]] = {"alone": {"source": "none"}}
    for k in cfg.num_drafted if draft else ():
        servers[f"K{k}"] = {"source": "draft", "draft": draft, "num_drafted": k, "p_min": 0.0}
    servers["lookup"] = LOOKUP
    files = {name: stage.folder / "answers" / f"{name}.jsonl" for name in servers}
    if not stage.finished:
        shared = {"model": target, "max_tokens": sampling["max_new_tokens"], "temperature": sampling["temperature"]}
        number = len(servers) * len(prompts)
        print(
            f"llama.cpp is started {len(servers)} times ({', '.join(servers)}) for {number} answers of at most "
            f"{sampling['max_new_tokens']} tokens"
        )
        python = cfg.engine_python or sys.executable
        with tqdm(total=number, desc="answers", unit="answer") as bar:
            for name, settings in servers.items():
                ask_xllamacpp(python, {**shared, **settings}, prompts, files[name], bar.update)
    return price_files(list(files.values()), stage)


def ask_xllamacpp(
    python: Path | str,
    settings: Mapping[str, Any],
    prompts: Sequence[Any],
    path: Path,
    progress: Callable[[int], object] = int,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Ask what `path` has no answer to yet; returns all answers. Raises InputError if the engine's process fails.

    python, settings  the engine's interpreter, and what `ask_xllamacpp.py` is told
    progress          is called with numbers of answers, those that are kept, too
    """

    def missing(first: int) -> Iterator[dict[str, Any]]:
        progress(first)
        if first >= len(prompts):
            return
        facts = {name: settings[name] for name in ("source", "num_drafted") if name in settings}
        facts |= {"processor": processor(), "file_type": file_type(settings["model"])}
        command = [str(python), str(SCRIPT), json.dumps({**settings, "first": first})]
        for answer in answers_of_process(command, prompts[first:], environment):
            progress(1)
            yield {**answer, **facts}

    return kept(path, missing)


def answers_of_process(
    command: Sequence[str], prompts: Sequence[Any], environment: Mapping[str, str] | None
) -> Iterator[dict[str, Any]]:
    """The answers that a process prints as it gets them. Raises InputError, with its last words, if it fails."""
    with TemporaryFile() as log, TemporaryFile("w+") as waiting:
        json.dump(prompts, waiting)
        waiting.seek(0)
        with subprocess.Popen(command, stdin=waiting, stdout=subprocess.PIPE, stderr=log, env=environment) as process:
            assert process.stdout is not None
            try:
                yield from (json.loads(line) for line in process.stdout if line.startswith(b"{"))
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            log.seek(0)
            last = log.read().decode(errors="replace").strip().rpartition("\n")[2] or "nothing was said"
            hint = "; engine_python=PATH names an interpreter with it" if "No module named" in last else ""
            raise InputError(f"xllamacpp ended with {process.returncode}: {last}{hint}")


def kept(path: Path, missing: Callable[[int], Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The answers of a file, then `missing(their number)`: each is appended as it comes, and a torn line is passed over."""
    answers = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with suppress(ValueError):
            answers.append(json.loads(line))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        journal.note(path, sha256="")  # listed, so that it is deleted with the stage's other files
    for answer in missing(len(answers)):
        journal.append_line(path, json.dumps(answer), flush=True)
        answers.append(answer)
    write_text(path, "".join(json.dumps(answer) + "\n" for answer in answers))
    return answers


@cache
def file_type(model: str) -> str:
    """How a GGUF file's weights are stored: Q4_K_M; empty where its header does not say it, or gguf is not installed.

    The header is searched, not parsed: its lists of tokens take a parser seconds. The key is followed by the type of a number
    in 32 bits (4), and by the number.
    """
    try:
        from gguf import LlamaFileType
    except ImportError:
        return ""
    key = b"general.file_type" + (4).to_bytes(4, "little")
    with open(model, "rb") as file:
        _, separator, rest = file.read(LONGEST_HEADER).partition(key)
    number = int.from_bytes(rest[:4], "little")
    return LlamaFileType(number).name.partition("_")[2] if separator else ""  # without MOSTLY_ or ALL_


def ask_server(cfg: keys.Timing) -> Path:
    """Ask a server that runs; returns the folder of its answers."""
    if cfg.source == "draft" and len(cfg.num_drafted) != 1:
        raise InputError(
            f"source=draft: expected num_drafted=[K] that the server was started with, got {cfg.num_drafted}"
        )
    prompts, sampling = _prompts(cfg), plain(cfg.sampling)
    stage = open_stage("timing", cfg, inputs=prompt_files(cfg), ignore=(*UNREAD, "pair"))
    path = stage.folder / "answers.jsonl"
    if not stage.finished:
        server = EngineServer(str(cfg.engine))
        facts: dict[str, Any] = {"source": cfg.source}
        facts |= {"num_drafted": cfg.num_drafted[0]} if cfg.source == "draft" else {}
        facts |= {"processor": processor()} if server.is_local else {}
        body = {"max_tokens": sampling["max_new_tokens"], "temperature": sampling["temperature"]}
        server.ask(prompts[0], max_tokens=4)  # warms it up
        bar = partial(tqdm, desc="answers", unit="answer")
        answers = kept(path, lambda first: ({**server.ask(each, **body), **facts} for each in bar(prompts[first:])))
        stage.finish(num_answers=len(answers))
    print(f"answers: {path}; with those of other starts (alone, other K): python -m analysis.timing engine=[FILE,...]")
    return stage.folder


class EngineServer(Endpoint):
    """A server with /v1/completions for texts and /v1/chat/completions for messages, and the first model that it lists."""

    name, url_key, variable_key = "the server", "engine", "engine"

    def __init__(self, base_url: str):
        base = base_url.rstrip("/")
        super().__init__(base if base.count("/") > 2 else f"{base}/v1", EndpointKeys())
        self.base = self.address.removesuffix(self.path)
        models = self._reply(f"{self.base}/models")
        try:
            self.model = models["data"][0]["id"]
        except (LookupError, TypeError):
            raise InputError(f"{self.base}/models: expected the server's model, got {models!r}") from None
        self.is_local = LOCAL.fullmatch(urlsplit(base_url).hostname or "") is not None

    def ask(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """An answer, with its seconds. Raises InputError if none comes."""
        path, field = ("/completions", "prompt") if isinstance(prompt, str) else ("/chat/completions", "messages")
        request = prompt if isinstance(prompt, dict) else {field: prompt}
        begun = perf_counter()
        answer = self._reply(f"{self.base}{path}", {"model": self.model, **request, **body})
        return {**answer, "seconds": perf_counter() - begun}

    def _reply(self, url: str, body: Any = None) -> dict[str, Any]:
        try:
            answer = self.send(url, body)
            if not isinstance(answer, dict):
                raise self.nonsense(json.dumps(answer))
        except NoAnswer as error:
            raise InputError(f"{url}: {reason_of(error)}") from None
        return answer


def _prompts(cfg: keys.Timing) -> list[Any]:
    """The first prompts: texts, messages or requests. Raises InputError for one alone."""
    prompts = [prompt.content for prompt in without_grammars(instantiate(cfg.prompts).load())[: cfg.requests]]
    if len(prompts) < 2:
        raise InputError(f"expected requests of at least 2, and as many prompts, got {len(prompts)}")
    return prompts
