"""The draft that is trained: a pair's own weights, fresh ones, or some of the target's layers; and its folder when it is done.

A draft of the target's layers has its embeddings, last norm and output layer, and those layers whose absence costs most. The
cost of a layer is the mean KL(p || p without it) over the tokens of responses, measured by leaving it out (cf. Men et al.,
ShortGPT, arXiv:2403.03853, who rank layers by the angle between their input and output).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolkit.distillation.layers import layer_list, layers_in, shorter_model, skipped
from toolkit.engine.device import check_device
from toolkit.errors import InputError
from toolkit.files import generate_folder
from toolkit.files.atomic import content_hash, read_json, write_folder, write_json
from toolkit.files.text import first_line, shown
from toolkit.models import gguf
from toolkit.models.block_draft import BlockDraft
from toolkit.models.block_format import save as save_block
from toolkit.models.draft_formats import reads_target
from toolkit.models.eagle3 import Eagle3, is_eagle3
from toolkit.models.eagle3 import save as save_eagle3
from toolkit.models.fingerprint import computed_by
from toolkit.models.pair import check_same_tokenizer, lacks_tokenizer, load_draft, load_tokenizer, resolve
from toolkit.models.reduced import kept_tokens, whole_vocabulary
from toolkit.models.reduced import save as save_reduced
from toolkit.models.teacher import Text, produced_logits

DRAFT = "draft"
CARD = "README.md"  # what the hub calls a model card


def begin(
    source: str,
    shape: Mapping[str, Any],
    from_pretrained: str | None,
    tokenizer: Any,
    seed: int,
    device: str,
    dtype: str,
) -> Any:
    """A draft that asks for gradients: the weights of `from_pretrained`, or fresh ones of the source's configuration.

    shape      changes to that configuration: {hidden_size: 64, ...}
    tokenizer  the target's
    Raises InputError if the weights have another shape or another tokenizer, or if no model has such a shape.
    """
    check_device(device)
    weights = source if from_pretrained is None else from_pretrained
    if weights is not None and is_eagle3(resolve(weights)):
        raise InputError(f"{weights} is an EAGLE-3 draft, which kind=eagle3 trains: expected a draft of its own")
    if from_pretrained is not None:
        check_same_tokenizer(tokenizer, load_tokenizer(from_pretrained))
        model = load_draft(from_pretrained, device=device, dtype=dtype)
        for name, expected in shape.items():
            actual = getattr(model.config, name, None)
            if actual != expected:
                raise InputError(
                    f"from_pretrained: expected a draft with {name}={expected}, {from_pretrained} has {actual}; leave "
                    "shape out, or begin with fresh weights (from_pretrained=null)"
                )
    else:
        model = _fresh(load_draft(source, device="cpu", dtype=dtype), shape, seed).to(device)
    return model.requires_grad_(True)


def _fresh(original: Any, shape: Mapping[str, Any], seed: int) -> Any:
    """A model of the same class with other sizes and random weights."""
    settings = original.config.to_dict()
    unknown = sorted(name for name in shape if name not in settings)
    if unknown:
        raise InputError(f"shape.{unknown[0]}: expected keys of {type(original.config).__name__}, such as hidden_size")
    config = copy.deepcopy(original.config)
    if "hidden_size" in shape and "head_dim" not in shape and "head_dim" in settings:
        heads = shape.get("num_attention_heads", settings["num_attention_heads"])
        config.head_dim = shape["hidden_size"] // heads
    for name, value in shape.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = type(original)(config).to(original.dtype)
        except (ValueError, RuntimeError, TypeError) as error:
            raise InputError(f"shape: no {type(original).__name__} can be made of it: {first_line(error)}") from error
    model.generation_config = copy.deepcopy(original.generation_config)
    return model.eval()


def shape_of(model: Any) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


def export(
    folder: Path,
    model: Any,
    tokenizer: Any,
    card: str,
    target: str = "",
    architectures: Sequence[str] = (),
    compact: bool = False,
) -> Path:
    """A Hugging Face checkpoint with tokenizer and card, whole or not at all; of a reduced vocabulary, one of ours.

    A draft of the target's states is written in the format of `speculators`, with its target's name and classes.
    compact  in bfloat16, without the embeddings and the tokenizer, which are the target's (of a reduced vocabulary alone)
    """

    def write(temporary: Path) -> None:
        if isinstance(model, Eagle3):
            save_eagle3(temporary, model, target, architectures)
        elif isinstance(model, BlockDraft):
            save_block(temporary, model, target, architectures)
        elif kept_tokens(model) is None:
            model.save_pretrained(temporary)
        else:
            save_reduced(temporary, model, compact)
        if not lacks_tokenizer(temporary):
            tokenizer.save_pretrained(temporary)
        (temporary / CARD).write_text(card, encoding="utf-8")
        generate_folder.write(temporary)

    return write_folder(folder, write)


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
    architectures: Sequence[str] = (),
) -> None:
    """Write the draft, and what `exports` names: a plain checkpoint of the whole vocabulary, a GGUF file of it, a compact one.

    rows  an output layer of all tokens: those that a reduced vocabulary lacks, so both draw tokens that `draft` would not
    """
    export(folder / DRAFT, draft, tokenizer, card, target, architectures)
    whole = draft
    if "compact" in exports:
        export(folder / f"{DRAFT}_compact", draft, tokenizer, card, compact=True)
    if exports and kept_tokens(draft) is not None and rows is not None:
        whole = whole_vocabulary(draft, rows.weight, rows.bias)
    if "plain" in exports:
        export(folder / f"{DRAFT}_plain", whole, tokenizer, card)
    if "gguf" in exports:
        gguf.write(folder / f"{DRAFT}.gguf", whole, tokenizer, gguf.tokenizer_file(target))


def card_of(config: Mapping[str, Any], facts: Mapping[str, Any], scores: Mapping[str, float]) -> str:
    """The card of a draft in Markdown: what it was trained from, on what, what validation says, and how it is used.

    facts  revision, machine, versions, sampling, the number of texts, their prompts (`toolkit.runs.sources`), and the number
           of tokens that have an output row (None: all)
    """
    loss, sampling, target = config["loss"], facts["sampling"], shown(config["pair"]["target"])
    own = {name: value for name, value in loss.items() if name != "_target_" and not isinstance(value, dict)}
    options = ", ".join(f"{name}={value}" for name, value in own.items())
    settings = ", ".join(f"{name}={sampling[name]}" for name in ("temperature", "top_k", "top_p", "max_new_tokens"))
    rows = facts["output_rows"]
    return f"""---
