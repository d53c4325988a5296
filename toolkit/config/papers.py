"""The tables and figures of the papers as choices of config groups: one yaml per paper, `conf/papers/PAPER.yaml`.

Its entry `table3` is the choice PAPER_table3 of two groups: `+experiment=PAPER_table3` runs the entry's stages and makes its
page, `table=PAPER_table3` is what the page shows (`analysis.papers.table`). A choice is put into a ConfigStore when an override
names it. The keys of such a yaml are:

    name, cite  what pages call the paper
    toy         what stands in for the paper's data and sizes while the pair is the toy pair
    stages      {GROUP: {STAGE: ...}}, as in `before` of an experiment; lists in `overrides` may be nested
    entries     {table1: ...}: `stages`, the groups it needs; `runs`, {NAME: STAGE} that its cells name; `models`, the pair in
                words; the rest is the table
    shared      whatever else has a YAML anchor
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.core.config_store import ConfigStore

GROUPS = ("experiment", "table")
CHOSEN = ("experiment=", "table=")  # how an override begins that may name one
FOLDER = "papers"  # below conf/
OF_RUNS = ("stages", "runs", "models")  # keys of an entry that its table does not need


def names(folders: Sequence[Path]) -> list[str]:
    """Every entry of every paper in these config folders."""
    return [f"{key}_{item}" for folder in folders for key, paper in read(folder) for item in paper["entries"]]


def register(store: ConfigStore, overrides: Sequence[str], folders: Sequence[Path]) -> None:
    """Put what the overrides name of the papers into a store of Hydra's."""
    choices = [word.lstrip("+").partition("=") for word in overrides]
    chosen = {name for group, _, value in choices if group in GROUPS for name in value.split(",")}
    if not chosen:
        return
    for key, paper in (entry for folder in folders for entry in read(folder)):
        for item in paper["entries"]:
            if (name := f"{key}_{item}") in chosen:
                store.store(name, experiment(key, item, paper), group="experiment", package="_global_")
                store.store(name, table(key, item, paper), group="table")


def experiment(key: str, item: str, paper: Mapping[str, Any]) -> dict[str, Any]:
    """What `+experiment=KEY_ITEM` appends: the entry's stages, then its page."""
    entry = paper["entries"][item]
    before = {name: stage for group in entry["stages"] for name, stage in paper["stages"][group].items()}
    runs = ", ".join(f'{name}: "{{{stage}}}"' for name, stage in entry["runs"].items())
    models = entry.get("models", "${pair.draft} drafts for ${pair.target}")
    words = [f"table={key}_{item}", f"runs={{{runs}}}", f'models="{models}"']
    return {
        "defaults": [{"override /model": "none"}, {"override /data": None}, "_self_"],
        "tags": [key, item],
        "toy": paper["toy"],
        "before": {name: _flat(stage) for name, stage in before.items()},
        "after": {"page": {"run": "analysis.paper.run", "config": "paper", "overrides": words}},
    }


def table(key: str, item: str, paper: Mapping[str, Any]) -> dict[str, Any]:
    """What `table=KEY_ITEM` chooses: the entry without what makes its runs."""
    kind = item.rstrip("0123456789")
    source = {"paper": paper["name"], "cite": paper["cite"], "experiment": f"{key}_{item}"}
    content = {name: value for name, value in paper["entries"][item].items() if name not in OF_RUNS}
    return {**source, "item": f"{kind.capitalize()} {item.removeprefix(kind)}", **content}


def read(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The papers of a config folder, by the names of their files."""
    for path in sorted((folder / FOLDER).glob("*.yaml")):
        yield path.stem, _parsed(path, path.stat().st_mtime_ns)


@cache
def _parsed(path: Path, changed: int) -> Mapping[str, Any]:
    """A paper's yaml. It is read again when it has changed."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            for key, value in node.value:
                if key.value == "published":
                    as_printed(value)
            return super().construct_mapping(node, deep)

    def as_printed(node: Any) -> None:
        """Numbers below a node are texts: 2.60 stays 2.60."""
        if isinstance(node, yaml.ScalarNode):
            node.tag = "tag:yaml.org,2002:str" if node.tag.endswith((":int", ":float")) else node.tag
            return
        for item in node.value:
            as_printed(item[1] if isinstance(node, yaml.MappingNode) else item)

    content: Mapping[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    return content


def _flat(stage: Any) -> Any:
    if isinstance(stage, Mapping):
        return {key: _flat(value) for key, value in stage.items()}
    if isinstance(stage, list):
        return [word for part in map(_flat, stage) for word in (part if isinstance(part, list) else [part])]
    return stage
