"""`make bench`: decoding speed beside `transformers`' own `generate`, on the toy pair and on a padded pair.

    python -m benchmarks.speed                      all tables: about 40 minutes on 2 quiet cores
    python -m benchmarks.speed toy queue            some of them
    python -m benchmarks.speed toy --prompts 2 --max-new-tokens 8      a small run

The tables are printed and written to outputs/benchmarks.md. One unit of work is one group of prompts (one batch)
decoded by one decoder. Decoders take turns on every group, in an order that rotates, so that other load of the machine
affects all of them alike. A warm-up comes first. Texts differ, so speeds are new tokens over seconds. Intervals are
over groups, all decoders by the same draws, and of fewer than 16 groups ranges (`analysis.tables.bootstrap`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from analysis.tables.bootstrap import Bootstrap, brackets
from benchmarks.decoders import Decoder, ForwardMeter, constant, engine, theirs
from benchmarks.evidence import made_by
from data_gen.held_out import load_frozen
from toolkit import ModelPair, config, generate
from toolkit.errors import InputError, answer_signals
from toolkit.files.atomic import write_text
from toolkit.integrations.transformers import assistant
from toolkit.testing.padding import padded_pair

REFERENCE = "transformers autoregressive"
BOOTSTRAP = Bootstrap(2000, seed=0)


def ours(name: str, method: str, *overrides: str) -> Decoder:
    """A method of this engine by its name in conf/method/."""
    return engine(name, lambda pair: config.method(method, list(overrides), pair.head))


DECODERS = {
    decoder.name: decoder
    for decoder in (
        theirs(REFERENCE),
        theirs("transformers assisted K=4", **constant(4)),
        theirs("transformers assisted dynamic", **{**constant(20), "assistant_confidence_threshold": 0.4}),
        theirs("transformers assisted heuristic", **{**constant(5), "num_assistant_tokens_schedule": "heuristic"}),
        theirs("transformers assisted, rate head", lambda pair: assistant(pair.draft, "rate", head=pair.head)),
        ours("autoregressive", "autoregressive"),
        ours("speculative K=2", "speculative", "policy.num_drafted=2"),
        ours("speculative K=4", "speculative", "policy.num_drafted=4"),
        ours("speculative K=8", "speculative", "policy.num_drafted=8"),
        ours("block K=4", "block", "policy.num_drafted=4"),
        ours("confidence .4", "confidence", "policy.threshold=0.4"),
        ours("specdec_pp h=.3", "specdec_pp", "policy.threshold=0.3"),
        ours("tail .2", "tail", "policy.threshold=0.2"),
        ours("rate", "rate"),
        ours("rate block", "rate", "rule@method.rule=block"),
    )
}
FEW = (REFERENCE, "autoregressive", "speculative K=4", "confidence .4", "rate")


@dataclass(frozen=True)
class Table:
    """One table: its title, and what is measured for it."""

    title: str
    pair: str = "toy"
    threads: int = 2
    prompts: int = 24
    max_new_tokens: int = 96
    warm_up: int = 2  # groups that every decoder decodes before anything is timed
    batch_sizes: tuple[int, ...] = (1,)
    decoders: tuple[str, ...] = tuple(DECODERS)


TABLES = {
    "toy": Table("Toy pair (2.0 M / 0.2 M), batch 1, one thread", threads=1, warm_up=8),
    "batches": Table("Toy pair, batches, two threads", prompts=48, batch_sizes=(1, 4, 8, 16), decoders=FEW),
    "padded": Table("Padded pair (207 M / 0.2 M), batch 1, two threads", "toy_padded", prompts=16, max_new_tokens=64,
                    warm_up=1),
    "padded_batches": Table("Padded pair, batches, two threads", "toy_padded", prompts=16, max_new_tokens=48, warm_up=1,
                            batch_sizes=(4, 16), decoders=FEW),
    "queue": Table("Toy pair, prompts in one call, slots refilled, two threads", prompts=96, batch_sizes=(1, 4, 8, 16),
                   decoders=("autoregressive", "speculative K=4")),
}  # fmt: skip
NOTES = """Every decoder samples at T = 1 from the same prompts (test prompts of `math` and `code`, alternating) to the same
length limit. transformers' assisted generation takes one prompt at a time. *Outside forwards*: share of the time that is not
spent inside the models' forwards. In brackets: 95 % intervals, or [a to b], the range, of fewer than 16 groups."""


