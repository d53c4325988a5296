"""Steps whose loss is a quotient of two sums: over all batches that are accumulated, and over all processes.

    loss = sum(total) / sum(weight)

A mean of the batches' own quotients would weigh positions of short batches more. Lightning divides each batch's loss by the
number of accumulated batches, and averages gradients over processes. So a batch's numerator is divided by a fixed number,
and before the optimizer's step the gradients are rescaled by the whole weight. A training that accumulates two batches, or
runs in two processes, thus equals one with twice the batch, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

REFERENCE = 1024.0  # what a share of a step's loss is divided by until the step's whole weight is known


class WholeSteps(pl.LightningModule):
    """A module whose training step ends with `share_of_step`.

    optimizer  of the parameters, a partial
    scheduler  of (optimizer, num_steps), one step per batch; None: constant rate
    about      travels in every checkpoint
    """

    def __init__(
        self,
        optimizer: partial[torch.optim.Optimizer],
        scheduler: Callable[..., Any] | None = None,
        about: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self.make_optimizer, self.make_scheduler, self.about = optimizer, scheduler, dict(about or {})
        self.step_weight = torch.zeros(())

    def with_schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        """What `configure_optimizers` returns: the optimizer, with its schedule if there is one."""
        if self.make_scheduler is None:
            return optimizer
        schedule = self.make_scheduler(optimizer, num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["about"] = self.about

    @property
    def num_shares(self) -> int:
        """The number of batches that make one step: those that are accumulated, of all processes."""
        return int(self.trainer.accumulate_grad_batches) * int(self.trainer.world_size)

    def share_of_step(self, total: Tensor, weight: Tensor, positions: int) -> dict[str, Tensor]:
        """The loss of a batch, and numerator, denominator and positions of the batches of all processes (see Curves).

        total, weight  numerator and denominator of this batch's loss (scalars); positions: their number
        """
        alone = self.num_shares == 1
        if not alone:
            self.step_weight = self.step_weight + weight.detach()
        sums = torch.stack([total.detach().double(), weight.detach().double(), weight.new_tensor(positions).double()])
        if self.trainer.world_size > 1:
            sums = self.trainer.strategy.reduce(sums, reduce_op="sum")
        loss = total / (weight if alone else REFERENCE)
        return {"loss": loss, "total": sums[0], "weight": sums[1], "positions": sums[2]}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Make the gradient that of sum(total) / sum(weight) over all batches and processes of the step."""
        if self.num_shares == 1:
            return
        weight = self.trainer.strategy.reduce(self.step_weight, reduce_op="sum")
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(REFERENCE * self.num_shares / weight)
        self.step_weight = torch.zeros_like(self.step_weight)
