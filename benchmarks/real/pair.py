"""Which pair the steps are about, and how much is asked: SmolLM2 with the draft that ships, or PAIR=FOLDER; SMALL=1."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.errors import InputError

PAIR = os.environ.get("PAIR")
SMALL = bool(os.environ.get("SMALL"))


@dataclass(frozen=True)
class Sizes:
    """Numbers of questions, and tokens of an answer.

    learn        questions that heads and statistics learn from, of `learn_tokens` each
    dev          questions that settings are chosen on
    kinds        test questions of a PAIR by what they are; of Spec-Bench alone there are `per_category`
    tokens       of an answer that is reported, or that settings are chosen on
    fewest       questions of a category that has figures of its own in the table of predictors
    advised      questions of an advice
    live         questions of each kind or category that are decoded live, with `live_tokens`
    ratios       costs of a draft forward pass, columns free, at which predictors are compared beside the measured ones
    """

    learn: int = 200
    learn_tokens: int = 96
    dev: int = 48
    kinds: Mapping[str, int] | None = None
    per_category: int = 8
    tokens: int = 48
    fewest: int = 20
    advised: int = 24
    live: int = 2
    live_tokens: int = 48
    ratios: tuple[float, ...] = (0.06,)  # one layer of thirty (docs/results/)


SIZES = Sizes()
if PAIR:
    kinds = {"code": 35, "mathematics": 30, "chat": 35}
    SIZES = Sizes(125, kinds=kinds, tokens=96, live=4, live_tokens=64, ratios=(0.05, 0.1))
if SMALL:
    SIZES = replace(
        SIZES, learn=24, learn_tokens=24, dev=8, kinds=SIZES.kinds and dict.fromkeys(SIZES.kinds, 4), per_category=1,
        tokens=8, fewest=3, advised=8, live=1, live_tokens=8,
    )  # fmt: skip


def models_of(folder: Path) -> list[Path]:
    """The two models of a folder, GGUF files or checkpoints, the larger one first. Raises InputError for another number."""
    models = [path for path in folder.glob("*") if path.suffix == ".gguf" or [*path.glob("*.safetensors")]]
    if len(models) != 2:
        names = ", ".join(sorted(path.name for path in models)) or "none"
        raise InputError(
            f"PAIR: expected two models in {folder}, GGUF files or folders with *.safetensors: the larger one is the target; "
            f"got {names}"
        )
    return sorted(models, key=size, reverse=True)


def size(model: Path) -> int:
    """Bytes of a model's files."""
    return sum(path.stat().st_size for path in ([model] if model.is_file() else model.glob("*")) if path.is_file())
