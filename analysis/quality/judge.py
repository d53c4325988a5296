"""Ratings from 1 to 10 by a judge: any model that is loaded here, or any endpoint that speaks OpenAI's chat completions.

Paper: MT-Bench (arXiv:2306.05685), single-answer grading; DSBD (arXiv:2409.16560) Table 1 and MTAD (arXiv:2407.09722) Table 6
report it with GPT-4 as the judge.
Deviation: one turn per prompt. An answer without a rating is left out of the mean and counted, as in the paper's code.

A judge is part of the result: who it is, its template and how it was asked stand in `about`. A model that is loaded here
decodes greedily. An endpoint is asked at temperature 0, which promises nothing: its answers repeat only if they are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from analysis.quality.base import Metric, Score, check_lengths
from data_gen.completions import Endpoint, answers
from data_gen.keys import EndpointKeys
from toolkit.config import method
from toolkit.config.notes import Above, AtLeast, File, Model
from toolkit.config.values import check_ranges
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash, read_json, write_json
from toolkit.models.fingerprint import configuration
from toolkit.models.pair import ModelPair, fingerprint, load_tokenizer
from toolkit.models.prompts import Message, Prompt
from toolkit.types import Generation
from toolkit.types import Prompt as Content

SYSTEM = "You are a helpful assistant."
LOWEST, HIGHEST = 1.0, 10.0
RATING = re.compile(r"\[\[(\d+(?:\.\d+)?)\]\]")
PLACEHOLDER = re.compile(r"\{(question|answer|reference)\}")
SINGLE = """[Instruction]
Please act as an impartial judge and evaluate the quality of the response provided by an AI assistant to the user question \
displayed below. Your evaluation should consider factors such as the helpfulness, relevance, accuracy, depth, creativity, and \
level of detail of the response. Begin your evaluation by providing a short explanation. Be as objective as possible. After \
providing your explanation, you must rate the response on a scale of 1 to 10 by strictly following this format: \
"[[rating]]", for example: "Rating: [[5]]".

[Question]
{question}

