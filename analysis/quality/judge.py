"""Ratings from 1 to 10 by a judge: any model that is loaded here, or any endpoint that speaks OpenAI's chat completions.

Paper: MT-Bench (arXiv:2306.05685), single-answer grading; DSBD (arXiv:2409.16560) Table 1 and MTAD (arXiv:2407.09722) Table 6
report it with GPT-4 as the judge.
Deviation: one turn per prompt. An answer without a rating is left out of the mean and counted, as in the paper's code.

A judge is part of the result: who it is, its template and how it was asked stand in `about`. A model that is loaded here
decodes greedily. An endpoint is asked at temperature 0, which promises nothing: its answers repeat only if they are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from analysis.quality.base import Metric, Score, check_lengths
from analysis.quality.judge_templates import Template, rating_of
from analysis.quality.judges import Endpoint, LocalJudge, Reply
from toolkit.config.notes import Above, AtLeast, File, Model
from toolkit.config.values import check_ranges
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash, read_json, write_json
from toolkit.models.prompts import Prompt
from toolkit.types import Generation


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
        seconds: Annotated[float, Above(0)] = 120.0,
        retries: Annotated[int, AtLeast(0)] = 4,
        backoff: Annotated[float, AtLeast(0)] = 1.0,
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
        self.judge: LocalJudge | Endpoint
        if base_url is None:
            self.judge = LocalJudge(str(model), revision, dtype, device, batch_size, max_tokens)
        else:
            body, limits = {"max_tokens": max_tokens, **(request or {})}, (seconds, retries, backoff, workers)
            self.judge = Endpoint(base_url, str(model), key_variable, body, *limits)
        self._replies: dict[str, Reply] = {}  # one per question and answer: equal texts have equal ratings
        self._num_kept = 0
        self._say()

    def measure(self, prompts: Sequence[Prompt], generations: Sequence[Generation], pair: Any = None) -> list[Score]:
        """(rating, 1) of every answer that got one. Equal answers to a prompt are judged once.

        Raises InputError if the judge cannot be loaded or reached.
        """
        check_lengths(prompts, generations)
        reasons = []
        for prompt, generation in zip(prompts, generations, strict=True):
            if generation.error is not None:
                reasons.append(f"decoding failed: {generation.error}")
            else:
                unknown = self.template.needs_reference and prompt.answer is None
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
        for text, reply in zip(unasked, self.judge.ask(unasked) if unasked else (), strict=True):
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

    # -- earlier judgements ----------------------------------------------------------------------------------------

    def _path(self, text: str) -> Path | None:
        if self.kept is None:
            return None
        return self.kept / f"{content_hash([self.judge.identity, text], 24)}.json"

    def _say(self) -> None:
        """Bring `provenance` up to date."""
        rated = sum(_score(reply).counts is not None for reply in self._replies.values())
        by = sorted({reply.by for reply in self._replies.values() if reply.by})
        parts = [f"rated by {self.judge.about}", *(f"which answered as {name}" for name in by), self.template.about]
        if self._replies:
            parts.append(f"{rated} of {len(self._replies)} different answers rated")
        if self._num_kept:
            parts.append(f"{self._num_kept} judgements read from {self.kept}")
        self.provenance = ", ".join(parts)


def _score(reply: Reply) -> Score:
    """The rating in a reply; none where there is no reply, or no rating in it."""
    if reply.text is None:
        return Score(None, reply.reason)
    rating, reason = rating_of(reply.text)
    return Score(None, reason) if rating is None else Score.of(rating)
