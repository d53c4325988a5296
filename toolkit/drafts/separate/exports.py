"""What a separate draft is written as: of its own vocabulary, of the whole one, as GGUF, or without what is the target's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolkit.distillation.drafts import DRAFT, export
from toolkit.errors import InputError
from toolkit.models import gguf, reduced
from toolkit.models.reduced import kept_tokens, whole_vocabulary


def save(folder: Path, model: Any, target: str = "", architectures: Sequence[str] = (), compact: bool = False) -> None:
    """Write a checkpoint of transformers; of a reduced vocabulary, one of ours.

    compact  in bfloat16, without the embeddings, which are the target's (of a reduced vocabulary alone)
    """
    if kept_tokens(model) is None:
        model.save_pretrained(folder)
    else:
        reduced.save(folder, model, compact)


def output_rows(draft: Any, target: Any, needed: bool) -> nn.Linear | None:
    """The output layer that exports of the whole vocabulary take the rows of all tokens from.

    That is the draft's own, before its vocabulary is reduced. A draft whose vocabulary is reduced already has lost them: those
    of the target fit where the draft was made of its layers, which its embeddings show.
    needed  whether there are such exports: without them, None is returned for such a draft
    Raises InputError if there are no rows that fit.
    """
    if kept_tokens(draft) is None:
        own: nn.Linear = draft.get_output_embeddings()
        return own
    if not needed:
        return None
    if target is None:
        raise InputError("exports: the rows of all tokens are the target's; expected teacher.on_missing=generate")
    if not has_embeddings_of(draft, target):
        raise InputError(
            "exports: the draft lacks output rows of most tokens, and the target's do not fit, for its embeddings are others: "
            "expected a draft of the target's layers, or exports=[]"
        )
    layer: nn.Linear = target.get_output_embeddings()
    return layer


def has_embeddings_of(draft: Any, target: Any) -> bool:
    """Whether a draft's embeddings [V, D] are the target's, up to the rounding of a number format."""
    ours, theirs = (model.get_input_embeddings().weight.detach().float().cpu() for model in (draft, target))
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=0, atol=1e-2 * float(theirs.std()))


def check_compact(draft: Any, target: Any) -> None:
    """Raises InputError unless a draft can be written without its embeddings: they are the target's, and stay it."""
    if target is None or kept_tokens(draft) is None or not has_embeddings_of(draft, target):
        raise InputError(
            "exports=[compact]: the embeddings are left out, for they are the target's; expected a draft of the target's "
            "layers with a reduced vocabulary: layers=1 vocabulary=4000, say"
        )


def export_all(
    folder: Path,
    draft: Any,
    rows: nn.Linear | None,
    exports: Sequence[str],
    tokenizer: Any,
    card: str,
    target: str = "",
) -> None:
    """Write what `exports` names: a plain checkpoint of the whole vocabulary, a GGUF file of it, a compact one.

    rows  an output layer of all tokens: those that a reduced vocabulary lacks, so both draw tokens that `draft` would not
    """
    whole = draft
    if "compact" in exports:
        export(folder / f"{DRAFT}_compact", draft, tokenizer, card, compact=True)
    if exports and kept_tokens(draft) is not None and rows is not None:
        whole = whole_vocabulary(draft, rows.weight, rows.bias)
    if "plain" in exports:
        export(folder / f"{DRAFT}_plain", whole, tokenizer, card)
    if "gguf" in exports:
        gguf.write(folder / f"{DRAFT}.gguf", whole, tokenizer, gguf.tokenizer_file(target))
