"""A draft that learns from its target: one forward pass of the draft per batch, gradients through it alone.

On-policy texts are what the draft itself says, for the target to correct (GKD, arXiv:2306.13649; DistillSpec).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toolkit import config
from toolkit.decoding import decode
from toolkit.distillation.data import DraftBatch
from toolkit.distillation.losses import Loss, Outlook
from toolkit.distillation.teachers import Expected, Teacher, outlook
from toolkit.engine.engine import EngineOptions
from toolkit.engine.facts import fit_logits
from toolkit.errors import InputError
from toolkit.models.pair import ModelPair
from toolkit.models.reduced import kept_tokens, rows_alone
from toolkit.models.teacher import Text, produced_logits
from toolkit.sampling import Sampling
from toolkit.training.trainer import WholeSteps

PLAIN = EngineOptions(cuda_graphs="off")  # weights change between calls


@dataclass(frozen=True)
class OnPolicy:
    """How a batch's texts are drawn from the draft, with probability `lmbda`; ends: tokens that end a text."""

    lmbda: float
    sampling: Sampling
    ends: Sequence[int]
    seed: int


class DraftTraining(WholeSteps):
    """Logs val/alpha, val/cross_entropy of the text's tokens, val/loss and val/coverage; see also Curves.

    Coverage is the share of tokens that the draft has an output row for. All are means over the same produced tokens (cross
    entropy: over the covered ones), and read the whole of p, whatever the training reads.

    draft        a causal language model, in evaluation mode (no dropout); nothing else is in the checkpoints
    temperature  of q
    """

    def __init__(
        self,
        draft: Any,
        teacher: Teacher,
        loss: Loss,
        temperature: float,
        on_policy: OnPolicy,
        optimizer: partial[torch.optim.Optimizer],
        scheduler: Callable[..., Any] | None = None,
        about: Mapping[str, Any] | None = None,
    ):
        super().__init__(optimizer, scheduler, about)
        self.draft, self.loss, self.temperature = draft, loss, temperature
        self.teacher, self.on_policy = teacher, on_policy

    def configure_optimizers(self) -> Any:
        return self.with_schedule(self.make_optimizer(self.draft.parameters()), self._num_steps)

    def training_step(self, batch: DraftBatch, batch_idx: int) -> dict[str, Tensor]:
        own, step = self.on_policy, int(self.trainer.fit_loop.total_batch_idx)
        if is_on_policy(own.lmbda, own.seed, step):
            seed = own.seed + self.trainer.global_rank
            texts = batch.texts
            batch = DraftBatch(own_texts(self.draft, texts, own.sampling, own.ends, seed, step) if texts else [])
        if not batch.texts:  # no text is left for this process: it takes part with a loss of 0
            nothing = torch.stack([0.0 * weights.sum() for weights in self.draft.parameters()]).sum()
            return self.share_of_step(nothing, nothing.detach(), 0)
        progress = self.trainer.global_step / max(self._num_steps, 1)
        seen = self.outlooks(batch, self.teacher.expected(batch.texts))
        losses = [(weight, self.loss(depth, progress)) for weight, depth in seen]
        total = torch.stack([weight * loss.sum() for weight, loss in losses]).sum()
        whole = total.new_tensor(sum(weight * len(loss) for weight, loss in losses))
        return self.share_of_step(total, whole, len(batch.labels))

    def validation_step(self, batch: DraftBatch, batch_idx: int) -> None:
        (_, seen), *deeper = self.outlooks(batch, Expected(self.teacher.whole(batch)))
        for depth, (_, other) in enumerate(deeper, start=2):
            count = len(other.token_log_probs)
            self.log(f"val/alpha_{depth}", _mean(other.alpha), on_epoch=True, batch_size=count, sync_dist=True)
        values = {"val/alpha": _mean(seen.alpha), "val/loss": _mean(self.loss(seen, 1.0))}
        values["val/coverage"] = _mean(seen.has_row.float())
        self.log_dict(values, on_epoch=True, batch_size=len(seen.has_row), sync_dist=True, prog_bar=True)
        covered = int(seen.has_row.sum())
        cross_entropy = -seen.token_log_probs[seen.has_row].sum() / max(covered, 1)
        self.log("val/cross_entropy", cross_entropy, on_epoch=True, batch_size=covered, sync_dist=True)

    def outlooks(self, batch: DraftBatch, expected: Expected) -> list[tuple[float, Outlook]]:
        """The distributions of target and draft at a batch's positions, with the weight of their loss.

        There is one entry per depth that the draft is unrolled to; a separate draft has one. Gradients go to the draft.
        """
        tokens = kept_tokens(self.draft)
        with rows_alone(self.draft):
            logits = produced_logits(self.draft, batch.texts, batch.positions).float()
        if tokens is None:
            logits = fit_logits(logits, self.teacher.vocab_size, logits.device)
        return [(1.0, outlook(expected, logits, batch.labels, self.temperature, tokens))]

    @property
    def _num_steps(self) -> int:
        return int(self.trainer.estimated_stepping_batches)


def _mean(values: Tensor) -> Tensor:
    """The mean; 0 of none: short texts have no position at some depths, and a batch of them weighs nothing."""
    return values.sum() / max(len(values), 1)


def is_on_policy(lmbda: float, seed: int, step: int) -> bool:
    """Whether a step's texts are the draft's own: with probability lmbda, a function of (seed, step)."""
    generator = torch.Generator().manual_seed((seed << 32) + step)
    return bool(torch.rand((), generator=generator, dtype=torch.float64) < lmbda)


def own_texts(
    draft: Any, texts: Sequence[Text], sampling: Sampling, ends: Sequence[int], seed: int, step: int
) -> list[Text]:
    """The draft's responses to the prompts of texts, drawn as the target's were; random numbers of (seed, step)."""
    pair = ModelPair(target=draft, end_ids=tuple(ends), options=PLAIN)
    method = config.method("autoregressive")
    prompts = [list(prompt) for prompt, _ in texts]
    drawn = replace(sampling, seed=(seed << 32) + step, stop=())
    generations = decode(pair, prompts, method, drawn, batch_size=len(prompts))
    failed = next((generation.error for generation in generations if generation.error is not None), None)
    if failed is not None:
        raise InputError(f"the draft could not answer a prompt ({failed}); set lmbda=0, or leave that prompt out")
    return [(prompt, generation.token_ids) for prompt, generation in zip(prompts, generations, strict=True)]
