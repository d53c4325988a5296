"""Many heads on one stream of features: every batch is read once, and every head learns from it as if it were alone.

Each head has its own weights, optimizer, learning rate, schedule, early stop and best state. A head that has stopped costs
nothing more.

    together.pt   the state after the last whole epoch, written whole: the same command goes on from there
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit.files.atomic import write_atomic
from toolkit.training.batches import ExampleBatches
from toolkit.training.examples import ExampleData
from toolkit.training.module import HeadTraining

STATE = "together.pt"
OF_MEMBER = ("best_score", "best", "waited", "epochs")


@dataclass
class Member:
    """One head in training: its best state so far, that state's score, and the validations that it has waited since."""

    name: str
    module: HeadTraining
    optimizer: Any
    schedule: Any
    best_score: float = math.inf
    best: dict[str, Any] = field(default_factory=dict)
    waited: int = 0
    epochs: int = 0

    def learn(self, batch: Any) -> None:
        total, weight = self.module.loss_of(self.module.head, batch)
        self.optimizer.zero_grad()
        (total / weight).backward()
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()

    def validated(self, score: float) -> None:
        """Keep the state if it is the best one."""
        self.epochs += 1
        if score < self.best_score:
            self.best_score, self.best, self.waited = score, copy.deepcopy(self.module.head.state_dict()), 0
        else:
            self.waited += 1

    @property
    def parts(self) -> dict[str, Any]:
        """What has a state of its own."""
        parts = {"head": self.module.head, "optimizer": self.optimizer, "schedule": self.schedule}
        return {name: part for name, part in parts.items() if part is not None}

    def state(self) -> dict[str, Any]:
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return states | {name: getattr(self, name) for name in OF_MEMBER}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        for name in OF_MEMBER:
            setattr(self, name, state[name])


def train_together(
    modules: Mapping[str, HeadTraining], data: ExampleData, folder: Path, max_epochs: int, patience: int, metric: str
) -> list[Member]:
    """Train heads side by side until each has stopped; afterwards their modules hold their best states.

    patience  validations of a head without a better score before it stops
    metric    the validation score that is to be small
    """
    num_steps = len(data.shuffled_training()) * max_epochs
    path = folder / STATE
    state = torch.load(path, weights_only=True) if path.exists() else None
    members = []
    for name, module in modules.items():
        if state is not None and state["rates"][name] is not None:
            module.about["learning_rate"] = state["rates"][name]
        optimizer = module.build_optimizer(data, num_steps)
        schedule = None if module.make_scheduler is None else module.make_scheduler(optimizer, num_steps)
        members.append(Member(name, module, optimizer, schedule))
        if state is not None:
            members[-1].restore(state["members"][name])
    for epoch in range(0 if state is None else state["epoch"], max_epochs):
        learning = [member for member in members if member.waited < patience]
        if not learning:
            break
        _epoch(learning, data, epoch, metric)
        best = min(members, key=lambda member: member.best_score)
        print(
            f"epoch {epoch + 1}/{max_epochs}  {len(learning)} heads  best {metric} {best.best_score:.4f} ({best.name})",
            flush=True,
        )
        state = {
            "epoch": epoch + 1,
            "rates": {member.name: member.module.about.get("learning_rate") for member in members},
            "members": {member.name: member.state() for member in members},
        }
        write_atomic(path, partial(torch.save, state))
    for member in members:
        member.module.head.load_state_dict(member.best)
    return members


def _epoch(learning: Sequence[Member], data: ExampleData, epoch: int, metric: str) -> None:
    """One step of every head on every batch, in the order of a training alone; then the heads' validation scores.

    A batch is moved to the heads' device once.
    """
    options: dict[str, Any] = {"shuffle": data.shuffle, "seed": data.seed, "position": lambda: (epoch, 0)}
    for batch in ExampleBatches(data.states["train"], data.batch_size, **options):
        read = learning[0].module.moved(batch)
        for member in learning:
            member.learn(read)
    sums = [member.module.new_scores() for member in learning]
    with torch.no_grad():
        for member in learning:
            member.module.head.eval()
        for batch in data.whole_validation():
            read = learning[0].module.moved(batch)
            for member, scores in zip(learning, sums, strict=True):
                member.module.add_scores(scores, read)
        for member in learning:
            member.module.head.train()
    for member, scores in zip(learning, sums, strict=True):
        member.validated(float(member.module.named(scores)[metric]))
