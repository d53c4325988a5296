"""python -m analysis.advise pair.target=T pair.draft=[D1,D2] prompts.path=P.jsonl batch_sizes=[1,4,16]: which draft, how far?

From two or more models and a prompts file to one sentence per batch size. The prompts are split into dev and test by their
ids. The target answers all of them once; every draft is recorded beside it; what forwards cost is measured on this
machine, modelled from a device's peak figures (hardware=h100) or read from a file (costs=FILE). Then every policy of the
grid is served at every batch size by simulation: chosen on dev, reported on test. A second call with other batch sizes, costs
or policies keeps responses and recordings and only replays. Files:

    advice      one line per batch size, draft and method: its setting, tokens per second, speed-up over plain decoding
    advice.md   the sentences and the table
    advice.png  speed-up over batch size (also pdf and svg)
    costs-N.json  the cost table of draft N
    exports/    files for transformers, vLLM, SGLang, llama.cpp and this package
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.loads import speedups
from analysis.loads.choosing import FIXED, Candidate, best_lengths, choose, sentences
from analysis.loads.costs import costs_of
from analysis.loads.exports import write_exports
from analysis.loads.recorded import RecordedPair
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import markdown, save_table, show
from analysis.tables.grid import PLAIN, Setting, expand
from analysis.tables.workbench import Workbench
from toolkit.config import instantiate, plain
from toolkit.errors import InputError
from toolkit.io import content_hash, write_text
from toolkit.pair import ModelPair
from toolkit.prompts import Prompt
from toolkit.stage import command, open_stage, prompt_files
from toolkit.tracking import log_image, log_table, wandb_run

IGNORED = (
    "batch_sizes",
    "costs",
    "hardware",
    "grid",
    "track",
    "resamples",
    "confidence",
    "seed",
    "rounds",
    "drops",
    "hidden",
)
FEWEST = 8  # prompts; fewer cannot be split into two parts that say anything


def run(cfg: Any) -> Path:
    """Record, cost, simulate, advise; returns the output folder."""
    sizes = sorted(set(plain(cfg.batch_sizes)))
    pair, sampling = instantiate(cfg.pair), instantiate(cfg.sampling)
    if not pair.drafts:
        raise InputError("advice needs a draft model: expected pair.draft=NAME or pair.draft=[NAME, NAME], got none")
    parts = split(instantiate(cfg.prompts).load())
    stage = open_stage("advise", cfg, inputs=prompt_files(cfg), ignore=IGNORED)
    stage.start()
    wanted = _settings(cfg)
    candidates = []
    names = _names(cfg, pair)
    for number, name in enumerate(names):
        one = _single(pair, number, plain(cfg.heads), name)
        dev, test = (
            RecordedPair(
                Workbench(one, prompts, sampling, cfg.batch_size), wanted, stage.folder, cfg.max_drafted, cfg.hidden
            )
            for prompts in parts
        )
        for method, reason in dev.left_out.items():
            print(f"{name}: {method} left out, {reason}")
        asked = [prompt.content for prompt in parts[0]]
        costs = costs_of(cfg, one, number, asked, sampling, sizes, stage.folder)
        costs.save(stage.folder / f"costs-{number}.json")
        candidates.append(Candidate(name, dev, test, costs))
    table = choose(candidates, sizes, cfg.drops, Bootstrap(cfg.resamples, cfg.confidence, cfg.seed))
    _publish(cfg, stage.folder, table, candidates, sizes)
    return stage.finish(num_prompts=[len(part) for part in parts], drafts=names)


def split(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Dev and test prompts: by a hash of the id, so that a prompt stays on its side when others are added.

    Raises InputError for too few prompts, or if all fall on one side.
    """
    if len(prompts) < FEWEST:
        raise InputError(f"expected at least {FEWEST} prompts to split into dev and test, got {len(prompts)}")
    ordered = sorted(prompts, key=lambda prompt: content_hash([str(prompt.id)]))
    chosen = {str(prompt.id) for prompt in ordered[: len(ordered) // 2]}
    dev, test = ([prompt for prompt in prompts if (str(prompt.id) in chosen) == side] for side in (True, False))
    if not dev or not test:
        raise InputError("expected prompts with different ids to split into dev and test")
    return dev, test


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The table as people read it: fastest first, what loses to plain decoding marked."""
    ordered = table.sort_values(["batch", "tokens_per_second"], ascending=[True, False])
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
    """The grid's, and every fixed length with greedy drafts, for engines that draft so."""
    settings = expand(plain(cfg.grid), with_plain=True, max_drafted=cfg.max_drafted)
    greedy = [
        replace(setting, parameters={**setting.parameters, "draft_temperature": 0})
        for setting in settings
        if setting.method == FIXED and cfg.sampling.temperature > 0
    ]
    return [*settings, *greedy]


def _names(cfg: Any, pair: ModelPair) -> list[str]:
    given = plain(cfg.pair).get("draft") or plain(cfg.pair).get("drafts") or []
    given = [given] if isinstance(given, str) else list(given)
    if len(given) != len(pair.drafts):
        return [f"draft {number}" for number in range(len(pair.drafts))]
    short = [Path(name).name for name in given]
    return short if len(set(short)) == len(short) else [str(name) for name in given]


def _single(pair: ModelPair, number: int, heads: list[str | None] | None, name: str) -> ModelPair:
    """The target with one of the drafts, and its heads."""
    if heads is not None and len(heads) != len(pair.drafts):
        raise InputError(f"expected a head (or null) for each of {len(pair.drafts)} drafts, got heads={heads}")
    head = heads[number] if heads is not None else pair.head
    return replace(pair, draft=pair.drafts[number], drafts=(), head=head, name=name)


def _publish(
    cfg: Any, folder: Path, table: pd.DataFrame, candidates: Sequence[Candidate], sizes: Sequence[int]
) -> None:
    said = sentences(table)
    save_table(table, folder, "advice")
    source = candidates[0].costs.source
    about = f"costs {source}" + ("" if source == "measured" else ", not measured")
    figure = speedups(table, folder / "advice.png", about)
    answer = table[table.advised & (table.batch == min(sizes))].iloc[0]
    best = _best_draft(table, candidates, answer)
    where = dict(zip([one.draft for one in candidates], _sources(cfg, candidates), strict=True))
    overrides = [f"method={answer.method}", *_overrides(answer.parameters)]
    if answer.method.startswith("batch_rate"):
        number = [one.draft for one in candidates].index(answer.draft)
        overrides.append(f"method.policy.costs={(folder / f'costs-{number}.json').resolve()}")
    greedy = best_lengths(table, best, greedy=True) if table.greedy.any() else None
    write_exports(folder / "exports", where[best], best_lengths(table, best, greedy=False), greedy, overrides)
    text = [f"# Advice ({about})", *(f"- {line}" for line in said), markdown(readable(table))]
    write_text(folder / "advice.md", "\n\n".join(text) + "\n")
    show(readable(table), f"{table.batch.nunique()} batch sizes, {about}")
    print("\n" + "\n".join(said) + f"\nfiles for serving engines: {folder / 'exports'}")
    with wandb_run("advise", plain(cfg), folder, track=cfg.track) as wandb:
        log_table(wandb, "advise/advice", table)
        log_image(wandb, "advise/speedup", figure)


def _best_draft(table: pd.DataFrame, candidates: Sequence[Candidate], answer: Any) -> str:
    if answer.method != PLAIN:
        return str(answer.draft)
    drafting = table[(table.method != PLAIN) & (table.batch == table.batch.min())]
    return str(drafting.loc[drafting.dev_tokens_per_second.idxmax()].draft) if len(drafting) else candidates[0].draft


def _sources(cfg: Any, candidates: Sequence[Candidate]) -> list[str]:
    given = plain(cfg.pair).get("draft") or plain(cfg.pair).get("drafts") or []
    given = [given] if isinstance(given, str) else list(given)
    return given if len(given) == len(candidates) else [one.draft for one in candidates]


def _overrides(parameters: str) -> list[str]:
    return [f"method.{name}={json.dumps(value)}" for name, value in json.loads(parameters).items() if value is not None]


if __name__ == "__main__":
    command("advise", run)
