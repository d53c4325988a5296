"""Answers of a serving engine, with counts and seconds, for `analysis.loads.engine_costs`; no model is loaded here.

    engine=xllamacpp     llama.cpp is started in processes of its own: alone, once per K, and with its own lookup; then priced
    engine=http://...    a server that runs is asked, and its answers are kept: K is what it was started with

Prompts are encoded by the engine. Answers are kept as they come, so that the same line goes on after an interruption.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
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
from toolkit.files.atomic import write_text
from toolkit.files.machine import processor
from toolkit.files.shards import is_gguf
from toolkit.files.text import lines_of
from toolkit.models.gguf_file import GGUFFile
from toolkit.runs.stage import open_stage, prompt_files

SCRIPT = Path(__file__).with_name("ask_xllamacpp.py")
LOOKUP = {"source": "lookup", "ngram": [2, 8]}  # of a probe: copies come often, and are as long as drafts


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
        with tqdm(total=number, desc="answers", unit="answer") as bar:

            def answered(answer: Mapping[str, Any]) -> None:
                bar.update()
                if bar.n == 1:
                    seconds = answer["seconds"]
                    bar.write(
                        f"about {seconds * number / 60:.0f} minutes at the first answer's {seconds:.1f} s, and starts"
                    )

            for name, settings in servers.items():
                ask_xllamacpp(
                    cfg.engine_python or sys.executable, {**shared, **settings}, prompts, files[name], answered
                )
    return price_files(list(files.values()), stage)


def ask_xllamacpp(
    python: Path | str,
    settings: Mapping[str, Any],
    prompts: Sequence[Any],
    path: Path,
    answered: Callable[[Mapping[str, Any]], Any] = lambda answer: None,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Ask what `path` has no answer to yet, in a process of the engine's interpreter; every answer is kept as it comes.

    settings  of `ask_xllamacpp.py`;  answered  called with every answer, those that are kept, too
    Returns all answers. Raises InputError if the process fails.
    """
    answers = read_kept(path)
    for answer in answers:
        answered(answer)
    if len(answers) >= len(prompts):
        return answers
    facts = {"source": settings["source"], "processor": processor(), "file_type": file_type(settings["model"])}
    facts |= {"num_drafted": settings["num_drafted"]} if "num_drafted" in settings else {}
    command = [str(python), str(SCRIPT), json.dumps({**settings, "first": len(answers)})]
    with TemporaryFile() as log, TemporaryFile("w+") as waiting:
        json.dump(prompts[len(answers) :], waiting)
        waiting.seek(0)
        with subprocess.Popen(command, stdin=waiting, stdout=subprocess.PIPE, stderr=log, env=environment) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line.startswith(b"{"):
                        keep(path, answers, {**json.loads(line), **facts})
                        answered(answers[-1])
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            log.seek(0)
            last = [line.strip() for line in log.read().decode(errors="replace").split("\n") if line.strip()][-1:]
            missing = "; engine_python=PATH names an interpreter with it" if "No module named" in "".join(last) else ""
            raise InputError(f"xllamacpp ended with {process.returncode}: {(last or ['nothing was said'])[0]}{missing}")
    return answers


def read_kept(path: Path) -> list[dict[str, Any]]:
    """The answers that a file holds; none if there is no file."""
    return [json.loads(line) for line in lines_of(path.read_text("utf-8")) if line] if path.exists() else []


def keep(path: Path, answers: list[dict[str, Any]], answer: dict[str, Any]) -> None:
    """Add an answer to a file's."""
    answers.append(answer)
    write_text(path, "".join(json.dumps(each) + "\n" for each in answers))


@cache
def file_type(model: str) -> str:
    """How a GGUF file's weights are stored: Q4_K_M; empty without the package that reads it."""
    if find_spec("gguf") is None:
        return ""
    from gguf import LlamaFileType

    number = GGUFFile.read(Path(model)).keys.get("general.file_type")
    return "" if number is None else LlamaFileType(number).name.partition("_")[2]  # MOSTLY_, ALL_


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
        answers = read_kept(path)
        server.ask(prompts[0], max_tokens=4)  # warms it up
        for prompt in tqdm(prompts[len(answers) :], desc="answers", unit="answer"):
            keep(path, answers, {**server.ask(prompt, **body), **facts})
        stage.finish(num_answers=len(answers))
    print(f"answers: {path}; with those of other starts (alone, other K): python -m analysis.timing engine=[FILE,...]")
    return stage.folder


class EngineServer(Endpoint):
    """A server with /v1/completions for texts and /v1/chat/completions for messages, and the first model that it lists."""

    name, url_key, variable_key = "the server", "engine", "engine"

    def __init__(self, base_url: str):
        base = base_url.rstrip("/")
        super().__init__(base if base.count("/") > 2 else f"{base}/v1", EndpointKeys(concurrency=1, attempts=2))
        self.base = self.address.removesuffix(self.path)
        models = self._reply(f"{self.base}/models").get("data")
        if not (isinstance(models, list) and models and isinstance(models[0], dict)):
            raise InputError(f"{self.base}/models: expected the server's model, got {models!r}")
        self.model = models[0].get("id")
        self.is_local = LOCAL.fullmatch(urlsplit(base_url).hostname or "") is not None

    def ask(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """An answer, with the seconds of the try that brought it. Raises InputError if none comes."""
        path, field = ("/completions", "prompt") if isinstance(prompt, str) else ("/chat/completions", "messages")
        request = prompt if isinstance(prompt, dict) else {field: prompt}
        return self._reply(f"{self.base}{path}", {"model": self.model, **request, **body})

    def _reply(self, url: str, body: Any = None) -> dict[str, Any]:
        def reply(server: EngineServer, url: str) -> dict[str, Any]:
            begun, content = perf_counter(), server.send(url, body)
            if not isinstance(content, dict):
                raise server.nonsense(json.dumps(content))
            return {**content, "seconds": perf_counter() - begun}

        try:
            answer: dict[str, Any] = self.answer(reply, url)
        except NoAnswer as error:
            raise InputError(f"{url}: {reason_of(error)}") from None
        return answer


def _prompts(cfg: keys.Timing) -> list[Any]:
    """The first prompts: texts, messages or requests. Raises InputError for one alone."""
    prompts = [prompt.content for prompt in instantiate(cfg.prompts).load()[: cfg.requests]]
    if len(prompts) < 2:
        raise InputError(f"expected requests of at least 2, and as many prompts, got {len(prompts)}")
    return prompts
