"""How much acceptance each multi-draft rule leaves on the table: analysis.acceptance prompts=toy_math.

Source: Khisti et al. (arXiv:2410.18234), Table 3, for any pair. Along target text, with p and q at every position, it measures
the mean acceptance of each rule with K candidates, the optimum of its scheme, and the gap between them. It also says which
tree to draft at given costs. At temperature 0 the candidates are the draft's K most probable tokens (MCSD, arXiv:2401.06706,
section 3). Files:

    sums, acceptance, alphabet, block_efficiency, advice  tables: see `analysis.multi_draft`
    acceptance.md     all of them as people read them
    figures/    acceptance-<dataset>.png: acceptance over K
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from analysis import keys
from analysis.figures import plots
from analysis.multi_draft import acceptance_table
from analysis.multi_draft.acceptance_table import TreeCost, advise, as_sentence, block_efficiency_table, readable_shapes
from analysis.multi_draft.target_texts import MethodRule, TargetText, Walk, alphabet_table
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import markdown, read_table, save_table, show, show_page
from analysis.tables.rows import labels
from analysis.tables.selection import as_one_part, check_comparable, load_rows
from data_gen.texts import fingerprints
from toolkit.config import instantiate, method_config, plain
from toolkit.errors import InputError, warn
from toolkit.files.atomic import write_text
from toolkit.models.generation_config import SAME as WARPING
from toolkit.models.prompts import without_grammars
from toolkit.runs.stage import finished_stage, open_stage, settings_hash
from toolkit.runs.tracking import log_image, log_lines, log_table, wandb_run

COSTS = ("cost_ratio", "node_cost", "target_seconds", "draft_seconds", "node_seconds")
LIMITS = ("max_levels", "max_nodes")
# Keys that the parts of the work do not depend on, or that name them themselves.
SHOWN = ("join", "sweeps", "resamples", "confidence", "track")
IGNORED = ("methods", "overrides", "num_drafts", "alphabet", *COSTS, *LIMITS, *SHOWN)


def measure_acceptance(cfg: keys.Acceptance) -> Path:
    """Measure every rule along the texts; returns the output folder."""
    cost = TreeCost.of(*(getattr(cfg, name) for name in COSTS))
    bootstrap = Bootstrap(cfg.resamples, cfg.confidence, cfg.seed)
    trees = as_one_part(load_rows(plain(cfg.sweeps), "sweeps")) if cfg.sweeps else None
    efficiency = None if trees is None else block_efficiency_table(trees, bootstrap)
    others = [read_table(folder, "sums") for folder in plain(cfg.join)]
    names = [_dataset(cfg), *(str(name) for frame in others for name in frame.dataset.unique())]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"join: two runs call their texts {twice[0]!r}; name them apart (dataset=NAME)")
    methods = list(dict.fromkeys(plain(cfg.methods)))
    if not methods:
        raise InputError("methods: expected names, e.g. methods=[specinfer,mcsd], got none")
    digest = settings_hash(
        "acceptance", cfg, IGNORED, methods_used=[plain(method_config(name, plain(cfg.overrides))) for name in methods]
    )
    finished = finished_stage("acceptance", cfg, ignore=IGNORED, repairs=True)
    if finished is not None and finished.manifest.get("asked") == digest:
        show_page(finished.folder / "acceptance.md")
        return finished.folder
    walk = _walk(cfg)
    method_rules = [MethodRule.of(name, plain(cfg.overrides), walk.sampling, len(walk.pair.drafts)) for name in methods]
    stage = open_stage("acceptance", cfg, ignore=IGNORED, repairs=True)
    check_comparable([stage.folder, *map(Path, plain(cfg.join))])
    with tqdm(total=len(walk.source), desc="acceptance", unit="prompt") as bar:
        own_sums = walk.run(method_rules, stage.folder / "parts", bar.update)
    if own_sums.empty:
        raise InputError("acceptance: no prompt gave a text of at least one token")
    own_sums.insert(0, "dataset", _dataset(cfg))
    sums = pd.concat([own_sums, *others], ignore_index=True)
    table = acceptance_table.acceptance_table(sums, bootstrap)
    advice = advise(table, cost, *(getattr(cfg, name) for name in LIMITS))
    tables = {"sums": own_sums, "acceptance": table, "advice": advice}
    if efficiency is not None:
        tables["block_efficiency"] = efficiency
    if cfg.alphabet:
        tables["alphabet"] = alphabet_table(walk, stage.folder / "parts")
    _publish(stage.folder, tables, cost, cfg)
    return stage.finish(
        num_texts=own_sums.prompt.nunique(), num_positions=int(table.positions.max()), **{"asked": digest}
    )


def _walk(cfg: keys.Acceptance) -> Walk:
    """The walk along the responses of a folder, or along prompts that the target has yet to respond to."""
    if cfg.responses is None:
        source: list[Any] = without_grammars(instantiate(cfg.prompts).load())
        responses = None
    else:
        responses = instantiate(cfg.read)(cfg.responses)
        source = [TargetText(str(row["id"]), row["prompt_ids"], row["token_ids"]) for row in responses.rows]
        source = source[: plain(cfg.prompts).get("limit")]
    num_drafts, options = sorted(set(plain(cfg.num_drafts))), (cfg.draft_temperature, cfg.batch_size, cfg.optimum)
    pair, sampling = instantiate(cfg.pair), instantiate(cfg.sampling)
    walk = Walk(pair, source, sampling, num_drafts, cfg.positions, cfg.draws, cfg.seed, *options)
    if responses is not None:
        fingerprints(pair, responses)
        drawn, read = ({name: getattr(each, name) for name in WARPING} for each in (responses.sampling, walk.sampling))
        if drawn != read:
            warn(f"{cfg.responses}: texts drawn at {drawn}, p and q read at {read}: decoding reaches other texts")
    return walk


def _dataset(cfg: keys.Acceptance) -> str:
    if cfg.responses is not None and cfg.dataset is None:
        return Path(cfg.responses).name
    names = labels(cfg)
    return f"{names['dataset']} {names['split']}".strip()


def _publish(folder: Path, tables: dict[str, pd.DataFrame], cost: TreeCost, cfg: keys.Acceptance) -> None:
    for name, table in tables.items():
        save_table(table, folder, name)
    table, advice = tables["acceptance"], tables["advice"]
    figures = {}
    for dataset, rows in table.groupby("dataset", sort=False):
        path = folder / "figures" / ("acceptance-" + re.sub(r"[^\w.-]+", "_", str(dataset)) + ".png")
        figures[str(dataset)] = plots.acceptance(rows, path, f"{dataset}, {acceptance_table.headline(rows)}")
    sentences = [as_sentence(rows, cost) for _, rows in advice.groupby("dataset", sort=False)]
    parts = ["# Acceptance", acceptance_table.as_markdown(table)]
    parts += [f"![{path.stem}](figures/{path.name})" for path in figures.values()]
    if "block_efficiency" in tables:
        for dataset, rows in tables["block_efficiency"].groupby("dataset", sort=False):
            parts += [f"## {dataset}: tokens per target forward pass", markdown(readable_shapes(rows))]
    parts += ["## Advice", "\n".join(f"- {sentence}" for sentence in sentences), markdown(advice)]
    page = write_text(folder / "acceptance.md", "\n\n".join(parts) + "\n")
    datasets = list(figures)
    options = {"tags": datasets, "name": " ".join(datasets), "inputs": plain(cfg.join), "track": cfg.track}
    with wandb_run("acceptance", plain(cfg), folder, **options) as wandb:
        for name, frame in tables.items():
            log_table(wandb, f"acceptance/{name}", frame)
        for dataset, path in figures.items():
            log_image(wandb, f"acceptance/{path.stem}", path)
            curves = table[table.dataset == dataset]
            title = f"{dataset}: acceptance over the number of candidates"
            log_lines(wandb, f"acceptance/{path.stem}-curves", curves, "K", "acceptance", "method", title)
    for dataset, rows in table.groupby("dataset", sort=False):
        show(acceptance_table.compact(rows), f"{dataset}: acceptance, {acceptance_table.headline(rows)}", page)
    for dataset, rows in tables.get("block_efficiency", table[:0]).groupby("dataset", sort=False):
        show(readable_shapes(rows), f"{dataset}: tokens per target forward pass, {rows.prompts.iloc[0]} prompts", page)
    print("\nadvice:")
    for sentence in sentences:
        print(f"  {sentence}")
