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
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from data_gen import keys
from data_gen.domains import Example, get
from data_gen.toy_pair.training import encode
from toolkit import ModelPair, generate
from toolkit.files.atomic import write_folder, write_json, write_text
from toolkit.models.teacher import produced_logits

PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"  # ids 0, 1, 2
BATCH = 50  # prompts at a time
Pair = tuple[list[int], list[int]]  # token ids of a prompt and of a response to it


def evaluate(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    domain: str,
    examples: list[Example],
    cfg: keys.Toy,
) -> dict[str, float]:
    """One domain's measures: share of right answers at temperature 0, nats per token of the reference responses, alpha (mean of
    sum_x min(p, q)) along responses at temperature 1, and their mean length in tokens, end of text included.
    """
    models = {"target": target, "draft": draft}
    prompts = [example.prompt for example in examples]
    measures: dict[str, float] = {}
    for name, model in models.items():
        if examples[0].answer is not None:
            texts = [
                tokenizer.decode(response, skip_special_tokens=True)
                for _, response in respond(model, tokenizer, prompts, cfg.evaluation.max_new_tokens)
            ]
            hits = [get(domain).is_correct(text, e.answer) for text, e in zip(texts, examples, strict=True)]
            measures[f"exact_match_{name}"] = sum(hits) / len(hits)
        measures[f"loss_{name}"] = reference_loss(model, tokenizer, examples, cfg.max_length)
    sampled = respond(target, tokenizer, prompts, cfg.evaluation.max_new_tokens, temperature=1.0, seed=cfg.seed)
    measures["alpha"] = acceptance(target, draft, sampled)
    measures["response_tokens"] = sum(len(response) for _, response in sampled) / len(sampled)
    return measures


def respond(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Pair]:
    generations = generate(
        ModelPair(target=model, draft=model, tokenizer=tokenizer),
        prompts,
        method="autoregressive",
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        batch_size=BATCH,
    )
    return [(generation.prompt_ids, generation.token_ids) for generation in generations]


@torch.inference_mode()
def acceptance(target: LlamaForCausalLM, draft: LlamaForCausalLM, pairs: list[Pair]) -> float:
    """alpha = sum_x min(p(x), q(x)) at temperature 1, averaged over all response positions."""
    values = []
    for start in range(0, len(pairs), BATCH):
        p, q = (produced_logits(model, pairs[start : start + BATCH]).float().softmax(-1) for model in (target, draft))
        values.append(torch.minimum(p, q).sum(-1))
    return torch.cat(values).mean().item()


@torch.inference_mode()
def reference_loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[Example], max_length: int
) -> float:
    documents = encode(tokenizer, examples, max_length)
    pairs = [(d.tokens[: d.num_prompt].tolist(), d.tokens[d.num_prompt :].tolist()) for d in documents]
    losses = []
    for start in range(0, len(pairs), BATCH):
        batch = pairs[start : start + BATCH]
        labels = torch.tensor([token for _, response in batch for token in response])
        losses.append(cross_entropy(produced_logits(model, batch).float(), labels, reduction="none"))
    return torch.cat(losses).mean().item()


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
    def write(temporary: Path) -> None:
        copy.deepcopy(model).half().save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)

    return write_folder(folder, write)


def versions() -> dict[str, str]:
    packages = (torch, transformers, pytorch_lightning, tokenizers)
    return {"python": platform.python_version(), **{package.__name__: package.__version__ for package in packages}}


def write_card(card: dict[str, Any], folder: Path) -> Path:
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
