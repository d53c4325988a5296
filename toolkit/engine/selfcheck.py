"""Is an architecture decoded right? A tiny copy of it says so, before its first text is decoded.

The copy has the model's own class and config, but few and small layers and random weights. Its windows are so short
that a text of sixteen tokens passes them (`toolkit.engine.shrinking`). It decodes a ragged batch of trees in float64, in a
session of its own. What differs from its uncached forward is refused by
name, with the reason; so an unknown family is never silently wrong. What was right is remembered: in this process, and
in a small file in the user's cache.

A session assumes three things of a model that no interface promises. It takes positions and a ready mask, and writes its keys
and values into the cache it is handed. It attends only to what the mask shows.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from toolkit.engine.facts import forwards_lock, max_positions, unwrapped
from toolkit.engine.hf import HFSession
from toolkit.engine.row_coupling import coupled_layer
from toolkit.engine.shrinking import WINDOW, UnknownSizes, build, tiny_config
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash, file_hash, read_json, write_json
from toolkit.files.digests import cache_folder

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
# Of logits, relative to the largest. In float64 right results are within 1e-15, or 4e-7 where a model turns to float32
# inside. Wrong ones are off by 1e-2 and more. A few models cannot run in float64.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
PARENTS = [[-1, -1, 0, 0, 3, 2], [-1, 0, 1, 0, -1, 2]]
KEPT = [4, 2]  # the nodes whose paths become context
SHORT = 4  # tokens of the second row's context: it passes no window before its tree begins
TAIL = 3  # tokens that follow
RECURRENT = ("mamba", "linear_attention", "recurrent", "conv", "hybrid", "ssm", "rwkv", "lstm", "gated_delta")
_VERDICTS: dict[str, str | None] = {}


def check_architecture(model: Any, role: str = "model") -> None:
    """Raises InputError, in one line, if a transformers model's architecture is not decoded right.

    role  what the message calls the model: target, draft, ...
    """
    verdict, model = hopeless(model) or (coupled_layer(model) if role == "target" else None), unwrapped(model)
    hint = "" if verdict else "; self_check=off decodes it unchecked (on the command line: pair.self_check=off)"
    with torch.device("cpu"):  # whatever this process makes tensors on
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
    """Try a class that cannot be built tiny on a copy of a small model, decoded past its windows."""
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


# -- the trial: trees through a session, against the model's own uncached forwards ------------------------------------


class Differs(Exception):
    """A model's logits through its session are not its own, or do not depend on the text; the message says more."""


@torch.no_grad()
def check_trees(model: Any, threshold: int = WINDOW) -> None:
    """Decode and compare; raises Differs, or whatever the model raises.

    threshold  tokens after which the model attends otherwise (a window, a chunk): one context is longer, one shorter
    """
    generator = torch.Generator().manual_seed(0)
    size = min(int(model.get_input_embeddings().weight.shape[0]), 60)
    first = max(0, min(3, size - 3))  # the first ones may be special
    prompts, nodes, tail = (
        torch.randint(first, size, (2, n), generator=generator) for n in (threshold + 1, len(PARENTS[0]), TAIL)
    )
    session = HFSession(model, 2, threshold + 24)
    reading = session.extend(prompts, counts=[threshold + 1, SHORT])
    contexts = [prompts[0].tolist(), prompts[1, -SHORT:].tolist()]
    texts, logits = list(contexts), list(reading.logits[:, -1])
    reading = session.extend(nodes, parents=torch.tensor(PARENTS), last=nodes.shape[1])
    paths = [_paths(*row) for row in zip(contexts, nodes.tolist(), PARENTS, strict=True)]
    texts += [path for row in paths for path in row]
    logits += list(reading.logits.flatten(0, 1))
    session.keep(torch.tensor(KEPT).unsqueeze(1))
    reading = session.extend(tail, last=TAIL)
    for row, node in enumerate(KEPT):
        texts += [paths[row][node] + tail[row, : i + 1].tolist() for i in range(TAIL)]
        logits += list(reading.logits[row])
    _compare(model, texts, logits)
    _check_context(model, texts[-1], size)


