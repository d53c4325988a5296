"""Batches of the toy pair and of a padded one: does deciding for all rows keep up with the best method at every batch size?

All contenders decode one queue of prompts at every batch size, side by side (`benchmarks.side_by_side`). Responses differ in
length: with a short limit, all plain responses would end together, and the next prompts would be read in one forward.
The batch rules and the simulator use the same costs, which are measured on other prompts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import analysis.serving
from analysis.loads.hardware import Shape, modelled
from analysis.loads.measured import measured_costs
from analysis.loads.recorded import RecordedPair
from analysis.loads.rules import with_rules
from analysis.loads.simulator import Load
from analysis.tables.files import read_table
from analysis.tables.grid import PLAIN, Setting
from analysis.tables.workbench import Workbench
from benchmarks.side_by_side import LEG, Contender, apart, decoded, ratio
from data_gen.frozen import load_frozen
from toolkit import ModelPair, config
from toolkit.decoding import Sampling
from toolkit.load_cost import LoadCost
from toolkit.padding import pad_model
from toolkit.prompts import Prompt

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "evidence"
SIZES, PROMPTS, THREADS = (1, 2, 4, 8, 16, 32), 96, 1
DOMAINS = ("instruct", "math")  # alternating: short and longer responses
TOKENS, TURNS = 96, 6
LENGTHS = range(1, 9)
PADDED: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 8,
}
PADDED_PROMPTS, PADDED_TOKENS, PADDED_TURNS = 32, 32, 6
ROUNDS = 12  # timed rounds per batch size and draft length, twice at each of two contexts
TOGETHER = ("batch_rate", "batch_rate_confidence")
SHOWN_SIZES = (1, 4, 16)
SHOWN = ("autoregressive", "speculative K=4", "rate", "batch_rate_confidence")
LATENCY = "Seconds of a request, from its slot to its answer; intervals from the lowest to the highest turn:"
CONTEXT = 64
MODELLED = "What forwards cost, measured here in the decoding loop and modelled for a CPU (`hardware=cpu`):"
ENOUGH = 0.97  # of the best other contender
AHEAD = 0.05  # where the simulator expects so much more, live decoding should show it


def contenders(known: Mapping[str, dict[str, Any]]) -> list[Setting]:
    """Plain decoding, fixed lengths, rules that decide row by row, and those that decide for the batch.

    known  parameters of the latter, by method
    """
    fixed = [Setting("speculative", {"policy.num_drafted": length}) for length in LENGTHS]
    alone = [
        Setting("confidence", {"policy.threshold": 0.4}),
        Setting("tail", {"policy.threshold": 0.2}),
        Setting("rate", {}),
        Setting("dynamic_confidence", {}),
    ]
    together = [Setting(name, {f"policy.{key}": value for key, value in known[name].items()}) for name in TOGETHER]
    return [Setting("autoregressive"), *fixed, *alone, *together]


def study(
    pair: ModelPair, sizes: Sequence[int], count: int, tokens: int, turns: int
) -> tuple[list[dict[str, Any]], LoadCost]:
    """One line per batch size and contender: tokens/s and seconds of every turn, and the simulator's prediction; the costs."""
    sampling = Sampling(temperature=1.0, max_new_tokens=tokens, seed=5)
    both = zip(*(load_frozen(domain, "test") for domain in DOMAINS), strict=False)
    prompts = [example.prompt for pair_of in both for example in pair_of][: count + 32]
    others = prompts[count:]
    with TemporaryDirectory() as scratch:
        ((costs, _),) = apart(measured_costs, pair, others, sampling, sizes, LENGTHS, ROUNDS, None, 8)
        unknown = contenders({name: {} for name in TOGETHER})
        before = RecordedPair(_bench(pair, others, sampling), unknown, Path(scratch), 20)
        costs = with_rules(costs, pair, before.methods, others, sampling, sizes)
        kept = {"costs": str(costs.save(Path(scratch) / "costs.json"))}
        settings = contenders({name: {**kept, **before.told(Setting(name))} for name in TOGETHER})
        recorded = RecordedPair(_bench(pair, prompts[:count], sampling), settings, Path(scratch), 20)
        lines = []
        for size in sizes:
            named = {setting.name: Contender(setting) for setting in settings}
            live = apart(decoded, {"": pair}, named, prompts[:count], sampling, size, turns)
            for setting in settings:
                served = recorded.serve(setting, costs, Load(size, drops="half"))
                figures = served.figures()
                lines.append({
                    "batch": size, "name": _name(setting), "method": setting.method,
                    "speeds": [turn.speed for turn in live[setting.name]],
                    "latencies": [(turn.latency, turn.latency_95) for turn in live[setting.name]],
                    "predicted": served.tokens_per_second,
                    "predicted_latencies": (figures["latency"], figures["latency_95"]),
                })  # fmt: skip
    return lines, costs


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """By batch size: the batch rules' speed over the best other contender's, and how often the simulator orders alike."""
    text = [
        "| batch | best of the others | batch_rate over it | batch_rate_confidence over it | the same over the best of other "
        "turns | gaps beyond their interval | ordered alike by the simulator |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for size, part in _by_size(lines).items():
        others = [line for line in part if line["method"] not in TOGETHER]
        best = max(others, key=lambda line: statistics.median(line["speeds"]))
        ratios = [_shown(*ratio(_of(part, name)["speeds"], best["speeds"])) for name in TOGETHER]
        ratios.append(_shown(*held_out(part, TOGETHER[1])))
        clear, alike = order(part)
        text.append(f"| {size} | {best['name']} | {' | '.join(ratios)} | {clear} | {alike} |")
    return "\n".join(text)


def held_out(part: Sequence[dict[str, Any]], method: str) -> tuple[float, float, float]:
    """A method's speed over that of the contender that is best in the other turns, turn by turn, as `ratio`.

    So no contender is the best by chance of the turn that it is compared in.
    """
    others = [line for line in part if line["method"] not in TOGETHER]
    chosen = []
    for turn in range(len(others[0]["speeds"])):
        best = max(others, key=lambda line: statistics.median(without(line["speeds"], turn)))
        chosen.append(best["speeds"][turn])
    return ratio(_of(part, method)["speeds"], chosen)


def without(values: Sequence[float], turn: int) -> list[float]:
    """All values but one; of a single turn, itself."""
    return [value for at, value in enumerate(values) if at != turn] or list(values)


def order(part: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Pairs of contenders whose ratio's interval leaves out 1, and those of them that the simulator orders alike."""
    clear = alike = 0
    for a, b in combinations(part, 2):
        _, low, high = ratio(a["speeds"], b["speeds"])
        if low > 1 or high < 1:
            clear += 1
            alike += (a["predicted"] > b["predicted"]) == (low > 1)
    return clear, alike


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Measured tokens/s (median, lowest and highest turn) beside the simulator's."""
    text = [
        "| batch | contender | tokens/s | lowest to highest | simulated | simulated / decoded |",
        "|---:|---|---:|---|---:|---:|",
    ]
    for size, part in _by_size(lines).items():
        for line in sorted(part, key=lambda line: -statistics.median(line["speeds"])):
            middle = statistics.median(line["speeds"])
            spread = f"{min(line['speeds']):.0f} to {max(line['speeds']):.0f}"
            predicted = f"{line['predicted']:.0f} | {line['predicted'] / middle:.2f}"
            text.append(f"| {size} | {line['name']} | {middle:.0f} | {spread} | {predicted} |")
    return "\n".join(text)


def latencies(lines: Sequence[dict[str, Any]]) -> str:
    """Seconds from a request's slot to its answer, decoded and simulated: median and 95th percentile over requests."""
    text = [
        "| batch | contender | median, decoded | simulated | 95 %, decoded | simulated |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for size, part in _by_size(lines).items():
        for line in part:
            if size in SHOWN_SIZES and line["name"] in SHOWN:
                cells = []
                for at in (0, 1):
                    found = sorted(turn[at] for turn in line["latencies"])
                    cells.append(f"{statistics.median(found):.3f} [{found[0]:.3f}, {found[-1]:.3f}]")
                    cells.append(f"{line['predicted_latencies'][at]:.3f}")
                text.append(f"| {size} | {line['name']} | {' | '.join(cells)} |")
    return "\n".join(text)


def modelled_beside(costs: LoadCost, pair: ModelPair) -> str:
    """Milliseconds of forwards: measured here, and modelled from the configs and the figures of `hardware=cpu`."""
    known = modelled(Shape.of(pair.target), Shape.of(pair.draft), "cpu", 1, SIZES)
    text = ["| batch | forward | measured, ms | modelled, ms | modelled / measured |", "|---:|---|---:|---:|---:|"]
    for size in SHOWN_SIZES:
        for name, width in (("draft", 1), ("target", 1), ("target", 5)):
            found, thought = (getattr(table, name)(size, width, CONTEXT) for table in (costs, known))
            about = f"{name}, {width} token{'s' if width > 1 else ''} per row"
            text.append(f"| {size} | {about} | {1000 * found:.2f} | {1000 * thought:.2f} | {thought / found:.2f} |")
    return "\n".join(text)


def shortfalls(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Where the interval of a batch rule's speed over the best other contender's lies below `ENOUGH`."""
    found = []
    for size, part in _by_size(lines).items():
        others = [line for line in part if line["method"] not in TOGETHER]
        best = max(others, key=lambda line: statistics.median(line["speeds"]))
        for name in TOGETHER:
            middle, _, high = ratio(_of(part, name)["speeds"], best["speeds"])
            if high < ENOUGH:
                found.append(f"{name} at batch {size} ({middle:.3f})")
    return found


def predicted_ahead(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Where the simulator has a batch rule more than `AHEAD` ahead of all others, and the decoded ratio to its second best."""
    found: list[str] = []
    for size, part in _by_size(lines).items():
        others = [line for line in part if line["method"] not in TOGETHER]
        best = max(others, key=lambda line: line["predicted"])
        found += [
            f"{name} at batch {size} ({_shown(*ratio(_of(part, name)['speeds'], best['speeds']))})"
            for name in TOGETHER
            if _of(part, name)["predicted"] > (1 + AHEAD) * best["predicted"]
        ]
    return found


def padded() -> ModelPair:
    """The toy pair with its target grown to 20 M parameters: a draft forward costs a small part of a target forward."""
    pair = ModelPair.toy()
    return replace(
        pair, target=pad_model(pair.target, **PADDED), draft=None, drafts=pair.drafts, name="toy, padded to 20 M"
    )


def batches() -> str:
    """Tokens per second by batch size, toy pair: rules that decide for the batch, plain decoding, fixed K and rules per row."""
    return _page(ModelPair.toy(), PROMPTS, TOKENS, TURNS)


def batches_padded() -> str:
    """Tokens per second by batch size, target padded to 20 M parameters: there a draft forward costs little."""
    return _page(padded(), PADDED_PROMPTS, PADDED_TOKENS, PADDED_TURNS)


def serving() -> str:
    """A 70B target with a 1B draft on eight modelled H100s, by users: what drafting is worth. Modelled, not measured."""
    loads = (1, 4, 16, 64, 256)
    with TemporaryDirectory() as scratch:
        words = ["prompts=toy_math", "prompts.limit=128", "hardware=h100", "devices=8", "shapes=[llama-70b,llama-1b]",
                 f"users={list(loads)}", "slots=256", "requests=256", f"paths.root_dir={scratch}", "track=false"]  # fmt: skip
        folder = analysis.serving.run(config.compose("serving", words))
        figures = FOLDER / "figures"
        figures.mkdir(parents=True, exist_ok=True)
        for kind in ("png", "svg"):
            shutil.copy(folder / f"serving.{kind}", figures / f"serving.{kind}")
        table = read_table(folder, "serving")
    best = table.loc[table.groupby(["amount", "method"], sort=False).tokens_per_second.idxmax()]
    methods = [method for method in dict.fromkeys(best.method) if method != PLAIN]
    text = [f"| users | plain tokens/s | {' | '.join(methods)} |", "|---:|---:|" + "---:|" * len(methods)]
    for load in loads:
        part = best[best.amount == load].set_index("method")
        cells = [f"{part.times_plain[method]:.2f}" for method in methods]
        text.append(f"| {load} | {part.tokens_per_second[PLAIN]:,.0f} | {' | '.join(cells)} |")
    head = (
        "Acceptance is the toy pair's on `math` (128 prompts, recorded). Costs are those of Llama-3 shapes of 70B and 1B at "
        "70 % of the devices' peaks (`analysis.loads.hardware`). Columns: tokens per second over plain decoding's, each method "
        "at its best setting for that load, chosen and reported on the same prompts."
    )
    return "\n".join([head, "", *text, "", "![tokens per second over plain decoding by users](figures/serving.png)"])


# -- inside -----------------------------------------------------------------------------------------------------------


def _page(pair: ModelPair, count: int, tokens: int, turns: int) -> str:
    torch.set_num_threads(THREADS)
    lines, costs = study(pair, SIZES, count, tokens, turns)
    clear, alike = (sum(numbers) for numbers in zip(*(order(part) for part in _by_size(lines).values()), strict=True))
    return "\n\n".join([
        f"A queue of {count} prompts, responses of at most {tokens} tokens, {turns} turns behind one for warming up. T = 1, "
        f"{THREADS} thread, test prompts of `instruct` and `math` alternating. In a turn all contenders go on side by side, "
        f"{LEG} s at a time; the next turn has another seed. Ratios compare speeds of the same turn: their geometric mean "
        "with a 95 % interval over turns (Student's t). The best of the others is the one with the highest median in these "
        "turns, so it is flattered by chance. The best of other turns is chosen for each turn from all turns but this one. A "
        "gap is beyond its interval if the interval of two contenders' ratio leaves out 1. Costs were measured on other "
        "prompts, and so were the seconds of the policies themselves.",
        f"With its whole interval below {ENOUGH} of the best other: {', '.join(shortfalls(lines)) or 'nowhere'}. The simulator "
        f"orders {alike} of {clear} clear gaps as live decoding does. Where it has a batch rule more than {AHEAD:.0%} ahead "
        "of all others, with the decoded ratio to the best of them by the simulator: "
        f"{', '.join(predicted_ahead(lines)) or 'nowhere'}.",
        summary(lines), table(lines), LATENCY, latencies(lines), MODELLED, modelled_beside(costs, pair),
    ])  # fmt: skip


def _by_size(lines: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    return {
        size: [line for line in lines if line["batch"] == size]
        for size in dict.fromkeys(line["batch"] for line in lines)
    }


def _of(part: Sequence[dict[str, Any]], method: str) -> dict[str, Any]:
    return next(line for line in part if line["method"] == method)


def _shown(middle: float, low: float, high: float) -> str:
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def _bench(pair: ModelPair, prompts: Sequence[str], sampling: Sampling) -> Workbench:
    return Workbench(pair, [Prompt(str(number), text) for number, text in enumerate(prompts)], sampling, 32)


def _name(setting: Setting) -> str:
    return setting.method if setting.method in TOGETHER else setting.name


def main() -> None:
    """The study with other numbers, for experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--padded", action="store_true", help="the pair whose target is padded")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--out", help="write the lines here, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pair = padded() if options.padded else ModelPair.toy()
    lines, _ = study(pair, options.sizes, options.prompts, options.tokens, options.turns)
    if options.out:
        Path(options.out).write_text(json.dumps(lines))
    print(f"{summary(lines)}\n\n{table(lines)}")


if __name__ == "__main__":
    main()
