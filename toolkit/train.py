"""python -m toolkit.train +experiment=NAME: train an acceptance head, or a pre-read head (model=preread_head data=traced).

Writes checkpoints/{last,best}.ckpt, head/, MODEL_CARD.md, metrics.csv, metrics.json, reliability.{csv,png},
config.yaml, and a W&B run below wandb/. Run the same command again to go on after an interruption; the result is the
same, bit for bit on a CPU. `ckpt_path=FILE` resumes from another checkpoint, `from_pretrained=FOLDER` starts from a
trained head. An experiment with `model: null` trains nothing: it runs its stages, `before`, then `after`. `dry_run=true`
composes and checks every stage and prints the plan: no model is loaded.
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("train")

import inspect
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from hydra.utils import get_class
from omegaconf import OmegaConf
from pytorch_lightning.loggers import Logger, WandbLogger

from toolkit.acceptance.saved import SavedHead
from toolkit.config import commands, escaped, instantiate, override, plain
from toolkit.errors import InputError
from toolkit.files.atomic import read_json
from toolkit.runs.pipeline import expand_stages, fill_folders, plan_stages, run_stages
from toolkit.runs.sources import prompts_behind
from toolkit.runs.stage import Stage, open_stage, provenance, read_manifest
from toolkit.runs.tracking import log_summary, overrides_name, parameter_counts, tagged
from toolkit.training.baselines import comparison, complaint, references
from toolkit.training.checkpoints import (
    BEST,
    check_choice,
    check_resumable,
    folder_of,
    pretrained_files,
    read_checkpoint,
    warm_start,
)
from toolkit.training.console import print_comparison, print_config, print_scores
from toolkit.training.examples import ExampleData
from toolkit.training.export import DIAGRAM, HEAD, SCORES, export
from toolkit.training.module import HeadTraining, check_metric
from toolkit.training.processes import Processes, is_first_process
from toolkit.training.trainer import begin_training, opened_trainer

# Keys that do not determine the head. The data do, by their content.
IGNORED = ("before", "after", "tags", "prompts", "sampling", "toy", "dry_run", "optimized_metric")


def run(cfg: commands.Train) -> Path:
    """The stages before, training, the stages after; returns the run's folder (of the last stage if nothing is trained)."""
    with tagged(cfg.tags):
        return _run(cfg)


def _run(cfg: commands.Train) -> Path:
    if cfg.toy is not None and not str(cfg.pair.get("target", "toy/")).startswith("toy/"):
        cfg.toy = None  # it stands in for a paper's data and sizes while the pair is the toy pair
    if cfg.dry_run:
        return dry_run(cfg)
    expand_stages(cfg.after or {})  # its faults, before anything is made
    if cfg.model is None:
        if not cfg.before and not cfg.after:
            raise InputError(
                "model: null trains nothing, and there are no stages; expected a model or +experiment=NAME"
            )
        folders = run_stages(cfg.before, cfg.paths.root_dir)
        return list({**folders, **run_stages(cfg.after, cfg.paths.root_dir, folders)}.values())[-1]
    check_parts(cfg)
    check_choice(cfg.ckpt_path, cfg.from_pretrained)
    check_metric(cfg)
    processes, first = Processes.of(cfg), is_first_process()
    if not first:
        processes.wait()  # until the first one has made the data and opened the folder
    folders = run_stages(cfg.before, cfg.paths.root_dir)
    data_folder = data_folder_of(cfg, folders)
    data_class: type[ExampleData] = get_class(cfg.data._target_)
    inputs = [*data_class.inputs(data_folder), *pretrained_files(cfg.from_pretrained)]
    config = plain(cfg)
    config["data"]["path"] = str(data_folder)
    stage = open_stage("train", config, inputs=inputs, ignore=IGNORED, follows=not first)
    if first:
        processes.wait()
    if not stage.finished:
        train(cfg, stage, data_folder)
    if not first:
        return stage.folder  # the first process does the rest
    training: type[HeadTraining] = get_class(cfg.model._target_)
    scores = read_json(stage.folder / SCORES)
    print_scores(scores, training.suffixes)
    print_comparison(comparison(scores, training.outputs), complaint(scores, training.outputs))
    done = run_stages(cfg.after, cfg.paths.root_dir, {**folders, "train": stage.folder})
    after = [done[name] for name in done if name not in (*folders, "train")]
    lines = [line for folder in after if (line := read_manifest(folder).get("next"))]  # of the best method of a table
    print(f"next: {lines[-1] if lines else decode_command(cfg, stage.folder / HEAD)}")
    return stage.folder


def decode_command(cfg: commands.TrainsHeads, folder: Path) -> str:
    """What decodes with a trained head."""
    kind: type[SavedHead] = get_class(cfg.head._target_)
    named = {"head": folder, "pair.target": cfg.pair.target, "pair.draft": cfg.pair.draft}
    words = [override(key, value) for key, value in named.items()]
    return f"python -m toolkit.decode method={kind.method} {shlex.join(words)}"


def dry_run(cfg: commands.Train) -> Path:
    """Compose and check every stage; print what a run would do, in order."""
    print("a name in capitals stands for the output folder of that stage")
    folders = plan_stages(cfg.before, cfg.paths.root_dir)
    if cfg.model is not None:
        data_folder_of(cfg, folders)
        folders["train"] = Path(cfg.paths.root_dir, "train")
        print("train")
    plan_stages(cfg.after, cfg.paths.root_dir, folders)
    return Path(cfg.paths.root_dir)


