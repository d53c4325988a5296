"""A draft that learns from its target: one forward pass of the draft per batch, gradients through it alone.

Logits of all positions, and the tensors that a loss makes of them, would be many times the model: those of CHUNK positions are
computed at a time, and once more for the gradient. A batch of more tokens than are read at once is read in parts likewise.

On-policy texts are what the draft itself says, for the target to correct (GKD, arXiv:2306.13649; DistillSpec).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from toolkit import config
from toolkit.config.notes import Internal
from toolkit.decoding import decode
from toolkit.distillation.data import DraftBatch
from toolkit.distillation.losses import DistillBatch, Loss
from toolkit.distillation.teachers import CHUNK, Prediction, Teacher, distill_batch
from toolkit.engine.engine import EngineOptions
from toolkit.engine.facts import fit_logits
from toolkit.errors import InputError
from toolkit.models.pair import ModelPair
from toolkit.models.reduced import kept_tokens, rows_alone
from toolkit.models.teacher import Text, logits_of, produced_states
from toolkit.sampling import Sampling, seed_of
from toolkit.training.trainer import WholeSteps

PLAIN = EngineOptions(cuda_graphs="off", packed="off")  # weights change between calls
recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # nothing is drawn in it


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
        about: Annotated[Mapping[str, Any] | None, Internal()] = None,
    ):
        super().__init__(optimizer, scheduler, about)
        self.draft, self.loss, self.temperature = draft, loss, temperature
        self.teacher, self.on_policy = teacher, on_policy

    def configure_optimizers(self) -> Any:
        return self.with_schedule(self.make_optimizer(self.draft.parameters()), self._num_steps)

    def training_step(self, batch: DraftBatch, batch_idx: int) -> dict[str, Tensor]:
        own, step = self.on_policy, int(self.trainer.fit_loop.total_batch_idx)
        if is_on_policy(own.lmbda, own.seed, step):
            stream = (own.seed, step, self.trainer.global_rank)
            sequences = batch.sequences
            drawn = own_sequences(self.draft, sequences, own.sampling, own.ends, *stream) if sequences else []
            batch = DraftBatch(drawn, None, batch.most)
        if not batch.sequences:  # no text is left for this process: it takes part with a loss of 0
            nothing = torch.stack([0.0 * weights.sum() for weights in self.draft.parameters()]).sum()
            return self.share_of_step(nothing, nothing.detach(), 0)
        progress = self.trainer.global_step / max(self._num_steps, 1)
        total, whole = self.sums(batch, progress)
        return self.share_of_step(total, whole.detach(), len(batch.labels))

    def sums(self, batch: DraftBatch, progress: float) -> Tensor:
        """Numerator and denominator of a batch's loss [2]; of several parts only the texts are kept."""
        parts = list(batch.parts())
        sums_of = partial(recomputed, self.sums_of_part) if len(parts) > 1 else self.sums_of_part
        return torch.stack([sums_of(part, self.teacher.expected(part.sequences), progress) for part in parts]).sum(0)

    def sums_of_part(self, batch: DraftBatch, expected: Prediction, progress: float) -> Tensor:
        """As `sums`, of texts that are read at once; of logits nothing is kept."""
        sums = []
        for depth, states, index in self.chunks(batch):
            losses = recomputed(self.losses, states, expected, batch.labels[index], index, progress)
            sums.append(self.weight_of(depth) * torch.stack([losses.sum(), losses.new_tensor(len(losses))]))
        return torch.stack(sums).sum(0)

    def losses(self, states: Tensor, expected: Prediction, labels: Tensor, index: Tensor, progress: float) -> Tensor:
        """The loss [c] at positions of final states [c, D]."""
        return self.loss(self.distill_batch(states, expected, labels, index), progress)

    def validation_step(self, batch: DraftBatch, batch_idx: int) -> None:
        columns: dict[tuple[int, str], list[Tensor]] = {}
        for part in batch.parts():
            expected = self.teacher.whole(part)
            produced = torch.tensor([number for numbers in part.positions for number in numbers])
            for depth, states, index in self.chunks(part):
                after_prompt = produced[index] >= depth  # no round of decoding begins inside a prompt
                states, index = states[after_prompt.to(states.device)], index[after_prompt]
                seen = self.distill_batch(states, expected, part.labels[index], index)
                values = {"alpha": seen.alpha, "loss": self.loss(seen, 1.0), "coverage": seen.has_row.float()}
                values["log_probs"] = seen.token_log_probs[seen.has_row]
                for name, column in values.items():
                    columns.setdefault((depth, name), []).append(column)
        rows = {key: torch.cat(parts) for key, parts in columns.items()}
        for depth in range(1, 1 + max(depth for depth, _ in rows)):
            alpha = rows[depth, "alpha"]
            self.log(f"val/alpha_{depth + 1}", _mean(alpha), on_epoch=True, batch_size=len(alpha), sync_dist=True)
        first = {f"val/{name}": _mean(rows[0, name]) for name in ("alpha", "loss", "coverage")}
        self.log_dict(first, on_epoch=True, batch_size=len(rows[0, "alpha"]), sync_dist=True, prog_bar=True)
        covered = rows[0, "log_probs"]
        self.log("val/cross_entropy", -_mean(covered), on_epoch=True, batch_size=len(covered), sync_dist=True)

    @property
    def tokens(self) -> Tensor | None:
        """The tokens [V'] that the draft's logits are of; None: the whole vocabulary."""
        return kept_tokens(self.draft)

    def weight_of(self, depth: int) -> float:
        """Of the loss at a depth that the draft is unrolled to, from 0. A separate draft has one."""
        return 1.0

    def final_states(self, batch: DraftBatch) -> list[tuple[Tensor, Tensor]]:
        """Per depth the draft's final states [n', D], and which of a batch's n positions these are [n']."""
        return [(produced_states(self.draft, batch.sequences, batch.positions), torch.arange(len(batch.labels)))]

    def logits(self, states: Tensor) -> Tensor:
        """The draft's logits [c, V'] of final states [c, D]."""
        with rows_alone(self.draft):
            logits = logits_of(self.draft, states).float()
        return logits if self.tokens is not None else fit_logits(logits, self.teacher.vocab_size, logits.device)

    def chunks(self, batch: DraftBatch) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The depth, final states [c, D] and numbers [c] of some of a batch's positions at a time."""
        for depth, (states, index) in enumerate(self.final_states(batch)):
            for some, numbers in zip(states.split(CHUNK), index.cpu().split(CHUNK), strict=True):
                yield depth, some, numbers

    def distill_batch(self, states: Tensor, expected: Prediction, labels: Tensor, index: Tensor) -> DistillBatch:
        """The distributions of target and draft at positions of final states [c, D]. Gradients go to the draft."""
        return distill_batch(expected.at(index), self.logits(states), labels, self.temperature, self.tokens)

    @property
    def _num_steps(self) -> int:
        return int(self.trainer.estimated_stepping_batches)


