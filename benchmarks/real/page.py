"""outputs/real/index.md: the tables of the steps that are done."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd

from analysis.replay.predictor_costs import standing_of
from analysis.replay.predictor_rows import NAMES
from analysis.tables.bootstrap import Bootstrap, brackets
from analysis.tables.files import markdown, read_table
from analysis.tables.rows import COUNTS
from analysis.tables.standing import interval_text
from benchmarks.evidence import made_by
from benchmarks.real.folder import FOLDER, REPORTED, noted, rows_of, weights
from benchmarks.real.pair import PAIR, SIZES
from benchmarks.real.predictors import DOMAINS, ENDPOINTS
from benchmarks.real.settings import FIXED, PLAIN, choices, replayed
from benchmarks.speed import summary
from toolkit.costs.table import CostTable
from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_text

BOOTSTRAP = Bootstrap(4000, seed=0)


def page() -> None:
    """outputs/real/index.md, of the steps that are done."""
    steps = read_json(FOLDER / "steps.json")
    models = f"{weights().name} with {Path(noted('draft')).name}" if PAIR else "SmolLM2-135M-Instruct"
    parts = [f"# {models} on real questions", made_by("benchmarks.real", perf_counter())]
    minutes = ", ".join(f"{name} {step['seconds'] / 60:.1f}" for name, step in steps.items())
    disk = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) / 2**20
    memory = max(step["MiB"] for step in steps.values())
    parts.append(f"Minutes of each step: {minutes}. Memory: {memory:,} MiB at most. Disk: {disk:,.0f} MiB.")
    if ENDPOINTS.exists():
        parts.append(f"The target's answers are an engine's, in its rounding: `{' '.join(read_json(ENDPOINTS))}`.")
    parts += [f"## {title}\n\n" + "\n".join(lines()) for title, lines in SECTIONS.items() if ready(lines)]
    write_text(FOLDER / "index.md", "\n\n".join(parts) + "\n")
    print(f"output: {FOLDER / 'index.md'}")


def replay_table(temperature: int) -> Iterator[str]:
    """One line per method with its chosen setting: rates, and tokens per target time with paired intervals."""
    rows, chosen = replayed("test", temperature), choices(temperature)
    category = {row["id"]: row["category"] for row in rows_of(FOLDER / REPORTED)}
    by_method = {
        method: rows[(rows.method == method) & (rows.setting == setting)].set_index("prompt")
        for method, setting in chosen.items()
    }
    prompts = by_method[PLAIN].index
    values = {m: part.loc[prompts, [*COUNTS, "cost"]].to_numpy(float) for m, part in by_method.items()}
    names = [*COUNTS, "cost"]
    base = dict.fromkeys(values, FIXED) | {"lookup_rate": "prompt_lookup"}
    parts = max(("rate", "lookup_rate"), key=lambda name: speed_of(values[name].sum(0)))
    base["best_source"] = parts
    columns = ["method", "setting", "tokens / target forward", "draft forwards / token", "discard rate"]
    yield f"| {' | '.join(columns)} | verification rate | tokens / target time | gain |"
    yield "|---|---|---:|---:|---:|---:|---:|---|"
    for method, counts in values.items():
        sums = dict(zip(names, counts.sum(0), strict=True))
        produced = sums["num_generated"]
        speed, low, high = (float(x) for x in BOOTSTRAP.interval(counts, speed_of))
        gains = BOOTSTRAP.interval(
            np.concatenate([counts, values[base[method]]], 1),
            lambda totals: speed_of(totals[..., : len(names)]) / speed_of(totals[..., len(names) :]) - 1,
        )
        gain = "{:+.1%} [{:+.1%}, {:+.1%}]".format(*(float(x) for x in gains)) + f" over {base[method]}"
        yield (
            f"| {method} | {chosen[method] or '-'} | {produced / sums['num_target_calls']:.2f} | "
            f"{sums['num_draft_calls'] / produced:.2f} | {sums['num_discarded'] / produced:.2f} | "
            f"{sums['num_target_calls'] / produced:.2f} | {speed:.3f} [{low:.3f}, {high:.3f}] | "
            f"{'' if base[method] == method else gain} |"
        )
    yield from by_category(
        {method: counts[:, [COUNTS.index("num_generated"), -1]] for method, counts in values.items()},
        [category[prompt] for prompt in prompts],
    )


def by_category(values: dict[str, Any], categories: Sequence[str]) -> Iterator[str]:
    """Tokens per cost over those of plain decoding, a column per category; values: (tokens, cost) of every question."""
    groups = pd.Series(categories)
    yield ""
    yield f"Tokens per cost by category, x {PLAIN} ({groups.value_counts().min()} questions of each):"
    yield ""
    yield "| method | " + " | ".join(groups.unique()) + " |"
    yield "|---|" + "---:|" * groups.nunique()
    rates = {
        method: pd.DataFrame(counts).groupby(groups, sort=False).sum().pipe(lambda sums: sums[0] / sums[1])
        for method, counts in values.items()
    }
    for method, rate in rates.items():
        yield f"| {method} | " + " | ".join(f"{value:.2f}" for value in rate / rates[PLAIN]) + " |"


def kinds_table(temperature: int) -> Iterator[str]:
    """What predictors are worth by category, where it has questions enough, at every cost table."""
    texts = read_table(Path(noted("predictors")), "cost_texts")
    texts = texts[(texts.domain == DOMAINS[temperature]) & ~texts.method.str.contains(" of ")]
    category = pd.Series([row["category"] for row in rows_of(FOLDER / REPORTED)])
    enough = [name for name, count in category.value_counts(sort=False).items() if count >= SIZES.fewest]
    for costs, at_table in texts.groupby("costs", sort=False):
        columns: dict[str, list[str]] = {}
        for name in enough:
            lines = standing_of(at_table[at_table.row.map(category) == name], BOOTSTRAP)
            entries = [line for _, line in lines.iterrows()]
            columns = columns or {f"at costs {costs}": [NAMES.get(name, name) for name in lines.method]}
            columns[name] = [interval_text(line, "throughput", "{:.3f}") for line in entries]
            columns[f"share, {name}"] = [interval_text(line, "upper_bound_share", "{:.0%}") for line in entries]
        yield markdown(pd.DataFrame(columns)) + "\n"


def layer_tables() -> Iterator[str]:
    """Advice with both drafts, by cost table."""
    for path in sorted((FOLDER / "layer").glob("*.md")):
        yield f"### At costs {path.stem}\n"
        yield re.sub("^#+", "####", path.read_text("utf-8"), flags=re.MULTILINE)


def live_table(temperature: int, batch_size: int) -> Iterator[str]:
    """Seconds of decoding, in turns, and what they were measured on."""
    facts = read_json(FOLDER / "live.json")
    packed = "weights packed where that is faster" if facts["packed"] else "weights not packed"
    yield f"{facts['processor']}, {facts['threads']} threads, {facts['dtype']}, {packed}, torch {facts['torch']}."
    yield f"{facts['questions']} questions. Draft: {facts['draft'] or 'none'}."
    yield ""
    yield "| way | batch | tokens/s | x transformers | tokens / target forward | draft forwards / token | outside forwards |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    lines = pd.read_csv(FOLDER / f"live-{temperature}-{batch_size}.csv", keep_default_na=False)
    yield from summary(lines, batch_size)
    yield ""
    yield "The prompt's reading is left out of what the forward passes cost by the table of this machine. In brackets: 95 %"
    yield "intervals over the same questions, or ranges."
    yield ""
    yield f"| way | tokens per cost, x {PLAIN} | CPU seconds per token, x {PLAIN} |"
    yield "|---|---:|---:|"
    lines = lines.assign(cost=costs_of(lines, CostTable(**facts["costs"][str(batch_size)])))
    yield from beside_plain(lines)
    if batch_size == 1 and not PAIR:
        ways = lines.sort_values("group").groupby("decoder", sort=False)
        yield from by_category(
            {way: part[["tokens", "cost"]].to_numpy(float) for way, part in ways},
            [row["category"] for row in rows_of(FOLDER / "live.jsonl")],
        )


def costs_of(lines: pd.DataFrame, table: CostTable) -> Any:
    """What the target's and the draft's forward passes of each line cost, in seconds."""
    context = float(np.median(table.contexts))
    draft = table.draft(context) if table.draft_seconds else 0.0
    read = [sum(table.target(int(width), context) for width in widths.split()) for widths in lines.target_widths]
    return np.array(read) + draft * lines.draft_forwards


def beside_plain(lines: pd.DataFrame) -> Iterator[str]:
    """Tokens per cost of the forward passes, and CPU seconds per token, over those of plain decoding."""
    pivots = {
        name: lines.pivot(index="group", columns="decoder", values=name) for name in ("tokens", "cost", "cpu_seconds")
    }
    for name in lines.decoder.unique():
        values = np.concatenate([pivots[key][[name, PLAIN]].to_numpy(float) for key in pivots], 1)
        figures = (
            BOOTSTRAP.spread(values, lambda t: (t[..., 0] / t[..., 2]) / (t[..., 1] / t[..., 3]), "log"),
            BOOTSTRAP.spread(values, lambda t: (t[..., 4] / t[..., 0]) / (t[..., 5] / t[..., 1]), "log"),
        )
        cells = [f"{value:.2f} {brackets(f'{low:.2f}', f'{high:.2f}', len(values))}" for value, low, high in figures]
        yield f"| {name} | {' | '.join(cells)} |"


def tables_of(*keys: str) -> Callable[[], list[str]]:
    """The Markdown tables of noted folders."""

    def lines() -> list[str]:
        sequences = []
        for key in keys:
            folder = Path(noted(key))
            pages = [path.read_text("utf-8") for path in sorted(folder.glob("*.md")) if path.name != "README.md"]
            sequences += [re.sub("^#", "###", page, flags=re.MULTILINE) for page in pages]
        return sequences

    return lines


def alpha_table() -> list[str]:
    """Validation alpha, by depth, over the tokens that a draft was trained on in its full training."""
    run = Path(noted("draft")).parent
    curve = pd.read_csv(run / "metrics.csv")
    names = ["val/cross_entropy", *(name for name in curve if name.startswith("val/alpha"))]
    curve = curve[curve["val/alpha"].notna()][["step", *names]]
    curve = curve.iloc[1:-1]  # the first one is of the start, the last one of the best state again
    scores = read_json(run / "metrics.json")
    curve.insert(
        0, "training tokens, all epochs", (scores["tokens"] * (curve.step + 1) / (curve.step.max() + 1)).round()
    )
    start = {name: scores.get(name.replace("val/", "start/")) for name in names}
    rows = pd.concat([pd.DataFrame([{"training tokens, all epochs": 0, **start}]), curve.drop(columns="step")])
    return [markdown(rows.round(4))]


def products_line() -> str:
    speeds = read_json(FOLDER / "products.json")
    share = speeds["training"] / speeds["products"]
    return (
        f"{speeds['training']:.0f} response tokens per second in training, {speeds['products']:.0f} by its matrix products "
        f"alone: {share:.0%} of what these allow."
    )


def agreement_table() -> list[str]:
    tables = [read_table(Path(noted(f"agreement{T}")), "agreement").assign(T=T) for T in (0, 1)]
    shown = ["T", "method", "setting", "prompts", "replayed", "live", "difference", "low", "high"]
    return [markdown(pd.concat(tables)[shown].round(3))]


def llamacpp_table() -> list[str]:
    lines = ["| llama.cpp, 4-bit weights | tokens/s |", "|---|---:|"]
    for path in sorted(FOLDER.glob("llamacpp-*.csv")):
        values = pd.read_csv(path)[["tokens", "seconds"]].to_numpy(float)
        ends = BOOTSTRAP.spread(values, lambda totals: totals[..., 0] / totals[..., 1], "log")
        speed, low, high = (float(end) for end in ends)
        lines.append(
            f"| {path.stem.removeprefix('llamacpp-')} | {speed:.1f} {brackets(f'{low:.1f}', f'{high:.1f}', len(values))} |"
        )
    if len(lines) == 2:
        raise KeyError("llamacpp")
    return lines


def calls_table() -> list[str]:
    ways = {path.stem.removeprefix("calls-"): read_json(path) for path in sorted(FOLDER.glob("calls-*.json"))}
    if not ways:
        raise KeyError("calls")
    lines = ["| way | " + " | ".join(map(str, range(1, 11))) + " | sum |", "|---|" + "---:|" * 11]
    return lines + [
        f"| {name} | " + " | ".join(f"{value:.1f}" for value in values) + f" | {sum(values):.1f} |"
        for name, values in ways.items()
    ]


def greedy_table() -> list[str]:
    lines = ["| method | equal | gap of the two largest logits where they part |", "|---|---|---|"]
    rows = read_json(FOLDER / "greedy.json")
    return lines + [f"| {row['method']} | {row['equal']} of {row['of']} | {row['gaps'] or '-'} |" for row in rows]


def ready(lines: Callable[[], Any]) -> bool:
    """Whether the files of a section are there."""
    try:
        list(lines())
    except (KeyError, OSError, InputError):
        return False
    return True


def speed_of(totals: Any) -> Any:
    return totals[..., COUNTS.index("num_generated")] / totals[..., -1]


SECTIONS: dict[str, Callable[[], Any]] = {
    "Which draft, and what it is worth": tables_of("shapes", "worth"),
    "The draft's training": alpha_table,
    "What predicts acceptance": tables_of("predictors"),
    "Distillation beside bare matrix products": lambda: [products_line()],
    "By replay, T = 0": lambda: replay_table(0),
    "By replay, T = 1": lambda: replay_table(1),
    "Live, T = 0, batch 1": lambda: live_table(0, 1),
    "Live, T = 1, batch 1": lambda: live_table(1, 1),
    "Live, T = 0, batch 4": lambda: live_table(0, 4),
    "Live, T = 1, batch 4": lambda: live_table(1, 4),
    "llama.cpp": llamacpp_table,
    "Replay beside live decoding": agreement_table,
    "CPU seconds of the first ten calls": calls_table,
    "Greedy texts beside those of transformers": greedy_table,
    "Advice": tables_of("advice alone", "advice"),
}
if PAIR:
    SECTIONS |= {f"By category, T = {temperature}": partial(kinds_table, temperature) for temperature in DOMAINS}
    SECTIONS["Which draft: its own, or one layer of the target"] = layer_tables
