"""Training an acceptance head, or a pre-read head, on the states of a frozen draft."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from hydra.utils import get_class
from torch import Tensor

from toolkit.acceptance.calibration.scores import NAMES, CalibrationScores
from toolkit.config import commands
from toolkit.config.notes import Internal
from toolkit.errors import unknown_name
from toolkit.training.checkpoints import check_modes
from toolkit.training.examples import ExampleData, Positions
from toolkit.training.losses import WeightedBCE
from toolkit.training.processes import is_first_process
from toolkit.training.schedule import best_rate, trial_steps
from toolkit.training.trainer import WholeSteps

OUTPUTS = ("accepted", "following")  # of a pre-read head
MEANS = ("val/log_loss", "val/log_loss_calibrated")  # of the outputs


class HeadTraining(WholeSteps):
    """A head, its loss and its optimizer. Validation is reported raw and with the class weight undone.

    head       built for the draft's hidden size
    loss       returns numerator and denominator of a batch; the head learns from their quotient
    optimizer  of the parameters, a partial; where its lr is None, a short trial finds the rate (`schedule`)
    scheduler  of (optimizer, num_steps), one step per batch; None: constant rate
    about      travels in every checkpoint: the draft's fingerprint, the head's shape, the W&B run, the rate that was found

    Logs val/{log_loss, log_loss_calibrated, binary_kl, brier, ece, auroc}, each also with the suffix _corrected; for the
    rest see Curves.
    """

    suffixes: ClassVar[tuple[str, ...]] = ("", "_corrected")  # of the sets of scores that are kept apart
    outputs: ClassVar[tuple[str, ...]] = ("",)  # of the suffixes, those of different outputs

    def __init__(
        self,
        head: Any,
        loss: WeightedBCE,
        optimizer: partial[torch.optim.Optimizer],
        scheduler: Callable[..., Any] | None = None,
        about: Annotated[Mapping[str, Any] | None, Internal()] = None,
    ):
        super().__init__(optimizer, scheduler, about)
        self.head, self.loss = head, loss
        self.scores = torch.nn.ModuleList(CalibrationScores() for _ in self.suffixes)

    def configure_optimizers(self) -> Any:
        num_steps = int(self.trainer.estimated_stepping_batches)
        optimizer = self.build_optimizer(self.trainer.datamodule, num_steps, self.num_shares)  # type: ignore[attr-defined]
        return self.with_schedule(optimizer, num_steps)

    def build_optimizer(self, data: ExampleData, num_steps: int, shares: int = 1) -> torch.optim.Optimizer:
        """The optimizer, its rate found on the data where none is given; shares: batches that make one step."""
        if self.make_optimizer.keywords.get("lr", 0.0) is None and "learning_rate" not in self.about:
            trial_rate = self._find_rate(data, num_steps, shares)
            alone = self._trainer is None
            self.about["learning_rate"] = trial_rate if alone else self.trainer.strategy.broadcast(trial_rate)
        rate = {"lr": self.about["learning_rate"]} if "learning_rate" in self.about else {}
        return self._optimizers()(self.head.parameters(), **rate)

    def on_fit_start(self) -> None:
        self.first_seed = torch.initial_seed()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed dropout by the seed, the batch and the process: a resumed training has the uninterrupted one's numbers."""
        if getattr(self.head, "dropout", 0.0):
            batches = (int(self.trainer.fit_loop.total_batch_idx) + 1) * self.trainer.world_size
            torch.manual_seed(((self.first_seed + 1) * 1_000_003 + batches + self.trainer.global_rank) % 2**64)

    def training_step(self, batch: Positions, batch_idx: int) -> dict[str, Tensor]:
        total, weight = self.loss_of(self.head, batch)
        return self.share_of_step(total, weight, len(batch.labels))

    def loss_of(self, head: Any, batch: Positions) -> tuple[Tensor, Tensor]:
        return self.loss(self.logits_of(head, batch), batch.labels)

    def logits_of(self, head: Any, batch: Positions) -> Tensor:
        """A head's logits of a batch, in float32 at least, so that loss and scores are not computed in bfloat16."""
        logits: Tensor = head(self._read(batch))
        return logits.float() if logits.dtype.itemsize < 4 else logits

    def on_validation_epoch_start(self) -> None:
        for scores in self.scores:
            scores.reset()  # type: ignore[operator]

    def validation_step(self, batch: Positions, batch_idx: int) -> None:
        with torch.autocast(batch.hidden.device.type, enabled=False):  # scores are those of the exported head
            self.add_scores(self._own_scores(), batch)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.named(self._own_scores()))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "learning_rate" in checkpoint["about"]:  # comes before the optimizer is built
            self.about["learning_rate"] = checkpoint["about"]["learning_rate"]

    def add_scores(self, scores: Mapping[str, CalibrationScores], batch: Positions, head: Any = None) -> None:
        """Add a batch to the sets of scores, by suffix. head: another head of the same kind; None: the module's own."""
        head = self.head if head is None else head
        logits = self.logits_of(head, batch)
        scores[""].update(logits, batch.labels)
        scores["_corrected"].update(head.corrected(logits), batch.labels)

    def named(self, scores: Mapping[str, CalibrationScores]) -> dict[str, Tensor]:
        """All scores under their keys: val/ece, val/ece_corrected, ..."""
        values: dict[str, Tensor] = {}
        for suffix, metric in scores.items():
            values |= {f"val/{name}{suffix}": value for name, value in metric.compute().items()}
        return values

    @classmethod
    def score_names(cls) -> list[str]:
        """The keys of `named`, known before anything is trained."""
        return [f"val/{name}{suffix}" for suffix in cls.suffixes for name in NAMES]

    def evaluate(self, batches: Iterable[Positions], head: Any = None) -> dict[str, CalibrationScores]:
        """The sets of scores over batches, in this process alone. head: another one of the same kind; None: the own."""
        scores = self.new_scores()
        with torch.no_grad():
            for batch in batches:
                self.add_scores(scores, self.moved(batch), head)
        return scores

    def new_scores(self) -> dict[str, CalibrationScores]:
        """Empty sets of scores, by suffix, on the head's device."""
        device = next(self.head.parameters()).device
        return {suffix: CalibrationScores(sync_on_compute=False).to(device) for suffix in self.suffixes}

    def moved(self, batch: Positions) -> Positions:
        """A batch on the head's device, its states in the head's number format."""
        device = next(self.head.parameters()).device
        return Positions(self._read(batch).to(device), *(values.to(device) for values in batch[1:]))

    def _find_rate(self, data: ExampleData, num_steps: int, shares: int) -> float:
        """The learning rate by trial, on all data and not this process's share; shares: batches that make one step."""

        def score_of(head: Any) -> float:
            parts = self.evaluate(data.whole_validation(), head)
            return sum(float(parts[suffix].compute()["log_loss_calibrated"]) for suffix in self.outputs)

        def loss_of(head: Any, batch: Positions) -> Tensor:
            total, weight = self.loss_of(head, self.moved(batch))
            return total / weight

        batches, steps = data.shuffled_training(data.batch_size * shares), trial_steps(num_steps)
        rate, scores = best_rate(self.head, self._optimizers(), batches, steps, loss_of, score_of)
        if is_first_process():
            trials = ", ".join(f"{tried:.2g}: {score:.4f}" for tried, score in scores.items())
            print(
                f"learning rate {rate:.2g} (calibrated log loss on validation after a short trial of {trials})",
                flush=True,
            )
        return rate

    def _optimizers(self) -> partial[torch.optim.Optimizer]:
        """The optimizer with one kernel for all weights, where it has one: small heads spend much of a step in it.

        Mixed precision does without it, because Lightning then clips no gradients of such optimizers.
        """
        mixed = self._trainer is not None and "mixed" in str(self.trainer.precision)
        parameters = inspect.signature(self.make_optimizer.func).parameters
        if mixed or "fused" not in parameters or {"fused", "foreach"} & self.make_optimizer.keywords.keys():
            return self.make_optimizer
        return partial(self.make_optimizer, fused=True)

    def _own_scores(self) -> dict[str, CalibrationScores]:
        return dict(zip(self.suffixes, self.scores, strict=True))  # type: ignore[arg-type]

    def _read(self, batch: Positions) -> Tensor:
        return batch.hidden.to(next(self.head.parameters()).dtype)