def _paths(context: list[int], tokens: list[int], parents: list[int]) -> list[list[int]]:
    """The text up to each node."""
    paths: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*(context if parent < 0 else paths[parent]), token])
    return paths


def _compare(model: Any, texts: list[list[int]], logits: list[Tensor]) -> None:
    """Compare logits [V] after each text with the model's own, texts of one length in one forward pass."""
    for length in sorted({len(text) for text in texts}):
        chosen = [i for i, text in enumerate(texts) if len(text) == length]
        own = _last_logits(model, [texts[i] for i in chosen])
        ours = torch.stack([logits[i] for i in chosen])
        error = float((ours - own).abs().max() / own.abs().max())
        if not error <= TOLERANCES[own.dtype]:
            raise Differs(f"logits after {length} tokens differ by {error:.1e}")


def _check_context(model: Any, text: list[int], size: int) -> None:
    """Raises Differs for a model that looks at one token only: its trial would show nothing."""
    own = _last_logits(model, [text, [*text[:-3], (text[-3] + 1) % size, *text[-2:]]])
    if torch.allclose(own[0], own[1], rtol=1e-6, atol=0):
        raise Differs("its logits do not depend on the text")


def _last_logits(model: Any, texts: list[list[int]]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor(texts, device=model.device), use_cache=False).logits
    return logits[:, -1]


# -- why an architecture is not decoded, for messages ------------------------------------------------------------------


def hopeless(model: Any) -> str | None:
    """What rules a tree-structured cache of keys and values out from the start; None: nothing."""
    config = model.config.get_text_config(decoder=True)
    kinds = [str(kind) for kind in getattr(config, "layer_types", None) or []]
    recurrent = [kind for kind in kinds if any(word in kind for word in RECURRENT)]
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if getattr(model, "_is_stateful", False) or recurrent:
        return "it keeps a state (recurrent, or compressed) that no tree of tokens can share"
    if getattr(getattr(model, "get_output_embeddings", lambda: None)(), "weight", None) is None:
        return "it has no output embedding"
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "its adapter puts tokens of its own in front of every text"
    attention = str(getattr(model.config, "_attn_implementation", None) or "")
    if "flash" in attention or "flex" in attention:
        return f"its attention ({attention}) takes no masks of trees: load it with attn_implementation=sdpa"
    if getattr(model.config, "_experts_implementation", None) == "grouped_mm" and model.dtype == torch.float64:
        return "its experts (grouped_mm) know no float64: load it in float32, or with experts_implementation=eager"
    return None


def likely(model: Any, seen: str) -> str:
    """Why its cached forward may differ from its uncached one, by what is known of such models.

    seen  what went wrong: the reason, shortened, where nothing better is known
    """
    config = model.config.get_text_config(decoder=True)
    inner = getattr(config, "attn_config", None)
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or []}
    sparse = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
    if getattr(config, "alibi", False) or getattr(inner, "alibi", False) or "Bloom" in type(model).__name__:
        return "its attention is biased by slots (alibi), and nodes of a tree are not in order"
    if sparse:
        return f"it has layers of type {sparse[0]}, which keep more than keys and values"
    if config.model_type == "gpt_neo":
        return "its attention counts slots, not positions, and nodes of a tree are not in order"
    if "position_ids" not in inspect.signature(inspect.unwrap(model.forward)).parameters:
        return "its forward takes no positions (position_ids)"
    if _looks_ahead(model):
        return "its attention is bidirectional: a token's logits change with what follows it"
    return f"its cached forward differs from its uncached one ({' '.join(seen.split())[:120]})"


@torch.no_grad()
def _looks_ahead(model: Any) -> bool:
    """Whether the first token's logits change with the second."""
    try:
        tokens = torch.tensor([[0, 0, 1], [0, 1, 1]], device=model.device)
        first = model(input_ids=tokens, use_cache=False).logits[:, 0]
        return not torch.allclose(first[0], first[1], rtol=1e-4, atol=1e-5)
    except Exception:  # a model that cannot be run tells nothing
        return False


# -- memory -----------------------------------------------------------------------------------------------------------


def memory_file() -> Path:
    """Where architectures that were right are remembered: in the user's cache folder."""
    return cache_folder() / "architectures.json"


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
