"""A stage: one command, one config, one output folder with its manifest.

    python -m data_gen.responses ...  ->  toolkit.runs.command  ->  run(cfg) -> Path

The folder is named by the stage and a hash of what determines its content: the config, with contents instead of paths
(`toolkit.config.identity`), and the inputs. Its manifest is written when work starts and again when it ends. Work of the same
config is kept; work of another one is refused (StaleError). With `overwrite=true` the files that the stage has written are
deleted (`toolkit.files.journal`), and nothing else. One process works in a folder at a time (`toolkit.files.lock`).
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from toolkit import config as configs
from toolkit.config.commands import Command, OnPrompts
from toolkit.config.identity import UNRESOLVED, Contents, contents_of, is_content
from toolkit.errors import InputError, StaleError
from toolkit.files import digests, journal, lock
from toolkit.files.atomic import content_hash, parse_json_file, write_failure, write_json
from toolkit.files.text import lines_of

MANIFEST = journal.MANIFEST
APP_NAME = "acceptance-toolkit"  # hydra.help.app_name of every command (conf/paths/default.yaml)
OUTPUT = "output.json"  # in a multirun: written into each job's folder of the sweep, says where the job's output is
PACKAGES = ("torch", "transformers", "pytorch-lightning", "datasets", "wandb", "hydra-core", "scikit-learn")
# Keys that do not determine the content of an output folder.
FREE_KEYS = ("paths", "overwrite", "batch_size", "logger", "progress", "ckpt_path", "num_workers")
UNCHECKED = ("status", "time", "argv", "checksum")  # of a manifest: what its checksum does not cover
SPARE = ("checkpoints/", "figures/")  # of a finished stage: nothing is lost with these
SHOWN = 8  # names in a message
Config = Command | Mapping[str, Any]  # of a stage: the composed one, or plain containers


@dataclass
class Stage:
    """An output folder under way.

    inputs    files the content depends on, with their hashes
    contents  the config with contents instead of paths
    shared    several processes work in the folder, each on a part of its own
    """

    name: str
    folder: Path
    inputs: dict[str, str]
    contents: Contents
    shared: str = ""

    @property
    def identity(self) -> dict[str, Any]:
        return self.contents.identity

    @property
    def manifest(self) -> dict[str, Any]:
        return read_manifest(self.folder)

    @property
    def finished(self) -> bool:
        return (self.folder / MANIFEST).exists() and self.manifest.get("status") == "finished"

    def start(self) -> None:
        """Write the manifest of work under way. Raises InputError if another process works here."""
        self._write("running", {})

    def finish(self, **facts: Any) -> Path:
        """Write the manifest of finished work, with facts about the outputs; the folder is free for other processes."""
        journal.begin(self.folder)
        files = journal.read(self.folder).files
        listed = {name: files[name][-1] for name in sorted(files) if (self.folder / name).is_file()}
        self._write("finished", {**facts, "files": {k: v for k, v in listed.items() if k != MANIFEST}})
        self.leave()
        return self.folder

    def leave(self) -> None:
        """Let other processes work here; what is missing is theirs."""
        lock.release(self.folder, self._lock)

    def remove(self, below: str) -> None:
        """Delete the stage's own files in a subfolder; others are left."""
        journal.remove(self.folder, below)

    @property
    def _lock(self) -> str:
        return f".lock{self.shared and '-' + self.shared}"

    def _write(self, status: str, facts: Mapping[str, Any]) -> None:
        lock.take(self.folder, self._lock)
        manifest = {"stage": self.name, "status": status, "config": self.identity}
        manifest |= {"given": self.contents.paths, "models": self.contents.models, "inputs": self.inputs}
        manifest |= {**provenance(), **facts}
        write_json(self.folder / MANIFEST, {**manifest, "checksum": checksum(manifest)})


def checksum(manifest: Mapping[str, Any]) -> str:
    """The checksum of a manifest's facts; its status and time may change."""
    return content_hash({key: value for key, value in manifest.items() if key not in UNCHECKED}, 32)