def _mean(values: Tensor) -> Tensor:
    """The mean; 0 of none: short texts have no position at some depths, and a batch of them weighs nothing."""
    return values.sum() / max(len(values), 1)


def is_on_policy(lmbda: float, seed: int, step: int) -> bool:
    """Whether a step's texts are the draft's own: with probability lmbda, a function of (seed, step)."""
    generator = torch.Generator().manual_seed(seed_of(seed, step))
    return bool(torch.rand((), generator=generator, dtype=torch.float64) < lmbda)


def own_sequences(
    draft: Any, sequences: Sequence[Text], sampling: Sampling, ends: Sequence[int], seed: int, step: int, rank: int = 0
) -> list[Text]:
    """The draft's responses to the prompts of texts, drawn as the target's were; random numbers of (seed, step, rank)."""
    pair = ModelPair(target=draft, end_ids=tuple(ends), options=PLAIN)
    method = config.method("autoregressive")
    prompts = [list(prompt) for prompt, _ in sequences]
    drawn = replace(sampling, seed=seed_of(rank, seed, step), stop=())
    generations = decode(pair, prompts, method, drawn, batch_size=len(prompts))
    failed = next((generation.error for generation in generations if generation.error is not None), None)
    if failed is not None:
        raise InputError(f"the draft could not answer a prompt ({failed}); set lmbda=0, or leave that prompt out")
    return [(prompt, generation.token_ids) for prompt, generation in zip(prompts, generations, strict=True)]
