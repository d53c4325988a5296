"""Which draft, how far: analysis.advise pair.target=T pair.draft=[D1,D2] prompts.path=P.jsonl batch_sizes=[1,4,16].

The prompts are split into dev and test by their ids. The target answers all of them once, and every draft is recorded along
the answers. Forward passes are measured here, modelled (hardware=h100), or read from a file (costs=FILE). Every policy of the
grid is then simulated at every batch size, chosen on dev and reported on test. A second call with other batch sizes, costs or
policies only replays. A target alone (pair.draft=null) is advised on prompt lookup, and told how to make a draft.

    advice      one line per batch size, draft and method: its setting, tokens per second, speed-up over autoregressive decoding
    advice.md   the sentences and the table
    advice.png  speed-up over batch size (also pdf and svg)
    schedule    the best fixed draft length by batch size and context, of the exported draft: from one recording, no intervals
    costs-N.json  the cost table of draft N; of a target alone costs-0.json
    exports/    files for transformers, vLLM, SGLang, TensorRT-LLM, llama.cpp and this package
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from analysis import keys
from analysis.figures.plots import speedups
from analysis.loads.choosing import (
    FIXED,
    LOOKUP,
    NO_DRAFT,
    Candidate,
    best_lengths,
    best_p_min,
    choose,
    sentences,
    speed,
)
from analysis.loads.costs import costs_of, costs_of_files
from analysis.loads.exports import engine_notes, next_line, write_exports
from analysis.loads.rates import by_context, survival
from analysis.loads.recorded import HEADLESS, RecordedPair, needs_no_draft
from analysis.tables.bootstrap import Bootstrap, spread_name
from analysis.tables.files import markdown, save_table, show
from analysis.tables.grid import PLAIN, Setting, expand
from analysis.tables.sweep_context import SweepContext
from toolkit.config import instantiate, override, plain
from toolkit.costs.load import LoadCost
from toolkit.drafts.kinds import gives_blocks
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash, write_text
from toolkit.files.text import visible
from toolkit.models.pair import ModelPair, draft_command
from toolkit.models.prompts import Prompt, first_ids, without_grammars
from toolkit.runs.stage import open_stage, prompt_files
from toolkit.runs.tracking import log_image, log_table, wandb_run
from toolkit.sampling import Sampling

REPLAYED = (
    "batch_sizes",
    "costs",
    "hardware",
    "grid",
    "rounds",
    "drops",
    "hidden",
    "responses",
    "cost_ratio",
    "blocks",
)
IGNORED = (*REPLAYED, "track", "resamples", "confidence", "seed")
FEWEST = 8  # prompts; fewer cannot be split into two parts that say anything
DRAFT_TOKENS = 25_000  # response tokens that a draft is made from
DRAFT_SHARE = 7  # all of `+experiment=draft` over its responses alone, in time (SmolLM2-135M, two cores: 50 minutes)


def advise_by_replay(cfg: keys.Advise) -> Path:
    """Record, simulate and advise; returns the output folder."""
    sizes = sorted(set(plain(cfg.batch_sizes)))
    if not sizes:
        raise InputError("batch_sizes: expected [N, ...], got []")
    pair, sampling = instantiate(cfg.pair), instantiate(cfg.sampling)
    # Faults of files are reported before anything is recorded.
    from_files = costs_of_files(cfg, max(len(pair.drafts), 1), sizes)
    for draft, table in zip(pair.drafts, from_files, strict=False):
        if gives_blocks(draft):
            table.apart("drafts that give blocks")
    parts = split(without_grammars(instantiate(cfg.prompts).load()))
    stage = open_stage("advise", cfg, inputs=prompt_files(cfg), ignore=IGNORED)
    stage.start()
    ends = min((int(table.target.width[-1]) - 1 for table in from_files if table.is_published), default=None)
    bound, heads = None if cfg.max_drafted == "auto" else cfg.max_drafted, plain(cfg.heads)
    settings = expand(plain(cfg.grid), with_plain=True, max_drafted=bound)
    if from_files:
        settings = _priced(settings, from_files[0], alone=not pair.drafts)
    if sampling.temperature > 0:  # every fixed length with greedy drafts, too, for engines that draft so
        fixed = [setting for setting in settings if setting.method == FIXED]
        settings += [replace(each, parameters={**each.parameters, "draft_temperature": 0}) for each in fixed]
    if heads is not None and len(heads) != len(pair.drafts):
        raise InputError(f"expected a head (or null) for each of {len(pair.drafts)} drafts, got heads={heads}")
    sources, names = drafts_of(cfg, pair)
    each = zip(pair.drafts, names, heads or [pair.head] * len(names), strict=True)
    singles = [replace(pair, draft=draft, drafts=(), head=head, name=name) for draft, name, head in each]
    shared = [*parts["dev"], *parts["test"]], sampling, cfg.batch_size
    candidates = _recorded(
        stage.folder, (cfg.max_drafted, cfg.hidden, ends), pair, singles, shared, len(parts["dev"]), settings
    )
    tables = costs_of(cfg, singles or [pair], sizes)
    for number, candidate in enumerate(candidates):
        costs, path = tables[number % len(tables)], stage.folder / f"costs-{number % len(tables)}.json"
        candidate.recorded.costs = (costs, costs.save(path))
    widest = 1 + max(candidate.recorded.deepest for candidate in candidates)
    for beyond in dict.fromkeys(table.beyond(1, widest) for table in tables):
        if beyond:
            print(f"costs: {beyond}: the last slope continues there")
    table = choose(candidates, sizes, cfg.drops, Bootstrap(cfg.resamples, cfg.confidence, cfg.seed))
    _publish(cfg, stage.folder, table, candidates, sources, names)
    return stage.finish(num_prompts={name: len(part) for name, part in parts.items()}, drafts=names)


def split(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Dev and test: halves by the order of a hash of the ids, of its first one where a prompt has several.

    Raises InputError for too few prompts, or different ones.
    """
    if len(prompts) < FEWEST:
        raise InputError(f"expected at least {FEWEST} prompts to split into dev and test, got {len(prompts)}")
    ids = first_ids(prompts)
    ordered = sorted({*ids}, key=lambda name: content_hash([name]))
    on_dev = set(ordered[: round(len(ordered) / 2)])
    if not 0 < len(on_dev) < len(ordered):
        raise InputError("expected different prompts to split into dev and test")
    parts: dict[str, list[Prompt]] = {"dev": [], "test": []}
    for prompt, first in zip(prompts, ids, strict=True):
        parts["dev" if first in on_dev else "test"].append(prompt)
    return parts


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The table as people read it: fastest first, what loses to autoregressive decoding marked."""
    ordered = table.sort_values(["batch", "speedup"], ascending=[True, False])
    return pd.DataFrame({
        "batch": ordered.batch,
        "draft": ordered.draft,
        "method": [f"{row.method} {row.setting}".strip() for row in ordered.itertuples()],
        "tokens/s": ordered.tokens_per_second.map("{:.4g}".format),
        "times plain": [speed(row) for row in ordered.itertuples()],
        "drafted": ordered.drafted_per_round.map("{:.2f}".format),
        "note": [
            "advised" if row.advised else "slower than plain" if row.loses else "" for row in ordered.itertuples()
        ],
    })  # fmt: skip


def _recorded(
    folder: Path,
    depth: tuple[int | Literal["auto"], bool, int | None],
    pair: ModelPair,
    singles: Sequence[ModelPair],
    shared: tuple[Sequence[Prompt], Sampling, int],
    num_dev: int,
    settings: Sequence[Setting],
) -> list[Candidate]:
    """A candidate per draft, and one for what needs none; prints what is left out. Raises InputError if nothing is left.

    depth  what `RecordedPair` takes: most tokens of a round, whether states are recorded, where the cost table ends
    """

    def candidate(pair: ModelPair, settings: Sequence[Setting]) -> Candidate:
        recorded = RecordedPair(SweepContext(pair, *shared), settings, folder, *depth)
        for method, reason in recorded.left_out.items():
            hint = "; heads=[FOLDER] names one" if reason == HEADLESS else ""
            print(f"{pair.name}: {method} left out, {reason}{hint}")
        usable = recorded.recording.usable  # of the prompts, dev first
        dev = [number for number, row in enumerate(usable) if row < num_dev]
        test = list(range(len(dev), len(usable)))
        if not dev or not test:
            raise InputError(
                f"{pair.name}: expected responses to dev and to test prompts, got {len(dev)} and {len(test)}"
            )
        return Candidate(pair.name, recorded, dev, test)

    drafting = [setting for setting in settings if setting.method == PLAIN or not needs_no_draft(setting)]
    copying = [setting for setting in settings if needs_no_draft(setting)]
    if len(copying) == 1:
        pair.check_has_draft("a grid of methods that do not copy tokens")
    elif not singles and len(drafting) > 1:
        methods = dict.fromkeys(setting.method for setting in drafting if setting.method != PLAIN)
        print(f"left out, as they need a draft model: {', '.join(methods)}")
    candidates = [candidate(single, drafting) for single in singles if len(drafting) > 1]
    alone = replace(pair, draft=None, drafts=(), head=None, name=NO_DRAFT)
    return [*candidates, candidate(alone, copying)] if len(copying) > 1 else candidates


def _priced(settings: list[Setting], costs: LoadCost, alone: bool) -> list[Setting]:
    """The settings whose rounds a table prices; prints why others are left out. Raises InputError if none of these drafts.

    alone  there is no draft model
    """
    try:
        costs.apart("copied tokens")
    except InputError as error:
        drafting = [setting for setting in settings if setting.method == PLAIN or not needs_no_draft(setting)]
        if alone or len(drafting) == 1:
            raise
        print(f"left out: {error}")
        return drafting
    return settings


def drafts_of(cfg: keys.Advise, pair: ModelPair) -> tuple[list[str], list[str]]:
    """Where each draft of the pair comes from, and a short name of its own for it."""
    sources = plain(cfg.pair).get("draft") or plain(cfg.pair).get("drafts") or []
    sources = [str(name) for name in ([sources] if isinstance(sources, str) else sources)]
    if len(sources) != len(pair.drafts):
        sources = [f"draft {number}" for number in range(len(pair.drafts))]
    short = [Path(name).name for name in sources]
    names = short if len(set(short)) == len(short) else sources
    return sources, [name if names.count(name) == 1 else f"{name} ({n})" for n, name in enumerate(names)]


def _export(
    folder: Path,
    table: pd.DataFrame,
    name: str,
    source: str | None,
    recorded: RecordedPair,
    overrides: list[str],
) -> tuple[list[str], pd.DataFrame | None]:
    """Write the files for engines, and the table `schedule`; returns what engines do otherwise, and that table.

    name, source  of the draft that they are for; None: no draft model, which has neither
    """
    greedy = best_lengths(table, name, greedy=True) if table.greedy.any() else None
    lengths = best_lengths(table, name, greedy=False, method=FIXED if source else LOOKUP)
    if source is None:
        write_exports(folder / "exports", None, lengths, greedy, overrides)
        return [], None
    schedule = lengths if greedy is None else greedy
    alive = survival(recorded, greedy is not None, max(schedule.values()))
    method: Any = recorded.context.methods.get(best_p_min(table, name, greedy is not None) or "")
    p_min = method and (method.max_drafted, method.policy.threshold)
    write_exports(folder / "exports", source, lengths, greedy, overrides, alive.tolist(), p_min)
    contexts, longest = None, survival(recorded, False)
    if len(longest):
        assert recorded.costs is not None
        blocks = gives_blocks(recorded.context.pair.draft)
        contexts = by_context(recorded.costs[0], sorted(lengths), longest, blocks)
        save_table(contexts, folder, "schedule")
    return engine_notes(source, schedule), contexts


def _publish(
    cfg: keys.Advise,
    folder: Path,
    table: pd.DataFrame,
    candidates: Sequence[Candidate],
    sources: Sequence[str],
    names: Sequence[str],
) -> None:
    """Write, draw, export, print and log the answer. Exports are of the draft that is advised for the smallest batch size."""
    save_table(table, folder, "advice")
    by_name = {candidate.draft: candidate.recorded for candidate in candidates}
    first = candidates[0].recorded
    assert first.costs is not None
    tables = [candidate.recorded.costs[0] for candidate in candidates if candidate.recorded.costs is not None]
    beyond = {
        batch: next(filter(None, (each.beyond(batch) for each in tables)), None) for batch in table.batch.unique()
    }
    cost_note, smallest = first.costs[0].whose, int(table.batch.min())
    if first.costs[0].engine is not None:
        beyond = {batch: "; ".join(filter(None, [cost_note, note])) for batch, note in beyond.items()}
    lines = sentences(table, beyond)
    figure = speedups(table, folder / "advice.png", cost_note)
    answer = table[table.advised & (table.batch == smallest)].iloc[0]
    source_of: dict[str, str | None] = {NO_DRAFT: None, **dict(zip(names, sources, strict=True))}
    exported = answer.draft
    if answer.method == PLAIN or source_of[exported] is None:  # serving engines are told of a draft, if there is one
        drafting = table[(table.method != PLAIN) & (table.batch == smallest)]
        models = drafting[drafting.draft != NO_DRAFT]
        drafting = models if len(models) else drafting
        exported = drafting.draft[drafting.dev_times_plain.idxmax()]
    recorded = by_name[answer.draft]
    setting = next(s for s in recorded.settings if (s.method, s.label) == (answer.method, answer.setting))
    overrides = [override(name, value) for name, value in recorded.overrides(setting, smallest).items()]
    notes, contexts = _export(folder, table, exported, source_of[exported], by_name[exported], overrides)
    text = [f"# Advice ({cost_note})", *(f"- {visible(line)}" for line in lines), markdown(readable(table))]
    if contexts is not None:
        text += [f"Fixed lengths of {visible(exported)} by context, without intervals:", markdown(contexts)]
    write_text(folder / "advice.md", "\n\n".join(text) + "\n")
    title = (
        f"batch size {', '.join(map(str, table.batch.unique()))}; {cost_note}; settings of dev prompts, numbers of test "
        f"({spread_name(table.requests.min(), cfg.confidence)})"
    )
    show(readable(table), title, folder / "advice.md", ("batch", "method", "times plain", "note", "tokens/s"))
    print(visible("\n" + "\n".join(lines)))
    alone = f"vllm, tensorrt_llm and sglang_adaptive by batch size, the others for batch size {smallest}"
    if (table.method == FIXED).any():
        print(f"files for serving engines: {folder / 'exports'} ({alone})")
    for note in notes:
        print(visible(note))
    if answer.method != PLAIN:
        print(next_line(cfg, overrides, source_of[answer.draft], smallest))
    if not sources:  # the command that makes a draft of the target, and how long it takes at its speed
        speed, prompts = first.target_speed, plain(cfg.prompts).get("path") or "FILE.jsonl"
        minutes = DRAFT_SHARE * DRAFT_TOKENS / speed / 60
        line = draft_command(str(plain(cfg.pair)["target"]), str(prompts))
        work = f"{DRAFT_TOKENS:,} response tokens at {speed:.3g} tokens/s, and training on them"
        print(f"a draft of this target, in about {minutes:.0f} minutes ({work}): {line}")
    with wandb_run("advise", plain(cfg), folder, track=cfg.track) as wandb:
        log_table(wandb, "advise/advice", table)
        log_image(wandb, "advise/speedup", figure)
