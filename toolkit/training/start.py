"""The start of a training: with fresh weights, with a trained head's, or with a checkpoint.

from_pretrained=FOLDER   the weights of that head; optimizer, schedule and data from the beginning
ckpt_path=FILE           the whole state of a checkpoint
neither                  the run folder's own last checkpoint if there is one, else fresh weights
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.utils import get_class
from omegaconf import OmegaConf

from toolkit.acceptance.folder import KINDS, inside
from toolkit.acceptance.saved import SavedHead
from toolkit.errors import InputError, unknown_name
from toolkit.models.fingerprint import Weights
from toolkit.training.checkpoints import LAST, folder_of
from toolkit.training.module import HeadTraining


def check_choice(ckpt_path: str | None, from_pretrained: str | None) -> None:
    """Raises InputError if a training is to begin at two points, or at a checkpoint that is not there."""
    if ckpt_path is not None and from_pretrained is not None:
        raise InputError("ckpt_path resumes a training, from_pretrained starts one from a trained head: set only one")
    if ckpt_path not in (None, "last") and not Path(str(ckpt_path)).exists():
        raise InputError(f"ckpt_path: expected a checkpoint at {ckpt_path}, found none")


def pretrained_files(from_pretrained: str | None) -> list[Path]:
    """The files that a warm start depends on. Raises InputError if they hold no head."""
    if from_pretrained is None:
        return []
    folder = inside(from_pretrained)
    here = [kind for kind in KINDS.values() if kind.is_in(folder)]
    for kind in here or KINDS.values():  # of none, the first one says what is missing
        kind.load(folder)
    return [folder / name for kind in here for name in (kind.weights_file, kind.config_file)]


def warm_start(head: SavedHead, from_pretrained: str | None, draft: Weights) -> None:
    """Copy a trained head's weights. Raises InputError if it was made for another draft or in another shape."""
    if from_pretrained is None:
        return
    trained, record = type(head).load(inside(from_pretrained))
    if (reason := Weights.changed(record, draft)) is not None:
        raise InputError(f"from_pretrained: the head in {from_pretrained} was trained for another draft ({reason})")
    for name in {**head.config, **trained.config}:
        here, there = head.config.get(name), trained.config.get(name)
        if there != here and name not in ("log_w_rej", "dropout"):  # another goal or training, not another head
            raise InputError(f"from_pretrained: expected a head with {name}={here}, {from_pretrained} has {there}")
    head.load_state_dict(trained.state_dict())


def resume_path(run_folder: Path, ckpt_path: str | None) -> Path | None:
    """The checkpoint to go on from; None: begin."""
    if ckpt_path not in (None, "last"):
        return Path(str(ckpt_path))
    own = folder_of(run_folder) / LAST
    return own if own.exists() else None


def check_resumable(checkpoint: Mapping[str, Any], head: SavedHead, draft: Weights, path: Path) -> None:
    """Raises InputError if a checkpoint is of another draft or of a head of another shape."""
    record = checkpoint["about"]
    if (reason := Weights.changed(record, draft)) is not None:
        raise InputError(f"{path} was made with another draft ({reason})")
    for name in {**head.config, **record["head"]}:
        here, there = head.config.get(name), record["head"].get(name)
        if there != here:
            raise InputError(f"{path} holds another head: expected {name}={here}, got {there}")


def check_metric(cfg: Any) -> None:
    """Raises InputError unless this training gives the scores that `optimized_metric` and the callbacks name."""
    training: type[HeadTraining] = get_class(cfg.model._target_)
    every: Mapping[str, Any] = OmegaConf.select(cfg, "callbacks") or {}
    callbacks = {name: spec for name, spec in every.items() if spec is not None}
    closing = [name for spec in callbacks.values() for name in getattr(get_class(spec._target_), "CLOSING", ())]
    names = [*training.score_names(), *closing]
    monitored = {f"callbacks.{name}.monitor": spec.get("monitor", names[0]) for name, spec in callbacks.items()}
    for key, score in {"optimized_metric": cfg.optimized_metric, **monitored}.items():
        if score not in names:
            raise unknown_name("score", score, names, f"as {key}")