[The Start of Assistant's Answer]
{answer}
[The End of Assistant's Answer]"""
REFERENCE = """[Instruction]
Please act as an impartial judge and evaluate the quality of the response provided by an AI assistant to the user question \
displayed below. Your evaluation should consider correctness and helpfulness. You will be given a reference answer and the \
assistant's answer. Begin your evaluation by comparing the assistant's answer with the reference answer. Identify and \
correct any mistakes. Be as objective as possible. After providing your explanation, you must rate the response on a scale \
of 1 to 10 by strictly following this format: "[[rating]]", for example: "Rating: [[5]]".

[Question]
{question}

[The Start of Reference Answer]
{reference}
[The End of Reference Answer]

[The Start of Assistant's Answer]
{answer}
[The End of Assistant's Answer]"""
TEMPLATES = {"single": SINGLE, "reference": REFERENCE}


@dataclass(frozen=True)
class Template:
    """A judge's instruction with the placeholders {question}, {answer} and perhaps {reference}."""

    name: str
    text: str

    @classmethod
    def named(cls, name: str) -> Template:
        """One of TEMPLATES, or a text file. Raises InputError if it is neither, or lacks a placeholder."""
        text = TEMPLATES.get(name)
        if text is None:
            try:
                text = Path(name).read_text(encoding="utf-8")
            except (OSError, ValueError):
                names = " or ".join(TEMPLATES)
                raise InputError(
                    f"template: expected {names}, or a text file with {{question}} and {{answer}}, got {name!r}"
                ) from None
        if missing := {"question", "answer"} - set(PLACEHOLDER.findall(text)):
            raise InputError(f"template: {name} lacks the placeholder {{{min(missing)}}}")
        return cls(name, text)

    @property
    def about(self) -> str:
        return f"template {self.name} ({content_hash(self.text, 8)})"

    def filled(self, prompt: Prompt, answer: str) -> str:
        """The instruction about one answer. Placeholders inside the question or the answer stay as they are."""
        objects = {key: value for key, value in prompt.options.items() if key in ("tools", "documents")}
        turns: list[Message] = [{"role": key, "content": json.dumps(value)} for key, value in objects.items()]
        turns += prompt.messages or ()  # all of a conversation with several
        texts = [turn["content"] + (json.dumps(turn["tool_calls"]) if turn.get("tool_calls") else "") for turn in turns]
        headed = "\n\n".join(
            f"### {turn['role'].capitalize()}:\n{text}" for turn, text in zip(turns, texts, strict=True)
        )
        question = prompt.prompt if prompt.prompt is not None else turns[0]["content"] if len(turns) == 1 else headed
        values = {"question": question, "answer": answer, "reference": prompt.answer or ""}
        return PLACEHOLDER.sub(lambda match: values[match[1]], self.text)


def rating_of(reply: str) -> tuple[float | None, str]:
    """The first "[[rating]]" of a reply; or None, and why."""
    match = RATING.search(reply)
    if match is None:
        return None, "the judge gave no rating"
    rating = float(match[1])
    if not LOWEST <= rating <= HIGHEST:
        return None, f"the judge's rating is not from {LOWEST:g} to {HIGHEST:g}"
    return rating, ""


@dataclass(frozen=True)
class Reply:
    """What a judge said. text: None if nothing came, `reason` says why. by: what the judge calls itself, if it does."""

    text: str | None
    reason: str = ""
    by: str = ""


class RemoteLLMJudge(Endpoint):
    """A chat completions endpoint. keys: its model, limits, and keys of every request, of which null takes one out."""

    path, name = "/chat/completions", "the judge"
    url_key, variable_key = "judge.base_url", "judge.key_variable"

    def __init__(self, base_url: str, keys: EndpointKeys):
        super().__init__(base_url, keys)
        request = {"model": keys.model, "temperature": 0, **keys.request}
        self.body = {name: value for name, value in request.items() if value is not None}
        how = ", ".join(f"{name} {value}" for name, value in self.body.items() if name != "model")
        self.about = f"{keys.model} at {self.address} ({how}; an endpoint need not answer twice alike)"
        self.identity = {"endpoint": self.address, "request": self.body}

    def open(self, pair: Any) -> None:
        self.left_out = ""

    def ask(self, questions: Sequence[str]) -> Iterator[tuple[str, Reply]]:
        """Several at once, as they are answered. Raises InputError for a wrong address or key, or a judge that is silent."""
        hint = "run the judge again when it answers (kept=FOLDER keeps the answers so far)"
        for question, reply, _ in answers([self], questions, RemoteLLMJudge._reply, 1, lambda _: None, hint):
            yield question, Reply(None, str(reply)) if isinstance(reply, Exception) else reply

    def _reply(self, question: str) -> Reply:
        """The answer to one try. Raises NoAnswer."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        completion = self.send(self.url, {**self.body, "messages": messages})
        try:
            text = completion["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            text = None
        if not isinstance(text, str):
            raise self.nonsense(json.dumps(completion))
        return Reply(
            text, by=" ".join(str(completion[n]) for n in ("model", "system_fingerprint") if completion.get(n))
        )


class LocalLLMJudge:
    """A checkpoint folder or a name of the hub. A tokenizer without a chat template is given the question as it is."""

    def __init__(
        self, model: str, revision: str | None, dtype: str, device: str | None, batch_size: int, max_tokens: int
    ):
        self.model, self.revision, self.dtype, self.device = model, revision, dtype, device
        self.batch_size = batch_size
        self.sampling = Sampling(temperature=0.0, max_new_tokens=max_tokens)
        self.pair: ModelPair | None = None
        load_tokenizer(model, revision)  # a wrong name is said before anything is decoded

    @property
    def identity(self) -> dict[str, Any]:
        identity = {"model": self.model, "revision": self.revision, "max_tokens": self.sampling.max_new_tokens}
        if self.pair is not None:
            target = self.pair.target
            identity |= {"weights": fingerprint(target), "dtype": str(target.dtype).removeprefix("torch.")}
            template = getattr(self.pair.tokenizer, "chat_template", None)
            identity["read_as"] = content_hash([configuration(target), template, SYSTEM])
        return identity

    @property
    def about(self) -> str:
        identity = self.identity
        weights = f" (weights {identity['weights']}, {identity['dtype']})" if "weights" in identity else ""
        return f"{self.model}{weights}, greedily"

    def open(self, pair: Any) -> None:
        if self.pair is None:
            device = self.device or ("cpu" if pair is None else str(pair.device))
            options: dict[str, Any] = {
                "device": device,
                "dtype": self.dtype,
                "revision": self.revision,
                "writable": False,
            }
            self.pair = ModelPair.from_pretrained(self.model, **options)

    def ask(self, questions: Sequence[str]) -> Iterator[tuple[str, Reply]]:
        assert self.pair is not None
        for first in range(0, len(questions), self.batch_size):
            batch = questions[first : first + self.batch_size]
            prompts = [self._prompt(question) for question in batch]
            generations = decode(
                self.pair, prompts, method("autoregressive"), self.sampling, batch_size=self.batch_size
            )
            for question, generation in zip(batch, generations, strict=True):
                error = generation.error and f"the judge could not read it: {generation.error.partition(': ')[2]}"
                yield question, Reply(None, error) if error else Reply(generation.text)

    def _prompt(self, question: str) -> Content:
        assert self.pair is not None
        if not getattr(self.pair.tokenizer, "chat_template", None):
            return question
        turn = {"role": "user", "content": question}
        chat = [{"role": "system", "content": SYSTEM}, turn]
        try:
            self.pair.encode(chat)
        except InputError:
            return [turn]
        return chat


class Judge(Metric):
    """Mean rating of the answers that got one.

    model         the judge: a checkpoint folder or a name of the hub; with base_url, what the endpoint calls it
    base_url      of an endpoint, as https://api.openai.com/v1; null: the model is loaded here
    key_variable  environment variable that holds the endpoint's key; null: no key is sent
    template      single, reference (shows the prompt's answer), or a text file with {question}, {answer}, {reference}
    max_tokens    of a judgement
    kept          folder that every judgement is written into, and read from instead of asking again; null: none
    revision      of a model of the hub
    dtype         of a model that is loaded here
    device        likewise; null: the device of the pair that is judged
    batch_size    answers that a model judges at once
    seconds       an endpoint may take for one judgement
    retries       how often it is asked again
    backoff       seconds before the first of them; each later one waits twice as long
    workers       judgements that an endpoint makes at once
    request       further keys of a request; null takes one out: {max_tokens: null, max_completion_tokens: 2048}
    """

    name = "judge"
    label = "judge's rating"
    columns = ("rating", "texts")

    def __init__(
        self,
        model: Annotated[str | Path | None, Model()] = None,
        base_url: str | None = None,
        key_variable: str | None = None,
        template: Annotated[str, File()] = "single",
        max_tokens: Annotated[int, AtLeast(1)] = 1024,
        kept: str | Path | None = None,
        revision: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: Annotated[int, AtLeast(1)] = 4,
        seconds: Annotated[float, Above(0)] = 120,
        retries: Annotated[int, AtLeast(0)] = 4,
        backoff: Annotated[float, AtLeast(0)] = 1,
        workers: Annotated[int, AtLeast(1)] = 4,
        request: Mapping[str, Any] | None = None,
    ):
        if model is None:
            raise InputError(
                "judge: expected model=FOLDER or NAME, or base_url=URL with the endpoint's model, got none"
            )
        self.max_tokens, self.batch_size, self.seconds = max_tokens, batch_size, seconds
        self.retries, self.backoff, self.workers = retries, backoff, workers
        check_ranges(self, "judge.")
        self.template = Template.named(template)
        self.kept = None if kept is None else Path(kept)
        self.judge: LocalLLMJudge | RemoteLLMJudge
        if base_url is None:
            self.judge = LocalLLMJudge(str(model), revision, dtype, device, batch_size, max_tokens)
        else:
            keys = EndpointKeys(
                model=str(model), key_variable=key_variable, concurrency=workers, seconds=seconds, attempts=retries + 1,
                backoff=backoff, request={"max_tokens": max_tokens, **(request or {})},
            )  # fmt: skip
            self.judge = RemoteLLMJudge(base_url, keys)
        self._replies: dict[str, Reply] = {}  # one per question and answer: equal texts have equal ratings
        self._num_kept = 0
        self._say()

    def measure(self, prompts: Sequence[Prompt], generations: Sequence[Generation], pair: Any = None) -> list[Score]:
        """(rating, 1) of every answer that got one; equal ones are judged once. Raises InputError without a judge."""
        check_lengths(prompts, generations)
        reasons = []
        for prompt, generation in zip(prompts, generations, strict=True):
            if generation.error is not None:
                reasons.append(f"decoding failed: {generation.error}")
            else:
                unknown = "{reference}" in self.template.text and prompt.answer is None
                reasons.append("no reference answer is known" if unknown else "")
        if all(reasons):
            return [Score(None, reason) for reason in reasons]
        self.judge.open(pair)
        questions = [
            "" if reason else self.template.filled(prompt, generation.text)
            for reason, prompt, generation in zip(reasons, prompts, generations, strict=True)
        ]
        unasked = []
        for text in dict.fromkeys(filter(None, questions)):
            path = self._path(text)
            if text not in self._replies and path is not None and path.exists():
                record = read_json(path)
                self._replies[text] = Reply(record["reply"], by=record["by"])
                self._num_kept += 1
            if text not in self._replies:
                unasked.append(text)
        for text, reply in self.judge.ask(unasked) if unasked else ():
            self._replies[text] = reply
            path = self._path(text)
            if path is not None and reply.text is not None:
                record = {"judge": self.judge.identity, "by": reply.by, "question": text, "reply": reply.text}
                write_json(path, record)
        self._say()
        return [
            Score(None, reason) if reason else _score(self._replies[text])
            for reason, text in zip(reasons, questions, strict=True)
        ]

    def _path(self, text: str) -> Path | None:
        if self.kept is None:
            return None
        return self.kept / f"{content_hash([self.judge.identity, text], 24)}.json"

    def _say(self) -> None:
        rated = sum(_score(reply).counts is not None for reply in self._replies.values())
        by = sorted({reply.by for reply in self._replies.values() if reply.by})
        parts = [f"rated by {self.judge.about}", *(f"which answered as {name}" for name in by), self.template.about]
        if self._replies:
            parts.append(f"{rated} of {len(self._replies)} different answers rated")
        if self._num_kept:
            parts.append(f"{self._num_kept} judgements read from {self.kept}")
        self.provenance = ", ".join(parts)


def _score(reply: Reply) -> Score:
    if reply.text is None:
        return Score(None, reply.reason)
    rating, reason = rating_of(reply.text)
    return Score(None, reason) if rating is None else Score.of(rating)
