"""Data of a training that can stop and go on anywhere: the number of batches seen determines which ones are left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl

from toolkit.errors import InputError
from toolkit.training.batches import ExampleBatches, Examples


class ResumableData(pl.LightningDataModule):
    """Batches of `batch_size` examples of `states["train"]` and `states["validation"]`, in an order of (seed, epoch)."""

    batch_size: int
    shuffle: bool
    seed: int
    states: Mapping[str, Examples]

    def train_dataloader(self) -> ExampleBatches:
        """This process's training batches, from where the trainer stands."""
        return ExampleBatches(
            self.states["train"],
            self.batch_size,
            shuffle=self.shuffle,
            seed=self.seed,
            rank=self._rank,
            world=self._world,
            even=True,
            position=self._position,
        )

    def val_dataloader(self) -> ExampleBatches:
        """This process's validation batches, in order."""
        return ExampleBatches(self.states["validation"], self.batch_size, rank=self._rank, world=self._world)

    def state_dict(self) -> dict[str, Any]:
        """What the batches depend on, for checkpoints."""
        assert self.trainer is not None
        trainer: Any = self.trainer
        return {
            "examples": self.states["train"].num_examples,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "processes": trainer.world_size,
            "limit_train_batches": trainer.limit_train_batches,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises InputError if the checkpoint's training had other batches: their rest is not the rest of these."""
        for name, here in self.state_dict().items():
            there = state_dict.get(name)
            if there != here:
                raise InputError(
                    f"the checkpoint's training had other batches: {name} was {there}, is {here}; resume with the same "
                    "data, or start again from its weights (from_pretrained)"
                )

    @property
    def _rank(self) -> int:
        assert self.trainer is not None
        return int(self.trainer.global_rank)

    @property
    def _world(self) -> int:
        assert self.trainer is not None
        return int(self.trainer.world_size)

    def _position(self) -> tuple[int, int]:
        """(epoch, batch) of the next training batch: a function of how many batches the trainer has seen in all."""
        assert self.trainer is not None
        seen = self.trainer.fit_loop.total_batch_idx + 1
        return divmod(seen, int(self.trainer.num_training_batches))
