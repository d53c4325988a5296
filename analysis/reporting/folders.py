"""Output folders as a report sees them, and which of them may stand beside each other.

Numbers of different pairs or sampling settings do not compare: such folders go into separate groups, each with its own
headline and charts. Seeds and devices may differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.tables.selection import FREE
from toolkit.errors import InputError
from toolkit.files.text import lines_of
from toolkit.runs.stage import MANIFEST, read_manifest

# Change no token; two are of older folders.
TECHNICAL = ("_target_", "cuda_graphs", "self_check", "packed", "writable", "cpu_packing", "weight_check")
OFF = {
    "dtype": "float32",
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "generation_config": False,
}  # these change nothing


@dataclass(frozen=True)
class Folder:
    path: Path
    manifest: dict[str, Any]

    @property
    def stage(self) -> str:
        return str(self.manifest.get("stage", "stage"))

    def table(self, name: str) -> pd.DataFrame | None:
        """<name>.parquet or <name>.csv; None where there is none that can be read."""
        for path, read in ((self.path / f"{name}.parquet", pd.read_parquet), (self.path / f"{name}.csv", pd.read_csv)):
            try:
                return read(path)  # type: ignore[operator]
            except (OSError, ValueError):
                continue
        return None

    @property
    def run_id(self) -> str | None:
        """The id of its W&B run, if it left one: the last one of several."""
        runs = sorted((self.path / "wandb").glob("*run-*-*"))
        return runs[-1].name.rsplit("-", 1)[1] if runs else None


@dataclass(frozen=True)
class FolderGroup:
    pair: dict[str, Any]
    sampling: dict[str, Any] | None
    folders: list[Folder] = field(default_factory=list)

    @property
    def title(self) -> str:
        """What sets the group apart: "toy/target with toy/draft, temperature=1 max_new_tokens=96"."""
        if not self.pair:
            return "pair not recorded"
        drafts = self.pair.get("draft") or self.pair.get("drafts")
        names = [self.called(str(draft)) for draft in (drafts if isinstance(drafts, list) else [drafts])]
        models = f"{self.called(str(self.pair.get('target')))} with {' and '.join(names)}"
        others = {name: value for name, value in self.pair.items() if name not in ("target", "draft", "drafts")}
        facts = {name: value for name, value in {**others, **(self.sampling or {})}.items() if OFF.get(name) != value}
        settings = " ".join(f"{name}={value}" for name, value in facts.items() if value not in (None, [], {}, ""))
        return f"{models}, {settings}" if settings else models

    def called(self, content: str) -> str:
        """The name that stood for a content in the command, if a manifest tells; of a whole path its last two parts."""
        names = (name for folder in self.folders for name in _names_of(folder.manifest, content, 0))
        name = next(names, content)
        return "/".join(Path(name).parts[-2:]) if Path(name).is_absolute() else name


def read_folder(path: Path) -> Folder:
    """Raises InputError if the folder has no manifest."""
    if not (path / MANIFEST).exists():
        raise InputError(f"inputs: expected an output folder (with a {MANIFEST}) at {path}, found none")
    return Folder(path, read_manifest(path))


def grouped(folders: Sequence[Folder]) -> list[FolderGroup]:
    """Groups in the order of the folders. A folder that records no sampling joins the first group of its pair."""
    groups: list[FolderGroup] = []
    origins = [(folder, *_made_with(folder.manifest, 0)) for folder in folders]
    for folder, pair, sampling in sorted(origins, key=lambda entry: entry[2] is None):
        home = next((g for g in groups if g.pair == pair and (sampling is None or g.sampling == sampling)), None)
        if home is None:
            groups.append(home := FolderGroup(pair, sampling))
        home.folders.append(folder)
    order = {folder.path: number for number, folder in enumerate(folders)}
    for group in groups:
        group.folders.sort(key=lambda folder: order[folder.path])
    return sorted(groups, key=lambda group: order[group.folders[0].path])


def generations(folder: Folder) -> list[dict[str, Any]]:
    """The lines of generations.jsonl; a broken line ends them."""
    path, lines = folder.path / "generations.jsonl", []
    if path.exists():
        for line in lines_of(path.read_text(encoding="utf-8")):
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return lines


def _made_with(manifest: dict[str, Any], depth: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    config = manifest.get("config") or {}
    pair, sampling = (manifest.get(name) or config.get(name) for name in ("pair", "sampling"))
    for source in manifest.get("inputs") or {} if depth < 3 else ():
        if isinstance(pair, dict) and isinstance(sampling, dict):
            break
        path = Path(source).parent / MANIFEST
        if path.exists():
            other = _made_with(read_manifest(path.parent), depth + 1)
            pair = pair if isinstance(pair, dict) else other[0]
            sampling = sampling if isinstance(sampling, dict) or manifest.get("stage") == "train" else other[1]
    relevant = lambda values: {k: v for k, v in values.items() if k not in (*FREE, *TECHNICAL) and v != {}}
    return relevant(pair) if isinstance(pair, dict) else {}, relevant(sampling) if isinstance(sampling, dict) else None


def _names_of(manifest: dict[str, Any], content: str, depth: int) -> Iterator[str]:
    """Names under which a pair's model of this content was given to the stage, or to those it was made from."""
    pair, names = (manifest.get("config") or {}).get("pair") or {}, manifest.get("given") or {}
    for key, value in pair.items() if isinstance(pair, dict) else ():
        for number, item in enumerate(value if isinstance(value, list) else [value]):
            named = f"pair.{key}.{number}" if isinstance(value, list) else f"pair.{key}"
            if item == content and named in names:
                yield str(names[named])
    for source in manifest.get("inputs") or {} if depth < 3 else ():
        if (path := Path(source).parent / MANIFEST).exists():
            yield from _names_of(read_manifest(path.parent), content, depth + 1)
