"""What stays with a model of transformers from one `custom_generate` to the next: its drafts and their engines.

They are found again by content (`_content`), four drafts at most. The pair is made in each call, so that calls at the same time
share no tokenizer and no stop strings.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.engine.engine import Engine, engine_of
from toolkit.engine.facts import vocab_size
from toolkit.errors import InputError
from toolkit.files.digests import folder_stamp, hub_commit
from toolkit.models.pair import (
    ModelPair,
    lacks_tokenizer,
    load_draft,
    load_tokenizer,
    resolve,
    unshared_by,
    unshared_tokens,
)

KEPT = "_acceptance_drafts"  # the model's attribute that keeps its drafts and engines
MOST_DRAFTS = 4  # that stay loaded beside a model


@dataclass
class LoadedDrafts:
    """Draft models beside a target, the token ids that they never propose, and the engine of them all."""

    drafts: Sequence[Any]
    unshared: tuple[int, ...]
    engine: Engine | None = None


@dataclass
class KeptDrafts:
    """A model's drafts by their content, the last used last; gone with the model, left out of its copies.

    form  device, dtype and output size of the model that they were loaded beside
    """

    form: tuple[Any, ...] = ()
    loaded: dict[Any, LoadedDrafts] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptDrafts, ()


class WholeTextPair(ModelPair):
    """A pair whose stop strings may begin in the prompt and end in the response, as in transformers."""

    def stop_position(self, stops: Sequence[str], token_ids: Sequence[int], before: Sequence[int] = ()) -> int | None:
        prompt = self.text(before[-4 * max(map(len, stops), default=0) :])  # a character has at most four tokens
        text = self.text(token_ids, before)
        halves = ((stop[:length], stop[length:]) for stop in stops for length in range(1, len(stop)))
        if any(prompt.endswith(first) and text.startswith(second) for first, second in halves):
            return 0
        return super().stop_position(stops, token_ids, before)


def pair_of(model: Any, draft: Any, tokenizer: Any = None) -> ModelPair:
    """The pair of a loaded target and what `draft` names, for one call; its drafts and engine are kept with the model.

    Drafts that are folders or names are loaded like the model (device, dtype), and again once the folder's files or the model's
    form have changed. Raises InputError for a draft of another tokenizer. Whether a *loaded* draft's tokenizer is the model's
    is looked up where both came from, if they say so.
    """
    sources = [] if draft is None else list(draft) if isinstance(draft, list | tuple) else [draft]
    kept: KeptDrafts = vars(model).setdefault(KEPT, KeptDrafts())
    with kept.lock:
        form = (model.device, model.dtype, vocab_size(model))
        if form != kept.form:
            kept.form, kept.loaded = form, {}
        key = tuple(map(_content, sources))
        loaded = kept.loaded.pop(key, None) or _load(model, sources)
        pair = WholeTextPair(model, drafts=loaded.drafts, end_ids=(), unshared=loaded.unshared)
        pair.tokenizer = tokenizer  # of this call; its vocabulary need not be compared in each
        loaded.engine = engine_of(pair, loaded.engine)
        for other in kept.loaded.values():  # the target's packed weights are one copy
            if other.engine is not None and other.engine.models[0] is model:
                loaded.engine.linears[0] = other.engine.linears[0]
        kept.loaded[key] = loaded
        number = 0
        for name, other in reversed(list(kept.loaded.items())):
            number += len(other.drafts)
            if other.drafts and number > MOST_DRAFTS and name != key:
                del kept.loaded[name]
    return pair


def _content(source: Any) -> Any:
    """What a draft is found again by: where its folder is and the stamps of its files, a commit of the hub, a loaded model."""
    if not isinstance(source, str | Path):
        return id(source)
    path = resolve(source)
    return (path.resolve(), folder_stamp(path)) if isinstance(path, Path) else (path, hub_commit(path))


def _load(model: Any, sources: Sequence[Any]) -> LoadedDrafts:
    device, dtype = str(model.device), str(model.dtype).removeprefix("torch.")
    drafts, unshared = [], set[int]()
    for source in sources:
        if isinstance(source, str | Path):
            path = resolve(source)
            if not lacks_tokenizer(path):  # then it is of the target's tokens
                unshared |= set(unshared_by(own_tokenizer(model), [path], None, False))
            drafts.append(load_draft(source, device, dtype, target=model))
        else:
            tokenizers = [own_tokenizer(each, needed=False) for each in (model, source)]
            if None not in tokenizers:
                unshared |= set(unshared_tokens(*tokenizers))
            drafts.append(source)
    return LoadedDrafts(drafts, tuple(sorted(unshared)))


def own_tokenizer(model: Any, needed: bool = True) -> Any:
    """The tokenizer of the folder or hub name that a model came from. Where it is not needed, None if there is none."""
    try:
        return load_tokenizer(getattr(model, "name_or_path", "") or "a model without a name")
    except InputError as error:
        if not needed:
            return None
        raise InputError(
            f"{error}; the model's tokenizer is read from where the model came from: expected a model of `from_pretrained`"
        ) from None
