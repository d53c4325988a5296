"""python -m analysis.compare prompts=toy_math: methods side by side, in speed, forward passes, memory, energy and quality.

On each group of prompts the settings take turns, in an order that rotates. Only decoding is timed and metered; the texts are
scored afterwards. A group is written whole when all settings have decoded it: run the same line again to go on. Files:

    parts/<group>.json   what each setting made of a group: texts, counts, seconds, joules, bytes of cache
    rows, prompts        one line per setting and group, and per setting and prompt
    comparison           one line per setting: parameters, figures with intervals, speed against the baseline's. With
                         `dev_share`, `dev_tokens_per_second` is measured on the groups to choose on, the rest on the others
    comparison.md, figures/  the same for readers
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("compare")

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from analysis import keys, quality
from analysis.reporting import method_table
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import save_table, show, show_page
from analysis.tables.grid import REFERENCES, Setting, expand
from analysis.tables.rows import labels
from analysis.tables.sweep_context import SweepContext
from toolkit.config import instantiate, plain
from toolkit.costs.energy import EnergyMeter
from toolkit.decoding import Decoded, Sampling, decode_measured
from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_json, write_text
from toolkit.models.prompts import without_grammars
from toolkit.runs.stage import check_some_done, finished_stage, open_stage, prompt_files, settings_hash
from toolkit.runs.tracking import log_image, log_summary, log_table, wandb_run

IGNORED = ("metrics", "dev_share", "cost_ratio", "baseline", "resamples", "confidence", "seed", "track")


def run(cfg: keys.Compare) -> Path:
    settings = expand(plain(cfg.grid))
    if bound := next((setting.method for setting in settings if setting.method in REFERENCES), None):
        raise InputError(f"grid.{bound}: expected methods that decode; leave it out with ~grid.{bound}")
    config = {**plain(cfg), "settings": {setting.name: setting.content for setting in settings}}
    digest = settings_hash("compare", cfg, IGNORED, judged_by=quality.configs(plain(cfg.metrics)))
    finished = finished_stage("compare", config, inputs=prompt_files(cfg), ignore=IGNORED)
    if finished is not None and finished.manifest.get("asked") == digest:
        show_page(finished.folder / "comparison.md")
        return finished.folder
    metrics = quality.build(plain(cfg.metrics))
    if wider := next((name for name, metric in metrics.items() if getattr(metric, "k", 1) > 1), None):
        raise InputError(
            f"metrics: {wider} needs several texts of every prompt, and each method writes one; expected k=1"
        )
    context = SweepContext(
        instantiate(cfg.pair),
        without_grammars(instantiate(cfg.prompts).load()),
        instantiate(cfg.sampling),
        cfg.group_size,
    )
    for setting in settings:
        context.prepare(setting)
    names = [setting.name for setting in settings]
    if cfg.baseline not in names:
        raise InputError(f"baseline: expected one of {'; '.join(names)}, got {cfg.baseline!r}")
    stage = open_stage("compare", config, inputs=prompt_files(cfg), ignore=IGNORED)
    meter = EnergyMeter(context.pair.devices)
    count, size = len(context.prompts), cfg.group_size
    if not 1 <= size <= count:
        raise InputError(f"group_size: expected 1 to {count} (the prompts), got {size}")
    groups = [range(first, min(first + size, count)) for first in range(0, count, size)]
    dev = method_table.groups_to_choose_on(len(groups), cfg.dev_share, cfg.seed)
    parts = [stage.folder / "parts" / f"{number:05d}.json" for number in range(len(groups))]
    _decode(context, settings, groups, parts, meter, cfg)
    loaded = [read_json(part) for part in parts]
    errors = [g["error"] for part in loaded for record in part["settings"].values() for g in record["generations"]]
    failed = [error for error in errors if error is not None]
    check_some_done(len(failed), len(errors), failed[0] if failed else None, stage.folder)
    rows, prompt_rows, unscored = method_table.group_rows(loaded, settings, groups, context, metrics, dev)
    save_table(rows, stage.folder, "rows")
    save_table(prompt_rows, stage.folder, "prompts")
    table = _table(rows, prompt_rows, settings, context, metrics, dev, cfg)
    save_table(table, stage.folder, "comparison")
    part = labels(cfg)
    title = f"{part['dataset']} {part['split']}, {table.prompts.max()} prompts, batch {cfg.group_size}"
    figures = method_table.draw(table, metrics, stage.folder / "figures", title)
    results = method_table.readable(table, metrics, cfg.cost_ratio)
    judged = {name: metric.provenance for name, metric in metrics.items() if metric.provenance}
    judge_notes = [f"{name}: {note}." for name, note in judged.items()]
    for name, reasons in unscored.items():
        pairs = ((setting, *entry) for setting, counted in reasons.items() for entry in counted.items())
        each = "; ".join(f"{setting} {count} ({reason})" for setting, reason, count in pairs)
        judge_notes.append(f"{name}: texts without a score, left out of it: {each}.")
    notes = " ".join(filter(None, [_energy_note(loaded), *judge_notes]))
    write_text(stage.folder / "comparison.md", method_table.as_markdown(title, results, figures, notes, cfg.cost_ratio))
    first = ("method", "setting", method_table.LABELS["tokens_per_second"], method_table.LABELS["speedup"])
    show(results, title, stage.folder / "comparison.md", first)
    _log(cfg, stage.folder, table, figures, title, context.parameters)
    counted = {"num_prompts": len(context.prompts), "num_groups": len(groups)}
    return stage.finish(**counted, **{"asked": digest}, judged=judged, unscored=unscored)


def _table(
    rows: pd.DataFrame,
    prompt_rows: pd.DataFrame,
    settings: Sequence[Setting],
    context: SweepContext,
    metrics: Mapping[str, quality.Metric],
    dev: list[int],
    cfg: keys.Compare,
) -> pd.DataFrame:
    """The comparison on all groups but those of `dev`; on these, how fast each setting was."""
    chosen_on = rows.group.isin(dev)
    bootstrap = Bootstrap(cfg.resamples, cfg.confidence, cfg.seed)
    reported = rows[~chosen_on], prompt_rows[~prompt_rows.group.isin(dev)]
    table = method_table.table_of(*reported, settings, metrics, cfg.baseline, cfg.cost_ratio, bootstrap)
    prompt_tokens = sum(len(context.pair.encode(prompt.content)) for prompt in context.prompts) / len(context.prompts)
    table = table.join(method_table.about_settings(settings, context)).assign(prompt_tokens=prompt_tokens)
    sums = rows[chosen_on].groupby("name", sort=False)[["num_generated", "seconds"]].sum()
    speeds = (sums.num_generated / sums.seconds).reindex([setting.name for setting in settings]).tolist()
    return table.assign(dev_tokens_per_second=speeds) if dev else table


def _log(
    cfg: keys.Compare,
    folder: Path,
    table: pd.DataFrame,
    figures: Sequence[Path],
    title: str,
    parameters: Mapping[str, Any],
) -> None:
    names = labels(cfg)
    tags = [names["dataset"], names["split"]]
    with wandb_run("compare", plain(cfg), folder, tags=tags, track=cfg.track, name=title) as wandb:
        best = table.loc[table.throughput.idxmax()]
        log_summary(wandb, {"best": best.method, "throughput": best.throughput, "speedup": best.speedup, **parameters})
        log_table(wandb, "compare/table", table)
        for figure in figures:
            log_image(wandb, f"compare/{figure.stem}", figure)


def _decode(
    context: SweepContext,
    settings: Sequence[Setting],
    groups: list[range],
    parts: list[Path],
    meter: EnergyMeter,
    cfg: keys.Compare,
) -> None:
    missing = [number for number, part in enumerate(parts) if not part.exists()]
    if not missing:
        return
    for setting in settings:  # first calls load and allocate
        for _ in range(cfg.warmup):
            _decoded(context, setting, groups[0])
    idle = meter.measure_idle(cfg.idle_seconds) if cfg.idle_seconds else None
    for number in tqdm(missing, desc="compare", unit="group"):
        turns = [*settings[number % len(settings) :], *settings[: number % len(settings)]]
        records = {}
        for setting in turns:
            with meter:
                decoded = _decoded(context, setting, groups[number])
            records[setting.name] = {
                "seconds": meter.energy.seconds,
                "energy": asdict(meter.energy),
                "cache_bytes": decoded.cache_bytes,
                "generations": [asdict(generation) for generation in decoded.generations],
            }
        write_json(parts[number], {"idle_watts": idle, "settings": records})


def _decoded(context: SweepContext, setting: Setting, group: range) -> Decoded:
    """One setting decodes one group, each prompt with the random stream it has everywhere."""
    sampling: Sampling = context.sampling
    prompts = [context.prompts[i].content for i in group]
    return decode_measured(
        context.pair, prompts, context.methods[setting.name], sampling, batch_size=len(group), row_ids=list(group)
    )


def _energy_note(parts: list[dict[str, Any]]) -> str:
    sources = sorted({record["energy"]["source"] for part in parts for record in part["settings"].values()})
    idle = sorted({f"{part['idle_watts']:.1f} W" for part in parts if part["idle_watts"] is not None})
    idle_power = f" Idle power {', '.join(idle)}, not subtracted." if idle else " Idle power was not measured."
    measured = not all(source.startswith("not available") for source in sources)
    return f"Energy: {'; '.join(sources)}." + (idle_power if measured else "")
