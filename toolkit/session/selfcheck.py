"""Is an architecture decoded right? A tiny copy of it says so, before its first text is decoded.

The copy has the model's own class and config, but few and small layers and random weights. Its windows are so short
that a text of sixteen tokens passes them (`toolkit.session.shrinking`). It decodes a ragged batch of trees
(`toolkit.session.trial`) in float64, in a session of its own. What differs from its uncached forward is refused by
name, with the reason; so an unknown family is never silently wrong. What was right is remembered: in this process, and
in a small file in the user's cache.
"""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from toolkit.errors import InputError
from toolkit.io import content_hash, file_hash, read_json, write_json
from toolkit.models import forwards_lock, max_positions
from toolkit.session.reasons import hopeless, likely
from toolkit.session.shrinking import UnknownSizes, build, tiny_config
from toolkit.session.trial import KEPT, TAIL, TOLERANCES, Differs, check_trees

SMALL = 50_000_000  # parameters of a model that is tried on its own weights, where its class cannot be built tiny
FAR = 1024  # tokens that such a trial reads at most
REMEMBERED = 500  # architectures in the file
VOLATILE = (
    "transformers_version",
    "dtype",
    "torch_dtype",
    "architectures",
    "id2label",
    "label2id",
    "task_specific_params",
)
_VERDICTS: dict[str, str | None] = {}


def check_architecture(model: Any, role: str = "model") -> None:
    """Raises InputError, in one line, if a transformers model's architecture is not decoded right.

    role  what the message calls the model: target, draft, ...
    """
    model = getattr(model, "_orig_mod", model)  # compiled
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # with adapters
    verdict = hopeless(model)
    hint = "" if verdict else "; self_check=off decodes it unchecked (on the command line: pair.self_check=off)"
    verdict = verdict or _verdict(model)
    if verdict is not None:
        raise InputError(f"the {role} ({type(model).__name__}) cannot be decoded: {verdict}{hint}")


def _verdict(model: Any) -> str | None:
    """Why this architecture is refused; None: it is right. Remembered by all that decides it."""
    config = tiny_config(model.config)
    attention = getattr(model.config, "_attn_implementation", None)
    key = _key(type(model), config, attention)
    if key not in _VERDICTS:
        if key in _read(memory_file()):
            _VERDICTS[key] = None
            return None
        try:
            verdict = _try(build(type(model), config, attention))
        except UnknownSizes as error:
            return _on_own_weights(model, str(error))
        _VERDICTS[key] = verdict
        if verdict is None:
            _remember(memory_file(), key)
    return _VERDICTS[key]


def _try(model: Any, threshold: int | None = None) -> str | None:
    """Decode a model in float64, or float32 if it cannot; returns why it is refused."""
    sizes = {} if threshold is None else {"threshold": threshold}
    reason = ""
    for dtype in TOLERANCES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check_trees(model.to(dtype), **sizes)
            return None
        except (Differs, InputError) as error:
            return likely(model, str(error))
        except Exception as error:  # whatever a model's code says to masks and caches that it did not expect
            reason = likely(model, f"{type(error).__name__}: {str(error).strip()}")
    return reason


def _on_own_weights(model: Any, why: str) -> str | None:
    """The same for a class that cannot be built tiny: a copy of a small model, decoded past its windows."""
    size = sum(parameter.numel() for parameter in model.parameters())
    config = model.config.get_text_config()
    lengths = [getattr(config, name, None) or 0 for name in ("sliding_window", "attention_chunk_size", "window_size")]
    far = max(8, *(length for length in lengths if isinstance(length, int)))
    room = max_positions(model) - far - len(KEPT) - TAIL - 6
    elsewhere = any(parameter.is_meta for parameter in model.parameters())  # offloaded
    if size > SMALL or far > FAR or room < 0 or elsewhere:
        return f"its class could not be built tiny, which a check of it needs ({why})"
    with forwards_lock(model):
        return _try(copy.deepcopy(model).to("cpu").eval(), far)


# -- memory -----------------------------------------------------------------------------------------------------------


def memory_file() -> Path:
    """Where architectures that were right are remembered: in the user's cache folder."""
    folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(folder).expanduser() / "acceptance-toolkit" / "architectures.json"


def _key(model_class: type, config: Any, attention: str | None) -> str:
    """Everything that decides the verdict: class, config without sizes, versions, and the code of both sides."""
    facts = {key: value for key, value in config.to_dict().items() if key not in VOLATILE}
    name = f"{model_class.__module__}.{model_class.__qualname__}"
    versions = (transformers.__version__, torch.__version__, attention)
    return content_hash([name, repr(facts), versions, _code_of(model_class), _own_code()], 24)


@cache
def _code_of(model_class: type) -> str:
    """Hash of the file that defines a class; empty if there is none."""
    try:
        return file_hash(inspect.getsourcefile(model_class) or "")
    except (OSError, TypeError):
        return ""


@cache
def _own_code() -> str:
    return content_hash([file_hash(path) for path in sorted(Path(__file__).parent.glob("*.py"))])


def _read(path: Path) -> list[str]:
    """Keys of architectures that were right; none if the file is missing or not what it should be."""
    try:
        keys = read_json(path)["right"]
        return keys if isinstance(keys, list) else []
    except (InputError, OSError, KeyError, TypeError):
        return []


def _remember(path: Path, key: str) -> None:
    """Add a key, unless the folder cannot be written to."""
    try:
        write_json(path, {"right": [*_read(path), key][-REMEMBERED:]})
    except (InputError, OSError):
        return
