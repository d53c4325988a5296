"""python -m toolkit.distill +experiment=distill: train a draft on its target.

    python -m toolkit.distill responses=[FOLDER,...] loss=lk                    the pair's draft, trained on
    python -m toolkit.distill responses=... from_pretrained=null 'shape={hidden_size: 64}'     a smaller one from scratch
    python -m toolkit.distill responses=... pair.draft=null layers=4      four of the target's layers, where there is no draft
    python -m toolkit.distill responses=... vocabulary=8000    its output layer has rows for the most frequent tokens alone
    python -m toolkit.distill responses=... kind=eagle3    a draft that reads the target's states (EAGLE-3)
    python -m toolkit.distill responses=... kind=dflash loss=cross_entropy    one that gives blocks of tokens (kind=dspark
                                                                              loss=dspark: with a confidence head)

Writes draft/ (a Hugging Face checkpoint with tokenizer and card: pair.draft=FOLDER/draft), checkpoints/{last,best}.ckpt,
metrics.csv, metrics.json and config.yaml; with exports=[plain,gguf] also draft_plain/ and draft.gguf, of the whole vocabulary,
for other programs; with exports=[compact] draft_compact/, which lacks what is the target's. The state of the highest val/alpha
is exported. Run the same command again to go on after an interruption; the weights come out the same, bit for bit on a CPU.
With export=true it exports the best draft so far instead.
What layers, vocabulary and exports ask of a model is tried at the start (rehearse=true: nothing else is done).
What a draft is worth is what `python -m analysis.heads` says, not its loss.

A reduced vocabulary leaves the input embeddings as they are: the target's, where the draft is made of its layers.
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("distill")

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from pytorch_lightning.loggers import WandbLogger

from toolkit.config import commands, instantiate, override, plain
from toolkit.distillation.data import TextData
from toolkit.distillation.drafts import DRAFT, card_of, shape_of
from toolkit.distillation.losses import Loss
from toolkit.distillation.module import DraftTraining, OnPolicy
from toolkit.distillation.recipe import Recipe
from toolkit.distillation.teachers import Teacher
from toolkit.drafts.kinds import kind_by_target
from toolkit.engine.facts import NO_LIMIT, max_positions, vocab_size
from toolkit.errors import InputError, unknown_name
from toolkit.files.atomic import read_json, write_json
from toolkit.models.fingerprint import Weights
from toolkit.models.pair import ModelPair, load_tokenizer
from toolkit.models.prompts import check_token_ids
from toolkit.models.reduced import kept_tokens
from toolkit.models.teacher import Text
from toolkit.runs.pipeline import fill_folders, run_stages
from toolkit.runs.sources import prompts_behind
from toolkit.runs.stage import Stage, open_stage, provenance
from toolkit.runs.tracking import log_summary, tagged
from toolkit.training.checkpoints import BEST, check_choice, check_modes, folder_of
from toolkit.training.processes import Processes, is_first_process
from toolkit.training.trainer import begin_training, opened_trainer

SCORES = "metrics.json"
IGNORED = ("rehearse", "before", "after", "tags", "prompts", "sampling", "optimized_metric", "read", "export")


def run(cfg: commands.Distill) -> Path:
    """The stages before, the training, the stages after; returns the run's folder."""
    with tagged(cfg.tags):
        return _run(cfg)


def _run(cfg: commands.Distill) -> Path:
    check_choice(cfg.ckpt_path, None)
    check_modes(cfg.callbacks or {})
    processes, first = Processes.of(cfg), is_first_process()
    if not first:
        processes.wait()  # until the first one has made the responses and opened the folder
    else:
        record: Path | None = kind_by_target(cfg.kind).part("training").rehearse(cfg)
        if record is not None and cfg.rehearse:
            return record
    folders = run_stages(cfg.before, cfg.paths.root_dir)
    if OmegaConf.is_missing(cfg, "responses"):
        raise InputError(
            "expected responses=[FOLDER,...] (of data_gen.responses), or +experiment=distill, which makes some"
        )
    listed = [cfg.responses] if isinstance(cfg.responses, str) else list(cfg.responses)
    sources = [fill_folders(str(source), folders) for source in listed]
    responses = instantiate(cfg.read)(sources)
    config = {**plain(cfg), "responses": sources}
    config["teacher"] = {
        name: value for name, value in config["teacher"].items() if name != "folder"
    }  # only where it lies
    stage = open_stage("distill", config, inputs=responses.inputs, ignore=IGNORED, follows=not first)
    if first:
        processes.wait()
    if not stage.finished:
        train(cfg, stage, responses)
        if cfg.export:
            return stage.folder
    if not first:
        return stage.folder  # the first process does the rest
    scores = read_json(stage.folder / SCORES)
    if "start/cross_entropy" not in scores:
        raise InputError(f"{stage.folder} holds the scores of an earlier revision: overwrite=true makes them again")
    for name in ("alpha", "cross_entropy"):
        values = f"val/{name} {scores[f'start/{name}']:.4f} before, {scores[f'val/{name}']:.4f} after"
        print(f"distill: {values} {scores['tokens']:,} tokens, at {scores['positions']} tokens of validation texts")
    run_stages(cfg.after, cfg.paths.root_dir, {**folders, "distill": stage.folder})
    words = [override("pair.target", cfg.pair.target), override("pair.draft", stage.folder / DRAFT)]
    print(f"next: python -m toolkit.decode method=speculative {shlex.join(words)}")
    return stage.folder


