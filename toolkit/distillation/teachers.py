"""Sources of log p: the target reads every batch, or a folder holds what it has computed.

For training, a cache keeps the k most probable tokens of every position, and the log of the mass of all others. So a loss may
be a bound of the true one (`losses.py` says which). For validation it keeps the whole of p: no score is a bound.

    FOLDER/<hash of target, its configuration, k, temperature, formats>/
        about.json                         which they are, and V
        <hash of texts>.safetensors        of up to SHARD texts: tokens [N, k], log_probs [N, k], log_rest [N], and where each
                                           text begins
        validation/<hash>.safetensors      of one text: log_probs [m, V] of the m tokens that validation looks at

Shapes: n positions of all texts of a batch, V the target's output size, k kept tokens.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal, Protocol

import torch
from torch import Tensor
from tqdm.auto import tqdm

from toolkit.config.notes import AtLeast, Internal
from toolkit.distillation.data import DraftBatch, length_of
from toolkit.distillation.losses import LOWEST, DistillBatch
from toolkit.engine.facts import vocab_size
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash, read_json, write_json
from toolkit.files.tensors import load_tensors, save_tensors
from toolkit.models.fingerprint import Weights, configuration
from toolkit.models.teacher import Text, logits_of, produced_states

SHARD = 256  # texts of a file
CHUNK = 128  # positions whose logits are there at once
LONGEST = 60  # seconds of work that a file holds
ABOUT = "about.json"


@dataclass(frozen=True)
class Expected:
    """What the target expects: log_probs [n, V]; or [n, k] of `tokens` [n, k], and log_rest [n] of all others together."""

    log_probs: Tensor
    tokens: Tensor | None = None
    log_rest: Tensor | None = None

    def at(self, index: Tensor) -> Expected:
        parts = (self.log_probs, self.tokens, self.log_rest)
        return Expected(*(None if part is None else part[index.to(part.device)] for part in parts))  # type: ignore[arg-type]


class Prediction(Protocol):
    """What a target expects at n positions, as much at once as is asked for: all of it is n distributions over V tokens."""

    def at(self, index: Tensor) -> Expected:
        """What it expects at the positions of these numbers [c]."""


@dataclass(frozen=True)
class ReadPositions:
    """Positions that the target has read: its final states [n, D]. Raises InputError where it gives no numbers."""

    target: Any
    temperature: float
    states: Tensor

    @torch.no_grad()
    def at(self, index: Tensor) -> Expected:
        logits = logits_of(self.target, self.states[index.to(self.states.device)]).float()
        log_probs = (logits / self.temperature).log_softmax(-1)
        if bool(log_probs[:, 0].isnan().any()):  # one logit that is not a number leaves none in its whole row
            raise InputError(
                "the target's distributions hold values that are not numbers: expected a checkpoint that is whole, in a number "
                "format that holds its states (pair.dtype=float32 or bfloat16)"
            )
        return Expected(log_probs)


@dataclass(frozen=True)
class KeptRows:
    """Positions whose log p [V] is in files that are mapped into memory."""

    rows: Sequence[Tensor]

    def at(self, index: Tensor) -> Expected:
        rows = [self.rows[i] for i in index.tolist()]
        return Expected(torch.stack(rows) if rows else self.rows[0].unsqueeze(0)[:0])


class Teacher(Protocol):
    """The source of log p in a training. vocab_size: V; folder: where all that this target says may be kept; None: nowhere."""

    vocab_size: int
    folder: Path | None

    def prepare(self, train: DraftBatch, validation: DraftBatch) -> None:
        """Announce the texts that `expected` and `whole` will get."""

    def expected(self, sequences: Sequence[Text]) -> Prediction:
        """What the target expects at every produced token of texts, one text after another."""

    def whole(self, batch: DraftBatch) -> Prediction:
        """The whole of p at a batch's positions."""


