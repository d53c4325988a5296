"""How a separate draft is begun and trained: the pair's own weights, fresh ones, or some of the target's layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.config import commands, plain
from toolkit.distillation.data import TextData
from toolkit.distillation.recipe import Recipe, frequent_tokens
from toolkit.drafts.separate.costs import draft_of, most_costly
from toolkit.drafts.separate.exports import check_compact, export_all, output_rows
from toolkit.drafts.separate.rehearsal import rehearse
from toolkit.drafts.separate.weights import begin
from toolkit.engine.facts import end_ids, vocab_size
from toolkit.errors import InputError
from toolkit.files.digests import cache_folder
from toolkit.models import gguf
from toolkit.models.pair import ModelPair
from toolkit.models.reduced import reduce_vocabulary

LAYER_TEXTS, LAYER_TOKENS = 16, 16  # texts, and tokens of each, that the cost of a layer's absence is measured on


class SeparateRecipe(Recipe):
    """How a causal language model of its own is trained as a draft, and written for other programs."""

    def __init__(self, cfg: commands.Distill, *arguments: Any):
        super().__init__(cfg, *arguments)
        self.exports, pair = list(cfg.exports), cfg.pair
        if cfg.layers is None:
            shape = plain(cfg.shape) or {}
            self.draft = begin(
                str(pair.draft), shape, cfg.from_pretrained, self.tokenizer, cfg.seed, pair.device, pair.dtype
            )

    @classmethod
    def rehearse(cls, cfg: commands.Distill) -> Path | None:
        if cfg.layers is None and cfg.pair.draft is None and cfg.from_pretrained is None:
            raise InputError("expected pair.draft=FOLDER, or layers=N for a draft of N of the target's layers")
        changed = cfg.layers is not None or cfg.vocabulary is not None or cfg.exports
        return rehearse(cfg, cls) if cfg.rehearse or (changed and not cfg.export) else None

    def begin(self, texts: TextData) -> Any:
        draft = self.draft if self.draft is not None else from_target(self.cfg, self.target, texts)
        return self.made(draft, partial(frequent_tokens, texts=texts, verb="keep"))

    def made(self, draft: Any, tokens_of: Callable[..., list[int]]) -> Any:
        """The draft with the output rows that it keeps. Raises InputError for what cannot be exported.

        tokens_of  count, size=..., ends=... -> the tokens of a reduced vocabulary
        """
        cfg, target = self.cfg, None if self.target is None else self.target.target
        self.rows = output_rows(draft, target, bool({*self.exports} - {"compact"}))
        if cfg.vocabulary is not None and cfg.vocabulary < (size := vocab_size(draft)):
            ends = end_ids(draft, self.tokenizer)
            reduce_vocabulary(draft, tokens_of(cfg.vocabulary, size=size, ends=ends), ends)
        if "compact" in self.exports:
            check_compact(draft, target)
        if "gguf" in self.exports:
            gguf.check_writable(draft, self.tokenizer, gguf.tokenizer_file(cfg.pair.target))  # before it is trained
        return draft

    def export(self, folder: Path, draft: Any, card: str) -> None:
        super().export(folder, draft, card)
        export_all(folder, draft, self.rows, self.exports, self.tokenizer, card, str(self.cfg.pair.target))


def from_target(cfg: commands.Distill, target: ModelPair | None, data: TextData) -> Any:
    """A draft of the target's layers, those of the config, or as many as it says. Raises InputError without the target."""
    if target is None:
        raise InputError("layers: the draft is made of the target's weights; expected teacher.on_missing=generate")
    if isinstance(cfg.layers, int):
        first = data.states["train"].whole.sequences[: 4 * LAYER_TEXTS]
        sequences = sorted(first, key=lambda text: len(text[0]))[:LAYER_TEXTS]  # prompts are read, too
        sequences = [(prompt, produced[:LAYER_TOKENS]) for prompt, produced in sequences]
        layers = most_costly(target.target, sequences, cfg.layers, cache_folder() / "layers")
        print(f"distill: a draft of the target's layers {layers}", flush=True)
    else:
        layers = list(cfg.layers or ())
    return draft_of(target.target, layers).requires_grad_(True)
