"""`analysis.advise` from two drafts and a prompts file to its answer, and the answer decoded live; several times in turn.

The drafts for the toy target are the shipped one and one sliced to states of 64. The command runs as a user runs it, in a
process of its own and from nothing. Then the test half of the prompts is decoded at every batch size. Plain decoding and every
method, with the settings that the advice chose for it, decode side by side (`benchmarks.side_by_side`). Then all of it starts
again, with other seeds. A machine changes its speed between measuring and decoding. So the intervals are over these cycles.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
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

SLICED, PROMPTS = 64, 96
CYCLES = 6  # commands, each followed by its answer decoded live
# By batch size, turns of every contender in a cycle: larger batches are through with the prompts sooner.
TURNS = {1: 2, 4: 4, 16: 6}
SIZES = tuple(TURNS)
THREADS = 1
BOUND = 0.05  # allowed relative difference between the live speed-up and the predicted one
Interval = tuple[float, float, float]


@dataclass(frozen=True)
class Line:
    """A setting that was decoded in one cycle.

    role       draft and method; the setting of a role may change from cycle to cycle
    predicted  speed-up over plain decoding by the advice
    speed      tokens per second, decoded live: geometric mean over the turns
    """

    cycle: int
    batch: int
    role: str
    setting: str
    advised: bool
    predicted: float
    speed: float


def advice() -> str:
    """Seconds from nothing to the answer, the answer, and predicted beside decoded speed-ups."""
    torch.set_num_threads(THREADS)
    toy = ModelPair.toy()
    both = zip(*(load_frozen(domain, "test") for domain in DOMAINS), strict=False)
    asked = [example.prompt for pair_of in both for example in pair_of][:PROMPTS]
    prompts = [Prompt(f"p{number}", text) for number, text in enumerate(asked)]
    test = [str(prompt.content) for prompt in split(prompts)["test"]]
    seconds, lines = list[float](), list[Line]()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sliced = folder / f"sliced-{SLICED}"
        save(
            resized(toy.draft, SLICED, [toy.encode(e.prompt) for e in load_frozen("math", "dev")[:64]]),
            toy.tokenizer,
            sliced,
        )
        file = folder / "mine.jsonl"
        write_text(file, "".join(json.dumps({"id": p.id, "prompt": p.content}) + "\n" for p in prompts))
        drafts = {"draft": toy, sliced.name: ModelPair.from_pretrained("toy/target", str(sliced))}
        for cycle in range(CYCLES):
            started = perf_counter()
            said = _ask(folder / f"cycle-{cycle}", sliced, file, cycle)
            seconds.append(perf_counter() - started)
            out = next((folder / f"cycle-{cycle}").glob("advise-*"))
            for size in SIZES:
                lines += _lines(cycle, size, drafts, out, test)
    sentences = [f"- {line}" for line in lines_of(said) if re.match(r"batch \d+: ", line)]
    parts = [_conclusion(lines, seconds), "What the last command said:", *sentences, _advised(lines), _table(lines)]
    return "\n\n".join(parts)


# -- inside -----------------------------------------------------------------------------------------------------------


def _ask(root: Path, sliced: Path, prompts: Path, seed: int) -> str:
    """What the command prints. Its outputs go to `root`."""
    words = [
        "-m", "analysis.advise", f"pair.draft=[toy/draft,{sliced}]", f"heads=[{TOY}/head,null]", f"prompts.path={prompts}",
        "prompts.limit=null", f"batch_sizes={list(SIZES)}", "sampling.temperature=1", f"sampling.max_new_tokens={TOKENS}",
        f"sampling.seed={seed}", f"paths.root_dir={root}", "track=false",
    ]  # fmt: skip
    return run(words, OMP_NUM_THREADS=str(THREADS)).replace(str(root), "outputs")


def _lines(cycle: int, size: int, drafts: Mapping[str, ModelPair], out: Path, prompts: Sequence[str]) -> list[Line]:
    """One line per setting that is decoded at a batch size."""
    table = pd.read_csv(out / "advice.csv", keep_default_na=False)
    chosen = _chosen(table[table.batch == size])
    contenders = {role: Contender(_setting(line, list(drafts), out), line.draft) for role, line in chosen.items()}
    sampling = Sampling(temperature=1.0, max_new_tokens=TOKENS, seed=11 + 100 * cycle)
    live = apart(decoded, drafts, contenders, prompts, sampling, size, TURNS[size])
    return [
        Line(
            cycle, size, role, _said(line), bool(line.advised), float(line.speedup),
            geometric_mean([turn.speed for turn in live[role]]),
        )
        for role, line in chosen.items()
    ]  # fmt: skip


def _chosen(part: pd.DataFrame) -> dict[str, Any]:
    """Plain decoding, every method of the advised draft, and the best fixed lengths of the other, by role."""
    first = part[part.advised].iloc[0]
    taken = [line for line in part.itertuples() if line.draft == first.draft or line.method == "speculative"]
    return {_role(line): line for line in taken}


def _role(line: Any) -> str:
    if line.method == PLAIN:
        return PLAIN
    return f"{line.draft}, {line.method}{' with greedy drafts' if line.greedy else ''}"


def _said(line: Any) -> str:
    """The setting without what the role says."""
    return str(line.setting).replace("draft_temperature=0", "").strip() or "defaults"


def _setting(line: Any, drafts: Sequence[str], out: Path) -> Setting:
    """The setting of a line of the advice. A batch rule gets the parameters that it had in the advice."""
    parameters = json.loads(str(line.parameters))
    costs = out / f"costs-{drafts.index(line.draft)}.json"
    told = LoadCost.load(costs).about["told"].get(Setting(str(line.method), parameters).name)
    if told:
        parameters |= {"policy.costs": str(costs), **{f"policy.{name}": value for name, value in told.items()}}
    return Setting(str(line.method), {name: value for name, value in parameters.items() if name != "head"})


def _over(lines: Sequence[Line], others: Sequence[Line]) -> Interval:
    """Speeds of the lines over those of the others of the same cycle and batch size."""
    matching = {(line.cycle, line.batch): line.speed for line in others}
    return ratio([line.speed for line in lines], [matching[line.cycle, line.batch] for line in lines])


def _over_prediction(lines: Sequence[Line], plain: Sequence[Line]) -> Interval:
    """Decoded speed-ups of the lines over their predicted ones."""
    found = [_over([line], plain)[0] for line in lines]
    return ratio(found, [line.predicted for line in lines])


def _parts(lines: Sequence[Line], size: int) -> tuple[list[Line], list[Line], dict[str, list[Line]]]:
    """Of a batch size: the advised line of every cycle, plain decoding's of every cycle, and the lines by role."""
    here = [line for line in lines if line.batch == size]
    roles = {role: [line for line in here if line.role == role] for role in dict.fromkeys(line.role for line in here)}
    return [line for line in here if line.advised], roles[PLAIN], roles


