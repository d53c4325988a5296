"""python -m analysis.advise pair.target=T pair.draft=[D1,D2] prompts.path=P.jsonl batch_sizes=[1,4,16]: which draft, how far?

From two or more models and a prompts file to one sentence per batch size. The prompts are split into dev and test by their
ids. The target answers all of them once, and every draft is recorded along the answers. The cost of forward passes is measured
on this machine, modelled from a device's peak figures (hardware=h100), or read from a file (costs=FILE). A simulation then
serves every policy of the grid at every batch size. Settings are chosen on dev and reported on test. A second call with
other batch sizes, costs or policies keeps responses and recordings and only replays. With train_heads=true two further
parts of the prompts train and calibrate heads for every draft. The advice then compares these with the other methods.

With responses=FILE.jsonl a serving engine's own counts speak for a draft length: see `analysis.loads.observed`.

    advice      one line per batch size, draft and method: its setting, tokens per second, speed-up over autoregressive decoding
    advice.md   the sentences and the table
    advice.png  speed-up over batch size (also pdf and svg)
    costs-N.json  the cost table of draft N
    exports/    files for transformers, vLLM, SGLang, llama.cpp and this package
"""

from __future__ import annotations

if __name__ == "__main__":  # help and faults, before anything heavy is imported
    from toolkit.config.command_line import check_command_line

    check_command_line("advise")

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.loads import speedups
from analysis.loads.choosing import FIXED, Candidate, best_lengths, choose, sentences
from analysis.loads.costs import costs_of
from analysis.loads.exports import next_line, write_exports
from analysis.loads.observed import advise_from_counts
from analysis.loads.recorded import HEADLESS, RecordedPair
from analysis.loads.trained_heads import CALIBRATION, TRAINING, HeadTrainer, named_drafts, with_calibrated
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.console import show
from analysis.tables.files import markdown, save_table
from analysis.tables.grid import PLAIN, Setting, expand
from analysis.tables.workbench import Workbench
from toolkit.config import instantiate, override, plain
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash, write_text
from toolkit.models.pair import ModelPair
from toolkit.models.prompts import Prompt
from toolkit.runs.stage import command, open_stage, prompt_files
from toolkit.runs.tracking import log_image, log_table, wandb_run

REPLAYED = ("batch_sizes", "costs", "hardware", "grid", "rounds", "drops", "hidden", "responses", "cost_ratio")
IGNORED = (*REPLAYED, "track", "resamples", "confidence", "seed")
FEWEST = 8  # prompts; fewer cannot be split into two parts that say anything
SHARES = {"dev": 0.5, "test": 0.5}
FEWEST_TRAINED = 32
SHARES_TRAINED = {"dev": 3 / 16, "test": 3 / 16, TRAINING: 1 / 2, CALIBRATION: 1 / 8}


def run(cfg: Any) -> Path:
    """Record, cost, simulate, advise; returns the output folder."""
    if cfg.responses is not None:
        return advise_from_counts(cfg)
    sizes = sorted(set(plain(cfg.batch_sizes)))
    pair, sampling = instantiate(cfg.pair), instantiate(cfg.sampling)
    if not pair.drafts:
        raise InputError("advice needs a draft model: expected pair.draft=NAME or pair.draft=[NAME, NAME], got none")
    if cfg.train_heads and cfg.heads is not None:
        raise InputError("expected heads=[...] or train_heads=true, got both")
    drafts = named_drafts(cfg) if cfg.train_heads else []
    parts = split(instantiate(cfg.prompts).load(), cfg.train_heads)
    stage = open_stage("advise", cfg, inputs=prompt_files(cfg), ignore=IGNORED)
    stage.start()
    settings, heads = _settings(cfg), plain(cfg.heads)
    if cfg.train_heads:
        trained = {name: parts[name] for name in (TRAINING, CALIBRATION)}
        heads = HeadTrainer(cfg, stage.folder, trained, settings).heads(drafts)
        settings = with_calibrated(settings)
    if heads is not None and len(heads) != len(pair.drafts):
        raise InputError(f"expected a head (or null) for each of {len(pair.drafts)} drafts, got heads={heads}")
    sources, names = _drafts(cfg, pair)
    candidates = []
    for number, name in enumerate(names):
        head = heads[number] if heads is not None else pair.head
        single = replace(pair, draft=pair.drafts[number], drafts=(), head=head, name=name)
        dev, test = (
            RecordedPair(
                Workbench(single, parts[part], sampling, cfg.batch_size),
                settings,
                stage.folder,
                cfg.max_drafted,
                cfg.hidden,
            )
            for part in ("dev", "test")
        )
        for method, reason in dev.left_out.items():
            hint = "; train_heads=true trains one" if reason == HEADLESS and not cfg.train_heads else ""
            print(f"{name}: {method} left out, {reason}{hint}")
        candidates.append(Candidate(name, dev, test))
    singles = [candidate.dev.bench.pair for candidate in candidates]
    timed = [prompt.content for prompt in parts["dev"]]
    tables = costs_of(cfg, singles, timed, sampling, sizes, stage.folder)
    for number, (candidate, costs) in enumerate(zip(candidates, tables, strict=True)):
        candidate.dev.costs = candidate.test.costs = (costs, costs.save(stage.folder / f"costs-{number}.json"))
    table = choose(candidates, sizes, cfg.drops, Bootstrap(cfg.resamples, cfg.confidence, cfg.seed))
    _publish(cfg, stage.folder, table, candidates, sources)
    return stage.finish(num_prompts={name: len(part) for name, part in parts.items()}, drafts=names)


