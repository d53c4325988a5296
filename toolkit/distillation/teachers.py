"""Sources of log p: the target reads every batch, or a folder holds what it has computed.

A cache keeps the k likeliest tokens of every position; the others together are one more category, on both sides. Losses over
these k + 1 categories are lower bounds of the true ones (data processing inequality), and alpha is an upper bound. They
are exact where the target has no mass beyond the k.

    FOLDER/about.json                which target, k, temperature
    FOLDER/<hash of texts>.safetensors   of up to SHARD texts: tokens [N, k], log_probs [N, k], and where each text begins

Shapes: n positions of all texts of a batch, V vocabulary that both models have, k kept tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from torch import Tensor

from toolkit.config.notes import AtLeast
from toolkit.distillation.losses import LOWEST, Outlook
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash, read_json, write_json
from toolkit.files.tensors import load_tensors, save_tensors
from toolkit.models.fingerprint import Weights
from toolkit.models.teacher import Text, logits_of, pad_right

SHARD = 256  # texts of a file
ABOUT = "about.json"


@dataclass(frozen=True)
class Expected:
    """What the target expects: log_probs [n, V]; or [n, k] of `tokens` [n, k], the rest lumped."""

    log_probs: Tensor
    tokens: Tensor | None = None


class Teacher(Protocol):
    """The source of log p in a training."""

    def prepare(self, texts: Sequence[Text]) -> None:
        """Announce the texts that `expected` will get."""

    def expected(self, texts: Sequence[Text]) -> Expected:
        """What the target expects at every produced token of texts, one text after another."""


def produced_positions(texts: Sequence[Text]) -> tuple[list[int], list[int]]:
    """Rows and columns of the logits that say what comes at every produced token."""
    rows = [row for row, (_, produced) in enumerate(texts) for _ in produced]
    columns = [len(prompt) - 1 + i for prompt, produced in texts for i in range(len(produced))]
    return rows, columns


def reads(texts: Sequence[Text]) -> Tensor:
    """Texts [B, T] without their last tokens, padded."""
    return pad_right([[*prompt, *produced][:-1] for prompt, produced in texts])


def outlook(expected: Expected, logits: Tensor, tokens: Tensor, temperature: float) -> Outlook:
    """A draft's logits [n, V] beside what the target expects; `tokens` [n] are the text's."""
    target, compared = expected.log_probs.to(logits.device), (logits / temperature).log_softmax(-1)
    draft = compared
    if expected.tokens is not None:
        top_tokens = expected.tokens.to(logits.device).long()
        target, compared = _lumped(target, draft, top_tokens)
    token_log_probs = draft.gather(-1, tokens.to(logits.device).unsqueeze(-1)).squeeze(-1)
    return Outlook(target.clamp(min=LOWEST), compared, token_log_probs)


def _lumped(target: Tensor, draft: Tensor, top_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log probabilities [n, k + 1] of both sides: k tokens, and all the others. [n, k] if there are no others."""
    chosen = draft.gather(-1, top_tokens)
    if top_tokens.shape[-1] == draft.shape[-1]:
        return target, chosen
    rest = torch.log1p(-target.exp().sum(-1, keepdim=True).clamp(max=1.0))
    others = draft.scatter(-1, top_tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([target, rest], -1), torch.cat([chosen, others], -1)


def _log_probs(teacher: OnlineTeacher | CachedTeacher, texts: Sequence[Text]) -> Tensor:
    """log p [n, V] of texts, by a forward pass of the target."""
    logits = logits_of(teacher.target, reads(texts))[produced_positions(texts)][:, : teacher.vocab_size]
    return (logits.float() / teacher.temperature).log_softmax(-1)


class OnlineTeacher:
    """The target reads every batch.

    target       a causal language model
    temperature  of p
    vocab_size   V: tokens beyond it (padding of its output layer) are left out
    """

    def __init__(self, target: Any, temperature: float, vocab_size: int, about: Weights | None = None):
        self.target, self.temperature, self.vocab_size = target, temperature, vocab_size

    def prepare(self, texts: Sequence[Text]) -> None:
        """Do nothing: every batch is read when it comes."""

    def expected(self, texts: Sequence[Text]) -> Expected:
        """Log probabilities of the whole vocabulary."""
        return Expected(_log_probs(self, texts))


class CachedTeacher:
    """A folder of the target's likeliest tokens, memory-mapped.

    folder       their folder; created if it is not there
    top_k        tokens kept per position
    on_missing   generate: ask the target for texts that the folder does not know, and keep what it says; raise: refuse them
    target       None: it is not loaded
    temperature  of p
    vocab_size   V: tokens beyond it (padding of its output layer) are left out
    about        which target the texts are of, where it is not loaded

    Raises InputError if the folder is of another target, top_k or temperature.
    """

    def __init__(
        self,
        target: Any,
        temperature: float,
        vocab_size: int,
        about: Weights | None = None,
        *,
        folder: str,
        top_k: Annotated[int, AtLeast(1)] = 64,
        on_missing: Literal["generate", "raise"] = "generate",
    ):
        self.target, self.temperature, self.vocab_size = target, temperature, vocab_size
        self.folder, self.top_k, self.on_missing = Path(folder), top_k, on_missing
        self.weights = Weights.of(target) if target is not None else about
        self._check()
        self.entries: dict[str, tuple[dict[str, Tensor], int, int]] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            self._open(path)

    def prepare(self, texts: Sequence[Text]) -> None:
        """Compute what the folder lacks, `SHARD` texts at a time, and keep it."""
        missing = [text for text in texts if key_of(text) not in self.entries]
        if not missing:
            return
        if self.on_missing == "raise" or self.target is None:
            raise InputError(
                f"teacher.folder: {self.folder} lacks {len(missing)} of {len(texts)} texts; set teacher.on_missing=generate, "
                "or give the folder that was made from these responses"
            )
        if not (self.folder / ABOUT).exists():
            facts = {} if self.weights is None else self.weights.facts("target")
            write_json(self.folder / ABOUT, {**facts, **self._settings()})
        for first in range(0, len(missing), SHARD):
            self._write(missing[first : first + SHARD])

    def expected(self, texts: Sequence[Text]) -> Expected:
        """The likeliest tokens of every position; texts that the folder lacks are read by the target, and not kept."""
        answers = [self._stored(text) if key_of(text) in self.entries else self._asked([text]) for text in texts]
        return Expected(
            torch.cat([log_probs for log_probs, _ in answers]), torch.cat([tokens for _, tokens in answers])
        )

    def _stored(self, text: Text) -> tuple[Tensor, Tensor]:
        tensors, first, last = self.entries[key_of(text)]
        return tensors["log_probs"][first:last], tensors["tokens"][first:last]

    def _asked(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
        """Log probabilities and tokens [n, k] of texts, from the target."""
        if self.target is None:
            raise InputError("teacher.on_missing=raise: a text that the draft has written is in no folder; set lmbda=0")
        top = _log_probs(self, texts).topk(min(self.top_k, self.vocab_size))
        return top.values.cpu(), top.indices.int().cpu()

    def _write(self, texts: Sequence[Text]) -> None:
        parts = [self._asked(texts[first : first + 16]) for first in range(0, len(texts), 16)]
        tensors = {
            name: torch.cat(values)
            for name, values in zip(("log_probs", "tokens"), zip(*parts, strict=True), strict=True)
        }
        keys = [key_of(text) for text in texts]
        index = json.dumps([[key, len(produced)] for key, (_, produced) in zip(keys, texts, strict=True)])
        path = self.folder / f"{content_hash(keys)}.safetensors"
        save_tensors(path, tensors, {"index": index})
        self._open(path)

    def _open(self, path: Path) -> None:
        tensors, metadata = load_tensors(path, "teacher cache")
        first = 0
        for key, length in json.loads(metadata["index"]):
            self.entries[key] = (tensors, first, first + length)
            first += length

    def _settings(self) -> dict[str, float]:
        return {"top_k": self.top_k, "temperature": self.temperature, "vocab_size": self.vocab_size}

    def _check(self) -> None:
        if not (self.folder / ABOUT).exists():
            return
        record = read_json(self.folder / ABOUT)
        there = Weights.recorded(record, "target")
        reason = None if there is None or self.weights is None else there.other_than(self.weights)
        if reason is not None:
            raise InputError(
                f"teacher.folder: {self.folder} is of another target ({reason}); choose another folder, or delete it"
            )
        for name, here in self._settings().items():
            if record.get(name) != here:
                raise InputError(f"teacher.folder: {self.folder} was made with {name}={record.get(name)}, not {here}")


def key_of(text: Text) -> str:
    """A text's name in a cache."""
    return content_hash([list(text[0]), list(text[1])], 24)
