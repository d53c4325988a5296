"""How a draft of a kind is begun, trained and written: what `toolkit.distill` asks of every kind of draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.config import commands
from toolkit.distillation.data import TextData
from toolkit.distillation.drafts import DRAFT, export
from toolkit.distillation.module import DraftTraining
from toolkit.distillation.teachers import Teacher
from toolkit.drafts.kinds import DraftKind
from toolkit.models.pair import ModelPair
from toolkit.models.reduced import most_frequent
from toolkit.models.teacher import Text


class Recipe(ABC):
    """One training's.

    cfg        of `toolkit.distill`
    settings   of conf/kind/NAME.yaml; None: the kind has none
    target     None where a teacher's cache is all that is read
    tokenizer  the target's
    draft      what is loaded before any text is read, and then limits the texts; None: nothing
    """

    draft: Any = None

    def __init__(self, cfg: commands.Distill, kind: DraftKind, settings: Any, target: ModelPair | None, tokenizer: Any):
        self.cfg, self.kind, self.settings, self.target, self.tokenizer = cfg, kind, settings, target, tokenizer

    @classmethod
    def rehearse(cls, cfg: commands.Distill) -> Path | None:
        """Try what can be tried before there are responses; returns what remembers it, None if nothing can be.

        Raises InputError for what a config asks of a model and cannot have.
        """
        return None

    @abstractmethod
    def begin(self, texts: TextData) -> Any:
        """The draft, with gradients for what is trained. Raises InputError for settings that it cannot have."""

    def module(self, arguments: Sequence[Any], teacher: Teacher, texts: Sequence[Text]) -> DraftTraining:
        """The Lightning module.

        arguments  of `DraftTraining`, the draft first;  texts  all that are read, of training and validation
        """
        return DraftTraining(*arguments)

    def export(self, folder: Path, draft: Any, card: str) -> None:
        """Write the trained draft, and what else the config asks for, into a run's folder."""
        model = None if self.target is None else self.target.target
        names = getattr(getattr(model, "config", None), "architectures", None) or ()
        export(folder / DRAFT, draft, self.tokenizer, card, str(self.cfg.pair.target), names)


def frequent_tokens(count: int, size: int, ends: Sequence[int], texts: TextData, verb: str) -> list[int]:
    """The most frequent tokens of the training texts, and a line that says how many validation tokens these are."""
    tokens = most_frequent(texts.states["train"].whole.sequences, count, range(size), ends)
    covered = torch.isin(texts.states["validation"].whole.labels, torch.tensor(tokens)).float().mean()
    print(f"distill: {len(tokens):,} of {size:,} tokens {verb} an output row, {covered:.1%} of validation tokens")
    return tokens
