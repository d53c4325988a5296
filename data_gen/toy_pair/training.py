"""The Lightning module that trains the target, and then the draft, on the same stream of batches."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data_gen import keys
from data_gen.domains import Example

CHUNK = 1024  # documents that are sorted by length together
# Of the "Polar Express" (arXiv:2505.16932): its first three steps for singular values from .001 on.
POLYNOMIALS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
)


@dataclass(frozen=True)
class Document:
    """Token ids of begin + prompt + response + end, and how many of them belong to the prompt."""

    tokens: np.ndarray  # [T] int16
    num_prompt: int


def encode(tokenizer: PreTrainedTokenizerFast, examples: list[Example], max_length: int) -> list[Document]:
    """Tokenize prompt and response apart, as in decoding; documents longer than `max_length` are left out."""
    prompts = tokenizer([example.prompt for example in examples])["input_ids"]
    responses = tokenizer([example.response for example in examples], add_special_tokens=False)["input_ids"]
    documents = [
        Document(np.array(prompt + response + [tokenizer.eos_token_id], dtype=np.int16), len(prompt))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    return [document for document in documents if len(document.tokens) <= max_length]


class BatchStream(IterableDataset):
    """Batches `{"input_ids" [B, T], "weights" [B, T]}` from batch number `start` on; equal seeds give equal streams.

    `pools` are the domains' documents and `shares` the part of all training tokens that each domain gets.
    `weights` is the loss weight of a token: 1 in responses, `prompt_weight` in prompts, 0 for begin and padding.
    """

    def __init__(
        self,
        pools: dict[str, list[Document]],
        shares: dict[str, float],
        tokens_per_batch: int,
        prompt_weight: float,
        seed: int,
        start: int = 0,
    ) -> None:
        self.pools, self.shares = pools, shares
        self.tokens_per_batch, self.prompt_weight = tokens_per_batch, prompt_weight
        self.seed, self.start = seed, start

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(self._collate, islice(self._groups(), self.start, None))

    def _groups(self) -> Iterator[list[Document]]:
        """Documents that make up a batch: chunks are drawn by share, sorted by length, cut, and the cuts shuffled."""
        rng = random.Random(self.seed)
        domains = [domain for domain in self.pools if self.shares.get(domain, 0) > 0]
        mean_lengths = {d: sum(len(doc.tokens) for doc in self.pools[d]) / len(self.pools[d]) for d in domains}
        odds = [self.shares[domain] / mean_lengths[domain] for domain in domains]
        streams = {domain: _cycle(self.pools[domain], random.Random(f"{self.seed}/{domain}")) for domain in domains}
        while True:
            chunk = [next(streams[domain]) for domain in rng.choices(domains, odds, k=CHUNK)]
            groups = list(_cut(sorted(chunk, key=lambda doc: len(doc.tokens)), self.tokens_per_batch))
            rng.shuffle(groups)
            yield from groups

    def _collate(self, group: list[Document]) -> dict[str, Tensor]:
        width = max(len(document.tokens) for document in group)
        input_ids = torch.zeros(len(group), width, dtype=torch.long)
        weights = torch.zeros(len(group), width)
        for row, document in enumerate(group):
            length = len(document.tokens)
            input_ids[row, :length] = torch.from_numpy(document.tokens.astype(np.int64))
            weights[row, 1 : document.num_prompt] = self.prompt_weight
            weights[row, document.num_prompt : length] = 1.0
        return {"input_ids": input_ids, "weights": weights}


def _cycle(pool: list[Document], rng: random.Random) -> Iterator[Document]:
    pool = list(pool)
    while True:
        rng.shuffle(pool)
        yield from pool


def _cut(documents: list[Document], tokens_per_batch: int) -> Iterator[list[Document]]:
    """Cut documents, sorted by length, where the padded batch would exceed `tokens_per_batch`."""
    group: list[Document] = []
    for document in documents:
        if group and (len(group) + 1) * len(document.tokens) > tokens_per_batch:
            yield group
            group = []
        group.append(document)
    yield group


class Muon(torch.optim.Optimizer):
    """Matrices get Nesterov momentum, orthogonalised: an update's size depends on `lr` alone. Groups with `adam=True`
    (embeddings, norms) get Adam's update. One optimizer for both, because Lightning counts the steps of each.

    params        groups of matrices [out, in], or of anything if `adam`
    betas         Adam's; `momentum` is Muon's
    weight_decay  times the learning rate is taken off the weights at each step
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 0.02,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.0,
    ):
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "weight_decay": weight_decay, "adam": False}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            update = self._adam if group["adam"] else self._muon
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.sub_(group["lr"] * update(weight.grad, self.state[weight], group))
        return loss

    @staticmethod
    def _muon(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].lerp_(gradient, 1 - group["momentum"])
        rows, columns = gradient.shape
        return max(1.0, rows / columns) ** 0.5 * orthogonal(gradient.lerp(state["momentum"], group["momentum"]))

    @staticmethod
    def _adam(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if not state:
            state.update(step=0, mean=torch.zeros_like(gradient), square=torch.zeros_like(gradient))
        state["step"] += 1
        first, second = group["betas"]
        mean = state["mean"].lerp_(gradient, 1 - first) / (1 - first ** state["step"])
        square = state["square"].lerp_(gradient.square(), 1 - second) / (1 - second ** state["step"])
        return mean / (square.sqrt() + 1e-8)


def orthogonal(matrix: Tensor) -> Tensor:
    """U V^T of the singular value decomposition U S V^T, roughly: values within a factor of 100 end between 0.1 and 2."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / (1.02 * x.norm() + 1e-7)
    for linear, cubic, quintic in POLYNOMIALS:
        square = x @ x.mT
        x = torch.addmm(x, torch.addmm(square, square, square, beta=cubic, alpha=quintic), x, beta=linear)
    return x.mT if tall else x


def build_model(shape: keys.ToyModel, tokenizer: PreTrainedTokenizerFast, max_positions: int) -> LlamaForCausalLM:
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

    Embeddings dominate the residual stream; matrices that write to it start at zero.
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
    if step < warmup:
        return (step + 1) / warmup
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class ToyModule(pl.LightningModule):
    """One of the two models. `shape` is its part of the config: sizes, learning rates, steps, warmup."""

    def __init__(self, cfg: keys.Toy, shape: keys.ToyModel, tokenizer: PreTrainedTokenizerFast) -> None:
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
    def __init__(self, stream: BatchStream) -> None:
        super().__init__()
        self.stream = stream

    def train_dataloader(self) -> DataLoader:
        self.stream.start = 0 if self.trainer is None else self.trainer.global_step
        return DataLoader(self.stream, batch_size=None)