def score(cfg: commands.Distill, folder: Path) -> float:
    """What a sweep optimizes; nan after the export of a training that is under way."""
    return score_of(read_json(folder / SCORES), cfg.optimized_metric) if (folder / SCORES).exists() else float("nan")


def score_of(scores: Mapping[str, float], name: str) -> float:
    if name not in scores:
        raise unknown_name("score", name, scores, "as optimized_metric")
    return float(scores[name])


def train(cfg: commands.Distill, stage: Stage, responses: Any) -> None:
    """Train, or go on training, in the stage's folder; the first process writes the results."""
    resumed = begin_training(cfg, stage.folder)
    checkpoint = resumed.checkpoint
    if cfg.export and (checkpoint is None or not (folder_of(stage.folder) / BEST).exists()):
        raise InputError(f"export: expected a validated checkpoint in {stage.folder}, found none: leave export out")
    tokenizer = load_tokenizer(cfg.pair.target, cfg.pair.get("revision"), bool(cfg.pair.get("trust_remote_code")))
    target = load_target(cfg, responses)
    kind, settings = kind_by_target(cfg.kind), None if cfg.kind is None else instantiate(cfg.kind)
    recipe: Recipe = kind.part("training")(cfg, kind, settings, target, tokenizer)
    models = [model for model in (recipe.draft, target and target.target) if model is not None]
    data: TextData = instantiate(cfg.data)(readable(models, responses))
    draft = recipe.begin(data)
    module = build_module(cfg, responses, data, draft, recipe, resumed.run_id)
    if checkpoint is not None:
        check_resumable(checkpoint["about"], module.about, resumed.path)
    device = torch.device(cfg.pair.get("device") or "cpu")
    with opened_trainer(cfg, stage.folder, resumed, device) as (trainer, loggers):
        (start,) = trainer.validate(module, datamodule=data, verbose=False)  # also where the training goes on
        measured = data.states["validation"]  # all of it, or as far as trainer.limit_val_batches lets it be read
        num_read = sum(trainer.num_val_batches) * data.batch_size * trainer.world_size
        positions = sum(map(len, measured.whole.positions[: int(num_read)]))
        if trainer.is_global_zero:
            print(
                f"validation: alpha = sum min(p, q) over all {module.teacher.vocab_size:,} tokens of the vocabulary, at "
                f"{positions} of {measured.total} produced tokens of validation texts, evenly spread"
            )
        score_of(start, cfg.optimized_metric)  # its faults, before the training
        if cfg.export and checkpoint is not None:
            num_batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"]
        else:
            print("distill: the same line goes on after an interruption, and exports the best draft with export=true")
            trainer.fit(module, datamodule=data, ckpt_path=resumed.path)
            num_batches = trainer.fit_loop.total_batch_idx + 1
        scores = final_scores(stage.folder, module, data, start, trainer)  # in all processes together
        scores["positions"] = positions
        scores["tokens"] = round(data.states["train"].num_positions * num_batches / len(data.train_dataloader()))
        for logger in loggers:
            if isinstance(logger, WandbLogger):
                exported = {name: value for name, value in scores.items() if name.startswith("val/")}
                log_summary(logger.experiment, {name.replace("val/", "best/"): exported[name] for name in exported})
        if trainer.is_global_zero:
            trained = module.draft.cpu().eval().requires_grad_(False)
            kept = kept_tokens(trained)
            facts = {
                **provenance(),
                "sampling": asdict(responses.sampling),
                "texts": data.states["train"].num_examples,
                "prompts": prompts_behind(responses.inputs),
                "output_rows": None if kept is None or len(kept) == module.teacher.vocab_size else len(kept),
            }
            card = card_of(plain(cfg), facts, scores)
            recipe.export(stage.folder, trained, card)
            if cfg.export:
                alpha = scores["val/alpha"]
                print(f"distill: {stage.folder / DRAFT} holds the best draft so far, of val/alpha {alpha:.4f}")
            else:
                write_json(stage.folder / SCORES, scores)
                stage.finish(num_steps=trainer.global_step, metrics=scores)


