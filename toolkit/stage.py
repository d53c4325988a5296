"""A stage: one command, one config, one output folder with its manifest.

    python -m data_gen.responses ...  ->  command("responses", run)  ->  run(cfg) -> Path

The folder is named by the stage and a hash of what determines its content. Its manifest is written when work starts and
again when it ends: config, versions, revision, command line, inputs with their hashes. Work of the same config is kept;
work of another one is refused (StaleError) unless `overwrite=true`.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from toolkit import config as configs
from toolkit.command_line import check_choices as check_choices
from toolkit.command_line import prepare
from toolkit.command_line import tidy_overrides as tidy_overrides
from toolkit.errors import InputError, StaleError
from toolkit.io import content_hash, file_hash, read_json, write_json

MANIFEST = "manifest.json"
OUTPUT = "output.json"  # in a multirun: written into each job's folder of the sweep, says where the job's output is
PACKAGES = ("torch", "transformers", "pytorch-lightning", "datasets", "wandb", "hydra-core", "scikit-learn")
# Keys that do not determine the content of an output folder.
FREE_KEYS = ("paths", "overwrite", "batch_size", "logger", "progress", "ckpt_path", "num_workers")


@dataclass
class Stage:
    """An output folder under way."""

    name: str
    folder: Path
    identity: dict[str, Any]
    inputs: dict[str, str] = field(default_factory=dict)

    @property
    def manifest(self) -> dict[str, Any]:
        """What the folder's manifest says now."""
        return read_json(self.folder / MANIFEST)

    @property
    def finished(self) -> bool:
        """Whether the work was done before."""
        return (self.folder / MANIFEST).exists() and self.manifest.get("status") == "finished"

    def start(self) -> None:
        """Write the manifest of work under way."""
        self._write("running", {})

    def finish(self, **facts: Any) -> Path:
        """Write the manifest of finished work, with facts about the outputs."""
        self._write("finished", facts)
        return self.folder

    def _write(self, status: str, facts: Mapping[str, Any]) -> None:
        about = {
            "stage": self.name,
            "status": status,
            "config": self.identity,
            "inputs": self.inputs,
            **provenance(),
            **facts,
        }
        write_json(self.folder / MANIFEST, about)