def distill_batch(
    expected: Expected, logits: Tensor, tokens: Tensor, temperature: float, kept: Tensor | None = None
) -> DistillBatch:
    """A draft's logits [n, V'] beside what the target expects; `tokens` [n] are the text's.

    kept  the tokens [V'] that the logits are of, in any order; q is 0 at all others. None: the whole vocabulary
    """
    draft = (logits / temperature).log_softmax(-1).clamp(min=LOWEST)
    tokens, target = tokens.to(draft.device).unsqueeze(-1), expected.log_probs.to(draft.device).clamp(min=LOWEST)
    columns, present = _columns(tokens, kept)
    token_log_probs = draft.gather(-1, columns).where(present, LOWEST).squeeze(-1)
    reduced = kept is not None
    if expected.tokens is None or expected.log_rest is None:
        if kept is not None:  # the tokens without a row are one category, of which q is 0
            outside = target.index_fill(-1, kept, -torch.inf).logsumexp(-1, keepdim=True).clamp(min=LOWEST)
            target = torch.cat([target.index_select(-1, kept), outside], -1)
            draft = torch.cat([draft, torch.full_like(outside, LOWEST)], -1)
        return DistillBatch(target, draft, token_log_probs, reduced=reduced)
    top_tokens = expected.tokens.to(draft.device).long()
    columns, present = _columns(top_tokens, kept)
    chosen = draft.gather(-1, columns).where(present, LOWEST)
    if kept is None and top_tokens.shape[-1] == draft.shape[-1]:
        return DistillBatch(target, chosen, token_log_probs)
    log_rest = expected.log_rest.to(draft.device).clamp(min=LOWEST).unsqueeze(-1)
    nothing = draft.new_full((len(draft), 2), LOWEST)  # the first of its columns is for tokens without a row
    others = torch.cat([draft, nothing], -1).scatter(-1, columns.where(present, draft.shape[-1]), -torch.inf)
    rest = torch.cat([chosen, others.logsumexp(-1, keepdim=True)], -1)
    return DistillBatch(torch.cat([target, log_rest], -1), rest, token_log_probs, has_rest=True, reduced=reduced)


