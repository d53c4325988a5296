"""A config by what it names, not by where that lies: paths and names of models are replaced by digests of their content.

    pair.target: /models/a                  ->  sha256:...   weights, configuration and tokenizer of a local folder
    pair.target: org/name                   ->  commit:...   what the hub's name stands for
    prompts.path: file.jsonl                ->  sha256:...
    method.policy.estimator.head: FOLDER    ->  sha256:...
    responses: outputs/responses-1          ->  responses:... what determines that stage's content

So work is found again when its inputs have moved, and never when they have changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit import digests
from toolkit.errors import InputError
from toolkit.io import content_hash, parse_json_file

MANIFEST = "manifest.json"
ASSETS = Path(__file__).parents[1] / "assets"
LOADERS = ("ModelPair.from_pretrained", "pair.load_draft", "padding.padded_pair")  # whose arguments name models
MODELS = {"target": "revision", "draft": "draft_revision", "drafts": "draft_revision", "source": "revision"}
HEADS = ("head", "heads", "from_pretrained")
FILES = ("path", "data_files", "file", "reference", "draft_reference")
FOLDERS = ("responses", "traces", "dev", "test", "inputs", "replayed", "live", "sweeps", "join")
UNRESOLVED = "hub:"
CONTENT = ("sha256:", "commit:", UNRESOLVED)


@dataclass
class Contents:
    """A config with digests instead of paths.

    identity  the config
    given     key -> the path or name that stood there
    models    key -> {name, revision, commit, files} of models and data sets of the hub
    """

    identity: dict[str, Any] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def unresolved(self) -> list[str]:
        """Keys of models of the hub whose commit is not known here."""
        return [key for key, about in self.models.items() if about["commit"] is None]


def contents_of(plain: Mapping[str, Any], ask: bool = False) -> Contents:
    """The contents of a plain config. ask: ask the hub for commits that its cache does not know."""
    found = Contents()
    found.identity = {key: _value(key, key, value, plain, found, ask) for key, value in plain.items()}
    return found


def is_content(value: Any) -> bool:
    """Whether a value of an identity stands for a content."""
    return isinstance(value, str) and value.startswith(CONTENT)


def stage_content(folder: Path) -> str:
    """What determines the content of a stage's output folder."""
    about = parse_json_file(folder / MANIFEST)
    if not isinstance(about, dict) or "stage" not in about:
        return f"sha256:{digests.folder_digest(folder)}"
    inputs = sorted(map(str, (about.get("inputs") or {}).values()))
    return f"{about['stage']}:{content_hash([about.get('config'), inputs], 16)}"


def _value(path: str, key: str, value: Any, parent: Mapping[str, Any], found: Contents, ask: bool) -> Any:
    if isinstance(value, Mapping):
        inner = key if key in HEADS and "_target_" not in value else ""
        return {k: _value(f"{path}.{k}", inner or str(k), v, value, found, ask) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_value(f"{path}.{i}", key, one, parent, found, ask) for i, one in enumerate(value)]
    if not isinstance(value, str) or not value:
        return value
    content = _content(path, key, value, parent, found, ask)
    if content is None:
        return value
    found.given[path] = value
    return content


def _content(path: str, key: str, value: str, parent: Mapping[str, Any], found: Contents, ask: bool) -> str | None:
    """What stands for a text of a config, if it names a model, a file or a folder; None: the text itself."""
    if key in MODELS and str(parent.get("_target_", "")).endswith(LOADERS):
        return _model(path, value, parent.get(MODELS[key]), found, ask)
    if key == "dataset" and "_target_" in parent and parent.get("data_files") is None and not parent.get("path"):
        return _hub(path, value, parent.get("revision"), found, ask, "dataset")
    place = Path(value)
    try:
        if key in (*HEADS, *FILES, *FOLDERS) and place.is_file():
            return f"sha256:{digests.digest(place)[:32]}"
        if key in HEADS and place.is_dir():
            return _head(place)
        if key in (*FILES, *FOLDERS) and (place / MANIFEST).is_file():
            return stage_content(place)
        if key in (*FILES, *FOLDERS) and place.is_dir():
            return f"sha256:{digests.folder_digest(place)}"
    except OSError as error:
        raise InputError(f"{path}: could not read {value}: {error.strerror or error}") from None
    return None


def _head(folder: Path) -> str:
    """A head's folder, or a run's with one in head/."""
    inner = folder / "head"
    return f"sha256:{digests.folder_digest(inner if inner.is_dir() else folder)}"


def _model(path: str, value: str, revision: Any, found: Contents, ask: bool) -> str | None:
    place = ASSETS / value if value in ("toy/target", "toy/draft") else Path(value)
    if place.is_dir() and place.resolve() == (ASSETS / "toy" / "target").resolve():  # it brings its heads along
        return (
            f"sha256:{content_hash([digests.folder_digest(folder) for folder in (place, ASSETS / 'toy' / 'head')], 32)}"
        )
    if place.is_dir():
        return f"sha256:{digests.folder_digest(place)}"
    if Path(value).exists() or value.startswith((".", "/", "~")):
        return None
    return _hub(path, value, revision, found, ask, "model")


def _hub(path: str, name: str, revision: Any, found: Contents, ask: bool, kind: str) -> str:
    revision = None if revision is None else str(revision)
    commit = digests.hub_commit(name, revision, kind)
    if commit is None and ask:
        commit = digests.asked_commit(name, revision, kind)
    files = {} if commit is None else digests.hub_files(name, commit, kind)
    found.models[path] = {"name": name, "revision": revision, "commit": commit, "files": files}
    return f"commit:{commit}" if commit is not None else f"{UNRESOLVED}{name}@{revision or 'main'}"
