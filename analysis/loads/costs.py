"""The cost tables of a pair, one per draft: from files, modelled for a device, or measured here and kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from analysis.loads.hardware import PRESETS, Shape, modelled
from analysis.loads.measured import measured_costs
from analysis.loads.rules import with_rules
from toolkit.config import plain
from toolkit.decoding import Method
from toolkit.errors import InputError, unknown_name
from toolkit.io import content_hash, write_text
from toolkit.load_cost import LoadCost
from toolkit.pair import ModelPair, fingerprint
from toolkit.sampling import Sampling
from toolkit.stage import provenance

DRAFTED = (1, 2, 3, 4, 5, 8)  # draft lengths that are timed: processors are faster at some widths than at others


def costs_of(
    cfg: Any,
    pairs: Sequence[ModelPair],
    prompts: Sequence[Any],
    sampling: Sampling,
    batch_sizes: Sequence[int],
    folder: Path,
    methods: Sequence[Mapping[str, Method]],
) -> list[LoadCost]:
    """For each of these pairs of one target the cost table of its forwards, at these batch sizes.

    If the forwards are measured here, all drafts are measured side by side, and then the policies of `methods`.

    cfg      costs (a file, or one per draft), hardware and devices, rounds
    folder   where a measurement is kept, under a hash of models, machine, threads, batch sizes, lengths and rounds
    methods  of each pair
    """
    if cfg.costs is not None and cfg.hardware is not None:
        raise InputError("expected costs=FILE or hardware=NAME, got both")
    if cfg.costs is not None:
        files = plain(cfg.costs)
        files = [files] if isinstance(files, str) else files
        if len(files) not in (1, len(pairs)):
            raise InputError(f"expected one cost table, or one for each of {len(pairs)} drafts, got {len(files)}")
        return [LoadCost.load(file) for file in files] * (len(pairs) // len(files))
    if cfg.hardware is not None:
        shapes = [_shapes(cfg, one) for one in pairs]
        return [modelled(target, draft, cfg.hardware, cfg.devices, batch_sizes) for target, draft in shapes]
    return _measured(cfg, pairs, prompts, sampling, batch_sizes, folder, methods)


def _shapes(cfg: Any, pair: ModelPair) -> tuple[Shape, Shape]:
    """The shapes of target and draft: the pair's own, or those that `shapes` names."""
    names = plain(cfg.get("shapes")) or []
    if not names:
        return Shape.of(pair.target), Shape.of(pair.draft)
    for name in names:
        if name not in PRESETS:
            raise unknown_name("shape", name, PRESETS)
    if len(names) != 2:
        raise InputError(f"shapes: expected [TARGET, DRAFT], got {names}")
    return PRESETS[names[0]], PRESETS[names[1]]


def _measured(
    cfg: Any,
    pairs: Sequence[ModelPair],
    prompts: Sequence[Any],
    sampling: Sampling,
    batch_sizes: Sequence[int],
    folder: Path,
    methods: Sequence[Mapping[str, Method]],
) -> list[LoadCost]:
    pair = replace(pairs[0], draft=None, drafts=[one.draft for one in pairs])
    models = [fingerprint(model) for model in (pair.target, *pair.drafts)]
    drafted = [length for length in DRAFTED if length <= cfg.max_drafted]
    device = torch.cuda.get_device_name(pair.device) if pair.device.type == "cuda" else pair.device.type
    machine = provenance()["machine"], device, str(pair.target.dtype), torch.get_num_threads()
    asked = list(batch_sizes), cfg.rounds, drafted, sampling.max_new_tokens
    key = content_hash([models, machine, asked], length=16)
    paths = [folder / f"measured-{key}-{number}.json" for number in range(len(pairs))]
    if all(path.exists() for path in paths):
        tables = [LoadCost.load(path) for path in paths]
    else:
        about = {"machine": machine[0], "rounds": cfg.rounds, "batch_sizes": list(batch_sizes)}
        found = measured_costs(pair, prompts, sampling, batch_sizes, drafted, cfg.rounds, about)
        for path, (costs, entries) in zip(paths, found, strict=True):
            write_text(path.with_suffix(".csv"), entries.to_csv(index=False))
            costs.save(path)
        tables = [costs for costs, _ in found]
    known = []
    for one, path, costs, named in zip(pairs, paths, tables, methods, strict=True):
        known.append(with_rules(costs, one, named, prompts, sampling, batch_sizes, cfg.rounds))
        if known[-1] is not costs:
            known[-1].save(path)
    return known