library_name: transformers
tags: [speculative-decoding, draft]
---
# A draft for `{target}`

Proposes tokens that `{target}` verifies; it is not meant to be used by itself.

| | |
|---|---|
| begun from | {_begun_from(config)} |
| output rows | {"of the whole vocabulary" if rows is None else f"of {rows:,} tokens, the most frequent ones"} |
| loss | {loss["_target_"].rpartition(".")[2]} {options} |
| texts | {facts["texts"]} responses of the target ({settings}); share drawn from the draft itself: {config["lmbda"]} |
| prompts | {"; ".join(facts["prompts"]) or "not recorded"} |
| licence of the weights | that of the target, whose embeddings or layers it may hold, and of what it was begun from |
| tokens | {scores["tokens"]:,} in all epochs |
| optimizer | {config["optimizer"]["_target_"].rpartition(".")[2]}, lr {config["optimizer"]["lr"]} |
| seed | {config["seed"]} |
| code | {facts["revision"]} |

On {scores["positions"]} tokens of validation texts, which no step was trained on:

| | before | after |
|---|---|---|
| alpha | {scores["start/alpha"]:.4f} | {scores["val/alpha"]:.4f} |
| cross entropy | {scores["start/cross_entropy"]:.4f} | {scores["val/cross_entropy"]:.4f} |

