"""What an endpoint is asked: OpenAI's /v1/completions, with every field of our sampling in the words of its engine.

Neutral values are sent, too, for engines put a checkpoint's own generation config in the place of what is missing. An
engine that has no word for a field takes only its neutral value. Names and neutral values are those of vLLM 0.33
(entrypoints/openai/completion/protocol.py), SGLang of July 2026 (serving_completions.py, pull request 30917) and transformers
5.23 (cli/serving/completion.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import InputError
from toolkit.files.atomic import content_hash
from toolkit.models.pair import ModelPair
from toolkit.sampling import Sampling

NEUTRAL = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stop": (), "end_ids": (),
}  # fmt: skip
BASIC = ("temperature", "top_p", "stop")  # what every engine has
OURS = ("model", "prompt", "n", "stream", "echo", "seed", "max_tokens", "generation_config", *NEUTRAL)
SEEDS = 2**31  # engines take 32 bits
TOKENIZER = threading.Lock()  # the threads of a pool share one


@dataclass(frozen=True)
class ServingEngine:
    """How one kind of server is asked.

    sends_ids    prompts go as token ids; else as text, which the server encodes
    shows_stops  a text holds the stop string that ended it
    fields       of our sampling that it has a word for
    every        top-k that keeps all tokens
    further      keys of every request
    """

    name: str
    sends_ids: bool = True
    shows_stops: bool = False
    fields: tuple[str, ...] = tuple(NEUTRAL)
    every: int = 0
    further: Mapping[str, Any] | None = None


EXACT = {
    "return_token_ids": True, "skip_special_tokens": True, "ignore_eos": False, "min_tokens": 0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
ENGINES = {
    "vllm": ServingEngine("vllm", further=EXACT),
    "sglang": ServingEngine("sglang", every=-1, further=EXACT),
    "transformers": ServingEngine("transformers", sends_ids=False, shows_stops=True),
    "openai": ServingEngine("openai", fields=BASIC),
}


@dataclass(frozen=True)
class Asked:
    """One request: the row, its prompt [P] and how many tokens may follow it."""

    row: int
    prompt_ids: list[int]
    max_tokens: int


class Requests:
    """Bodies of requests for one pair and sampling. Raises InputError for a sampling that the engine has no words for.

    model    what the endpoints call the target
    further  more keys of every request; null takes one out, if it is neutral
    """

    def __init__(self, engine: str, model: str, pair: ModelPair, sampling: Sampling, further: Mapping[str, Any]):
        self.engine, self.model, self.pair, self.sampling = ENGINES[engine], model, pair, sampling
        self.further = dict(further)
        for name in self.changed():
            if name not in self.engine.fields:
                raise InputError(
                    f"sampling.{name}: engine={engine} knows no {name}; expected {name}={NEUTRAL[name]}, or another engine"
                )
        for name, value in self.further.items():
            if name in OURS and (value is not None or name in self.changed() or name not in NEUTRAL):
                raise InputError(f"served.request.{name}: said by model, prompts and sampling; leave it out")

    def changed(self) -> list[str]:
        """Fields of the sampling that are not neutral."""
        return [name for name, neutral in NEUTRAL.items() if getattr(self.sampling, name) != neutral]

    def body(self, request: Asked) -> dict[str, Any]:
        """The request of one row. Raises InputError if its prompt has no text that is encoded to it again."""
        basis = {
            "model": self.model,
            "prompt": request.prompt_ids if self.engine.sends_ids else self._text(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "seed": int(content_hash([self.sampling.seed, request.row], 16), 16) % SEEDS,
        }
        if self.engine.name == "transformers":
            body = {**basis, **self._generation(request.max_tokens)}
        else:
            body = {**basis, **self._fields(), **(self.engine.further or {}), "n": 1, "stream": False}
        body |= self.further
        return {name: value for name, value in body.items() if value is not None}

    def needless(self, name: str) -> bool:
        """Whether a key may be left out where a server does not know it: nothing is changed by that."""
        further = self.engine.further or {}
        return name in further or (name in NEUTRAL and name not in self.changed()) or name == "stop_token_ids"

    def _fields(self) -> dict[str, Any]:
        """Our sampling in the words of vLLM, SGLang and OpenAI."""
        fields = {name: getattr(self.sampling, name) for name in self.engine.fields if name != "end_ids"}
        fields["stop"] = list(self.sampling.stop) or None
        if "top_k" in fields:
            fields["top_k"] = fields["top_k"] or self.engine.every
            fields["stop_token_ids"] = list(self.pair.ends(self.sampling)) or None
        return fields

    def _generation(self, max_tokens: int) -> dict[str, Any]:
        """Our sampling in the words of transformers: a generation config, whole."""
        sampling = self.sampling
        generation: dict[str, Any] = {"do_sample": sampling.temperature > 0, "max_new_tokens": max_tokens}
        if sampling.temperature > 0:
            generation |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
            generation |= {"min_p": sampling.min_p} if sampling.min_p else {}
        ends = list(self.pair.ends(self.sampling))
        generation |= {"repetition_penalty": sampling.repetition_penalty}
        generation |= {"eos_token_id": ends, "pad_token_id": ends[0]} if ends else {}
        return {"generation_config": json.dumps(generation), "stop": list(sampling.stop) or None}

    def _text(self, ids: list[int]) -> str:
        tokenizer: Any = self.pair.tokenizer
        with TOKENIZER:
            for special in (False, True):  # with and without the tokens that the server itself puts in front
                text = str(tokenizer.decode(ids, skip_special_tokens=special))
                if list(tokenizer(text).input_ids) == ids:
                    return text
        raise InputError("the prompt's text is encoded to other tokens, and this engine takes texts only")