def _conclusion(lines: Sequence[Line], seconds: Sequence[float]) -> str:
    off, beaten = [], []
    for size in SIZES:
        advised, plain, roles = _parts(lines, size)
        off.append(f"{100 * abs(_over_prediction(advised, plain)[0] - 1):.0f} %")
        beaten += [f"{role} at batch {size}" for role, found in roles.items() if _over(found, advised)[1] > 1]
    faster = (
        f"faster with the whole interval: {'; '.join(beaten)}" if beaten else "none was faster with its whole interval"
    )
    return (
        f"The command ran {CYCLES} times from nothing to the answer, on {PROMPTS} prompts with {THREADS} thread: "
        f"{', '.join(f'{one:.0f}' for one in seconds)} s.\n"
        f"Each answer was decoded live. Over these cycles, the advised setting's speed-up is {', '.join(off)} from the "
        f"predicted one at batch {', '.join(map(str, SIZES))} (wanted: {100 * BOUND:.0f} %).\n"
        f"Of the settings that were decoded, {faster}.\n"
        f"The contenders decode side by side, {LEG} s at a time. In each cycle they decode the prompts "
        f"{', '.join(map(str, TURNS.values()))} times at batch {', '.join(map(str, SIZES))}, after once for warming up. "
        "Means are geometric, and their 95 % intervals are over cycles (Student's t)."
    )


def _advised(lines: Sequence[Line]) -> str:
    """What was advised in each cycle; predicted and decoded."""
    text = [
        "| batch | cycle | advised | predicted times plain | decoded times plain | decoded over predicted |",
        "|---:|---|---|---:|---:|---:|",
    ]
    for size in SIZES:
        advised, plain, _ = _parts(lines, size)
        for line in advised:
            live = _over([line], plain)[0]
            text.append(
                f"| {size} | {line.cycle + 1} | {line.role}, {line.setting} | {line.predicted:.2f} | {live:.2f} "
                f"| {live / line.predicted:.2f} |"
            )
        mean = geometric_mean([line.predicted for line in advised])
        text.append(
            f"| {size} | all | | {mean:.2f} | {_shown(_over(advised, plain))} | {_shown(_over_prediction(advised, plain))} |"
        )
    return "\n".join(text)


def _table(lines: Sequence[Line]) -> str:
    """All that was decoded, the fastest first."""
    text = [
        "| batch | draft and method | settings (cycles) | advised in | predicted | decoded times plain | over advised |",
        "|---:|---|---|---:|---:|---:|---:|",
    ]
    for size in SIZES:
        advised, plain, roles = _parts(lines, size)
        for role, found in sorted(roles.items(), key=lambda one: -_over(one[1], plain)[0]):
            counts = Counter(line.setting for line in found)
            settings = ", ".join(f"{setting} ({count})" for setting, count in counts.most_common())
            text.append(
                f"| {size} | {role} | {settings} | {sum(line.advised for line in found)} of {len(found)} "
                f"| {geometric_mean([line.predicted for line in found]):.2f} | {_shown(_over(found, plain))} "
                f"| {_shown(_over(found, advised))} |"
            )
    return "\n".join(text)


def _shown(found: Interval) -> str:
    return f"{found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]"