def read_manifest(folder: Path | str) -> dict[str, Any]:
    """A folder's manifest. Raises InputError, one line, if it is missing, damaged, or not this toolkit's."""
    path = Path(folder) / MANIFEST
    manifest = parse_json_file(path)
    if not isinstance(manifest, dict) or "stage" not in manifest:
        raise InputError(f"{path} is not a manifest of this toolkit; move it, or choose another folder")
    if manifest.get("checksum") != checksum(manifest):
        raise InputError(f"{path} is damaged (its checksum does not match); delete it and run the command again")
    return manifest


def config_as_written(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a manifest, with the paths and names that the command line said in place of digests."""
    config = copy.deepcopy(manifest.get("config", {}))
    for path, text in (manifest.get("given") or {}).items():
        *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
        node: Any = config
        for part in parents:
            node = node[part]
        node[last] = text
    return config


def open_stage(
    name: str,
    cfg: Config,
    *,
    inputs: Sequence[Path | str] = (),
    ignore: Sequence[str] = (),
    shared: str = "",
    repairs: bool = False,
    follows: bool = False,
) -> Stage:
    """The stage's output folder, made if new; kept if it holds work of this config; else StaleError.

    inputs   files the content depends on; their hashes become part of the identity
    ignore   top-level keys that do not determine the content, beside FREE_KEYS
    shared   names this process's part where several work in one folder
    repairs  damaged files count as missing: the stage makes them again
    follows  another process has opened the stage for this one, too: nothing is deleted, locked or begun
    Raises InputError if another process works there, the folder cannot be written, or a file of finished work is damaged.
    """
    stage, overwrite = _described(name, cfg, inputs, ignore, ask=True), configs.plain(cfg).get("overwrite") is True
    stage.shared = shared
    if follows:
        return stage
    try:
        if not overwrite and _is_done(stage, repairs):
            return stage
        stage.folder.mkdir(parents=True, exist_ok=True)
        lock.take(stage.folder, stage._lock)
        if not overwrite and _is_done(stage, repairs):  # another process has finished it in the meantime
            stage.leave()
            return stage
        if overwrite:
            try:
                _clear(stage)
            except InputError:
                stage.leave()
                raise
        journal.begin(stage.folder)
        if not overwrite:
            files = [entry for entry in sorted(stage.folder.iterdir()) if entry.is_file() and entry.name[0] != "."]
            if foreign := [path.name for path in files if path.name != MANIFEST and journal.is_foreign(path)]:
                print(f"{stage.folder}: {_some(foreign)}: not written by this stage, left alone", file=sys.stderr)
        if not shared:
            journal.clear_temporaries(stage.folder)
        if not (stage.folder / MANIFEST).exists() or stage.finished:
            stage.start()
    except OSError as error:
        raise InputError(f"could not write to {stage.folder}: {write_failure(error)}") from None
    return stage


def finished_stage(
    name: str, cfg: Config, *, inputs: Sequence[Path | str] = (), ignore: Sequence[str] = (), repairs: bool = False
) -> Stage | None:
    """The stage if it is finished, found without loading a model; None if there is work to do. Nothing is written.

    Arguments as for `open_stage`. Raises InputError if a file of finished work is damaged.
    """
    if configs.plain(cfg).get("overwrite") is True:
        return None
    stage = _described(name, cfg, inputs, ignore)
    try:
        return stage if _is_done(stage, repairs) else None
    except StaleError:
        return None


def settings_hash(name: str, cfg: Config, keys: Sequence[str], **more: Any) -> str:
    """A hash of keys that do not name the stage's folder, with contents instead of paths, and of more that counts."""
    plain = configs.plain(cfg)
    return content_hash(contents_of({**{key: plain.get(key) for key in keys if key != "track"}, **more}, name).identity)


def check_some_done(failed: int, total: int, reason: Any, folder: Path) -> None:
    """Raises InputError if every prompt of a run has failed: its command ends with exit code 1."""
    if total and failed == total:
        raise InputError(f"every one of {total} prompts failed, first: {reason}; the rows are in {folder}")


def _described(name: str, cfg: Config, inputs: Sequence[Path | str], ignore: Sequence[str], ask: bool = False) -> Stage:
    """The stage of a config: its identity, and its folder, which need not be there.

    Raises InputError if an input is not what its stage has written.
    """
    plain = configs.plain(cfg)
    counted = {key: value for key, value in plain.items() if key not in (*FREE_KEYS, *ignore)}
    contents = contents_of(counted, name)
    paths = [Path(path) for path in inputs]
    hashes = {}
    for path, digest in zip(paths, digests.digests(paths), strict=True):
        journal.check_digest(path, digest)
        hashes[str(path)] = digest[:16]
    stage = Stage(name, Path(), hashes, contents)
    if contents.unresolved:
        pattern = output_dir(name, plain, "*")  # the models are not known here: any folder may hold this work
        for folder in sorted(pattern.parent.glob(pattern.name)) if pattern.name.endswith("*") else [pattern]:
            stage.folder = folder
            if (folder / MANIFEST).is_file() and _difference(name, read_manifest(folder), stage) is None:
                return stage
        if ask:
            contents = contents_of(counted, name, ask=True)
            stage = Stage(name, Path(), hashes, contents)
    stage.folder = output_dir(name, plain, content_hash([contents.identity, sorted(hashes.values())]))
    return stage


def _is_done(stage: Stage, repairs: bool = False) -> bool:
    """Whether the folder holds this work, finished and whole. Raises StaleError if it holds other work."""
    if not (stage.folder / MANIFEST).exists():
        return False
    old = read_manifest(stage.folder)
    reason = _difference(stage.name, old, stage)
    if reason is not None:
        advice = "choose another paths.output_dir or overwrite=true"
        raise StaleError(f"{stage.folder} holds other work: {reason}; {advice}")
    if old.get("status") != "finished":
        return False
    files = {name: digest for name, digest in (old.get("files") or {}).items() if not name.startswith(SPARE)}
    paths = [stage.folder / name for name in files]
    if missing := [path.name for path in paths if not path.is_file()]:
        print(f"{stage.folder}: {_some(missing)} missing, made again")
        return False
    for path, digest in zip(paths, digests.digests(paths), strict=True):
        try:
            journal.check_digest(path, digest, default=files[journal.relative(stage.folder, path)])
        except InputError:
            if not repairs:
                raise
            print(f"{path} is damaged, made again")
            return False
    return True


def _clear(stage: Stage) -> None:
    """Delete what the stages that worked in the folder have written there; say what is left."""
    folder, own = stage.folder, (stage._lock, journal.JOURNAL)
    path = folder / MANIFEST
    present = [entry for entry in folder.iterdir() if entry.name not in own]
    if not path.exists() and not (folder / journal.JOURNAL).exists():
        if present:
            raise InputError(f"{folder} was not made by this toolkit (no {MANIFEST}): it is not overwritten")
        return
    if not (folder / journal.JOURNAL).exists():
        raise InputError(
            f"{folder} is not overwritten: its {MANIFEST} is not this toolkit's, or lists no files; "
            "delete the folder yourself, or choose another paths.output_dir"
        )
    left = journal.remove(folder, keep=(stage._lock,))
    names = [entry.relative_to(folder).as_posix() for entry in left if entry.name != journal.JOURNAL]
    if MANIFEST in names:
        raise InputError(f"{path} is not this toolkit's: it is left alone; choose another paths.output_dir")
    (folder / journal.JOURNAL).unlink()
    if names:
        print(f"{folder}: left {_some(names)}, which this stage has not written", file=sys.stderr)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def prompt_files(cfg: OnPrompts) -> list[str]:
    """The local prompts file of a config, if it names one, and files of its rows' grammars: inputs whose content counts."""
    path = configs.plain(cfg.prompts).get("path")
    return [] if path is None or not Path(path).is_file() else [str(path), *_grammar_files(Path(path))]


def _grammar_files(prompts: Path) -> list[str]:
    """Files that the rows of a prompts file name as their grammars; lines that cannot be read are passed over."""
    grammars = dict[str, None]()
    for line in lines_of(prompts.read_text(encoding="utf-8-sig", errors="replace")):
        with suppress(ValueError, RecursionError):
            row = json.loads(line) if '"grammar"' in line else None
            grammar = row.get("grammar") if isinstance(row, dict) else None
            if isinstance(grammar, str) and os.path.isfile(grammar):
                grammars[grammar] = None
    return list(grammars)


def output_dir(name: str, plain: Mapping[str, Any], identity_hash: str) -> Path:
    """`paths.output_dir` if given (with the hash below it in a multirun), else <root_dir>/<stage>-<hash>.

    Raises InputError for the root of the file system and for the user's home: everything else lies in them.
    """
    paths = plain.get("paths") or {}
    if paths.get("output_dir") is None:
        return Path(paths.get("root_dir", "outputs")) / f"{name}-{identity_hash}"
    folder = Path(paths["output_dir"])
    if folder.resolve() in (Path(folder.resolve().anchor), Path.home().resolve()):
        raise InputError(f"paths.output_dir: expected a folder of its own for the output, got {folder}")
    return folder / identity_hash if in_multirun() else folder


def provenance() -> dict[str, Any]:
    versions = dict.fromkeys(PACKAGES, "not installed")
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    machine = {"python": platform.python_version(), "machine": f"{platform.machine()}, {platform.system()}"}
    time = datetime.now(UTC).isoformat(timespec="seconds")
    return {"argv": sys.argv, "time": time, **machine, "versions": versions, "revision": revision()}


@cache
def revision() -> str:
    """The code's git revision, with + if the tree has changes; "unknown" outside a checkout. Read once per process."""
    folder = Path(__file__).resolve().parent
    options: dict[str, Any] = {"cwd": folder, "capture_output": True, "text": True, "check": True}
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **options)
        status = ["git", "--no-optional-locks", "status", "--porcelain"]  # never in the way of another git command
        changes = subprocess.run(status, **options)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def _difference(name: str, old: Mapping[str, Any], stage: Stage) -> str | None:
    """Why a folder's work is not this work; None if it is."""
    if old.get("stage") != name:
        return f"it was made by {old.get('stage')}, not {name}"
    before, now = configs.flatten(old.get("config", {})), configs.flatten(stage.identity)
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    models, old_models = stage.contents.models, old.get("models") or {}
    changed = [
        key
        for key in changed  # a model of the hub whose commit is not known here may be the one that the manifest names
        if not (str(now.get(key)).startswith(UNRESOLVED) and old_models.get(key))
        or any(models.get(key, {}).get(part) != old_models[key].get(part) for part in ("name", "revision"))
    ]
    contents = [key for key in changed if is_content(before.get(key)) and is_content(now.get(key))]
    for key in changed:
        if key not in contents:  # what the config said, a path or name, if there was one
            was = (old.get("given") or {}).get(key, before.get(key))
            return f"{key} was {was!r}, is {stage.contents.paths.get(key, now.get(key))!r}"
    if sorted(old.get("inputs", {}).values()) != sorted(stage.inputs.values()):
        files = [path for path, digest in stage.inputs.items() if digest not in old.get("inputs", {}).values()]
        return f"its inputs have changed ({', '.join(files) or 'fewer than before'})"
    if contents:
        return f"{contents[0]} has other content ({stage.contents.paths.get(contents[0], 'weights or files')})"
    return None


def hydra_job() -> Any:
    """Hydra's settings of the job that is running; None if it is no command of this project: another application's job."""
    from hydra.core.hydra_config import HydraConfig

    job: Any = HydraConfig.get() if HydraConfig.initialized() else None
    return job if job is not None and configs.unresolved(job.help).get("app_name") == APP_NAME else None


def job_dir() -> Path:
    """Hydra's folder of the job that is running; in a multirun its parent is the sweep's."""
    return Path(hydra_job().runtime.output_dir)


def sweep_name() -> str | None:
    """The name of the sweep that this job belongs to; None in a single run."""
    return job_dir().parent.name if in_multirun() else None


def in_multirun() -> bool:
    from hydra.types import RunMode

    job = hydra_job()
    return job is not None and job.mode == RunMode.MULTIRUN
