"""Writing the trained pair: float16 weights, the tokenizer, and a card that says what it is."""

from __future__ import annotations

import copy
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytorch_lightning
import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from toolkit.files.atomic import write_folder, write_json, write_text

PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"  # ids 0, 1, 2


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Learn the merges from texts. Encoding prepends `<|begin|>`; every text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def export_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Save a float16 copy of the model and the tokenizer, complete or not at all."""

    def write(temporary: Path) -> None:
        copy.deepcopy(model).half().save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)

    return write_folder(folder, write)


def versions() -> dict[str, str]:
    """The versions that the result depends on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "pytorch_lightning": pytorch_lightning.__version__,
        "tokenizers": tokenizers.__version__,
    }


def write_card(card: dict[str, Any], folder: Path) -> Path:
    """`card.json` for programs and `MODEL_CARD.md` for people."""
    measures = list(dict.fromkeys(name for values in card["domains"].values() for name in values))
    rows = [["domain", *measures], ["---"] * (1 + len(measures))]
    for domain, values in card["domains"].items():
        rows.append([domain, *(f"{values[name]:.3f}" if name in values else "-" for name in measures)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    documents_text = ", ".join(f"{domain} {count:,}" for domain, count in card["documents"].items())
    versions_text = ", ".join(f"{package} {version}" for package, version in card["versions"].items())
    texts = {"table": table, "documents_text": documents_text, "versions_text": versions_text}
    write_text(folder / "MODEL_CARD.md", CARD.format(**texts, **card))
    return write_json(folder / "card.json", card)


CARD = """# The toy pair

Two small Llama models that share a byte-level BPE tokenizer, trained from scratch by `python -m data_gen.toy`.
They exist to try out and test speculative decoding on a CPU; they know nothing about the world.

- Parameters: target {parameters[target]:,}, draft {parameters[draft]:,} (float16 on disk; load them in float32).
- Data: `instruct` (word tasks) and `math` (worked word problems) are generated; `code` is documented functions of
  Python's standard library (Python Software Foundation License). Documents: {documents_text}.
- Training, seed {seed}: target {steps[target]:,} steps, {tokens[target]:,} tokens, {seconds[target]:,.0f} seconds;
  draft {steps[draft]:,} steps, {tokens[draft]:,} tokens, {seconds[draft]:,.0f} seconds. Running losses at the end:
  {losses[target]:.3f} and {losses[draft]:.3f}.
- Test prompts are held out by the hash of the prompt (`instruct`, `math`) or by module (`code`).

Measures on {num_prompts} frozen test prompts per domain:

- exact match at temperature 0;
- loss in nats per token of the reference responses;
- alpha, the mean of sum_x min(p(x), q(x)) at temperature 1 along responses sampled from the target;
- the mean length of those responses in tokens.

{table}

Versions: {versions_text}.
"""
