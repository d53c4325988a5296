"""Who can judge: a model that is loaded here, or an endpoint that speaks OpenAI's chat completions. Both answer questions.

A request to an endpoint is repeated (`toolkit.runs.endpoint`) after silence, a dropped connection, "too many requests", a fault
of the server, or an answer that is no completion. Each wait is twice the one before it, or as long as the server asks for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from analysis.quality.judge_templates import SYSTEM
from toolkit.config import method
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError
from toolkit.models.pair import ModelPair, fingerprint, load_tokenizer
from toolkit.runs.endpoint import Client, Refused, Silent, Wrong, address, key_of, retrying
from toolkit.types import Prompt

GIVE_UP = 5  # questions without a reply, in a row


@dataclass(frozen=True)
class Reply:
    """What a judge said. text: None if nothing came, `reason` says why. by: what the judge calls itself, if it does."""

    text: str | None
    reason: str = ""
    by: str = ""


class Endpoint:
    """A chat completions endpoint.

    body     keys of every request, beside model, messages and temperature 0; None takes a key out
    seconds  one try may take; retries, backoff, workers as of the metric
    """

    def __init__(
        self, base_url: str, model: str, key_variable: str | None, body: Mapping[str, Any],
        seconds: float, retries: int, backoff: float, workers: int,
    ):  # fmt: skip
        url = address(base_url, "/chat/completions", "judge.base_url", "; name the key's variable: key_variable=NAME")
        mend = "expected base_url, model and key_variable of an endpoint"
        self.client = Client(url, key_of(key_variable, "judge.key_variable"), seconds, "the judge", mend)
        self.model = model
        request = {"model": model, "temperature": 0, **body}
        self.body = {name: value for name, value in request.items() if value is not None}
        self.retries, self.backoff, self.workers = retries, backoff, workers
        self._lock = threading.Lock()
        self._num_answered = self._num_silent = 0

    @property
    def identity(self) -> dict[str, Any]:
        """Address and the keys of a request."""
        return {"endpoint": self.client.address, "request": self.body}

    @property
    def about(self) -> str:
        """Model, address, and what is not promised."""
        how = ", ".join(f"{name} {value}" for name, value in self.body.items() if name != "model")
        return f"{self.model} at {self.client.address} ({how}; an endpoint need not answer twice alike)"

    def open(self, pair: Any) -> None:
        """Nothing is to be loaded."""

    def ask(self, questions: Sequence[str]) -> Iterator[Reply]:
        """Several at once. Raises InputError for a wrong address or key, or after GIVE_UP questions without a reply."""
        pool = ThreadPoolExecutor(self.workers)
        try:
            yield from pool.map(self._reply, questions)
        finally:
            pool.shutdown(cancel_futures=True)

    def _reply(self, question: str) -> Reply:
        """One question, tried until something comes."""
        try:
            reply = retrying(self.retries + 1, self.backoff)(self._try, question)
        except Refused as refusal:
            return self._without(str(refusal), counts=not self._num_answered)
        except Silent as silence:
            return self._without(str(silence), counts=True)
        with self._lock:
            self._num_answered, self._num_silent = self._num_answered + 1, 0
        return reply

    def _without(self, reason: str, counts: bool) -> Reply:
        """No reply to one question. Raises InputError once there were too many of them in a row."""
        with self._lock:
            self._num_silent += counts
            if self._num_silent >= GIVE_UP:
                raise InputError(
                    f"judge: {self.client.address} answered none of {GIVE_UP} questions in a row ({reason}); run again when it "
                    "answers (kept=FOLDER keeps the answers so far)"
                )
        return Reply(None, reason)

    def _try(self, question: str) -> Reply:
        """One request. Raises InputError, Refused or Silent."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        try:
            completion = self.client.post({**self.body, "messages": messages})
        except Wrong as error:
            raise Wrong(f"judge: {error}", error.status) from None
        try:
            text = completion["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            raise self.client.nonsense(completion) from None
        if not isinstance(text, str):
            raise Silent("the judge's answer holds no text")
        by = [str(completion[name]) for name in ("model", "system_fingerprint") if completion.get(name)]
        return Reply(text, by=" ".join(by))


class LocalJudge:
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
        """Name, weights and number format."""
        identity = {"model": self.model, "revision": self.revision, "max_tokens": self.sampling.max_new_tokens}
        if self.pair is not None:
            target = self.pair.target
            identity |= {"weights": fingerprint(target), "dtype": str(target.dtype).removeprefix("torch.")}
        return identity

    @property
    def about(self) -> str:
        """Name, weights and number format."""
        identity = self.identity
        weights = f" (weights {identity['weights']}, {identity['dtype']})" if "weights" in identity else ""
        return f"{self.model}{weights}, greedily"

    def open(self, pair: Any) -> None:
        """Load the model."""
        if self.pair is None:
            device = self.device or ("cpu" if pair is None else str(pair.device))
            self.pair = ModelPair.from_pretrained(self.model, device=device, dtype=self.dtype, revision=self.revision)

    def ask(self, questions: Sequence[str]) -> Iterator[Reply]:
        """In batches of neighbours; a question that the model cannot read has no reply."""
        assert self.pair is not None
        for first in range(0, len(questions), self.batch_size):
            prompts = [self._prompt(text) for text in questions[first : first + self.batch_size]]
            generations = decode(
                self.pair, prompts, method("autoregressive"), self.sampling, batch_size=self.batch_size
            )
            for generation in generations:
                error = generation.error and f"the judge could not read it: {generation.error.partition(': ')[2]}"
                yield Reply(None, error) if error else Reply(generation.text)

    def _prompt(self, question: str) -> Prompt:
        """As a chat, without the system's turn where the template has none; or as it is."""
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
