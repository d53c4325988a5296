"""Drafts with a reduced output vocabulary: the output layer has rows for V' of the V tokens, the others cannot be drawn.

FR-Spec (arXiv:2502.14856) does so because a small draft spends most of its time in the
output layer. Logits are scattered into V with -inf elsewhere, before penalties and warping, so every lossless rule stays exact.
That happens after the whole forward pass: what a model does to its logits (caps, scales) it does to those of the rows.

On disk: weights, and the base model's config as reduced_config.json. There is no config.json, so that other libraries refuse
the folder instead of filling the output layer with random numbers. A compact folder lacks the input embeddings, which are the
target's, and the tokenizer; its config says which embeddings these are (EMBEDDINGS: a sketch of them).

Shapes: V' kept tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.engine.facts import check_evaluation, vocab_size
from toolkit.errors import InputError
from toolkit.files.atomic import parse_json_file
from toolkit.files.text import first_line
from toolkit.models.fingerprint import Sketch, difference, tensor_sketch
from toolkit.models.probe import check_same_logits, probe_text

CONFIG, WEIGHTS, ROWS = "reduced_config.json", "model.safetensors", ".rows.weight"
EMBEDDINGS = "target_embeddings"


class ReducedOutput(nn.Module):
    """An output layer of some rows: states [..., D] -> logits [..., V'] of the kept tokens.

    alone  whether the model's logits stay those of the rows
    Raises InputError unless the rows are of different tokens below V.
    """

    kept: Tensor

    def __init__(self, rows: nn.Linear, kept: Tensor, size: int):
        super().__init__()
        if (
            len(kept) != rows.out_features
            or not set(kept.tolist()) <= set(range(size))
            or len(kept.unique()) < len(kept)
        ):
            raise InputError(f"a reduced vocabulary: expected {rows.out_features} different tokens below {size}")
        self.rows, self.size, self.alone = rows, size, False
        self.register_buffer("kept", kept)

    @property
    def weight(self) -> Tensor:
        """The rows [V', D]."""
        return self.rows.weight

    @property
    def is_whole(self) -> bool:
        """Whether there is a row for every token, in the tokens' order."""
        return torch.equal(self.kept, torch.arange(self.size, device=self.kept.device))

    def forward(self, states: Tensor) -> Tensor:
        logits: Tensor = self.rows(states)
        return logits

    def whole(self, logits: Tensor) -> Tensor:
        """Logits [..., V]: those of the rows [..., V'], and -inf for the tokens without one."""
        return logits.new_full((*logits.shape[:-1], self.size), -torch.inf).index_copy(-1, self.kept, logits)


class WithReducedOutput:
    """What transformers asks of a draft of our own classes, with its embeddings and rows."""

    embed_tokens: nn.Embedding
    lm_head: ReducedOutput

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, output: Any) -> None:
        self.lm_head = output


def _scatter(model: Any, args: Any, output: Any) -> Any:
    """The hook of a model with a reduced vocabulary: it returns logits [..., V]."""
    layer = model.get_output_embeddings()
    if isinstance(layer, ReducedOutput) and not layer.alone:
        output.logits = layer.whole(output.logits)
    return output


def most_frequent(
    texts: Sequence[tuple[Sequence[int], Sequence[int]]], count: int, tokens: Sequence[int], end_ids: Sequence[int]
) -> list[int]:
    """Choose `count` of a draft's output tokens: the most frequent ones of responses (FR-Spec, section 3).

    Tokens that are equally frequent there are ordered by frequency in the prompts, then by id. The tokens that end a text are
    among them.
    Raises InputError for a count that is not above the number of these ends, or above that of `tokens`.
    """
    ends = set(end_ids) & set(tokens)
    if not len(ends) < count <= len(tokens):
        raise InputError(f"vocabulary: expected {len(ends) + 1} to {len(tokens)} tokens, got {count}")
    prompts, responses = (Counter(chain.from_iterable(parts)) for parts in zip(*texts, strict=True))
    ordered = sorted(tokens, key=lambda token: (token not in ends, -responses[token], -prompts[token], token))
    return sorted(ordered[:count])


def kept_tokens(model: Any) -> Tensor | None:
    """The tokens [V'] that the rows of a reduced output layer are of, in their order; None: the layer is not reduced."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return output.kept if isinstance(output, ReducedOutput) else None


@contextmanager
def rows_alone(model: Any) -> Iterator[None]:
    """Within it, a model with a reduced vocabulary returns the logits [..., V'] of its rows alone."""
    output = model.get_output_embeddings()
    if not isinstance(output, ReducedOutput):
        yield
        return
    output.alone = True
    try:
        yield
    finally:
        output.alone = False


def reduce_vocabulary(model: Any, kept: Sequence[int], end_ids: Sequence[int]) -> Any:
    """Keep the output rows of some tokens, in place: `kept` in any order, each once. A reduced model is reduced further.

    Raises InputError without the tokens that end a text (such a draft would never propose one), and for tokens without a row.
    """
    output = model.get_output_embeddings()
    is_reduced_already = isinstance(output, ReducedOutput)
    rows = output.rows if is_reduced_already else output
    present = output.kept.tolist() if is_reduced_already else range(rows.weight.shape[0])
    size = output.size if is_reduced_already else len(present)
    columns = {token: column for column, token in enumerate(present)}
    tokens = sorted(set(map(int, kept)))
    if not tokens or not all(token in columns for token in tokens):
        raise InputError(f"a reduced vocabulary: expected tokens from 0 to {size - 1}, got {tokens[:1] + tokens[-1:]}")
    if missing := [token for token in end_ids if token in columns and token not in set(tokens)]:
        raise InputError(f"a reduced vocabulary needs the tokens that end a text: add {missing}")
    whole = _probed(model)
    index = torch.tensor([columns[token] for token in tokens], device=rows.weight.device)
    fewer = nn.Linear(rows.weight.shape[1], len(tokens), bias=rows.bias is not None)
    fewer.weight = nn.Parameter(rows.weight.detach()[index].clone(), requires_grad=rows.weight.requires_grad)
    if rows.bias is not None:
        fewer.bias = nn.Parameter(rows.bias.detach()[index].clone(), requires_grad=rows.weight.requires_grad)
    reduced = ReducedOutput(fewer, torch.tensor(tokens, device=index.device), size)
    without = torch.ones(size, dtype=torch.bool, device=index.device).index_fill(0, reduced.kept, False)
    try:
        _install(model, reduced)
        check_same_logits(_probed(model), whole.masked_fill(without, -torch.inf))
    except (InputError, AttributeError, RuntimeError, TypeError) as error:
        raise InputError(f"a {type(model).__name__} cannot have a reduced vocabulary: {first_line(error)}") from error
    return model


@torch.no_grad()
def _probed(model: Any) -> Tensor:
    """Logits [1, T, V] along the probe text. Raises InputError if the model would drop out activations."""
    check_evaluation(model)
    logits: Tensor = model(input_ids=probe_text(model), use_cache=False).logits
    return logits


def _install(model: Any, output: ReducedOutput) -> None:
    if not isinstance(model.get_output_embeddings(), ReducedOutput):
        model.register_forward_hook(_scatter)
    model.set_output_embeddings(output.train(model.training))
    model.config.tie_word_embeddings = False
    model.output_size = output.size


def save(folder: Path, model: Any, compact: bool = False) -> None:
    """Write weights and config of a model with a reduced vocabulary; `compact`: in bfloat16, without the input embeddings."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config, state = model.config.to_dict(), dict(model.state_dict())
    if compact:
        config[EMBEDDINGS] = tensor_sketch(EMBEDDINGS, state.pop(_embeddings_name(model)))
        state = {name: t.bfloat16() if t.is_floating_point() else t for name, t in state.items()}
    state = {name: tensor.clone().contiguous() for name, tensor in state.items()}  # some share their memory
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    model.generation_config.save_pretrained(folder)


def _embeddings_name(model: Any) -> str:
    """The name of the input embeddings among the model's weights."""
    embeddings = model.get_input_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is embeddings)


def is_reduced(source: str | Path) -> bool:
    return (Path(source) / CONFIG).is_file()


def is_compact(source: str | Path) -> bool:
    """Whether a folder is of a draft that has its target's embeddings and tokenizer. Raises InputError for a broken config."""
    return is_reduced(source) and EMBEDDINGS in parse_json_file(Path(source) / CONFIG)


def load(folder: Path, dtype: torch.dtype | str, target: Any = None) -> Any:
    """Read what `save` wrote, in a dtype ("auto": as stored). Errors are whatever the files' faults raise.

    target  the loaded model that a compact draft takes its embeddings from
    Raises InputError for a compact draft without its target, and beside another one.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    state, settings = load_file(folder / WEIGHTS), json.loads((folder / CONFIG).read_text("utf-8"))
    sketched = settings.pop(EMBEDDINGS, None)
    config = AutoConfig.for_model(**settings)
    (name,) = (name.removesuffix(ROWS) for name in state if name.endswith(ROWS))
    num_rows, width = state[name + ROWS].shape
    stored = state[name + ROWS].dtype
    model: Any = AutoModelForCausalLM.from_config(config, dtype=stored if dtype == "auto" else dtype)
    rows = nn.Linear(width, num_rows, bias=f"{name}.rows.bias" in state, dtype=model.dtype)
    _install(model, ReducedOutput(rows, state[f"{name}.kept"], vocab_size(model)))
    if sketched is not None:
        state[_embeddings_name(model)] = _target_embeddings(folder, sketched, target)
    model.load_state_dict(state)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _target_embeddings(folder: Path, sketched: Sketch, target: Any) -> Tensor:
    """The embeddings [V, D] that a compact draft lacks. Raises InputError unless they are those that it was trained with."""
    if target is None:
        raise InputError(
            f"{folder} has its target's embeddings: expected the target beside it, or its draft/ or draft_plain/"
        )
    embeddings: Tensor = target.get_input_embeddings().weight.detach().cpu()
    if (reason := difference(sketched, tensor_sketch(EMBEDDINGS, embeddings))) is not None:
        raise InputError(f"{folder} is another target's draft: {reason.replace(EMBEDDINGS, 'the table of embeddings')}")
    return embeddings


def whole_vocabulary(model: Any, output: Tensor, bias: Tensor | None = None) -> Any:
    """A plain model again: the rows that were kept, and the others from an output layer [V, D] of the same width.

    bias  [V] of that layer, if the model's has one
    Returns a copy, which any library loads. Raises InputError for a layer of another shape.
    """
    reduced: ReducedOutput = model.get_output_embeddings()
    config = type(model.config).from_dict({**model.config.to_dict(), "tie_word_embeddings": False})
    whole = type(model)._from_config(config, dtype=model.dtype)
    prefix = next(name for name, module in model.named_modules() if module is reduced)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(f"{prefix}.")}
    for name, rows in reduced.rows.named_parameters():
        source = output if name == "weight" else bias
        if source is None or source.shape != (reduced.size, *rows.shape[1:]):
            shape = None if source is None else list(source.shape)
            raise InputError(
                f"a whole vocabulary: expected {name} of shape {[reduced.size, *rows.shape[1:]]}, got {shape}"
            )
        state[f"{prefix}.{name}"] = source.detach().to(rows).index_copy(0, reduced.kept, rows.detach())
    whole.load_state_dict(state)
    whole.generation_config = model.generation_config
    return whole.eval().requires_grad_(False)
