"""A config by what it names, not by where that is stored: paths and names of models are replaced by digests of their content.

    pair.target: /models/a                  ->  sha256:...   weights, configuration and tokenizer of a local folder
    pair.target: org/name                   ->  commit:...   what the hub's name stands for
    prompts.path: file.jsonl                ->  sha256:...
    method.policy.estimator.head: FOLDER    ->  sha256:...
    method.policy._target_: my_parts.Margin ->  sha256:...   the user's own source files that it comes from
    responses: outputs/responses-1          ->  responses:... what determines that stage's content

So work is found again when its inputs have moved, and never when they have changed. Which keys name something is declared
beside their types (`toolkit.config.notes`: File, Head, Model, HubData), for commands and for classes alike. Where nothing is
declared, as in a class of the user's own, a text that is the path of a file counts by the file's content.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

from toolkit.config import classes
from toolkit.config.check import keys_below, parameters
from toolkit.config.commands import Command, Grid, command_of, keys_of, section_in
from toolkit.config.files import choices, flatten
from toolkit.config.notes import CONTENTS, Assumed, File, Head, HubData, Model, Neutral, notes
from toolkit.config.values import LISTS, MAPPINGS, is_known, is_node, options, origin_of
from toolkit.errors import InputError
from toolkit.files import digests
from toolkit.files.atomic import content_hash, parse_json_file
from toolkit.files.shards import shards

MANIFEST = "manifest.json"
ASSETS = Path(__file__).parents[1] / "assets"
UNRESOLVED = "hub:"
CONTENT = ("sha256:", "commit:", UNRESOLVED)


@dataclass
class Contents:
    """A config with digests instead of paths, `identity`.

    ask     whether the hub is asked for commits that its cache does not know
    paths   key -> the path or name that stood there
    models  key -> {name, revision, commit, files} of models and data sets of the hub
    """

    ask: bool = False
    identity: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def unresolved(self) -> list[str]:
        """Keys of models of the hub whose commit is not known here."""
        return [key for key, facts in self.models.items() if facts["commit"] is None]

    def of(self, path: str, value: Any, annotation: Any, parent: Mapping[str, Any], note: Any = None) -> Any:
        """A value of the config with contents in place of what it names.

        parent: the mapping that it stands in; note: what is declared of everything in it
        """
        note = next((own for own in notes(annotation) if isinstance(own, CONTENTS)), note)
        if isinstance(value, Mapping) and issubclass(section_in(annotation) or Command, Grid):
            return {name: self._settings(f"{path}.{name}", name, settings) for name, settings in value.items()}
        if isinstance(value, Mapping):
            declared = keys_below(value, annotation)
            keys = dict.fromkeys(value, _entries(annotation))
            if declared is not None:
                keys = {name: key.annotation for name, key in declared.keys.items()}
            inner = {k: self.of(f"{path}.{k}", v, keys.get(str(k), Any), value, note) for k, v in value.items()}
            for name, entry in value.items():
                for own in notes(keys.get(str(name), Any)):
                    if isinstance(own, Assumed) and entry is None:
                        inner[name] = own.value
                    if isinstance(own, Neutral) and entry == own.value:
                        del inner[name]
            if is_node(value) and (files := classes.users_files(str(value["_target_"]))):
                self.paths[f"{path}._target_"] = value["_target_"]
                inner["_target_"] = f"sha256:{content_hash([value['_target_'], digests.digests(files)], 32)}"
            return inner
        if isinstance(value, list | tuple):
            kind = _entries(annotation)
            return [self.of(f"{path}.{i}", entry, kind, parent, note) for i, entry in enumerate(value)]
        if not isinstance(value, str) or not value:
            return value
        if note is None and (is_node(parent) or not is_known(annotation)) and os.path.isfile(value):
            note = File()
        content = None if note is None else self._content(path, value, note, parent)
        if content is None:
            return value
        self.paths[path] = value
        return content

    def _settings(self, path: str, method: str, settings: Any) -> Any:
        """What a grid says of a method: keys, nested or dotted, with lists of values."""
        names: Any = flatten(settings) if isinstance(settings, Mapping) and method in choices("method") else ()
        annotations = parameters(method, names)

        def contents(value: Any, name: str) -> Any:
            if isinstance(value, Mapping):
                return {key: contents(inner, f"{name}.{key}") for key, inner in value.items()}
            return self.of(f"{path}{name}", value, annotations.get(name[1:], Any), {})

        return contents(settings, "")

    def _content(self, path: str, value: str, note: Any, parent: Mapping[str, Any]) -> str | None:
        """What stands for a text that names a model, a file or a folder; None: the text itself, for there is none."""
        if isinstance(note, HubData) and any(parent.get(key) is not None for key in note.instead):
            return None
        path_on_disk = ASSETS / value if value in ("toy/target", "toy/draft") else Path(value)
        try:
            if isinstance(note, HubData | Model) and not path_on_disk.exists():
                return None if value[0] in "./~" else self._hub(path, value, parent.get(note.revision), note.kind)
            if isinstance(note, Model) and path_on_disk.is_dir():
                if path_on_disk.resolve() != (ASSETS / "toy" / "target").resolve():
                    return f"sha256:{digests.folder_digest(path_on_disk)}"
                with_heads = map(digests.folder_digest, (path_on_disk, ASSETS / "toy" / "head"))
                return f"sha256:{content_hash([*with_heads], 32)}"
            if path_on_disk.is_file() and len(files := shards(path_on_disk)) > 1:
                return f"sha256:{content_hash(digests.digests(files), 32)}"
            if path_on_disk.is_file():
                return f"sha256:{digests.digest(path_on_disk)[:32]}"
            if isinstance(note, Head) and path_on_disk.is_dir():
                inner = path_on_disk / "head"
                return f"sha256:{digests.folder_digest(inner if inner.is_dir() else path_on_disk)}"
            if (path_on_disk / MANIFEST).is_file():
                manifest = parse_json_file(path_on_disk / MANIFEST)
                if isinstance(manifest, dict) and "stage" in manifest and isinstance(manifest.get("inputs"), dict):
                    made_of = [manifest.get("config"), sorted(map(str, manifest["inputs"].values()))]
                    return f"{manifest['stage']}:{content_hash(made_of, 16)}"
                return f"sha256:{digests.folder_digest(path_on_disk)}"
            if path_on_disk.is_dir():
                return f"sha256:{digests.tree_digest(path_on_disk)}"
            files = [Path(name) for name in sorted(glob(value, recursive=True)) if Path(name).is_file()]
            return f"sha256:{content_hash(digests.digests(files), 32)}" if files else None
        except OSError as error:
            raise InputError(f"{path}: could not read {value}: {error.strerror or error}") from None

    def _hub(self, path: str, name: str, revision: Any, kind: str) -> str:
        revision = None if revision is None else str(revision)
        commit = digests.hub_commit(name, revision, kind)
        if commit is None and self.ask:
            commit = digests.commit_on_hub(name, revision, kind)
        files = {} if commit is None else digests.hub_files(name, commit, kind)
        self.models[path] = {"name": name, "revision": revision, "commit": commit, "files": files}
        return f"commit:{commit}" if commit is not None else f"{UNRESOLVED}{name}@{revision or 'main'}"


def contents_of(plain: Mapping[str, Any], command: str = "", ask: bool = False) -> Contents:
    """The contents of a plain config; command: the root config whose declared keys say what names something."""
    section = command_of(command)
    keys = {} if section is None else keys_of(section).keys
    contents = Contents(ask=ask)
    for name, value in plain.items():
        contents.identity[name] = contents.of(name, value, keys[name].annotation if name in keys else Any, plain)
    return contents


def is_content(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(CONTENT)


def _entries(annotation: Any) -> Any:
    """The declared type of the entries of a list or mapping; Any if there is none."""
    inner = [typing.get_args(kind) for kind in options(annotation) if origin_of(kind) in (*LISTS, *MAPPINGS)]
    return inner[0][-1] if inner and inner[0] else Any
