"""python -m toolkit.train_heads data.path=FOLDER: the heads of a table side by side, on one stream of features.

Paper: SpecDec++ (arXiv:2405.19715), Table 3: heads of depth 0 to 4 with w_rej of 1, 3, 6 and 12. Each comes out as it would by
itself (python -m toolkit.train head.depth=D loss.w_rej=W): own weights, learning rate, early stop and best state. Every
batch is read, or computed by the draft, once for all. In one process, in float32 (or the number format of the states).

    depth-D_w_rej-W/   head/, MODEL_CARD.md, metrics.json, reliability.csv and .png of each: folders for analysis.heads
    table.csv, .md     their scores
    together.pt        where to go on after an interruption
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("train_heads")

import csv
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from hydra.utils import get_class
from omegaconf import OmegaConf

from toolkit.config import commands, instantiate
from toolkit.errors import InputError
from toolkit.files.atomic import read_json
from toolkit.files.text import lines_of
from toolkit.runs.stage import open_stage
from toolkit.train import about_head, build_module, check_parts, data_folder_of, decode_command
from toolkit.training.baselines import references
from toolkit.training.checkpoints import mode_of
from toolkit.training.console import print_table
from toolkit.training.examples import ExampleData
from toolkit.training.export import HEAD, SCORES, export
from toolkit.training.module import HeadTraining, check_metric
from toolkit.training.sweep_table import write_table
from toolkit.training.together import Member, train_together

SHOWN = ("val/auroc", "val/log_loss_calibrated", "val/binary_kl_corrected", "val/ece_corrected")


def run(cfg: commands.TrainHeads) -> Path:
    """Train every head that the lists of depths and weights name; returns the folder."""
    check_parts(cfg)
    check_metric(cfg)
    training: type[HeadTraining] = get_class(cfg.model._target_)
    if not {*SHOWN} <= {*training.score_names()}:
        raise InputError("model: expected acceptance_head, for the table's scores are its; toolkit.train takes others")
    if mode_of(cfg.optimized_metric) == "max":
        raise InputError(f"optimized_metric: expected a score that is to be small, got {cfg.optimized_metric}")
    folder = data_folder_of(cfg, {})
    data_class: type[ExampleData] = get_class(cfg.data._target_)
    stage = open_stage("train_heads", cfg, inputs=data_class.inputs(folder))
    if not stage.finished:
        data: ExampleData = instantiate(OmegaConf.merge(cfg.data, {"path": str(folder)}))
        modules = modules_of(cfg, data)
        data.prepare_data()
        data.setup("fit")
        members = train_together(modules, data, stage.folder, cfg.max_epochs, cfg.patience, cfg.optimized_metric)
        others = references(data.shuffled_training(), data.whole_validation(), members[0].module.outputs)
        rows = [_exported(cfg, member, data, stage.folder / member.name, others) for member in members]
        write_table(stage.folder, rows)
        stage.finish(heads=[row["head"] for row in rows])
    path = stage.folder / "table.csv"
    print_table("heads", list(csv.DictReader(lines_of(path.read_text()))), path)
    scores = {name: read_json(stage.folder / name / SCORES)[cfg.optimized_metric] for name in stage.manifest["heads"]}
    print(f"next: {decode_command(cfg, stage.folder / min(scores, key=scores.__getitem__) / HEAD)}")
    return stage.folder


def modules_of(cfg: commands.TrainHeads, data: ExampleData) -> dict[str, HeadTraining]:
    """Name -> a head with its loss and optimizer, each begun as `toolkit.train` begins it. Raises InputError if named twice."""
    modules: dict[str, HeadTraining] = {}
    for depth, w_rej in product(cfg.depths, cfg.w_rejs):
        name = f"depth-{depth}_w_rej-{w_rej:g}"
        if name in modules:
            raise InputError(f"depths, w_rejs: expected each combination once, got {name} twice")
        pl.seed_everything(cfg.seed, workers=True, verbose=False)
        own: Any = OmegaConf.merge(cfg, {"head": {"depth": depth}, "loss": {"w_rej": w_rej}})
        modules[name] = build_module(own, data, run_id="")
    return modules


def _exported(
    cfg: commands.TrainHeads, member: Member, data: ExampleData, folder: Path, others: Mapping[str, float]
) -> dict[str, str]:
    name = f"depth={member.module.head.config['depth']} w_rej={member.module.loss.w_rej:g}"
    record = {**about_head(cfg, member.module, data), "name": name}
    module = member.module.eval()
    of_training = module.named(module.evaluate(data.shuffled_training()))
    fitted = {"train/binary_kl": float(of_training[f"val/binary_kl{module.suffixes[0]}"])}
    scores = export(folder, module, record, data.whole_validation(), {**others, **fitted})
    columns = {name.removeprefix("val/"): f"{scores[name]:.4f}" for name in SHOWN}
    rate = f"{record['learning_rate']:.3g}"
    return {"head": member.name, "epochs": str(member.epochs), "learning_rate": rate, **columns}