Alpha is the probability of acceptance, sum of min(p, q) over the whole vocabulary; the draft's cross entropy is in nats.

Use it, with FOLDER this folder and TARGET the model above:

- Here: `python -m toolkit.decode method=rate pair.target=TARGET pair.draft=FOLDER`; in Python
  `ModelPair.from_pretrained("TARGET", "FOLDER")`
- By domain: `python -m analysis.heads pair.target=TARGET drafts='{{this: FOLDER}}' responses='{{DOMAIN: RESPONSES}}'`
- {_engines(config["kind"], rows)}
- Inside transformers, with `model` the target:

{generate_folder.lines('draft="FOLDER"')}"""


def _begun_from(config: Mapping[str, Any]) -> str:
    """Whose weights a training of this config begins with."""
    source = config["from_pretrained"]
    if config["layers"] is not None:
        return f"layers of the target: {config['layers']}"
    if config["kind"] is not None and not (source and reads_target(source)):
        return "fresh weights, with the target's embeddings and output rows"
    return f"`{shown(source)}`" if source else f"fresh weights, {config['shape'] or 'in the shape of the draft'}"


def _engines(kind: Mapping[str, Any] | None, rows: int | None) -> str:
    """How engines take a draft."""
    method, model, needed = "draft_model", "FOLDER", ""
    if kind is not None:
        method = str(kind.get("kind", "eagle3"))
    elif rows is not None:
        model = "draft_plain"
        needed = " needs rows of all tokens (`exports=[plain,gguf]` writes draft_plain/, and draft.gguf for llama.cpp)"
    settings = f'{{"method": "{method}", "model": "{model}", "num_speculative_tokens": 3}}'
    return f"""vLLM{needed}: `vllm serve TARGET --speculative-config '{settings}'`
- The length by batch size, and other engines:
  `python -m analysis.advise pair.target=TARGET pair.draft=FOLDER prompts.path=FILE.jsonl`"""


# -- drafts of the target's layers -----------------------------------------------------------------------------


def most_costly(model: Any, sequences: Sequence[Text], count: int, folder: Path) -> list[int]:
    """The layers whose absence costs most, in their order. Raises InputError for more than there are.

    folder  where the costs are kept, under a hash of model and texts
    """
    from tqdm.auto import tqdm

    name, layers = layer_list(model)
    total = len(layers)
    if count > total:
        raise InputError(f"layers: expected at most {total}, got {count}")
    path = folder / f"{content_hash([computed_by(model), name, [[*map(list, text)] for text in sequences]])}.json"
    if path.exists():
        costs = read_json(path)["nats"]
    else:
        costs = list(
            tqdm(absence_costs(model, sequences), desc="cost of each layer's absence", total=total, unit="layer")
        )
        with suppress(InputError):  # a cache that cannot be written
            write_json(path, {"nats": costs})
    return sorted(sorted(range(total), key=lambda layer: -costs[layer])[:count])


@torch.no_grad()
def absence_costs(model: Any, sequences: Sequence[Text]) -> Iterator[float]:
    """The cost of each layer's absence, in nats per response token, layer by layer: L + 1 forward passes over the texts."""
    whole = produced_logits(model, sequences).float().log_softmax(-1)
    for layer in range(len(layers_in(model))):
        with skipped(model, [layer]):
            without = produced_logits(model, sequences).float().log_softmax(-1)
        yield float(nn.functional.kl_div(without, whole, reduction="batchmean", log_target=True))


def draft_of(target: Any, layers: Sequence[int]) -> Any:
    """A model of the target's class with some of its layers, in their order; its weights are copies.

    Raises InputError for layers that do not exist.
    """
    count = len(layers_in(target))
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong or not layers or len(set(layers)) < len(layers):
        raise InputError(f"layers: expected layers from 0 to {count - 1} of the target, each once, got {list(layers)}")
    return shorter_model(target, sorted(layers))
