"""Stages one after another: each gets the folders of those before it.

Names in braces stand for folders. A folder is put into the composed config, never into the text of an override. So its
name may hold whatever a file system allows, such as blanks, commas, quotes and brackets.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from toolkit import config as configs
from toolkit.config.classes import hidden
from toolkit.config.files import with_texts
from toolkit.errors import InputError
from toolkit.runs.tracking import stage_named

NAME = re.compile(r"\{([^{}$]*)\}")
KEY = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^${}]*))?\}")  # of the config, and what stands for a missing one
ABSENT = object()
Stages = Mapping[str, Any] | None
NAMED = re.compile(r"[A-Za-z]\w*")  # what may name a config, and is put into an override as it is


def run_stages(stages: Stages, root_dir: Path | str, folders: Mapping[str, Path] | None = None) -> dict[str, Path]:
    """Run stages one after another below `root_dir`: each {run: module.function, config: name, overrides: [...]}.

    Overrides can name the folder of an earlier stage, or of one in `folders`, in braces: 'responses="{responses}"'. For
    stages that differ in names only see `expand_stages`. Returns the folders of all of them.
    """
    from hydra.utils import get_method

    done = dict(folders or {})
    for name, stage in expand_stages(stages or {}).items():
        print(f"\n== {name}", flush=True)
        config = compose_for(stage, done, root_dir, stages)
        with stage_named(name):
            done[name] = get_method(stage["run"])(config)
    return done


def plan_stages(stages: Stages, root_dir: Path | str, folders: Mapping[str, Path] | None = None) -> dict[str, Path]:
    """What `run_stages` would do: every stage composed, checked and printed, none run.

    Returns folders that are named after the stages and do not exist. Raises InputError for the first fault.
    """
    from hydra.utils import get_method

    planned = dict(folders or {})
    for name, stage in expand_stages(stages or {}).items():
        config = compose_for(stage, planned, root_dir, stages)
        get_method(stage["run"])
        for key in ("prompts", "pair"):
            if isinstance(node := configs.plain(config).get(key), Mapping) and node.get("_target_"):
                get_method(node["_target_"])
        marks = _Marks({done: done.upper() for done in planned})  # as one would type them, with values for keys
        typed = [marks.put(str(word), stages) for word in stage.get("overrides", ())]
        for mark, text in marks.texts.items():
            typed = [word.replace(mark, configs.quoted(text)[1:-1]) for word in typed]
        usual = configs.plain(configs.compose(stage["config"]))  # what it would have without the experiment
        words = [] if str(root_dir) == usual["paths"]["root_dir"] else [configs.override("paths.root_dir", root_dir)]
        for key in stage.get("inherit", ()):
            for part, value in configs.plain(config[key]).items():
                if part not in usual[key] or usual[key][part] != value:
                    words.append(configs.override(f"{'' if part in usual[key] else '+'}{key}.{part}", value))
        print(f"{name}: python -m {stage['run'].rpartition('.')[0]} {shlex.join([*words, *typed])}")
        planned[name] = Path(root_dir, name)
    return planned


def compose_for(
    stage: Mapping[str, Any], folders: Mapping[str, Path | str], root_dir: Path | str | None = None, within: Any = None
) -> Any:
    """The composed config of a stage, its output below `root_dir`, with folders instead of their names in braces.

    within  a node of the config that the stage comes from. In its overrides "${key}" is that config's text; so is
            "${oc.select:key,default}", or the default. The nodes that it inherits replace the composed config's own
    """
    from omegaconf import OmegaConf

    from toolkit.config.check import check

    marks, config_name = _Marks(folders), stage["config"]
    words = [marks.put(str(word), within) for word in stage.get("overrides", ())]
    if root_dir is not None:
        words.insert(0, f"paths.root_dir={marks.of(str(root_dir))}")
    config = configs.compose(config_name, words, checked=False)
    content = with_texts(marks.filled, OmegaConf.to_container(config, resolve=False))
    filled = OmegaConf.create(content, flags={"struct": True})
    root = within._get_root() if OmegaConf.is_config(within) else {}
    for key in stage.get("inherit", ()):
        if root.get(key) is None or key not in filled:
            raise InputError(f"inherit: expected keys that the experiment and {config_name} have, got {key}")
        inherited = with_texts(configs.escaped, OmegaConf.to_container(root[key], resolve=True))
        filled[key] = OmegaConf.create(inherited)  # "${" in a resolved text is not an interpolation
    check(filled, config_name, complete=False)
    return filled


class _Marks:
    """Short texts that stand for long ones while overrides are parsed."""

    def __init__(self, folders: Mapping[str, Path | str]):
        self.folders, self.texts, self.key = folders, {}, f"text{secrets.token_hex(8)}n"  # type: ignore[var-annotated]

    def of(self, text: str) -> str:
        mark = f"{self.key}{len(self.texts)}x"
        self.texts[mark] = text
        return mark

    def put(self, word: str, within: Any) -> str:
        """An override with marks for "{folder}" and for "${key}"."""
        word = KEY.sub(lambda match: self._value(match, within), word)
        folders = self.folders
        return NAME.sub(lambda match: self.of(str(folders[match[1]])) if match[1] in folders else match[0], word)

    def _value(self, match: re.Match[str], within: Any) -> str:
        from omegaconf import OmegaConf

        if not OmegaConf.is_config(within):
            return match[0]
        root, default = within._get_root(), match[2]
        value = OmegaConf.select(root, match[1], default=ABSENT, throw_on_missing=default is None)
        if value is ABSENT:  # a null that is there stays one
            return match[0] if default is None else default
        if isinstance(value, str):
            return value if NAMED.fullmatch(value) and value.lower() not in configs.NOT_TEXT else self.of(value)
        return {None: "null"}.get(value, str(value))

    def filled(self, value: str) -> str:
        """A text with others in place of their marks; "${" in these is not an interpolation."""
        for mark, text in self.texts.items():
            value = value.replace(mark, configs.escaped(text))
        return value


def fill_folders(text: str, folders: Mapping[str, Path | str]) -> str:
    """The text with "{name}" replaced by that stage's folder (or by whatever the name stands for)."""
    return NAME.sub(lambda match: str(folders[match[1]]) if match[1] in folders else match[0], text)


def expand_stages(stages: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The stages with `for_each` multiplied out: one per combination of its names, "{axis}" standing for each.

        "{part}_{domain}":
          for_each: {part: {dev: [prompts.split=dev], test: [prompts.split=test]}, domain: [math, code]}
          overrides: ["prompts=toy_{domain}"]

    makes dev_math, dev_code, test_math, test_code. A mapping gives every name overrides of its own. Raises InputError if
    two stages get the same name, or a stage's module is hidden by another one.
    """
    expanded: dict[str, dict[str, Any]] = {}
    for pattern, stage in configs.unresolved(stages).items():
        if reason := hidden(str(stage.get("run"))):
            raise InputError(reason)
        axes = stage.pop("for_each", None) or {}
        for names in product(*axes.values()):
            chosen = dict(zip(axes, names, strict=True))
            name, entry = fill_folders(pattern, chosen), dict(stage)
            own = [word for axis, at in chosen.items() if isinstance(axes[axis], Mapping) for word in axes[axis][at]]
            entry["overrides"] = [fill_folders(word, chosen) for word in (*stage.get("overrides", ()), *own)]
            if name in expanded:
                raise InputError(f"stages: expected a name of its own for each, got {name} twice (from {pattern!r})")
            expanded[name] = entry
    return expanded
