"""Drafts with a reduced output vocabulary: the output layer has rows for V' of the V tokens, the others cannot be drawn.

FR-Spec (arXiv:2502.14856) and EAGLE-3 (arXiv:2503.01840) do so because a small draft spends most of its time in the
output layer. Logits are scattered into V with -inf elsewhere, before penalties and warping, so every lossless rule stays exact.

On disk: weights, and the base model's config as reduced_config.json. There is no config.json, so that other libraries refuse
the folder instead of filling the output layer with random numbers.

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

from toolkit.errors import InputError

CONFIG, WEIGHTS = "reduced_config.json", "model.safetensors"


class ReducedOutput(nn.Module):
    """An output layer of some rows: states [..., D] -> logits [..., V], -inf for the tokens it has no row for.

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
        self.rows, self.size = rows, size
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
        logits = self.rows(states)
        return logits.new_full((*logits.shape[:-1], self.size), -torch.inf).index_copy(-1, self.kept, logits)


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
    model.set_output_embeddings(output.rows)
    try:
        yield
    finally:
        model.set_output_embeddings(output)


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
    index = torch.tensor([columns[token] for token in tokens], device=rows.weight.device)
    fewer = nn.Linear(rows.weight.shape[1], len(tokens), bias=rows.bias is not None)
    fewer.weight = nn.Parameter(rows.weight.detach()[index].clone(), requires_grad=rows.weight.requires_grad)
    if rows.bias is not None:
        fewer.bias = nn.Parameter(rows.bias.detach()[index].clone(), requires_grad=rows.weight.requires_grad)
    _install(model, ReducedOutput(fewer, torch.tensor(tokens, device=rows.weight.device), size))
    return model


def _install(model: Any, output: ReducedOutput) -> None:
    model.set_output_embeddings(output)
    model.config.tie_word_embeddings = False
    model.output_size = output.size


def save(folder: Path, model: Any) -> None:
    """Write weights and config of a model with a reduced vocabulary."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(model.config.to_dict(), indent=2) + "\n", encoding="utf-8")
    model.generation_config.save_pretrained(folder)


def is_reduced(source: str | Path) -> bool:
    return (Path(source) / CONFIG).is_file()


def load(folder: Path, dtype: torch.dtype | str) -> Any:
    """Read what `save` wrote, in a dtype ("auto": as stored). Errors are whatever the files' faults raise."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    state = load_file(folder / WEIGHTS)
    config = AutoConfig.for_model(**json.loads((folder / CONFIG).read_text("utf-8")))
    stored = state["lm_head.rows.weight"].dtype
    model: Any = AutoModelForCausalLM.from_config(config, dtype=stored if dtype == "auto" else dtype)
    num_rows, width = state["lm_head.rows.weight"].shape
    rows = nn.Linear(width, num_rows, bias="lm_head.rows.bias" in state, dtype=model.dtype)
    _install(model, ReducedOutput(rows, state["lm_head.kept"], config.vocab_size))
    model.load_state_dict(state)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def whole_vocabulary(model: Any, output: Tensor) -> Any:
    """A plain model again: the rows that were kept, and the others from an output layer [V, D] of the same width.

    A copy that shares all other weights; any library loads it.
    """
    reduced: ReducedOutput = model.get_output_embeddings()
    config = type(model.config).from_dict({**model.config.to_dict(), "tie_word_embeddings": False})
    whole = type(model)(config).to(model.dtype)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("lm_head.")}
    weight = output.detach().to(reduced.weight).clone()
    weight[reduced.kept] = reduced.weight.detach()
    whole.load_state_dict({**state, "lm_head.weight": weight})
    whole.generation_config = model.generation_config
    return whole.eval().requires_grad_(False)