def open_stage(name: str, cfg: Any, *, inputs: Sequence[Path | str] = (), ignore: Sequence[str] = ()) -> Stage:
    """The stage's output folder, made if new; kept if it holds work of this config; else StaleError.

    inputs  files the content depends on; their hashes become part of the identity
    ignore  top-level keys that do not determine the content, beside FREE_KEYS
    """
    plain = configs.plain(cfg)
    identity = {key: value for key, value in plain.items() if key not in (*FREE_KEYS, *ignore)}
    hashes = {str(path): file_hash(path) for path in inputs}
    identity_hash = content_hash([identity, sorted(hashes.values())])
    folder = output_dir(name, plain, identity_hash)
    stage = Stage(name, folder, identity, hashes)
    if (folder / MANIFEST).exists():
        old = read_json(folder / MANIFEST)
        reason = _difference(name, old, stage)
        if reason is None and not plain.get("overwrite"):
            return stage
        if reason is not None and not plain.get("overwrite"):
            raise StaleError(f"{folder} holds other work: {reason}; choose another paths.output_dir or overwrite=true")
        shutil.rmtree(folder)
    elif folder.exists() and any(folder.iterdir()) and plain.get("overwrite"):
        raise InputError(f"{folder} was not made by this toolkit (no {MANIFEST}): it is not overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    stage.start()
    return stage


def prompt_files(cfg: Any) -> list[str]:
    """The local prompts file of a config, if it names one: an input whose content counts."""
    path = configs.plain(cfg.prompts).get("path")
    return [] if path is None or not Path(path).is_file() else [str(path)]


def output_dir(name: str, plain: Mapping[str, Any], identity_hash: str) -> Path:
    """`paths.output_dir` if given (with the hash below it in a multirun), else <root_dir>/<stage>-<hash>."""
    paths = plain.get("paths") or {}
    if paths.get("output_dir") is None:
        return Path(paths.get("root_dir", "outputs")) / f"{name}-{identity_hash}"
    folder = Path(paths["output_dir"])
    return folder / identity_hash if _in_multirun() else folder


def provenance() -> dict[str, Any]:
    """Command line, versions, code revision, time."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "argv": sys.argv,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "versions": versions,
        "revision": revision(),
    }


def revision() -> str:
    """The code's git revision, with + if the tree has changes; "unknown" outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def command(config_name: str, run: Callable[[Any], Any], score: Callable[[Any, Path], float] | None = None) -> None:
    """The main function of a stage's module: Hydra on the command line, one line per error a user can mend.

    score  what a sweeper optimizes, as a function of the config and the output folder; None: the folder is returned
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import CompactHydraException
    from omegaconf import DictConfig

    from toolkit.schema.check import check

    @hydra.main(version_base="1.3", config_path=str(configs.CONF), config_name=config_name)
    def main(cfg: DictConfig) -> Any:
        try:
            check(cfg, HydraConfig.get().job.config_name or config_name)
            result = run(cfg)
        except InputError as error:
            if _in_multirun():  # the sweep's other jobs go on; Hydra names this one's overrides and prints one line
                raise CompactHydraException(f"error: {error}") from error
            sys.exit(f"error: {error}")
        if isinstance(result, Path):
            print(f"output: {result}")
            if _in_multirun():
                write_json(job_dir() / OUTPUT, {"folder": str(result)})
        return result if score is None else score(cfg, result)

    try:
        sys.argv[1:] = prepare(config_name, sys.argv[1:])
        main()
    except InputError as error:
        sys.exit(f"error: {error}")


def run_stages(
    stages: Mapping[str, Mapping[str, Any]] | None, root_dir: Path | str, known: Mapping[str, Path] | None = None
) -> dict[str, Path]:
    """Run stages one after another below `root_dir`: each {run: module.function, config: name, overrides: [...]}.

    Overrides can name the folder of an earlier stage, or of one in `known`, in braces: 'responses="{responses}"'. For
    stages that differ in names only see `expand_stages`. Returns the folders of all of them.
    """
    from hydra.utils import get_method

    done = dict(known or {})
    for name, stage in expand_stages(stages or {}).items():
        print(f"\n== {name}", flush=True)
        overrides = [fill_folders(override, done) for override in stage.get("overrides", ())]
        overrides.insert(0, f"paths.root_dir={root_dir}")
        done[name] = get_method(stage["run"])(configs.compose(stage["config"], overrides))
    return done


def expand_stages(stages: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The stages with `for_each` multiplied out: one per combination of its names, "{axis}" standing for each.

        "{part}_{domain}":
          for_each: {part: {dev: [prompts.split=dev], test: [prompts.split=test]}, domain: [math, code]}
          overrides: ["prompts=toy_{domain}"]

    makes dev_math, dev_code, test_math, test_code. A mapping gives every name overrides of its own. Raises InputError if
    two stages get the same name.
    """
    expanded: dict[str, dict[str, Any]] = {}
    for pattern, stage in configs.plain(stages).items():
        axes = stage.pop("for_each", None) or {}
        for names in product(*axes.values()):
            chosen = dict(zip(axes, names, strict=True))
            name, one = fill_folders(pattern, chosen), dict(stage)
            own = [word for axis, at in chosen.items() if isinstance(axes[axis], Mapping) for word in axes[axis][at]]
            one["overrides"] = [fill_folders(word, chosen) for word in (*stage.get("overrides", ()), *own)]
            if name in expanded:
                raise InputError(f"stages: expected a name of its own for each, got {name} twice (from {pattern!r})")
            expanded[name] = one
    return expanded


def fill_folders(text: str, folders: Mapping[str, Path | str]) -> str:
    """The text with "{name}" replaced by that stage's folder (or by whatever the name stands for)."""
    for name, folder in folders.items():
        text = text.replace(f"{{{name}}}", str(folder))
    return text


def _difference(name: str, old: Mapping[str, Any], stage: Stage) -> str | None:
    """Why a folder's work is not this work; None if it is."""
    if old.get("stage") != name:
        return f"it was made by {old.get('stage')}, not {name}"
    before, now = configs.flatten(old.get("config", {})), configs.flatten(stage.identity)
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            return f"{key} was {before.get(key)!r}, is {now.get(key)!r}"
    if sorted(old.get("inputs", {}).values()) != sorted(stage.inputs.values()):
        changed = [path for path, digest in stage.inputs.items() if digest not in old.get("inputs", {}).values()]
        return f"its inputs have changed ({', '.join(changed) or 'fewer than before'})"
    return None


def job_dir() -> Path:
    """Hydra's folder of the job that is running; in a multirun its parent is the sweep's."""
    from hydra.core.hydra_config import HydraConfig

    return Path(HydraConfig.get().runtime.output_dir)


def sweep_name() -> str | None:
    """The name of the sweep that this job belongs to; None in a single run."""
    return job_dir().parent.name if _in_multirun() else None


def _in_multirun() -> bool:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
