"""`analysis.advise` from two drafts and a prompts file to its answer, and the answer decoded live.

The drafts for the toy target are the shipped one and one sliced to states of 64. The command runs as a user runs it, in a
process of its own. Then the test half of the prompts is decoded at every batch size. Plain decoding and every method, with the
settings that the advice chose for it, decode side by side (`benchmarks.side_by_side`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import pandas as pd
import torch

from analysis.advise import split
from analysis.tables.grid import PLAIN, Setting
from benchmarks.batches import DOMAINS, TOKENS
from benchmarks.processes import run
from benchmarks.resized import resized, save
from benchmarks.side_by_side import LEG, Contender, apart, decoded, ratio
from data_gen.frozen import load_frozen
from toolkit import ModelPair
from toolkit.decoding import Sampling
from toolkit.io import write_text
from toolkit.lines import lines_of
from toolkit.load_cost import LoadCost
from toolkit.pair import TOY
from toolkit.prompts import Prompt

SLICED, PROMPTS, TURNS = 64, 96, 8
SIZES = (1, 4, 16)
THREADS = 1
BOUND = 0.05  # allowed relative difference between the live speed-up and the predicted one


@dataclass(frozen=True)
class Line:
    """A line of the advice, and the speed-ups and the speeds relative to the advised setting, turn by turn."""

    batch: int
    name: str
    advised: bool
    predicted: tuple[float, float, float]
    over_plain: tuple[float, float, float]
    over_advised: tuple[float, float, float]


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
) -> list[Line]:
    """One line per contender at a batch size, the fastest first."""
    chosen = _chosen(table[(table.batch == size) & (~table.greedy | table.advised)])
    contenders = {name: Contender(_setting(line, list(drafts), out), line.draft) for name, line in chosen.items()}
    sampling = Sampling(temperature=1.0, max_new_tokens=TOKENS, seed=11)
    live = apart(decoded, drafts, contenders, prompts, sampling, size, TURNS)
    speeds = {name: [turn.speed for turn in turns] for name, turns in live.items()}
    plain = next(name for name, line in chosen.items() if line.method == PLAIN)
    advised = next(name for name, line in chosen.items() if line.advised)
    lines = [
        Line(
            size, name, name == advised, (line.speedup, line.speedup_low, line.speedup_high),
            ratio(speeds[name], speeds[plain]), ratio(speeds[name], speeds[advised]),
        )
        for name, line in chosen.items()
    ]  # fmt: skip
    return sorted(lines, key=lambda line: -line.over_plain[0])


def _chosen(part: pd.DataFrame) -> dict[str, Any]:
    """Plain decoding, every method of the advised draft, and the best fixed length of the other, by name."""
    first = part[part.advised].iloc[0]
    taken = [line for line in part.itertuples() if line.draft == first.draft or line.method == "speculative"]
    return {f"{line.draft}, {line.method} {line.setting}".strip(" ,"): line for line in taken}


def _setting(line: Any, drafts: Sequence[str], out: Path) -> Setting:
    """The setting of a line of the advice. A batch rule gets the parameters that it had in the advice."""
    parameters = json.loads(str(line.parameters))
    costs = out / f"costs-{drafts.index(line.draft)}.json"
    told = LoadCost.load(costs).about["told"].get(Setting(str(line.method), parameters).name)
    if told:
        parameters |= {"policy.costs": str(costs), **{f"policy.{name}": value for name, value in told.items()}}
    return Setting(str(line.method), {name: value for name, value in parameters.items() if name != "head"})


def _conclusion(lines: Sequence[Line], seconds: float) -> str:
    advised = [line for line in lines if line.advised]
    missed = ", ".join(f"{100 * abs(line.over_plain[0] / line.predicted[0] - 1):.0f} %" for line in advised)
    beaten = {line.batch for line in lines if line.over_advised[1] > 1}
    return (
        f"The command took {seconds:.0f} s on {PROMPTS} prompts, from nothing to the answer, with {THREADS} thread.\n"
        f"Decoded live, the advised setting's speed-up is {missed} from the predicted one at batch "
        f"{', '.join(map(str, SIZES))} (wanted: {100 * BOUND:.0f} %).\n"
        "Of the settings that were decoded, none was faster with its whole interval at "
        f"{len(SIZES) - len(beaten)} of {len(SIZES)} batch sizes.\n"
        f"The contenders decode side by side, {LEG} s at a time, in {TURNS} turns behind one for warming up. Ratios compare "
        "speeds of the same turn: their geometric mean with a 95 % interval over turns (Student's t)."
    )


def _table(lines: Sequence[Line]) -> str:
    text = [
        "| batch | draft and method | advised | predicted times plain | decoded times plain | over advised |",
        "|---:|---|---|---:|---:|---:|",
    ]
    for line in lines:
        figures = " | ".join(map(_shown, (line.predicted, line.over_plain, line.over_advised)))
        text.append(f"| {line.batch} | {line.name} | {'yes' if line.advised else ''} | {figures} |")
    return "\n".join(text)


def _shown(found: tuple[float, float, float]) -> str:
    return f"{found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]"