def split(prompts: Sequence[Prompt], train_heads: bool = False) -> dict[str, list[Prompt]]:
    """The prompts by part, disjoint: dev and test; and, where heads are trained, train and calibration.

    By the order of a hash of their ids, so that most prompts stay on their side when others are added.
    Raises InputError for too few prompts, or if a part has none.
    """
    fewest, shares = (FEWEST_TRAINED, SHARES_TRAINED) if train_heads else (FEWEST, SHARES)
    if len(prompts) < fewest:
        *first, last = shares
        raise InputError(
            f"expected at least {fewest} prompts to split into {', '.join(first)} and {last}, got {len(prompts)}"
        )
    ordered = sorted({str(prompt.id) for prompt in prompts}, key=lambda name: content_hash([name]))
    cumulative, above = 0.0, 0
    part_of: dict[str, str] = {}
    for name, share in shares.items():
        cumulative, below = cumulative + share, above
        above = round(cumulative * len(ordered))
        part_of |= dict.fromkeys(ordered[below:above], name)
    parts = {name: [prompt for prompt in prompts if part_of[str(prompt.id)] == name] for name in shares}
    if not all(parts.values()):
        raise InputError(f"expected prompts with different ids to split into {', '.join(shares)}")
    return parts


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The table as people read it: fastest first, what loses to autoregressive decoding marked."""
    ordered = table.sort_values(["batch", "speedup"], ascending=[True, False])
    return pd.DataFrame({
        "batch": ordered.batch,
        "draft": ordered.draft,
        "method": [f"{row.method} {row.setting}".strip() for row in ordered.itertuples()],
        "tokens/s": ordered.tokens_per_second.map("{:.4g}".format),
        "times plain": [f"{r.speedup:.2f} [{r.speedup_low:.2f}, {r.speedup_high:.2f}]" for r in ordered.itertuples()],
        "drafted": ordered.drafted_per_round.map("{:.2f}".format),
        "note": [
            "advised" if row.advised else "slower than plain" if row.loses else "" for row in ordered.itertuples()
        ],
    })  # fmt: skip


# -- inside -----------------------------------------------------------------------------------------------------------


def _settings(cfg: Any) -> list[Setting]:
    """The settings of the grid, and every fixed length with greedy drafts, for engines that draft so."""
    settings = expand(plain(cfg.grid), with_plain=True, max_drafted=cfg.max_drafted)
    greedy = [
        replace(setting, parameters={**setting.parameters, "draft_temperature": 0})
        for setting in settings
        if setting.method == FIXED and cfg.sampling.temperature > 0
    ]
    return [*settings, *greedy]


def _drafts(cfg: Any, pair: ModelPair) -> tuple[list[str], list[str]]:
    """The drafts as the config names them, and names that tell them apart."""
    sources = plain(cfg.pair).get("draft") or plain(cfg.pair).get("drafts") or []
    sources = [str(name) for name in ([sources] if isinstance(sources, str) else sources)]
    if len(sources) != len(pair.drafts):
        sources = [f"draft {number}" for number in range(len(pair.drafts))]
    short = [Path(name).name for name in sources]
    names = short if len(set(short)) == len(short) else sources
    return sources, [name if names.count(name) == 1 else f"{name} ({n})" for n, name in enumerate(names)]


def _publish(
    cfg: Any, folder: Path, table: pd.DataFrame, candidates: Sequence[Candidate], sources: Sequence[str]
) -> None:
    """Write, draw, export, print and log the answer. Exports are of the draft that is advised for the smallest batch size."""
    save_table(table, folder, "advice")
    assert candidates[0].dev.costs is not None
    source, smallest, lines = candidates[0].dev.costs[0].source, int(table.batch.min()), sentences(table)
    cost_note = f"costs {source}" + ("" if source == "measured" else ", not measured")
    figure = speedups(table, folder / "advice.png", cost_note)
    answer = table[table.advised & (table.batch == smallest)].iloc[0]
    best = answer
    if answer.method == PLAIN:
        drafting = table[(table.method != PLAIN) & (table.batch == smallest)]
        best = drafting.loc[drafting.dev_times_plain.idxmax()]
    number = [candidate.draft for candidate in candidates].index(best.draft)
    keys = candidates[number].dev.overrides(candidates[number].setting_of(answer))
    overrides = [override(name, value) for name, value in keys.items()]
    greedy = best_lengths(table, best.draft, greedy=True) if table.greedy.any() else None
    write_exports(folder / "exports", sources[number], best_lengths(table, best.draft, greedy=False), greedy, overrides)
    text = [f"# Advice ({cost_note})", *(f"- {line}" for line in lines), markdown(readable(table))]
    write_text(folder / "advice.md", "\n\n".join(text) + "\n")
    title = (
        f"batch size {', '.join(map(str, table.batch.unique()))}; {cost_note}; settings of dev prompts, numbers of test"
    )
    show(readable(table), title, folder / "advice.md", ("batch", "method", "times plain", "note", "tokens/s"))
    print("\n" + "\n".join(lines))
    alone = f"vllm.json by batch size, the others for batch size {smallest}"
    if (table.method == FIXED).any():
        print(f"files for serving engines: {folder / 'exports'} ({alone})")
    if answer.method != PLAIN:
        print(next_line(cfg, overrides, sources[number], smallest))
    with wandb_run("advise", plain(cfg), folder, track=cfg.track) as wandb:
        log_table(wandb, "advise/advice", table)
        log_image(wandb, "advise/speedup", figure)


if __name__ == "__main__":
    command("advise", run)
