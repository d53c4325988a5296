"""A training in several processes: how they find each other and who goes first.

    python -m toolkit.train ... trainer=ddp trainer.devices=4                 Lightning starts the other processes
    torchrun --nproc-per-node 4 -m toolkit.train ... trainer=ddp trainer.devices=4
    srun python -m toolkit.train ... trainer=ddp trainer.devices=4 trainer.num_nodes=2

Each process runs the whole command. The first one makes the data and opens the output folder. The others wait for it at a
barrier (Lightning starts its own only then). The trainer's config says whether there are several, never a launcher's variables.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from pytorch_lightning.accelerators import AcceleratorRegistry
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from pytorch_lightning.utilities import rank_zero_only
from torch import distributed

from toolkit.config import commands
from toolkit.errors import InputError, exit_code
from toolkit.files.text import first_line
from toolkit.runs.stage import sweep_name

PATIENCE = timedelta(days=30)  # the first process may have responses of a large target to make
SINGLE = ("auto", "single_device")  # strategies of one process, if devices is 1
SPLITTING = ("fsdp", "deepspeed", "model_parallel")  # strategies that keep a part of the weights in each process
ALL = ("auto", "-1")  # devices: as many as there are


def is_first_process() -> bool:
    """Whether this is the process of a distributed run that writes and shows things."""
    return bool(getattr(rank_zero_only, "rank", 0) == 0)


def is_distributed(trainer: Mapping[str, Any]) -> bool:
    """Whether a trainer's config asks for several processes: by its strategy, its devices or its nodes."""
    devices = trainer.get("devices", 1)
    if str(devices) in ALL:
        devices = 1 if trainer.get("accelerator") == "cpu" else torch.cuda.device_count()
    alone = str(devices) in ("0", "1") if isinstance(devices, int | str) else len(devices) == 1
    return not alone or trainer.get("num_nodes", 1) > 1 or str(trainer.get("strategy", "auto")) not in SINGLE


def check_processes(trainer: Mapping[str, Any], *, multirun: bool) -> None:
    """Raises InputError if a trainer's config cannot work; multirun: several trainings by one command."""
    strategy = str(trainer.get("strategy", "auto"))
    if is_distributed(trainer) and multirun:
        raise InputError(
            f"trainer.strategy={strategy}: its processes run the whole command, and a multirun is several trainings; "
            "expected one command per training, or trainer=cpu or trainer=gpu with a launcher"
        )
    if any(name in strategy for name in SPLITTING):
        raise InputError(
            f"trainer.strategy={strategy} splits the weights: expected ddp, for each process exports and scores whole models"
        )


def check_accelerator(trainer: Mapping[str, Any]) -> None:
    """Raises InputError if the machine has not what a trainer's config asks to train on."""
    wanted = str(trainer.get("accelerator", "auto"))
    for name in ("cuda", "mps") if wanted == "gpu" else (wanted,):
        try:
            if name == "auto" or AcceleratorRegistry.get(name).is_available():
                return
        except (KeyError, ModuleNotFoundError):  # no such name; what it needs is not installed
            continue
    raise InputError(f"trainer.accelerator: expected auto, cpu or another that is here, got {wanted}")


class Processes:
    """The processes of one training that torchrun or Slurm has started; a single one otherwise."""

    @classmethod
    def of(cls, cfg: commands.Train | commands.Distill) -> Processes:
        """The processes of a training's config, checked before anything is made. Raises InputError.

        Those that are not the first print nothing from here on, except errors.
        """
        check_processes(cfg.trainer, multirun=sweep_name() is not None)
        check_accelerator(cfg.trainer)
        processes = cls(cfg.trainer)
        if not is_first_process():
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            for number in (signal.SIGINT, signal.SIGTERM):  # the first process says it
                signal.signal(number, lambda number, _: os._exit(exit_code(number)))
        return processes

    def __init__(self, trainer: Mapping[str, Any]):
        self.group: Any = None
        if not is_distributed(trainer):
            rank_zero_only.rank = 0  # type: ignore[attr-defined]  # Lightning has set it by the variables
            return
        try:
            kinds = (TorchElasticEnvironment, SLURMEnvironment)
            environment = next((kind() for kind in kinds if kind.detect()), LightningEnvironment())
        except RuntimeError as error:  # Slurm's tasks are not what Lightning can use
            strategy = trainer.get("strategy", "auto")
            raise InputError(f"trainer.strategy={strategy} under Slurm: {first_line(error)}") from None
        if isinstance(environment, LightningEnvironment):
            rank_zero_only.rank = max(environment.node_rank(), environment.local_rank())  # type: ignore[attr-defined]
            return
        rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]
        if environment.world_size() == 1:
            return
        check_number(trainer, environment.world_size())
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        if not distributed.is_initialized():
            distributed.init_process_group(rank=environment.global_rank(), world_size=environment.world_size())
        self.group = distributed.new_group(timeout=PATIENCE, backend="gloo")

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.group is not None:
            distributed.barrier(self.group)


def check_number(trainer: Mapping[str, Any], started: int) -> None:
    """Raises InputError if the trainer's config asks for another number of processes than were started."""
    devices, nodes = trainer.get("devices", 1), trainer.get("num_nodes", 1)
    if isinstance(devices, int) and devices > 0 and devices * nodes != started:
        raise InputError(
            f"trainer.devices={devices} on trainer.num_nodes={nodes} make {devices * nodes} processes, and {started} were "
            f"started: expected their product to be {started}"
        )