def measure(
    pair: ModelPair,
    prompts: list[list[int]],
    decoders: list[Decoder],
    batch_size: int = 1,
    max_new_tokens: int = 96,
    warm_up: int = 1,
    temperature: float = 1.0,
    results: Path | None = None,
) -> pd.DataFrame:
    """One line per decoder and group: new tokens, seconds, CPU seconds of all threads, forwards, and seconds inside forwards.

    `target_widths` are tokens per row of the target's forwards that read no prompt: prompts are longer than what is drafted.
    results  a CSV file of the groups that were measured before; each further one is added to it
    """
    decoders = [decoder for decoder in decoders if decoder.batched or batch_size == 1]
    if not 1 <= batch_size <= len(prompts):
        raise InputError(f"batch size: expected 1 to {len(prompts)} (the prompts), got {batch_size}")
    groups = [prompts[i : i + batch_size] for i in range(0, len(prompts) - batch_size + 1, batch_size)]
    lines: list[dict[str, Any]] = []
    if results is not None and results.exists():
        lines = pd.read_csv(results, dtype={"target_widths": str}, keep_default_na=False).to_dict("records")
    before = {line["group"] for line in lines}
    missing = [(index, group) for index, group in enumerate(groups) if index not in before]
    for decoder in decoders if missing else ():
        for group in groups[:warm_up]:
            decoder.run(pair, group, max_new_tokens, 0, temperature)
    most = len(missing) * len(decoders) * batch_size * max_new_tokens
    bar = tqdm(total=most, desc=f"batch {batch_size}", unit="token")
    for index, group in missing:
        first, shortest = index % len(decoders), min(map(len, group))
        for decoder in decoders[first:] + decoders[:first]:
            draft_model = pair.draft or torch.nn.Identity()  # a target alone: nothing is counted
            advance = partial(bar.update, batch_size)  # each pass of the target gives one token at least
            with ForwardMeter(pair.target, on_forward=advance) as target, ForwardMeter(draft_model) as draft:
                started, cpu_started = perf_counter(), process_time()
                sequences = decoder.run(pair, group, max_new_tokens, index, temperature)
                seconds, cpu_seconds = perf_counter() - started, process_time() - cpu_started
            lines.append({
                "decoder": decoder.name, "group": index, "tokens": sum(map(len, sequences)), "seconds": seconds,
                "cpu_seconds": cpu_seconds, "target_widths": " ".join(str(w) for w in target.widths if w < shortest - 1),
                "target_forwards": target.calls, "draft_forwards": draft.calls,
                "forward_seconds": target.seconds + draft.seconds,
            })  # fmt: skip
            bar.update(batch_size * (max_new_tokens - target.calls))
        if results is not None:
            write_text(results, pd.DataFrame(lines).to_csv(index=False))
    bar.close()
    return pd.DataFrame(lines)


def summary(lines: pd.DataFrame, batch_size: int) -> list[str]:
    """Rows of a Markdown table: tokens per second with an interval, the same over REFERENCE's, and forwards."""
    tokens, seconds = (lines.pivot(index="group", columns="decoder", values=v) for v in ("tokens", "seconds"))
    values, width = np.concatenate([tokens.to_numpy(float), seconds.to_numpy(float)], 1), tokens.shape[1]

    def speeds(totals: np.ndarray) -> np.ndarray:
        return totals[..., :width] / totals[..., width:]

    def over_reference(totals: np.ndarray) -> np.ndarray:
        return speeds(totals) / speeds(totals)[..., [tokens.columns.get_loc(REFERENCE)]]

    figures = [(speeds, 1), *([(over_reference, 2)] if REFERENCE in tokens else [])]
    numbers = [(np.stack(BOOTSTRAP.spread(values, figure), -1), digits) for figure, digits in figures]
    rows = []
    for name in lines.decoder.unique():
        own = lines[lines.decoder == name]
        at = tokens.columns.get_loc(name)
        entries = [*(_with_interval(*lines_of[at], digits, len(tokens)) for lines_of, digits in numbers), ""][:2]
        rows.append(
            f"| {name} | {batch_size} | {' | '.join(entries)} | {own.tokens.sum() / own.target_forwards.sum():.2f} "
            f"| {own.draft_forwards.sum() / own.tokens.sum():.2f} "
            f"| {1 - own.forward_seconds.sum() / own.seconds.sum():.0%} |"
        )
    return rows