def readable(models: Sequence[Any], responses: Any) -> list[Text]:
    """The texts that fit into the contexts of all models. Raises InputError if none does, and for unknown tokens."""
    limit = min(map(max_positions, models), default=NO_LIMIT)
    sequences = [(row["prompt_ids"], row["token_ids"]) for row in responses.rows]
    size = max(map(vocab_size, models), default=NO_LIMIT)  # a draft's may be padded less
    for row in responses.rows:
        check_token_ids([*row["prompt_ids"], *row["token_ids"]], size, f"response {row['id']}: ")
    fitting = [(prompt, response) for prompt, response in sequences if len(prompt) + len(response) <= limit]
    if not fitting:
        raise InputError(f"all {len(sequences)} texts exceed the context of {limit} tokens: expected shorter prompts")
    if len(fitting) < len(sequences):
        count = len(sequences) - len(fitting)
        print(f"{count} of {len(sequences)} texts exceed the context of {limit} tokens and are passed over")
    return fitting


def build_module(
    cfg: commands.Distill,
    responses: Any,
    data: TextData,
    draft: Any,
    recipe: Recipe,
    run_id: str,
) -> DraftTraining:
    """The draft, its teacher, its loss and its optimizer. Raises InputError if they do not go together."""
    loss = instantiate(cfg.loss)
    if not isinstance(loss, Loss):
        raise InputError(f"loss: expected a choice of the group loss, got {type(loss).__name__}")
    if kept_tokens(draft) is not None:
        draft.get_input_embeddings().requires_grad_(False)
    parts = [data.states[name].whole for name in ("train", "validation")]
    temperature = cfg.temperature or responses.sampling.temperature or 1.0
    target = recipe.target
    teacher: Teacher = instantiate(cfg.teacher)(target and target.target, temperature, responses.target)
    teacher.prepare(*parts)
    ends = () if target is None else target.end_ids or ()
    record = {"shape": shape_of(draft), "lmbda": cfg.lmbda, "temperature": temperature, "wandb_run_id": run_id}
    on_policy = OnPolicy(cfg.lmbda, responses.sampling, ends, cfg.seed)
    optimizer, scheduler = instantiate(cfg.optimizer), instantiate(cfg.scheduler) if cfg.scheduler else None
    arguments = (draft, teacher, loss, temperature, on_policy, optimizer, scheduler, record)
    return recipe.module(arguments, teacher, [text for part in parts for text in part.sequences])


def load_target(cfg: commands.Distill, responses: Any) -> ModelPair | None:
    """The pair's target; None where a cache is all that is asked. Raises InputError if it did not write the responses."""
    if cfg.teacher.get("on_missing") == "raise":
        if cfg.lmbda:
            raise InputError(
                f"teacher.on_missing=raise: the draft's own texts are in no cache; expected lmbda=0, got {cfg.lmbda}"
            )
        return None
    pair: ModelPair = instantiate(cfg.pair, draft=None)
    recorded = responses.target
    reason = None if recorded is None else recorded.other_than(Weights.of(pair.target))
    if reason is not None:
        raise InputError(
            f"the responses come from another target ({reason}): set pair.target to the model that made them"
        )
    return pair


def check_resumable(saved: dict[str, Any], current: dict[str, Any], path: Path | None) -> None:
    """Raises InputError if a checkpoint is of a draft of other shapes, or of another kind of training."""
    shapes, current_shapes = saved.get("shape", {}), current["shape"]
    for name in sorted(shapes.keys() | current_shapes.keys()):
        if shapes.get(name) != current_shapes.get(name):
            raise InputError(
                f"{path} holds another draft: expected {name} of shape {current_shapes.get(name)}, got {shapes.get(name)}"
            )
    for name in ("lmbda", "temperature"):
        if saved.get(name) != current[name]:
            raise InputError(f"{path} was trained with {name}={saved.get(name)}, not {current[name]}")


def final_scores(
    folder: Path, module: DraftTraining, data: TextData, start: Mapping[str, float], trainer: pl.Trainer
) -> dict[str, float]:
    """Load the best state if there is a checkpoint of it; the scores of that state, else the last one's."""
    best, last = folder_of(folder) / BEST, dict(trainer.callback_metrics)
    scores = {name: float(value) for name, value in last.items() if name.startswith("val/")}
    if best.exists():
        options: dict[str, Any] = {"ckpt_path": str(best), "weights_only": True, "verbose": False}
        loggers, trainer.loggers = trainer.loggers, []  # curves hold the state of their step, which this one is not
        (best_scores,) = trainer.validate(module, datamodule=data, **options)
        trainer.loggers = loggers
        scores = {name: float(value) for name, value in best_scores.items()}
    scores |= {name.replace("val/", "start/"): float(value) for name, value in start.items()}
    return scores
