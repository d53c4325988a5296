"""A rehearsal of a distillation: its draft is made, reduced, written and read, before any response is there.

Layers and tokens are chosen by responses. Here others stand for them: the first, the last and evenly spread layers, the first
tokens. So what a family of models does not allow is one line at the start, not an error after hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from toolkit.config import commands, instantiate, plain
from toolkit.config.identity import contents_of
from toolkit.distillation.drafts import DRAFT
from toolkit.drafts.kinds import SEPARATE
from toolkit.drafts.separate.costs import draft_of
from toolkit.drafts.separate.layers import layers_in
from toolkit.engine.facts import vocab_size
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash, write_json
from toolkit.files.digests import cache_folder
from toolkit.files.text import first_line
from toolkit.models.pair import ModelPair, load_draft, load_tokenizer
from toolkit.models.probe import check_same_logits, probe_text
from toolkit.models.reduced import kept_tokens, most_frequent
from toolkit.runs.stage import provenance

KEYS = ("pair", "from_pretrained", "layers", "shape", "vocabulary", "exports", "seed")


def rehearse(cfg: commands.Distill, recipe_class: type[Any]) -> Path:
    """Make a draft as a config describes it, write it and read it; returns the file that remembers that this went well.

    recipe_class  of separate drafts
    The file is in the user's cache. Where nothing can be kept there, every run rehearses.
    Raises InputError if its family of models does not allow it, or what was read is not what was written.
    """
    config = {key: value for key, value in plain(cfg).items() if key in KEYS}
    name = content_hash([contents_of(config, "distill", ask=True).identity, provenance()["versions"]])
    record = cache_folder() / "rehearsals" / f"{name}.json"
    if not record.exists():
        with TemporaryDirectory() as folder:
            _rehearse(cfg, recipe_class, Path(folder))
        with suppress(InputError):
            write_json(record, config)
    return record


def _rehearse(cfg: commands.Distill, recipe_class: type[Any], folder: Path) -> None:
    target = None if cfg.teacher.get("on_missing") == "raise" else instantiate(cfg.pair, draft=None)
    tokenizer = load_tokenizer(cfg.pair.target, cfg.pair.get("revision"), bool(cfg.pair.get("trust_remote_code")))
    recipe = recipe_class(cfg, SEPARATE, None, target, tokenizer)
    draft = _of_layers(cfg.layers or (), target) if recipe.draft is None else recipe.draft.requires_grad_(False)
    expected = {"plain": _logits(draft)}
    if cfg.vocabulary is not None and cfg.vocabulary < vocab_size(draft):
        if kept_tokens(draft) is not None:
            raise InputError("vocabulary: that of from_pretrained is reduced already: expected vocabulary=null")
        recipe.exports = sorted({"plain", *recipe.exports})  # which may be wanted later
    draft = recipe.made(draft, lambda count, size, ends: most_frequent([((), ())], count, range(size), ends))
    expected[DRAFT] = _logits(draft)
    try:
        recipe.export(folder, draft, "")
    except InputError:
        raise
    except Exception as error:  # whatever a class says to being written
        raise InputError(f"a {type(draft).__name__} cannot be exported: {first_line(error)}") from error
    for name, path in ((DRAFT, folder / DRAFT), ("plain", folder / f"{DRAFT}_plain")):
        if path.is_dir():
            options = {key: cfg.pair[key] for key in ("device", "dtype", "trust_remote_code") if key in cfg.pair}
            logits = _logits(load_draft(path, **options))
            try:
                check_same_logits(logits.masked_fill(expected[name].isneginf(), -torch.inf), expected[name])
            except InputError as error:
                raise InputError(f"a {type(draft).__name__} that was exported is read as another: {error}") from None


def _of_layers(layers: int | Sequence[int], pair: ModelPair | None) -> Any:
    """A draft of some of the target's layers, after other choices were tried, too."""
    if pair is None:
        raise InputError("layers: the draft is made of the target's weights; expected teacher.on_missing=generate")
    if not isinstance(layers, int):
        return draft_of(pair.target, list(layers))
    total = len(layers_in(pair.target))
    if layers > total:
        raise InputError(f"layers: expected at most {total}, got {layers}")
    spread = [(2 * i + 1) * total // (2 * layers) for i in range(layers)]
    for choice in (range(layers), spread, range(total - layers, total)):
        draft = draft_of(pair.target, list(choice))
    return draft


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=probe_text(model), use_cache=False).logits
    return logits