def check_parts(cfg: commands.TrainsHeads) -> None:
    """Raises InputError if a part of the training is missing."""
    empty = [name for name in ("head", "loss", "optimizer") if getattr(cfg, name) is None]
    if empty:
        raise InputError(f"{empty[0]}: expected one, got null; model=null, too, if nothing is to be trained")


def score(cfg: commands.Train, folder: Path) -> float:
    if cfg.model is None or cfg.dry_run:
        return float("nan")
    scores = read_json(folder / SCORES)
    if cfg.optimized_metric not in scores:
        raise InputError(f"optimized_metric: expected one of {', '.join(scores)}, got {cfg.optimized_metric}")
    return float(scores[cfg.optimized_metric])


def train(cfg: commands.Train, stage: Stage, data_folder: Path) -> None:
    """Train, or go on training, in the stage's folder; the first process writes the results."""
    if is_first_process():
        print_config(plain(cfg))
    resumed = begin_training(cfg, stage.folder)
    data: ExampleData = instantiate(OmegaConf.merge(cfg.data, {"path": escaped(str(data_folder))}))
    module = build_module(cfg, data, resumed.run_id)
    if resumed.checkpoint is not None and resumed.path is not None:
        check_resumable(resumed.checkpoint, module.head, data.weights, resumed.path)
    with opened_trainer(cfg, stage.folder, resumed) as (trainer, loggers):
        trainer.fit(module, datamodule=data, ckpt_path=resumed.path)
        if trainer.is_global_zero:
            callbacks: Sequence[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
            results_of = [getattr(callback, "results", {}) for callback in callbacks]
            closing = {name: value for results in results_of for name, value in results.items()}
            scores = _write_results(cfg, stage.folder, module, data, closing)
            models = {"head": module.head, "draft": data.draft}
            _log_results(loggers, {**scores, **parameter_counts(models)}, stage.folder / DIAGRAM, trainer.global_step)
            stage.finish(num_steps=trainer.global_step, metrics=scores)


def data_folder_of(cfg: commands.TrainsHeads, folders: dict[str, Path]) -> Path:
    """The folder of training data, as far as the stages before know it."""
    if cfg.data is None or OmegaConf.is_missing(cfg.data, "path"):
        raise InputError(
            "expected data.path=FOLDER (of data_gen.mix; of data_gen.traces with data=traced) or an +experiment=NAME that "
            "makes one"
        )
    return Path(fill_folders(str(cfg.data.path), folders))


def build_module(cfg: commands.TrainsHeads, data: ExampleData, run_id: str) -> HeadTraining:
    """A head of the draft's size, its loss and its optimizer."""
    loss = instantiate(cfg.loss)
    sizes = data.head_sizes()
    parameters = inspect.signature(get_class(cfg.head._target_)).parameters
    needed = {name for name, p in parameters.items() if name.endswith("_size") and p.default is p.empty}
    if not needed <= set(sizes):
        raise InputError(
            f"the model and the data do not go together (the data know {', '.join(sizes)}): expected model=acceptance_head "
            "data=mixed, or data=traced"
        )
    sizes = {name: sizes[name] for name in needed}
    further = data.further_sizes() if cfg.head.get("earlier") else {}
    more: dict[str, Any] = {name: size for name, size in further.items() if name in parameters}
    head: SavedHead = instantiate(cfg.head)(**sizes, **more, log_w_rej=loss.log_w_rej)
    data.read_by(head)
    warm_start(head, getattr(cfg, "from_pretrained", None), data.weights)
    record = {**data.weights.facts(), "head": head.config, "wandb_run_id": run_id}
    module: HeadTraining = instantiate(cfg.model)(head=head, loss=loss, about=record)
    return module


def _write_results(
    cfg: commands.Train, folder: Path, module: HeadTraining, data: ExampleData, closing: dict[str, float]
) -> dict[str, float]:
    """Export the best state there is a checkpoint of, else the last state; returns its scores."""
    best = folder_of(folder) / BEST
    if best.exists():
        module.load_state_dict(read_checkpoint(best)["state_dict"])
    module.cpu().eval()
    others = references(data.shuffled_training(), data.whole_validation(), module.outputs)
    return export(folder, module, about_head(cfg, module, data), data.whole_validation(), {**others, **closing})


def about_head(cfg: commands.TrainsHeads, module: HeadTraining, data: ExampleData) -> dict[str, Any]:
    """What a head remembers of its training."""
    facts = provenance()
    return {
        "name": overrides_name(without=("pair", "prompts", "sampling")),  # all heads of a table have these in common
        "target": str(cfg.pair.target),
        "draft": str(cfg.pair.draft),
        **data.about(),
        "prompts": prompts_behind([data.path]),
        "w_acc": module.loss.w_acc,
        "w_rej": module.loss.w_rej,
        "seed": cfg.seed,
        "learning_rate": module.about.get("learning_rate", cfg.optimizer.lr),
        **{name: facts[name] for name in ("revision", "machine", "versions")},
    }


def _log_results(loggers: Sequence[Logger], scores: dict[str, float], diagram: Path, step: int) -> None:
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            counts = {name: value for name, value in scores.items() if name.startswith("parameters/")}
            best = {f"best/{name.removeprefix('val/')}": v for name, v in scores.items() if name not in counts}
            log_summary(logger.experiment, {**counts, **best})
            logger.log_image("val/reliability", [str(diagram)], step=step - 1)
