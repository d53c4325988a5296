"""The cost tables of a pair, one per draft: from files, modelled for a device, or measured here and kept (`toolkit.costs`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analysis import keys
from analysis.loads.modelled import SHAPES, Shape, modelled
from toolkit.config import plain
from toolkit.costs.kept import costs_here
from toolkit.costs.load import LoadCost
from toolkit.errors import InputError, unknown_name
from toolkit.models.pair import ModelPair


def costs_of_files(cfg: keys.Advise | keys.Serving, count: int, batch_sizes: Sequence[int]) -> list[LoadCost]:
    """The cost tables of costs=FILE for `count` drafts; [] without it.

    Raises InputError for tables that would be read as flat, as they do not know these batch sizes or drafted tokens, and for an
    engine's answers that are too noisy to advise on.
    """
    if cfg.costs is None:
        return []
    if cfg.hardware is not None:
        raise InputError("expected costs=FILE or hardware=NAME, got both")
    files = plain(cfg.costs)
    files = [files] if isinstance(files, str) else files
    if len(files) not in (1, count):
        raise InputError(f"expected one cost table, or one for each of {count} drafts, got {len(files)}")
    tables = [LoadCost.load(file) for file in files]
    for file, table in zip(files, tables, strict=True):
        if table.engine is not None and table.engine.noise:
            raise InputError(f"costs={file}: {table.engine.noise}")
        if lacking := table.lacks(batch_sizes, widest=2 if cfg.max_drafted == "auto" else 1 + cfg.max_drafted):
            sizes = ",".join(map(str, batch_sizes))
            hint = "" if table.is_published else f"; python -m analysis.timing batch_sizes=[{sizes}] writes a table"
            raise InputError(f"costs={file}: {lacking}{hint}")
    return tables * (count // len(files))


def costs_of(cfg: keys.Advise | keys.Serving, pairs: Sequence[ModelPair], batch_sizes: Sequence[int]) -> list[LoadCost]:
    """For each of these pairs of one target, or a target alone, the cost table of its forward passes at these batch sizes."""
    if tables := costs_of_files(cfg, len(pairs), batch_sizes):
        for fall in dict.fromkeys(table.fall for table in tables if table.fall):
            print(f"costs: {fall}")
        return tables
    if cfg.hardware is not None:
        named = plain(getattr(cfg, "shapes", None)) or []
        if unknown := [name for name in named if name not in SHAPES]:
            raise unknown_name("shape", unknown[0], SHAPES)
        if len(named) not in (0, 2):
            raise InputError(f"shapes: expected [TARGET, DRAFT], got {named}")
        shapes = [
            (SHAPES[named[0]], SHAPES[named[1]])
            if named
            else (Shape.of(pair.target), Shape.of(pair.draft if pair.drafts else pair.target))
            for pair in pairs
        ]
        return [
            modelled(target, draft, cfg.hardware, cfg.devices, batch_sizes, cfg.overlap) for target, draft in shapes
        ]
    pair = pairs[0]
    if len(pairs) > 1:  # all drafts take turns beside one target
        pair = replace(pair, draft=None, drafts=[other.draft for other in pairs])
    sizes = sorted({1, *batch_sizes})
    by_size = [[table for table, _ in costs_here(pair, size, cfg.rounds)] for size in sizes]
    tables = [LoadCost.of(of_draft) for of_draft in zip(*by_size, strict=True)]
    for fall in dict.fromkeys(table.fall for table in tables if table.fall):
        print(f"costs: {fall}")
    return tables
