"""The examples of every batch: a pure function of (seed, epoch), so that training can stop and go on anywhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import torch

from toolkit.errors import InputError
from toolkit.sampling import seed_of


class Examples(ABC):
    """The examples that batches are made of: their number, and that of the positions that are learned from."""

    num_examples: int
    num_positions: int

    @abstractmethod
    def batch(self, examples: Sequence[int]) -> Any:
        """A batch of the examples of these numbers."""

    def batches(self, parts: Sequence[Sequence[int]], start: int = 0) -> Iterator[Any]:
        """The batches of an epoch, from number `start` on; their contents do not depend on `start`."""
        for part in parts[start:]:
            yield self.batch(part)


class ExampleBatches:
    """An iterable of batches of `batch_size` examples; the last batch of an epoch may be smaller.

    shuffle, seed  a new order of examples for every epoch; False: examples in order
    rank, world    this process's share of every `world * batch_size` examples in a row: each world-th of them. In training
                   (`even`) all processes make the same number of steps, so a share of the last ones may be an empty batch
    position       says where the training stands, (epoch, batch); called when the first batch of an epoch is needed

    Lightning 2.6 calls a loader's own `load_state_dict` neither at the end of an epoch nor after the schedule has asked for
    the number of steps. So it is not used.
    """

    def __init__(
        self,
        states: Examples,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        even: bool = False,
        position: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ):
        self.states, self.batch_size, self.shuffle, self.seed = states, batch_size, shuffle, seed
        self.rank, self.world, self.even, self.position = rank, world, even, position

    def __len__(self) -> int:
        first = 0 if self.even else self.rank
        return -(-len(range(first, self.states.num_examples, self.world)) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self.position()
        examples = self.order(epoch)
        parts = [examples[first : first + self.batch_size] for first in range(0, len(examples), self.batch_size)]
        yield from self.states.batches(parts, start)
        if len(parts) < len(self):  # too few examples are left for this process
            yield self.states.batch([0]).emptied()

    def order(self, epoch: int) -> list[int]:
        examples = list(range(self.states.num_examples))
        if self.shuffle:
            generator = torch.Generator().manual_seed(seed_of((self.seed << 20) + epoch))
            examples = torch.randperm(len(examples), generator=generator).tolist()
        return examples[self.rank :: self.world]


class ResumableData(pl.LightningDataModule):
    """Batches of `batch_size` examples of `states["train"]` and `states["validation"]`, in an order of (seed, epoch)."""

    batch_size: int
    shuffle: bool
    seed: int
    states: Mapping[str, Examples]

    def train_dataloader(self) -> ExampleBatches:
        """This process's training batches, from where the trainer stands."""
        return self._share("train", shuffle=self.shuffle, seed=self.seed, even=True, position=self._position)

    def val_dataloader(self) -> ExampleBatches:
        """This process's validation batches, in order."""
        return self._share("validation")

    def _share(self, split: str, **options: Any) -> ExampleBatches:
        trainer: Any = self.trainer
        options |= {"rank": trainer.global_rank, "world": trainer.world_size}
        return ExampleBatches(self.states[split], self.batch_size, **options)

    def state_dict(self) -> dict[str, Any]:
        trainer: Any = self.trainer
        own = {"batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed}
        theirs = {"processes": trainer.world_size, "limit_train_batches": trainer.limit_train_batches}
        return {"examples": self.states["train"].num_examples, **own, **theirs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises InputError if the checkpoint's training had other batches: their rest is not the rest of these."""
        for name, value in self.state_dict().items():
            saved = state_dict.get(name)
            if saved != value:
                raise InputError(
                    f"the checkpoint's training had other batches: {name} was {saved}, is {value}; resume with the same "
                    "data, or start again from its weights (from_pretrained)"
                )

    def _position(self) -> tuple[int, int]:
        """(epoch, batch) of the next training batch: a function of how many batches the trainer has seen in all."""
        trainer: Any = self.trainer
        return divmod(trainer.fit_loop.total_batch_idx + 1, int(trainer.num_training_batches))
