"""python -m benchmarks.trees --temperature 0: trees and chains of the toy pair at equal costs, one prompt at a time.

Every forward pass is priced as it is made: the target's by the tokens that it reads, the draft's by its nodes, at a table. The
tables: this processor's, measured now, and an H100's, modelled for Llama 8B and 1B. Settings are chosen on dev prompts, fixed
trees, EAGLE-2's, and chains alike; figures are of test prompts. Tokens per cost of plain decoding, with intervals over prompts;
`less` is the difference of `tree_rate` from each line, paired by prompt. Writes trees-T.csv and the costs beside it.

    --target T --draft D --prompts FILE.jsonl     another pair, the first of these questions for dev, and a few settings alone
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.loads.costs import SHAPES, modelled
from analysis.tables.bootstrap import Bootstrap
from benchmarks.real.folder import rows_of
from toolkit import ModelPair, config
from toolkit.costs.load import LoadCost
from toolkit.costs.measure import measure
from toolkit.decoding import Sampling, decode
from toolkit.engine import Session
from toolkit.errors import answer_signals
from toolkit.types import Prompt

DOMAINS = ("instruct", "math", "code")
WIDTHS = (1, 2, 3, 5, 9, 17, 33, 65)
FIXED = [f"policy.num_drafted={k}" for k in (1, 2, 3, 4, 5, 6, 8, 10)]
TREES = (
    "2x1x1",
    "2x2x1",
    "3x2x1x1",
    "4x2x1",
    "4x1x1x1",
    "2x1x1x1x1",
    "4x2x1x1x1",
    "4x2x2x1",
    "8x2x1x1",
    "3x2x2x2x1",
    "8x4x2x1x1",
)
NODES, DEPTHS = (8, 16, 32, 60), (2, 4, 6, 8)
FEW_CHAINS, FEW_TREES, FEW_NODES, FEW_DEPTHS = (2, 4, 6), ("2x2x1", "4x2x1", "4x2x2x1"), (8, 32), (4,)


@dataclass(frozen=True)
class Setting:
    """A method with overrides, and which line of the table it competes for; priced: it reads the table."""

    line: str
    method: str
    overrides: tuple[str, ...] = ()
    priced: bool = False


def settings(temperature: float, few: bool = False) -> list[Setting]:
    trees = [("specinfer", ("proposer.scheme=top_k",))] + ([("mcsd", ())] if temperature and not few else [])
    chains = [f"policy.num_drafted={k}" for k in FEW_CHAINS] if few else FIXED
    shapes, nodes, depths = (FEW_TREES, FEW_NODES, FEW_DEPTHS) if few else (TREES, NODES, DEPTHS)
    eagle = ["policy.estimator.confidence=true", "proposer.width=10"]
    return [
        Setting("plain", "autoregressive"),
        *(Setting("best fixed K", "speculative", (word,)) for word in chains),
        Setting("rate", "rate", priced=True),
        Setting("best_source", "best_source", priced=True),
        *(
            Setting("best fixed tree", name, (*words, f"proposer.k_config={shape}"))
            for (name, words), shape in product(trees, shapes)
        ),
        *(
            Setting("EAGLE-2's tree", "tree_rate", (*eagle, f"policy.num_nodes={m}", f"max_drafted={depth}"))
            for m, depth in product(nodes, depths)
        ),
        Setting("tree_rate", "tree_rate", priced=True),
        Setting("tree_rate, q itself", "tree_rate", ("policy.estimator.confidence=true",), priced=True),
        *([Setting("tree_rate, sampled", "tree_rate_sampled", priced=True)] if temperature else []),
    ]


class Meter:
    """What the forward passes of a text read: (is the draft's, tokens or nodes, context), the prompt left out."""

    def __init__(self, pair: ModelPair):
        self.draft, self.passes = pair.draft, []
        extend = Session.extend

        def counted(session: Session, tokens, **words):
            before = session.lengths[0]
            width = tokens.shape[1] if before else words.get("last", 1)  # the prompt is left out
            self.passes.append((session.model is self.draft, width, before))
            return extend(session, tokens, **words)

        Session.extend = counted

    def cost(self, table: LoadCost) -> float:
        """In target forward passes over one token."""
        total = 0.0
        for is_draft, width, context in self.passes:
            model = table.draft if is_draft else table.target
            total += model(1, width, context) / table.target(1, 1, context)
        return total


def run(pair: ModelPair, meter: Meter, setting: Setting, prompts: Sequence[Prompt], tables: dict[str, LoadCost], folder: Path,
        sampling: Sampling) -> pd.DataFrame:  # fmt: skip
    """Tokens and costs of every prompt by table; those that read no table are decoded once."""
    lines = []
    for table_name in tables if setting.priced else [None]:
        words = [*setting.overrides, *([f"policy.costs={folder / table_name}.json"] if table_name else [])]
        method = config.method(setting.method, words)
        for number, prompt in enumerate(prompts):
            meter.passes.clear()
            (generation,) = decode(pair, [prompt], method, sampling, row_ids=[number])
            for name in [table_name] if table_name else tables:
                rounds = generation.rounds
                lines.append({
                    "line": setting.line, "setting": " ".join([setting.method, *setting.overrides]), "table": name,
                    "prompt": number, "tokens": len(generation.token_ids), "cost": meter.cost(tables[name]),
                    "rounds": len(rounds), "nodes": sum(r.num_drafted for r in rounds),
                })  # fmt: skip
    table = pd.DataFrame(lines)
    sums = table.groupby("table")[["tokens", "cost"]].sum()
    speeds = ", ".join(f"{name} {speed:.2f}" for name, speed in (sums.tokens / sums.cost).items())
    print(f"{setting.line}, {' '.join(setting.overrides) or 'as it is'}, {len(prompts)} prompts: {speeds}", flush=True)
    return table


def prompts_of(split: str, limit: int) -> list[Prompt]:
    """So many toy prompts of each domain."""
    return [
        prompt.prompt
        for domain in DOMAINS
        for prompt in config.instantiate(
            config.compose(
                "responses", [f"prompts=toy_{domain}", f"prompts.split={split}", f"prompts.limit={limit}"]
            ).prompts
        ).load()
    ]


def figures(tests: pd.DataFrame, table: str) -> pd.DataFrame:
    """The lines of a table, with intervals."""
    bootstrap, own = Bootstrap(), tests[tests.table == table]
    sums = {line: part.set_index("prompt")[["tokens", "cost"]].to_numpy(float) for line, part in own.groupby("line")}
    lines = []
    for line, values in sums.items():
        part = own[own.line == line]
        speed = bootstrap.interval(values, lambda s: s[..., :1] / s[..., 1:2])
        both = np.concatenate([sums["tree_rate"], values], 1)
        less = bootstrap.interval(both, lambda s: (s[..., 0:1] / s[..., 1:2]) / (s[..., 2:3] / s[..., 3:4]) - 1)
        lines.append({
            "table": table, "line": line, "setting": part.setting.iloc[0], "tokens_per_cost": speed[0][0],
            "low": speed[1][0], "high": speed[2][0], "tree_rate_ahead": less[0][0], "ahead_low": less[1][0],
            "ahead_high": less[2][0], "nodes_per_round": part.nodes.sum() / part.rounds.sum(),
            "tokens_per_round": part.tokens.sum() / part.rounds.sum(),
        })  # fmt: skip
    return pd.DataFrame(lines).sort_values("tokens_per_cost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dev", type=int, default=8, help="prompts (of a toy domain) that settings are chosen on")
    parser.add_argument("--test", type=int, default=20, help="prompts (of a toy domain) that are reported")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path("outputs/trees"))
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--prompts", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    few = arguments.target is not None
    if few:
        pair = ModelPair.from_pretrained(arguments.target, arguments.draft, writable=False)
        asked = [row["messages"] for row in rows_of(arguments.prompts)]
        dev_prompts, test_prompts = asked[: arguments.dev], asked[arguments.dev :][: arguments.test]
    else:
        pair = config.instantiate(config.compose("decode", []).pair)
        dev_prompts, test_prompts = prompts_of("dev", arguments.dev), prompts_of("test", arguments.test)
    tables = {}
    for name in ("cpu", "h100"):
        path = arguments.folder / f"{name}.json"
        if not path.exists():
            table = LoadCost.of(measure(pair, widths=WIDTHS, repeats=25)) if name == "cpu" else None
            (table or modelled(SHAPES["llama-8b"], SHAPES["llama-1b"], "h100", 1, [1])).save(path)
        tables[name] = LoadCost.load(path)
    meter = Meter(pair)
    sampling = Sampling(temperature=arguments.temperature, max_new_tokens=arguments.tokens)
    common = (tables, arguments.folder.resolve(), sampling)
    every = settings(sampling.temperature, few)
    print(
        f"{len(every)} settings on {len(dev_prompts)} prompts, then the best of each on {len(test_prompts)}", flush=True
    )
    dev = pd.concat([run(pair, meter, each, dev_prompts, *common) for each in every])
    totals = dev.groupby(["table", "line", "setting"])[["tokens", "cost"]].sum()
    chosen = (totals.tokens / totals.cost).groupby(["table", "line"]).idxmax()
    tests = []
    for each in every:
        setting = " ".join([each.method, *each.overrides])
        chosen_for = [table for table, line, best in chosen if (line, best) == (each.line, setting)]
        if chosen_for:
            tests.append(run(pair, meter, each, test_prompts, {name: tables[name] for name in chosen_for}, *common[1:]))
    result = pd.concat([figures(pd.concat(tests), table) for table in tables])
    dev.to_csv(arguments.folder / f"dev-{sampling.temperature:g}.csv", index=False)
    result.to_csv(arguments.folder / f"trees-{sampling.temperature:g}.csv", index=False, float_format="%.4f")
    print(result.to_string(index=False, float_format="%.3f"))


if __name__ == "__main__":
    answer_signals()
    main()
