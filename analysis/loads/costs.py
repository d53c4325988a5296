"""The cost table of a pair: from a file, modelled for a device, or measured here and kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

DRAFTED = (1, 3, 5, 8)  # draft lengths that are timed; the table interpolates the others


def costs_of(
    cfg: Any,
    pair: ModelPair,
    number: int,
    prompts: Sequence[Any],
    sampling: Sampling,
    batch_sizes: Sequence[int],
    folder: Path,
    methods: Mapping[str, Method],
) -> LoadCost:
    """The cost table of this pair's forwards at these batch sizes.

    If the forwards are measured here, the policies of `methods` are measured, too.

    cfg      costs (a file, or one per draft), hardware and devices, rounds
    number   the index of the pair's draft among the drafts
    folder   where a measurement is kept, under a hash of models, machine, threads, batch sizes, lengths and rounds
    """
    if cfg.costs is not None and cfg.hardware is not None:
        raise InputError("expected costs=FILE or hardware=NAME, got both")
    if cfg.costs is not None:
        files = plain(cfg.costs)
        files = [files] if isinstance(files, str) else files
        if len(files) not in (1, number + 1) and number >= len(files):
            raise InputError(f"expected one cost table, or one for each draft, got {len(files)}")
        return LoadCost.load(files[0] if len(files) == 1 else files[number])
    if cfg.hardware is not None:
        target, draft = _shapes(cfg, pair)
        return modelled(target, draft, cfg.hardware, cfg.devices, batch_sizes)
    return _measured(cfg, pair, prompts, sampling, batch_sizes, folder, methods)


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
    pair: ModelPair,
    prompts: Sequence[Any],
    sampling: Sampling,
    batch_sizes: Sequence[int],
    folder: Path,
    methods: Mapping[str, Method],
) -> LoadCost:
    models = [fingerprint(model) for model in (pair.target, pair.draft)]
    drafted = [length for length in DRAFTED if length <= cfg.max_drafted]
    device = torch.cuda.get_device_name(pair.device) if pair.device.type == "cuda" else pair.device.type
    machine = provenance()["machine"], device, str(pair.target.dtype), torch.get_num_threads()
    asked = list(batch_sizes), cfg.rounds, drafted, sampling.max_new_tokens
    key = content_hash([models, machine, asked], length=16)
    path = folder / f"measured-{key}.json"
    if path.exists():
        costs = LoadCost.load(path)
    else:
        about = {"machine": machine[0], "rounds": cfg.rounds, "batch_sizes": list(batch_sizes)}
        costs, cells = measured_costs(pair, prompts, sampling, batch_sizes, drafted, cfg.rounds, about)
        write_text(path.with_suffix(".csv"), cells.to_csv(index=False))
        costs.save(path)
    known = with_rules(costs, pair, methods, prompts, sampling, batch_sizes, cfg.rounds)
    if known is not costs:
        known.save(path)
    return known
