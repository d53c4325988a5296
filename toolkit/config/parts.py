"""Choices of config groups that classes declare: their keys and defaults stand in the class alone.

    class Tail(Thresholded):
        name = "tail"  # stopping=tail
        threshold: Annotated[float, Probability] = 0.2

Such a choice has the class as `_target_`, and every argument that has a default. A yaml of the same name replaces it, and may
begin with it: `defaults: [base/tail@_here_, _self_]`. Classes are read as text, since importing them takes seconds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.core.config_store import ConfigNode, ConfigStore

ROOT = Path(__file__).parents[2]
# Files of each group's classes, and the package that `_target_` names them in, if that is not their own module.
GROUPS = {
    "loss": ("toolkit/distillation/losses.py", "toolkit.distillation"),
    "proposer": ("toolkit/decoding/proposers/*.py", "toolkit.decoding"),
    "quality": ("analysis/quality/*.py", ""),
    "rule": ("toolkit/verification/rules/*.py", ""),
    "stopping": ("toolkit/stopping/*.py", "toolkit.stopping"),
    "teacher": ("toolkit/distillation/teachers.py", "toolkit.distillation"),
}
BASE = "base"  # subgroup with every choice that a class declares, whatever yaml replaces it
DECLARED = re.compile(r'^class (\w+)|^    name = "(\w+)"$', re.MULTILINE)


class Nodes(dict[str, Any]):
    """Entries of a ConfigStore; that of a class is made when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        entry = super().__getitem__(name)
        return _node(*entry) if isinstance(entry, tuple) else entry


def register(store: ConfigStore, folders: Sequence[Path]) -> None:
    """Put the choices of all groups into a store of Hydra's, but for those that have a yaml in these config folders.

    With one, Hydra would take the entry of the same name for the yaml's schema.
    """
    for group in GROUPS:
        entries = {f"{name}.yaml": (group, name) for name in classes_in(group)}
        written = {path.name for folder in folders for path in (folder / group).glob("*.yaml")}
        nodes = {**store.repo.get(group, {}), **entries, BASE: Nodes(entries)}
        store.repo[group] = Nodes({name: node for name, node in nodes.items() if name not in written})


@cache
def classes_in(group: str) -> dict[str, tuple[str, str]]:
    """{choice: (module, class)} of a group; {} if no classes declare choices of it."""
    choices = {}
    for path in sorted(ROOT.glob(GROUPS[group][0])) if group in GROUPS else ():
        owner = ""
        for class_name, choice in DECLARED.findall(path.read_text(encoding="utf-8")):
            owner = class_name or owner
            if choice:
                choices[choice] = ".".join(path.relative_to(ROOT).with_suffix("").parts), owner
    return choices


@cache
def _node(group: str, choice: str) -> ConfigNode:
    from hydra.core.config_store import ConfigNode
    from omegaconf import OmegaConf

    module, owner = classes_in(group)[choice]
    content = {"_target_": f"{GROUPS[group][1] or module}.{owner}", **defaults_of(module, owner)}
    return ConfigNode(f"{choice}.yaml", OmegaConf.structured(content), group, None, None)


@cache
def defaults_of(module: str, class_name: str) -> dict[str, Any]:
    """Arguments of a class with a default: of its constructor, or the fields of a dataclass, inherited ones first.

    What the program fills in (`Internal`) is left out. Raises ValueError for a default that is not written as a plain value.
    """
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    owner = next((part for part in body if isinstance(part, ast.ClassDef) and part.name == class_name), None)
    if owner is None:  # a base class of another package
        return {}
    values: dict[str, Any] = {}
    fields: list[tuple[str, ast.expr | None, ast.expr | None]] = []
    functions = {part.name: part.args for part in owner.body if isinstance(part, ast.FunctionDef)}
    if (init := functions.get("__init__")) is not None:
        defaults = [*[None] * (len(init.args) - len(init.defaults)), *init.defaults, *init.kw_defaults]
        arguments = zip([*init.args, *init.kwonlyargs], defaults, strict=True)
        fields = [(argument.arg, argument.annotation, default) for argument, default in arguments]
    else:
        modules = {alias.name: part.module for part in body if isinstance(part, ast.ImportFrom) for alias in part.names}
        for base in reversed(owner.bases):
            if isinstance(base, ast.Name):
                values |= defaults_of(modules.get(base.id) or module, base.id)
        if any("dataclass" in ast.unparse(decorator) for decorator in owner.decorator_list):
            annotated = [part for part in owner.body if isinstance(part, ast.AnnAssign)]
            fields = [(ast.unparse(part.target), part.annotation, part.value) for part in annotated]
    for name, annotation, default in fields:
        if isinstance(default, ast.Call):  # field(default=1, kw_only=True)
            default = next((keyword.value for keyword in default.keywords if keyword.arg == "default"), None)
        note = ast.unparse(annotation) if annotation is not None else ""
        if default is not None and not note.startswith("ClassVar") and "Internal()" not in note:
            values[name] = ast.literal_eval(default)
    return values
