"""A folder of heads: the acceptance head, the pre-read head, or both; and what scores a draft step with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.acceptance.head import AcceptanceHead
from toolkit.acceptance.preread import PrereadHead, PrereadScorer, embedding_table
from toolkit.acceptance.published import is_published, rewritten
from toolkit.acceptance.saved import AtWork, SavedHead
from toolkit.engine.engine import engine_of
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash, file_hash, read_json
from toolkit.models.fingerprint import Weights, adapters
from toolkit.models.teacher import hidden_size
from toolkit.types import Step

Scorer = Callable[[Step], Tensor]  # a head at work: to raw logits [B] or [B, 2]
KINDS: dict[str, type[SavedHead]] = {"survival": AcceptanceHead, "preread": PrereadHead}


@dataclass(frozen=True)
class SurvivalScorer(AtWork):
    """An acceptance head at work: raw logits [B] of the token that a step's state has read.

    table  the draft's embeddings [V, E], for heads that read earlier positions
    """

    module: AcceptanceHead
    table: Tensor | None = None

    def __call__(self, step: Step) -> Tensor:
        inputs, hidden = self.module.inputs, step.hidden.to(self.module.readout.weight.dtype)
        logits: Tensor = self.module(inputs.with_more(hidden, inputs.before(step), self.table, step.depth - 1))
        return logits


def scorer(pair: Any, folder: Path | str, kind: str) -> SurvivalScorer | PrereadScorer:
    """The scorer of one kind of head in a folder; the head is read and checked once per pair.

    It is read again if its files or the adapters change. Raises InputError if the head is missing, or was not trained on the
    pair's draft; warns if it was trained for another target.
    """
    head_class = KINDS[kind]
    files = [Path(folder) / name for name in (head_class.weights_file, head_class.config_file)]
    stats = [path.stat() for path in files if path.exists()]
    stamps = [(stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats]
    key = (Path(folder).resolve(), head_class, *stamps, repr([adapters(model) for model in (pair.draft, pair.target)]))
    heads = engine_of(pair).heads
    if key not in heads:
        head, record = loaded(folder, kind)
        check_draft(record, pair.draft, str(folder))
        if pair.target is not pair.draft and (trained := target_of(record)) is not None:
            warn_of_target(trained.not_of(pair.target), str(folder), "this pair's")
        heads[key] = head.to(pair.device)
    return scorer_with(heads[key], pair.draft, pair.device)


def loaded(folder: Path | str, kind: str) -> tuple[SavedHead, dict[str, Any]]:
    """The head of one kind in a folder, with its `key`, and what was recorded about it. Raises InputError."""
    head, record = KINDS[kind].load(folder)
    head.key = recorded_name(head_hash(folder), kind)
    return head, record


def recorded_name(head: str, kind: str) -> str:
    """The name that the logits of one kind of head (`KINDS`) are recorded under."""
    return head if kind == "survival" else f"{head}.{kind}"


def scorer_with(head: Any, draft: Any, device: torch.device | str) -> SurvivalScorer | PrereadScorer:
    """The scorer of a head, on the head's device.

    Raises InputError if the head reads the draft's embeddings, and the draft has none.
    """
    if isinstance(head, PrereadHead):
        table = embedding_table(draft)
        if table.shape[1] != head.embedding_size:
            raise InputError(
                f"the head reads embeddings of size {head.embedding_size}, this draft's have {table.shape[1]}"
            )
        return PrereadScorer(head, table.to(device))
    return SurvivalScorer(head, embedding_table(draft).to(device) if reads_embeddings(head) else None)


def reads_embeddings(head: Any) -> bool:
    """Whether a head reads the draft's embeddings of tokens."""
    return isinstance(head, PrereadHead) or bool(head.inputs.earlier and head.inputs.earlier_tokens)


def scorers(pair: Any, folder: Path | str) -> dict[str, SurvivalScorer | PrereadScorer]:
    """The scorers of the heads in a folder, by kind (`KINDS`).

    Raises InputError if the folder holds no head, or another draft's.
    """
    folder = inside(folder)
    kinds = [kind for kind, head in KINDS.items() if head.is_in(folder)] or ["survival"]
    return {kind: scorer(pair, folder, kind) for kind in kinds}


def inside(folder: str | Path) -> Path:
    """Where the heads are: the folder itself, or its head/ if it is the output folder of a training.

    A head in the layout of the published SpecDec++ code is rewritten in ours, and the folder of the rewritten head is
    returned.
    """
    path = Path(folder)
    if any(kind.is_in(path) for kind in KINDS.values()):
        return path
    if is_published(path):
        return rewritten(path)
    return path / "head" if (path / "head").is_dir() else path


def head_hash(folder: str | Path) -> str:
    """Hash of the weights of all heads in a folder.

    Raises InputError if the folder holds no head.
    """
    folder = inside(folder)
    kinds = [kind for kind in KINDS.values() if kind.is_in(folder)]
    if not kinds:
        raise InputError(f"expected an acceptance head ({AcceptanceHead.weights_file}) in {folder}, found none")
    files = [Path(folder) / kind.weights_file for kind in kinds]
    return content_hash([file_hash(path) for path in files])


def head_name(folder: str | Path) -> str:
    """The name of a head in tables: the overrides that it was trained with, else its folder's name."""
    for kind in KINDS.values():
        path = inside(folder) / kind.config_file
        record = read_json(path) if path.is_file() else None
        if isinstance(record, dict) and record.get("name"):
            return str(record["name"])
    return Path(folder).resolve().name


def check_draft(record: Mapping[str, Any], draft: Any, where: str) -> None:
    """Raises InputError unless the head was trained on this draft's hidden states.

    The draft's number format may be another one here.
    """
    size, own = record["head"]["hidden_size"], hidden_size(draft)
    if size != own:
        raise InputError(f"the head in {where} reads states of size {size}, this draft's have {own}")
    trained = Weights.recorded(record)
    reason = None if trained is None else trained.not_of(draft)
    if reason is not None:
        raise InputError(f"the head in {where} was trained for another draft ({reason})")


def target_of(record: Mapping[str, Any]) -> Weights | None:
    """The target whose acceptance a head predicts; None: earlier heads do not say it for every number format."""
    trained = Weights.recorded(record, "target")
    return trained if trained is not None and trained.sketch is not None else None


def warn_of_target(reason: str | None, where: str, what: str) -> None:
    """Warn that a head predicts the acceptance of another target than `what`, if there is a reason to."""
    if reason is not None:
        warnings.warn(
            f"the head in {where} predicts the acceptance of another target than {what} ({reason})",
            RuntimeWarning,
            stacklevel=3,
        )