class PrereadTraining(HeadTraining):
    """As HeadTraining, with a PrereadHead; labels are [P, 2].

    Logs the scores of each output, val/log_loss_accepted, val/log_loss_following, ..., and the means of their log losses.
    """

    suffixes = outputs = tuple(f"_{name}" for name in OUTPUTS)

    def loss_of(self, head: Any, batch: Positions) -> tuple[Tensor, Tensor]:
        has_label = ~batch.labels.isnan()
        return self.loss(self.logits_of(head, batch)[has_label], batch.labels[has_label])

    def add_scores(self, scores: Mapping[str, CalibrationScores], batch: Positions, head: Any = None) -> None:
        head = self.head if head is None else head
        logits = head.corrected(self.logits_of(head, batch))
        for output, suffix in enumerate(self.suffixes):
            has_label = ~batch.labels[:, output].isnan()
            scores[suffix].update(logits[has_label, output], batch.labels[has_label, output])

    def named(self, scores: Mapping[str, CalibrationScores]) -> dict[str, Tensor]:
        values = super().named(scores)
        for name in MEANS:
            values[name] = torch.stack([values[f"{name}{suffix}"] for suffix in self.suffixes]).mean()
        return values

    @classmethod
    def score_names(cls) -> list[str]:
        return [*super().score_names(), *MEANS]


def check_metric(cfg: commands.Train | commands.TrainHeads) -> None:
    """Raises InputError unless this training gives the scores that `optimized_metric` and the callbacks name.

    Neither for callbacks that would take the worst score for the best one.
    """
    training: type[HeadTraining] = get_class(cfg.model._target_)
    every: Mapping[str, Any] = getattr(cfg, "callbacks", None) or {}
    callbacks = {name: spec for name, spec in every.items() if spec is not None}
    closing = [name for spec in callbacks.values() for name in getattr(get_class(spec._target_), "CLOSING", ())]
    names = [*training.score_names(), *closing]
    monitored = {f"callbacks.{name}.monitor": spec.get("monitor", names[0]) for name, spec in callbacks.items()}
    for key, score in {"optimized_metric": cfg.optimized_metric, **monitored}.items():
        if score not in names:
            raise unknown_name("score", score, names, f"as {key}")
    check_modes(callbacks)
