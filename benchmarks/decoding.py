"""Decoding speed, paired and interleaved: this engine's methods against transformers' own `generate`.

    python -m benchmarks.decoding                       toy pair, batch 1: tokens/s, forwards, time outside forwards
    python -m benchmarks.decoding --pair toy_padded     the same target grown to 207 M parameters
    python -m benchmarks.decoding --batch-sizes 1 4 8 16 --contenders autoregressive "speculative K=4"

One unit of work is one group of prompts (as many as the batch is wide) decoded by one contender. Contenders take turns
on every group, in an order that rotates. So other load of the machine affects all of them. A warm-up comes first. All
contenders sample at temperature 1 to the same length limit. Texts differ, so speeds are new tokens over seconds.
Intervals are bootstrapped over groups, all contenders by the same draws.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from analysis.tables.bootstrap import Bootstrap
from benchmarks.decoders import UNCAPTURED, Contender, constant, engine, theirs
from benchmarks.meter import ForwardMeter
from data_gen.frozen import load_frozen
from toolkit import ModelPair, config
from toolkit.errors import InputError
from toolkit.io import write_text
from toolkit.padding import padded_pair

NUM_BOOT = 2000
DOMAINS = ("math", "code")
REFERENCE = "transformers autoregressive"


def ours(name: str, method: str, *overrides: str, **options: str) -> Contender:
    """A method of this engine by its name in conf/method/; options of the pair that differ."""
    return engine(name, lambda pair: config.method(method, list(overrides), pair.head), **options)


UNPACKED = {"cpu_packing": "off"}


DYNAMIC = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}
HEURISTIC = {
    "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.0,
}
CONTENDERS = {
    contender.name: contender
    for contender in (
        theirs(REFERENCE),
        theirs("transformers assisted K=2", **constant(2)),
        theirs("transformers assisted K=4", **constant(4)),
        theirs("transformers assisted dynamic", **DYNAMIC),
        theirs("transformers assisted heuristic", **HEURISTIC),
        theirs("transformers assisted dynamic, packed", packed=True, **DYNAMIC),
        theirs("transformers assisted heuristic, packed", packed=True, **HEURISTIC),
        theirs("transformers autoregressive, packed", packed=True),
        ours("autoregressive", "autoregressive"),
        ours("autoregressive, not captured", "autoregressive", **UNCAPTURED),
        ours("speculative K=2", "speculative", "policy.num_drafted=2"),
        ours("speculative K=4", "speculative", "policy.num_drafted=4"),
        ours("speculative K=4, not captured", "speculative", "policy.num_drafted=4", **UNCAPTURED),
        ours("speculative K=8", "speculative", "policy.num_drafted=8"),
        ours("speculative K=4, not packed", "speculative", "policy.num_drafted=4", **UNPACKED),
        ours("block K=4", "block", "policy.num_drafted=4"),
        ours("confidence .4", "confidence", "policy.threshold=0.4"),
        ours("specdec_pp h=.5", "specdec_pp", "policy.threshold=0.5"),
        ours("specdec_pp h=.3", "specdec_pp", "policy.threshold=0.3"),
        ours("tail .2", "tail", "policy.threshold=0.2"),
        ours("rate", "rate"),
        ours("rate block", "rate", "rule@method.rule=block"),
        ours("rate, not packed", "rate", **UNPACKED),
    )
}


def measure(
    pair: ModelPair,
    prompts: list[list[int]],
    contenders: list[Contender],
    batch_size: int = 1,
    max_new_tokens: int = 96,
    seed: int = 0,
    warm_up: int = 1,
) -> pd.DataFrame:
    """One line per contender and group: new tokens, seconds, forwards, and seconds inside forwards.

    warm_up  groups that every contender decodes before anything is timed: forwards are captured there
    """
    contenders = [c for c in contenders if c.batched or batch_size == 1]
    if not 1 <= batch_size <= len(prompts):
        raise InputError(f"batch size: expected 1 to {len(prompts)} (the prompts), got {batch_size}")
    on_gpu = pair.device.type == "cuda"
    groups = [prompts[i : i + batch_size] for i in range(0, len(prompts) - batch_size + 1, batch_size)]
    for contender in contenders:
        for group in groups[:warm_up]:
            contender.run(pair, group, max_new_tokens, seed)
    lines = []
    for index, group in enumerate(tqdm(groups, desc=f"batch {batch_size}", unit="group")):
        for contender in contenders[index % len(contenders) :] + contenders[: index % len(contenders)]:
            with ForwardMeter(pair.target) as target, ForwardMeter(pair.draft) as draft:
                started = perf_counter()
                tokens = contender.run(pair, group, max_new_tokens, seed + index)
                if on_gpu:
                    torch.cuda.synchronize()
                seconds = perf_counter() - started
            lines.append({
                "contender": contender.name, "batch_size": batch_size, "group": index, "tokens": tokens,
                "seconds": seconds, "target_forwards": target.calls, "draft_forwards": draft.calls,
                # Without synchronisation, which would slow what is measured, a GPU's forwards are only launched here.
                "forward_seconds": float("nan") if on_gpu else target.seconds + draft.seconds,
            })  # fmt: skip
    return pd.DataFrame(lines)


def summary(lines: pd.DataFrame, reference: str | None = None, seed: int = 0) -> pd.DataFrame:
    """Tokens per second with a 95 % interval, and the rest, per contender and batch size.

    `against`: tokens/s over those of `reference` (same groups, same bootstrap draws), with its interval.
    """
    bootstrap, results = Bootstrap(NUM_BOOT, seed=seed), []
    for batch_size, part in lines.groupby("batch_size"):
        tokens, seconds = (part.pivot(index="group", columns="contender", values=v) for v in ("tokens", "seconds"))
        boot = resampled_speeds(tokens, seconds, bootstrap)
        for name in part.contender.unique():
            own = part[part.contender == name]
            speed = own.tokens.sum() / own.seconds.sum()
            low, high = bootstrap.group_interval(boot[name], len(tokens))
            line = {
                "contender": name, "batch": batch_size, "tokens/s": speed, "low": low, "high": high,
                "tokens per target forward": own.tokens.sum() / own.target_forwards.sum(),
                "draft forwards per token": own.draft_forwards.sum() / own.tokens.sum(),
                "outside forwards": 1 - own.forward_seconds.sum(min_count=1) / own.seconds.sum(),
            }  # fmt: skip
            if reference in boot:
                ratio = boot[name] / boot[reference]
                base = tokens[reference].sum() / seconds[reference].sum()
                low, high = bootstrap.group_interval(ratio, len(tokens))
                line |= {"against": speed / base, "against low": low, "against high": high}
            results.append(line)
    return pd.DataFrame(results)


def resampled_speeds(
    tokens: pd.DataFrame, seconds: pd.DataFrame, bootstrap: Bootstrap
) -> dict[str, NDArray[np.float64]]:
    """Tokens per second of every resample [R], per column; all by the same resampled rows."""
    totals = bootstrap.totals(np.concatenate([tokens.to_numpy(float), seconds.to_numpy(float)], 1))
    speeds = totals[:, : tokens.shape[1]] / totals[:, tokens.shape[1] :]
    return dict(zip(map(str, tokens.columns), speeds.T, strict=True))


def markdown(table: pd.DataFrame, reference: str) -> str:
    """The summary for people."""
    lines = [
        f"| contender | batch | tokens/s | x {reference} | tokens per target forward | draft forwards per token "
        "| outside forwards |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for _, row in table.iterrows():
        speed = f"{row['tokens/s']:.1f}" + ("" if pd.isna(row["low"]) else f" [{row['low']:.1f}, {row['high']:.1f}]")
        ratio = f"{row['against']:.2f}" if "against" in row else ""
        if ratio and not pd.isna(row["against low"]):
            ratio += f" [{row['against low']:.2f}, {row['against high']:.2f}]"
        lines.append(
            f"| {row['contender']} | {row['batch']} | {speed} | {ratio} "
            f"| {row['tokens per target forward']:.2f} | {row['draft forwards per token']:.2f} "
            f"| {'' if pd.isna(row['outside forwards']) else format(row['outside forwards'], '.0%')} |"
        )
    return "\n".join(lines)


def load_pair(name: str, device: str = "cpu", dtype: str = "float32", preset: str = "200m") -> ModelPair:
    """`toy`, or `toy_padded`: the toy pair with its target grown to `preset`."""
    if name == "toy":
        return ModelPair.toy(device=device, dtype=dtype)
    return padded_pair(target_preset=preset, device=device, dtype=dtype)


def prompts_of(pair: ModelPair, count: int) -> list[list[int]]:
    """`count` test prompts, alternating between the domains."""
    examples = [example for both in zip(*(load_frozen(d, "test") for d in DOMAINS), strict=False) for example in both]
    return [pair.encode(example.prompt) for example in examples[:count]]


def main() -> None:
    """Print the table; with --out write every line and the table there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=["toy", "toy_padded"], default="toy")
    parser.add_argument("--preset", default="200m", help="shape of toy_padded's target: 200m, 1b or 8b")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--warm-up", type=int, default=4, help="groups decoded before anything is timed")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), metavar="NAME",
                        help="; ".join(CONTENDERS))  # fmt: skip
    parser.add_argument("--reference", default=REFERENCE, help="what the others are divided by")
    parser.add_argument("--out", type=Path, help="folder for decoding.csv and decoding.md")
    arguments = parser.parse_args()
    pair = load_pair(arguments.pair, arguments.device, arguments.dtype, arguments.preset)
    prompts = prompts_of(pair, arguments.prompts)
    chosen = [CONTENDERS[name] for name in arguments.contenders]
    lines = pd.concat([
        measure(pair, prompts, chosen, size, arguments.max_new_tokens, warm_up=arguments.warm_up)
        for size in arguments.batch_sizes
    ])  # fmt: skip
    text = markdown(summary(lines, arguments.reference), arguments.reference)
    print(text)
    if arguments.out:
        write_text(arguments.out / "decoding.csv", lines.to_csv(index=False, float_format="%.6f"))
        write_text(arguments.out / "decoding.md", text + "\n")


if __name__ == "__main__":
    main()
