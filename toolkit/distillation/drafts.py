"""The folder of a draft that is done: its checkpoint and its card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.drafts.folders import kind_in
from toolkit.drafts.kinds import DraftKind, kind_by_target, kind_of
from toolkit.files import generate_folder
from toolkit.files.atomic import write_folder
from toolkit.files.text import shown
from toolkit.models.pair import lacks_tokenizer

DRAFT = "draft"
CARD = "README.md"  # what the hub calls a model card


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

    It is written as its kind says, with its target's name and the names of its classes.
    compact  in bfloat16, without the embeddings and the tokenizer, which are the target's (of a reduced vocabulary alone)
    """

    def write(temporary: Path) -> None:
        kind_of(model).part("save")(temporary, model, target, architectures, **({"compact": True} if compact else {}))
        if not lacks_tokenizer(temporary):
            tokenizer.save_pretrained(temporary)
        (temporary / CARD).write_text(card, encoding="utf-8")
        generate_folder.write(temporary)

    return write_folder(folder, write)


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
- {_engines(kind_by_target(config["kind"]), rows)}
- Inside transformers, with `model` the target:

{generate_folder.lines('draft="FOLDER"')}"""


def _begun_from(config: Mapping[str, Any]) -> str:
    """Whose weights a training of this config begins with."""
    source = config["from_pretrained"]
    if config["layers"] is not None:
        return f"layers of the target: {config['layers']}"
    if kind_by_target(config["kind"]).reads_target and not kind_in(source).reads_target:
        return "fresh weights, with the target's embeddings and output rows"
    return f"`{shown(source)}`" if source else f"fresh weights, {config['shape'] or 'in the shape of the draft'}"


def _engines(kind: DraftKind, rows: int | None) -> str:
    """How engines take a draft."""
    method, model, needed = kind.engines.get("vllm"), "FOLDER", ""
    if rows is not None and not kind.reads_target:
        model = "draft_plain"
        needed = " needs rows of all tokens (`exports=[plain,gguf]` writes draft_plain/, and draft.gguf for llama.cpp)"
    lengths = """The length by batch size, and other engines:
  `python -m analysis.advise pair.target=TARGET pair.draft=FOLDER prompts.path=FILE.jsonl`"""
    if method is None:
        return lengths
    settings = f'{{"method": "{method}", "model": "{model}", "num_speculative_tokens": 3}}'
    return f"""vLLM{needed}: `vllm serve TARGET --speculative-config '{settings}'`
- {lengths}"""
