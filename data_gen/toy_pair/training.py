"""The Lightning module that trains the target, and then the draft, on the same stream of batches."""

from __future__ import annotations

import math
import time
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data_gen.toy_pair.batches import BatchStream
from data_gen.toy_pair.muon import Muon
from toolkit.config import commands


def build_model(shape: commands.ToyModel, tokenizer: PreTrainedTokenizerFast, max_positions: int) -> LlamaForCausalLM:
    """A fresh Llama with tied embeddings in the shape given by the config."""
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        **special,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    initialise(model)
    return model


@torch.no_grad()
def initialise(model: LlamaForCausalLM) -> None:
    """Let every layer start as the identity: what a token is stays visible, so copying is learned several times sooner.

    Embeddings dominate the residual stream; the usual 0.02 drowns in the layers' outputs at these widths. Matrices keep
    the scale of what they read, and those that write to the residual stream start at zero.
    """
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            parameter.normal_(0, 0.1)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
        elif parameter.ndim == 2:
            parameter.normal_(0, 0.8 * parameter.shape[1] ** -0.5)


def parameter_groups(model: nn.Module, shape: Any, weight_decay: float) -> list[dict[str, Any]]:
    """For `Muon`: the layers' matrices, with weight decay; embeddings and scales, by Adam without."""
    groups = [
        {"params": [], "lr": shape.matrix_learning_rate, "weight_decay": weight_decay, "adam": False},
        {"params": [], "lr": shape.learning_rate, "weight_decay": 0.0, "adam": True},
    ]
    for name, parameter in model.named_parameters():
        groups[parameter.ndim != 2 or "embed_tokens" in name]["params"].append(parameter)
    return groups


def weighted_loss(model: nn.Module, input_ids: Tensor, weights: Tensor) -> Tensor:
    """Mean next-token cross entropy in nats; input_ids [B, T], weights [B, T] of the predicted tokens."""
    logits = model(input_ids=input_ids[:, :-1], use_cache=False).logits  # [B, T - 1, V]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def learning_rate_factor(step: int, warmup: int, steps: int) -> float:
    """Linear warmup, then a cosine down to nearly zero at the last step."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class ToyModule(pl.LightningModule):
    """One of the two models. `shape` is its part of the config: sizes, learning rates, steps, warmup."""

    def __init__(self, cfg: commands.Toy, shape: commands.ToyModel, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.cfg, self.shape = cfg, shape
        self.model = build_model(shape, tokenizer, cfg.max_positions)
        self.tokens_seen = 0
        self.seconds = 0.0
        self.last_loss: float | None = None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = weighted_loss(self.model, **batch)
        value = loss.item()
        self.last_loss = value if self.last_loss is None else 0.99 * self.last_loss + 0.01 * value
        self.tokens_seen += int((batch["input_ids"] != 0).sum())
        self.log("loss", self.last_loss, prog_bar=True)
        return loss

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._step_began = time.perf_counter()
        self._tokens_before = self.tokens_seen

    def on_train_batch_end(self, outputs: object, batch: dict[str, Tensor], batch_idx: int) -> None:
        elapsed = time.perf_counter() - self._step_began
        self.seconds += elapsed
        self.log("tokens/s", (self.tokens_seen - self._tokens_before) / elapsed, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = Muon(parameter_groups(self.model, self.shape, self.cfg.weight_decay))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, self.shape.warmup, self.shape.steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["progress"] = (self.tokens_seen, self.seconds, self.last_loss)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.tokens_seen, self.seconds, self.last_loss = checkpoint["progress"]


class ToyData(pl.LightningDataModule):
    """The stream of batches, continued where a resumed trainer stands."""

    def __init__(self, stream: BatchStream) -> None:
        super().__init__()
        self.stream = stream

    def train_dataloader(self) -> DataLoader:
        self.stream.start = 0 if self.trainer is None else self.trainer.global_step
        return DataLoader(self.stream, batch_size=None)
