"""python -m data_gen.toy: train the toy pair, two small language models and their tokenizer, from scratch.

Output: `target/` and `draft/` (float16 weights, each with the tokenizer), `card.json`, `MODEL_CARD.md`, checkpoints, and the
manifest. A run that was stopped goes on from its last checkpoint; a finished one returns at once.
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("toy")

import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, TQDMProgressBar
from pytorch_lightning.plugins.environments import LightningEnvironment
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from data_gen import keys
from data_gen.domains import DOMAINS, get
from data_gen.held_out import load_frozen
from data_gen.toy_pair.export import evaluate, export_model, train_tokenizer, versions, write_card
from data_gen.toy_pair.training import BatchStream, Document, ToyData, ToyModule, encode
from toolkit.config import plain
from toolkit.runs.stage import open_stage
from toolkit.training.checkpoints import AtomicCheckpointIO

IGNORED = ("threads", "checkpoint_every", "log_every")


def run(cfg: keys.Toy) -> Path:
    stage = open_stage("toy", cfg, ignore=IGNORED)
    if stage.finished:
        return stage.folder
    before = torch.get_num_threads()
    torch.set_num_threads(cfg.threads)
    try:
        corpus = {domain: get(domain).examples("train", cfg.examples, cfg.seed) for domain in DOMAINS}
        learned = [
            example for domain, count in plain(cfg.tokenizer_examples).items() for example in corpus[domain][:count]
        ]
        texts = [text for example in learned for text in (example.prompt, example.response)]
        tokenizer = train_tokenizer(texts, cfg.vocab_size, cfg.max_positions)
        pools = {domain: encode(tokenizer, examples, cfg.max_length) for domain, examples in corpus.items()}
        modules = {
            name: train(cfg, name, tokenizer, pools, stage.folder / "checkpoints") for name in ("target", "draft")
        }
        for name, module in modules.items():
            export_model(module.model, tokenizer, stage.folder / name)
        card = describe(cfg, modules, pools, stage.folder)
        write_card(card, stage.folder)
        return stage.finish(domains=card["domains"])
    finally:
        torch.set_num_threads(before)


def train(
    cfg: keys.Toy, name: str, tokenizer: PreTrainedTokenizerFast, pools: dict[str, list[Document]], folder: Path
) -> ToyModule:
    """Fit one of the two for its number of steps, from its last checkpoint in `folder` if there is one."""
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")  # ToyData is: it asks for the step
    warnings.filterwarnings("ignore", message=".*exists and is not empty.*")  # a stopped run goes on in its folder
    pl.seed_everything(cfg.seed, verbose=False)
    module = ToyModule(cfg, getattr(cfg, name), tokenizer)
    stream = BatchStream(pools, plain(cfg.shares), cfg.tokens_per_batch, cfg.prompt_weight, cfg.seed)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        max_steps=getattr(cfg, name).steps,
        limit_train_batches=getattr(cfg, name).steps,
        gradient_clip_val=cfg.clip_norm,
        callbacks=[
            ModelCheckpoint(folder, name, every_n_train_steps=cfg.checkpoint_every, enable_version_counter=False),
            TQDMProgressBar(refresh_rate=cfg.log_every),
        ],
        plugins=[AtomicCheckpointIO(), LightningEnvironment()],  # one process, whatever a launcher has left
        logger=False,
        enable_model_summary=False,
    )
    checkpoint = folder / f"{name}.ckpt"
    trainer.fit(module, ToyData(stream), ckpt_path=checkpoint if checkpoint.exists() else None, weights_only=False)
    trainer.save_checkpoint(checkpoint)
    return module.eval()


def describe(
    cfg: keys.Toy, modules: dict[str, ToyModule], pools: dict[str, list[Document]], folder: Path
) -> dict[str, Any]:
    """What the card says; the models are measured as exported, so rounding to float16 is included."""
    models = {name: LlamaForCausalLM.from_pretrained(folder / name, dtype="float32") for name in ("target", "draft")}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "target")
    measures = {}
    for domain in DOMAINS:
        examples = load_frozen(domain, "test")[: cfg.evaluation.prompts]
        values = evaluate(**models, tokenizer=tokenizer, domain=domain, examples=examples, cfg=cfg)
        measures[domain] = {name: round(value, 4) for name, value in values.items()}
    return {
        "parameters": {name: model.num_parameters() for name, model in models.items()},
        "documents": {domain: len(pool) for domain, pool in pools.items()},
        "steps": {name: getattr(cfg, name).steps for name in modules},
        "tokens": {name: module.tokens_seen for name, module in modules.items()},
        "seconds": {name: round(module.seconds, 1) for name, module in modules.items()},
        "seed": cfg.seed,
        "losses": {name: round(module.last_loss or 0.0, 4) for name, module in modules.items()},
        "num_prompts": cfg.evaluation.prompts,
        "domains": measures,
        "versions": versions(),
    }
