"""`analysis.advise` from two drafts and a prompts file to its answer, and the answer decoded live.

The drafts for the toy target are the shipped one and one sliced to states of 64. The command runs as a user runs it, in a
process of its own. Then the test half of the prompts is decoded at every batch size, in an order that rotates: by plain
decoding, and by every method with the settings that the advice chose for it. As in `benchmarks.batches`, every contender has
captured forwards of its own, and every turn a seed of its own.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import pandas as pd
import torch

from analysis.advise import split
from analysis.loads.measured import capture_soon
from analysis.tables.grid import PLAIN, Setting
from benchmarks.batches import DOMAINS, TOKENS
from benchmarks.processes import run
from benchmarks.resized import resized, save
from data_gen.frozen import load_frozen
from toolkit import ModelPair, config
from toolkit.decoding import Method, Sampling, decode
from toolkit.io import write_text
from toolkit.lines import lines_of
from toolkit.load_cost import LoadCost
from toolkit.pair import TOY
from toolkit.prompts import Prompt

SLICED, PROMPTS, TURNS, WARM_UP = 64, 96, 3, 2
SIZES = (1, 4, 16)
THREADS = 1
BOUND = 0.05  # how far the speed-up decoded live may be from the predicted one


@dataclass(frozen=True)
class Contender:
    """A line of the advice and what it decodes with."""

    line: Any
    pair: ModelPair
    method: Method

    @property
    def name(self) -> str:
        return f"{self.line.draft}, {self.line.method} {self.line.setting}".strip(" ,")


def advice() -> str:
    """Seconds from nothing to the answer, the answer, and predicted beside decoded speed-ups."""
    torch.set_num_threads(THREADS)
    toy = ModelPair.toy()
    both = zip(*(load_frozen(domain, "test") for domain in DOMAINS), strict=False)
    asked = [example.prompt for pair_of in both for example in pair_of][:PROMPTS]
    prompts = [Prompt(f"p{number}", text) for number, text in enumerate(asked)]
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        known = [toy.encode(example.prompt) for example in load_frozen("math", "dev")[:64]]
        save(resized(toy.draft, SLICED, known), toy.tokenizer, folder / f"sliced-{SLICED}")
        file = write_text(
            folder / "mine.jsonl", "".join(json.dumps({"id": p.id, "prompt": p.content}) + "\n" for p in prompts)
        )
        words = [
            "-m", "analysis.advise", f"pair.draft=[toy/draft,{folder}/sliced-{SLICED}]", f"heads=[{TOY}/head,null]",
            f"prompts.path={file}", "prompts.limit=null", f"batch_sizes={list(SIZES)}", "sampling.temperature=1",
            f"sampling.max_new_tokens={TOKENS}", f"paths.root_dir={folder}", "track=false",
        ]  # fmt: skip
        started = perf_counter()
        said = run(words, OMP_NUM_THREADS=str(THREADS)).replace(str(folder), "outputs")
        seconds = perf_counter() - started
        out = next(path for path in folder.iterdir() if path.name.startswith("advise-"))
        table = pd.read_csv(out / "advice.csv", keep_default_na=False)
        drafts = {
            "draft": toy,
            f"sliced-{SLICED}": ModelPair.from_pretrained("toy/target", str(folder / f"sliced-{SLICED}")),
        }
        test = [str(prompt.content) for prompt in split(prompts)["test"]]
        lines = [line for size in SIZES for line in _lines(table, size, drafts, out, test)]
    sentences = [line for line in lines_of(said) if re.match(r"batch \d+: ", line)]
    return "\n\n".join([_conclusion(lines, seconds), *(f"- {line}" for line in sentences), _table(lines)])


# -- inside -----------------------------------------------------------------------------------------------------------


def _lines(
    table: pd.DataFrame, size: int, drafts: Mapping[str, ModelPair], out: Path, prompts: Sequence[str]
) -> list[dict[str, Any]]:
    """One line per contender at a batch size: the speed-up predicted, and those decoded, turn by turn."""
    contenders = _contenders(table[(table.batch == size) & (~table.greedy | table.advised)], drafts, out)
    speeds = _decoded(contenders, size, prompts)
    plain = next(name for name, one in contenders.items() if one.line.method == PLAIN)
    return [
        {
            "batch": size, "name": name, "advised": bool(one.line.advised), "predicted": float(one.line.speedup),
            "low": float(one.line.speedup_low), "high": float(one.line.speedup_high),
            "decoded": [a / b for a, b in zip(speeds[name], speeds[plain], strict=True)],
        }
        for name, one in contenders.items()
    ]  # fmt: skip


def _contenders(part: pd.DataFrame, drafts: Mapping[str, ModelPair], out: Path) -> dict[str, Contender]:
    """Plain decoding, every method of the advised draft, and the best fixed length of the other."""
    first = part[part.advised].iloc[0]
    found: dict[str, Contender] = {}
    for line in part.itertuples():
        mine = line.draft == first.draft
        if not mine and line.method != "speculative":
            continue
        parameters = {name: value for name, value in json.loads(str(line.parameters)).items() if name != "head"}
        costs = out / f"costs-{list(drafts).index(str(line.draft))}.json"
        told = LoadCost.load(costs).about["told"].get(Setting(str(line.method), json.loads(str(line.parameters))).name)
        if told:
            parameters |= {"policy.costs": str(costs), **{f"policy.{name}": value for name, value in told.items()}}
        method = config.instantiate(config.plain(Setting(str(line.method), parameters).method_config()))
        one = Contender(line, drafts[str(line.draft)], method)
        found[one.name] = one
    return found


def _decoded(contenders: Mapping[str, Contender], size: int, prompts: Sequence[str]) -> dict[str, list[float]]:
    """Tokens per second of every contender, turn by turn, behind turns for warming up."""
    sampling = Sampling(temperature=1.0, max_new_tokens=TOKENS, seed=11)
    names, speeds = list(contenders), {name: list[float]() for name in contenders}
    pairs = {name: replace(one.pair, draft=None) for name, one in contenders.items()}  # with captures of their own
    for turn in range(WARM_UP + TURNS):
        first = turn * 3 % len(names)
        for name in [*names[first:], *names[:first]]:
            method, seeded = contenders[name].method, replace(sampling, seed=sampling.seed + turn)
            started = perf_counter()
            generations = decode(pairs[name], prompts, method, seeded, batch_size=size)
            if turn >= WARM_UP:
                speeds[name].append(sum(len(g.token_ids) for g in generations) / (perf_counter() - started))
            capture_soon(pairs[name])
    return speeds


def _conclusion(lines: Sequence[dict[str, Any]], seconds: float) -> str:
    within, best = [], []
    for size in SIZES:
        part = [line for line in lines if line["batch"] == size]
        advised = next(line for line in part if line["advised"])
        within.append(abs(statistics.median(advised["decoded"]) / advised["predicted"] - 1))
        best.append(all(min(_ratios(line, advised)) <= 1 for line in part if line is not advised))
    missed = ", ".join(f"{100 * value:.0f} %" for value in within)
    return (
        f"The command took {seconds:.0f} s on {PROMPTS} prompts, from nothing to the answer, with {THREADS} thread.\n"
        f"Decoded live, the advised setting's speed-up is {missed} from the predicted one at batch "
        f"{', '.join(map(str, SIZES))} (wanted: {100 * BOUND:.0f} %).\n"
        f"Of the settings that were decoded, none was faster in every one of {TURNS} turns at {sum(best)} of {len(SIZES)} "
        "batch sizes."
    )


def _ratios(line: dict[str, Any], advised: dict[str, Any]) -> list[float]:
    return [a / b for a, b in zip(line["decoded"], advised["decoded"], strict=True)]


def _table(lines: Sequence[dict[str, Any]]) -> str:
    text = [
        "| batch | draft and method | advised | predicted times plain | decoded: median [lowest, highest] | over advised |",
        "|---:|---|---|---:|---:|---:|",
    ]
    for size in SIZES:
        part = [line for line in lines if line["batch"] == size]
        advised = next(line for line in part if line["advised"])
        for line in sorted(part, key=lambda line: -statistics.median(line["decoded"])):
            predicted = f"{line['predicted']:.2f} [{line['low']:.2f}, {line['high']:.2f}]"
            decoded, over = _spread(line["decoded"]), _spread(_ratios(line, advised))
            mark = "yes" if line["advised"] else ""
            text.append(f"| {size} | {line['name']} | {mark} | {predicted} | {decoded} | {over} |")
    return "\n".join(text)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"