def _columns(tokens: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """The columns of tokens [n, k] among the kept ones, and which tokens are among them [n, k] bool."""
    if kept is None:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    order = kept.argsort()
    columns = order[torch.searchsorted(kept, tokens, sorter=order).clamp(max=len(kept) - 1)]
    return columns, kept[columns] == tokens


@torch.no_grad()
def read_positions(
    target: Any, temperature: float, sequences: Sequence[Text], positions: Sequence[Sequence[int]] | None = None
) -> ReadPositions:
    """Texts' produced tokens, by a forward pass of the target; arguments as for `produced_logits`."""
    return ReadPositions(target, temperature, produced_states(target, sequences, positions))


class OnlineTeacher:
    """The target, a causal language model, reads every batch. temperature: of p."""

    folder = None

    def __init__(self, target: Any, temperature: float, about: Weights | None = None):
        self.target, self.temperature, self.vocab_size = target, temperature, vocab_size(target)

    def prepare(self, train: DraftBatch, validation: DraftBatch) -> None:
        """Do nothing: every batch is read when it comes."""

    def expected(self, sequences: Sequence[Text]) -> Prediction:
        """Log probabilities of the whole vocabulary."""
        return read_positions(self.target, self.temperature, sequences)

    def whole(self, batch: DraftBatch) -> Prediction:
        return read_positions(self.target, self.temperature, batch.sequences, batch.positions)


class CachedTeacher:
    """A folder of the target's most probable tokens, and of its whole distributions for validation, memory-mapped.

    folder       where there is one folder for each target, top_k and temperature; created if it is not there
    top_k        tokens kept per position
    on_missing   generate: ask the target for texts that the folder does not know, and keep what it says; raise: refuse them
    dtype        of the forward passes over training texts; bfloat16 may be several times faster. Validation keeps the target's
    target       None: it is not loaded, and `about` says which one the texts are of; None: the only one that there is
    temperature  of p
    Raises InputError if there are several targets and none is named.
    """

    name = "cached"

    def __init__(
        self,
        target: Any,
        temperature: float,
        about: Annotated[Weights | None, Internal()] = None,
        *,
        folder: str,
        top_k: Annotated[int, AtLeast(1)] = 64,
        on_missing: Literal["generate", "raise"] = "generate",
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    ):
        self.target, self.temperature = target, temperature
        self.top_k, self.on_missing, self.dtype = top_k, on_missing, dtype
        self.weights = Weights.of(target) if target is not None else about
        self.folder = self._folder_in(Path(folder))
        record = read_json(self.folder / ABOUT) if target is None and (self.folder / ABOUT).exists() else {}
        self.vocab_size = int(record.get("vocab_size", 0)) if target is None else vocab_size(target)
        self.entries: dict[str, tuple[dict[str, Tensor], int, int]] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            self._open(path)

    def prepare(self, train: DraftBatch, validation: DraftBatch) -> None:
        """Compute what the folder lacks, and keep it: files of up to SHARD training texts, and one per validation text."""
        missing = sorted((text for text in train.sequences if key_of(text) not in self.entries), key=length_of)
        read = sorted(zip(validation.sequences, validation.positions, strict=True), key=lambda pair: length_of(pair[0]))
        unread = [(text, where) for text, where in read if not self._validation_file(text, where).exists()]
        if not missing and not unread:
            return
        if self.on_missing == "raise" or self.target is None:
            raise InputError(
                f"teacher.folder: {self.folder} lacks {len(missing) + len(unread)} of {len(train.sequences) + len(read)} "
                "texts; set teacher.on_missing=generate, or give the folder that was made from these responses and this "
                "data.seed"
            )
        if not (self.folder / ABOUT).exists():
            facts = {} if self.weights is None else self.weights.facts("target")
            settings = {**self._settings(), **self._format()}
            write_json(self.folder / ABOUT, {**facts, **settings, "vocab_size": self.vocab_size})
        tokens, whole = sum(len(text[1]) for text in missing), sum(len(where) for _, where in unread)
        size = (tokens * 8 * min(self.top_k, self.vocab_size) + whole * 4 * self.vocab_size) / 1e6
        print(f"teacher: {tokens + whole:,} tokens are read once, {size:,.0f} MB go to {self.folder}", flush=True)
        with tqdm(total=tokens + whole, desc="teacher", unit="token") as bar:
            self._write(DraftBatch(missing, None, train.most), bar)
            sequences, positions = [text for text, _ in unread], [where for _, where in unread]
            for part in DraftBatch(sequences, positions, validation.most).parts():
                seen = read_positions(self.target, self.temperature, part.sequences, part.positions)
                numbers = torch.arange(len(part.labels)).split([len(where) for where in part.positions])
                for text, where, index in zip(part.sequences, part.positions, numbers, strict=True):
                    save_tensors(self._validation_file(text, where), {"log_probs": seen.at(index).log_probs})
                    bar.update(len(index))

    def expected(self, sequences: Sequence[Text]) -> Prediction:
        """The most probable tokens of every position; texts that the folder lacks are read by the target, and not kept."""
        parts = []
        for text in sequences:
            if (key := key_of(text)) in self.entries:
                tensors, first, last = self.entries[key]
                parts.append({name: tensor[first:last] for name, tensor in tensors.items()})
            else:
                parts.append(self._computed([text]))
        return Expected(**_joined(parts))

    def whole(self, batch: DraftBatch) -> Prediction:
        files = map(self._validation_file, batch.sequences, batch.positions)
        return KeptRows([row for path in files for row in load_tensors(path, "teacher cache")[0]["log_probs"]])

    @cached_property
    def _reader(self) -> Any:
        """What reads training texts: the target, or a copy of it in another number format."""
        return self.target if self.dtype is None else copy.deepcopy(self.target).to(getattr(torch, self.dtype))

    def _validation_file(self, text: Text, positions: Sequence[int]) -> Path:
        return self.folder / "validation" / f"{content_hash([key_of(text), list(positions)], 24)}.safetensors"

    def _computed(self, sequences: Sequence[Text]) -> dict[str, Tensor]:
        """Log probabilities and tokens [n, k] of texts, and log_rest [n], from the target."""
        if self.target is None:
            raise InputError("teacher.on_missing=raise: a text that the draft has written is in no folder; set lmbda=0")
        seen, parts = read_positions(self._reader, self.temperature, sequences), list[dict[str, Tensor]]()
        for index in torch.arange(len(seen.states)).split(CHUNK):
            log_probs = seen.at(index).log_probs
            top = log_probs.topk(min(self.top_k, self.vocab_size))
            others = log_probs.scatter(-1, top.indices, -torch.inf)
            log_rest = others.logsumexp(-1)  # not the log of 1 - sum, which is 0 in float32
            parts.append({"log_probs": top.values.cpu(), "tokens": top.indices.int().cpu(), "log_rest": log_rest.cpu()})
        return _joined(parts)

    def _write(self, batch: DraftBatch, bar: tqdm[Any]) -> None:
        """Write files of texts: of SHARD texts, or fewer where these take more than a minute."""
        started, unsaved, parts = perf_counter(), list[Text](), list[dict[str, Tensor]]()
        groups = list(batch.parts())
        for number, group in enumerate(groups, start=1):
            unsaved += group.sequences
            parts.append(self._computed(group.sequences))
            bar.update(len(group.labels))
            if number < len(groups) and len(unsaved) < SHARD and perf_counter() - started < LONGEST:
                continue
            keys = [key_of(text) for text in unsaved]
            index = json.dumps([[key, len(produced)] for key, (_, produced) in zip(keys, unsaved, strict=True)])
            path = self.folder / f"{content_hash(keys)}.safetensors"
            save_tensors(path, _joined(parts), {"index": index})
            self._open(path)
            started, unsaved, parts = perf_counter(), [], []

    def _open(self, path: Path) -> None:
        tensors, metadata = load_tensors(path, "teacher cache")
        first = 0
        for key, length in json.loads(metadata["index"]):
            self.entries[key] = (tensors, first, first + length)
            first += length

    def _folder_in(self, root: Path) -> Path:
        """The folder of this target and these settings; of a target that is not loaded, in whatever number format it was."""
        own = root / content_hash(
            [self.weights and self.weights.fingerprint, self._settings(), *self._format().values()]
        )
        if self.target is not None or own.exists():
            return own
        records = {path.parent: read_json(path) for path in sorted(root.glob(f"*/{ABOUT}"))}
        settings = self._settings()
        folders = [
            folder
            for folder, record in records.items()
            if {name: record[name] for name in ("top_k", "temperature", "dtype") if name in record} == settings
            and (self.weights is None or Weights.changed(record, self.weights, "target") is None)
        ]
        folders = [folder for folder in folders if "format" not in records[folder]] or folders
        if len(folders) > 1:
            raise InputError(f"teacher.folder: {root} is of several targets: expected responses that name theirs")
        return folders[0] if folders else own

    def _settings(self) -> dict[str, Any]:
        dtype = {} if self.dtype is None else {"dtype": self.dtype}
        return {"top_k": self.top_k, "temperature": self.temperature, **dtype}

    def _format(self) -> dict[str, str]:
        """The target's configuration and its number format, unless that is float32: in others the same weights give other
        distributions.
        """
        if self.target is None:
            return {}
        other = {} if self.target.dtype == torch.float32 else {"format": str(self.target.dtype).removeprefix("torch.")}
        return {"configuration": configuration(self.target), **other}


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def key_of(text: Text) -> str:
    """A text's name in a cache."""
    return content_hash([list(text[0]), list(text[1])], 24)