def _with_interval(value: float, low: float, high: float, digits: int, number: int) -> str:
    ends = "" if np.isnan(low) else " " + brackets(f"{low:.{digits}f}", f"{high:.{digits}f}", number)
    return f"{value:.{digits}f}{ends}"


def beside_transformers(table: Table) -> str:
    """The table of every decoder at every batch size."""
    pair = ModelPair.toy() if table.pair == "toy" else padded_pair(target_preset="200m")
    prompts = prompts_of(pair, table.prompts)
    lines = [
        f"| decoder | batch | tokens/s | x {REFERENCE} | tokens per target forward | draft forwards per token "
        "| outside forwards |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    chosen = [DECODERS[name] for name in table.decoders]
    for size in table.batch_sizes:
        lines += summary(measure(pair, prompts, chosen, size, table.max_new_tokens, table.warm_up), size)
    return "\n".join(lines)


def queue(table: Table) -> str:
    """Tokens per second of one call of `generate`: a row that ends makes room for the next prompt. Three timed turns."""
    pair = ModelPair.toy()
    prompts = prompts_of(pair, table.prompts)
    lines = ["| method | batch | tokens/s, median (lowest, highest of 3) | over batch 1 |", "|---|---:|---:|---:|"]
    speeds: dict[tuple[str, int], list[float]] = {
        (name, size): [] for name in table.decoders for size in table.batch_sizes
    }
    for turn in range(4):  # the first one warms up
        for (name, size), values in speeds.items():
            method = "autoregressive" if name == "autoregressive" else "speculative"
            started = perf_counter()
            sequences = generate(pair, prompts, method, max_new_tokens=table.max_new_tokens, batch_size=size, seed=turn)
            if turn:
                values.append(sum(len(text.token_ids) for text in sequences) / (perf_counter() - started))
    for (name, size), values in speeds.items():
        middle, alone = median(values), median(speeds[name, table.batch_sizes[0]])
        spread = f"{middle:.0f} ({min(values):.0f}, {max(values):.0f})"
        lines.append(f"| {name} | {size} | {spread} | {middle / alone:.2f} |")
    return "\n".join(lines)


def prompts_of(pair: ModelPair, count: int) -> list[list[int]]:
    """`count` test prompts, alternating between two domains."""
    domains = (load_frozen(domain, "test") for domain in ("math", "code"))
    examples = [example for both in zip(*domains, strict=False) for example in both]
    return [pair.encode(example.prompt) for example in examples[:count]]


def main() -> None:
    """Print the chosen tables and write them to one page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(TABLES)}; default: all")
    parser.add_argument("--prompts", type=int, help="fewer prompts than a table has; at least its largest batch")
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks.md"))
    options = parser.parse_args()
    names = options.names or list(TABLES)
    if unknown := [name for name in names if name not in TABLES]:
        parser.error(f"expected names among {', '.join(TABLES)}, got {', '.join(unknown)}")
    page = [f"# Decoding speed\n\n{NOTES}"]
    for name in names:
        table = TABLES[name]
        sizes = {"prompts": options.prompts, "max_new_tokens": options.max_new_tokens}
        table = replace(table, **{key: value for key, value in sizes.items() if value is not None})
        torch.set_num_threads(table.threads)
        started = perf_counter()
        text = queue(table) if name == "queue" else beside_transformers(table)
        page.append(f"## {table.title}\n\n{text}\n\n{made_by(f'benchmarks.speed {name}', started)}")
        print(page[-1], flush=True)
        write_text(options.out, "\n\n".join(page) + "\n")


if __name__ == "__main__":
    answer_signals()
    main()
