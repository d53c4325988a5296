"""python -m benchmarks.experts DEV TEST [--ratios .02 .1 .3]: does drafting pay for a mixture of experts, and who knows?

DEV and TEST are recordings of a pair (`data_gen.traces`), whose acceptance is taken as it is; a target forward pass costs what
a published table of a mixture says (`toolkit.costs.published`), or nothing for further tokens (dense: a GPU at batch 1). A
draft forward pass costs a share of one over one token. Whatever is chosen or begun with comes from DEV, everything is counted
on TEST, with 95 % intervals over its texts, in tokens per cost: plain decoding makes 1.

    K=3, K=7            every round alike
    dense K             the fixed K that is best on DEV at dense costs
    best K              the fixed K that is best on DEV at the table's costs; it may be 0
    online logistic     its threshold chosen on DEV; carried from text to text
    probing             Cascade's controller (arXiv:2506.20675), as restated in `Probing`; its K chosen on DEV
    rate                statistics of q with the weights that ship; the texts of DEV give its first acceptance
    best_source         the same beside copies
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis.replay.predictor_costs import priced
from analysis.replay.predictor_rows import CARRIED, COLD, counted, untrained
from analysis.tables.bootstrap import Array, Bootstrap
from analysis.tables.files import markdown, with_interval
from analysis.tables.grid import FIXED
from data_gen.texts import read_responses
from toolkit import config
from toolkit.acceptance import StatisticsEstimator
from toolkit.costs.load import LoadCost
from toolkit.costs.published import PREFIX, names
from toolkit.errors import answer_signals
from toolkit.models.teacher import Text
from toolkit.runs.stage import read_manifest
from toolkit.stopping import Bounded
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.trace import Trace
from toolkit.trace.copies import Copies
from toolkit.trace.replay import carried, replay
from toolkit.trace.store import read_traces
from toolkit.types import Drafted, Step, Verified

DENSE = "dense"
LEVELS = [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
TRIAL, LEAST, MOST = 4, 16, 256  # rounds: of a trial, and until the next one


@dataclass(frozen=True)
class Probing(StoppingPolicy):
    """Decide by trials, for all texts in turn: utility = (tokens per round) / (cost per round), plain decoding's being 1.

    A trial is TRIAL rounds that draft `num_drafted` tokens. At a utility of 1 or more drafting goes on for LEAST rounds, then
    comes the next trial; below 1 it is off, for LEAST rounds, and twice as long (at most MOST) after every further failure.
    Theirs also moves K from trial to trial; here it is the best one on DEV.

    costs  [D + 1] of a round with 0, 1, 2, ... drafted tokens, that of 0 being 1
    """

    num_drafted: int
    costs: tuple[float, ...]

    @property
    def limit(self) -> int:  # type: ignore[override]
        return self.num_drafted

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state: rounds left of this phase, whether it is a trial and drafts, its tokens and cost, the last pause."""
        zeros = torch.zeros(num_rows)
        return {
            "left": zeros + TRIAL,
            "trial": zeros + 1,
            "on": zeros + 1,
            "tokens": zeros,
            "cost": zeros,
            "pause": zeros,
        }

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        return state, live & (state["on"] > 0)

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        return state, torch.full_like(state["on"], step.depth < self.num_drafted, dtype=torch.bool)

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        tokens = state["tokens"] + verdict.length + 1
        cost = state["cost"] + torch.tensor(self.costs)[proposal.num_drafted]
        left, trial = state["left"] - 1, state["trial"] > 0
        ended, pays = left <= 0, tokens >= cost
        failed = torch.where(state["pause"] > 0, (2 * state["pause"]).clamp(max=MOST), LEAST)
        pause = torch.where(ended & trial, torch.where(pays, 0.0, failed), state["pause"])
        after = torch.where(trial, torch.where(pays, LEAST, failed), TRIAL)
        return {
            "left": torch.where(ended, after, left),
            "trial": torch.where(ended, (~trial).float(), state["trial"]),
            "on": torch.where(ended, (~trial | pays).float(), state["on"]),
            "tokens": torch.where(ended, 0.0, tokens),
            "cost": torch.where(ended, 0.0, cost),
            "pause": pause,
        }


def rows_at(
    dev: Trace, test: Trace, texts: Sequence[Text], table: LoadCost, ratio: float
) -> dict[str, tuple[str, Array]]:
    """By row its setting, and tokens and cost [T, 2] of every text of TEST."""
    deepest = min(int(table.target.width[-1]) - 1 if table.is_published else dev.max_drafted, dev.max_drafted)
    fixed, online, online_carried = (untrained()[name] for name in (FIXED, COLD, CARRIED))
    on_dev, on_test = (fixed.counts(trace, [])[: deepest + 1] for trace in (dev, test))

    def speed(counts: Array, costs: LoadCost = table) -> Array:
        tokens, cost = np.moveaxis(priced(counts.sum(-2), costs), -1, 0)
        return tokens / cost

    best, dense = (int(speed(on_dev, costs).argmax()) for costs in (table, LoadCost.ratio(ratio)))
    rows = {f"K={k}": ("", on_test[k]) for k in (3, 7) if k <= deepest}
    rows |= {"dense K": (f"K={dense}", on_test[dense]), "best K": (f"K={best}", on_test[best])}
    shallow_dev, shallow_test = (replace(trace, max_drafted=deepest) for trace in (dev, test))
    level = LEVELS[int(speed(online.counts(shallow_dev, LEVELS)).argmax())]
    rows["online logistic"] = f"h={level:g}", online_carried.counts(shallow_test, [level])[0]
    passes = np.array([table.target(1, 1 + k) + k * table.draft(1) for k in range(deepest + 1)]) / table.target(1, 1)
    probing = {k: Probing(k, tuple(passes)) for k in range(1, deepest + 1)}
    chosen = max(probing, key=lambda k: speed(counted(carried(dev, probing[k])[0])))
    rows["probing"] = f"K={chosen}", counted(carried(test, probing[chosen])[0])
    acceptance = float(dev.accepted.float().mean())
    rows |= {"rate": ("", policy_counts("rate", test, table, acceptance, deepest))}
    copies = Copies(
        config.method("best_source").proposer.copies, texts, deepest, max(len(text) for _, text in texts), ()
    )
    rows |= {"best_source": ("", policy_counts("best_source", test, table, acceptance, deepest, copies))}
    return {name: (setting, priced(counts, table)) for name, (setting, counts) in rows.items()}


def policy_counts(
    name: str, test: Trace, table: LoadCost, acceptance: float, deepest: int, copies: Copies | None = None
) -> Array:
    """Counts of a rule that weighs costs, without a number of its own."""
    with TemporaryDirectory() as folder:
        costs = table.save(Path(folder) / "costs.json")
        words = [f"policy.costs={costs}", f"policy.acceptance={acceptance:.3f}", f"max_drafted={deepest}"]
        rule: Any = config.method(name, words).policy
        policy = Bounded(replace(rule, estimator=StatisticsEstimator()), 0, deepest).bind(None)
    return counted(replay(test, policy, copies))


def texts_of(folder: Path, trace: Trace) -> list[Text]:
    """The prompts and responses of a recording's texts."""
    rows = read_responses([read_manifest(folder)["given"]["responses"]]).rows
    return [(rows[row]["prompt_ids"], rows[row]["token_ids"]) for row in trace.rows.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dev", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.02, 0.1, 0.3])
    options = parser.parse_args()
    dev, test = (read_traces(path) for path in (options.dev, options.test))
    lines, bootstrap, texts = [], Bootstrap(), texts_of(options.test, test)
    for name in (DENSE, *names()):
        for ratio in options.ratios:
            table = LoadCost.ratio(ratio) if name == DENSE else LoadCost.load(f"{PREFIX}{name}:{ratio}")
            line = {"costs": name, "c": f"{ratio:g}"}
            for row, (setting, values) in rows_at(dev, test, texts, table, ratio).items():
                figures = bootstrap.figures(values, lambda sums: {"": sums[..., 0] / sums[..., 1]})
                line[row] = f"{with_interval(*(figures[end] for end in ('', '_low', '_high')))} {setting}".strip()
            lines.append(line)
            print(line, flush=True)
    print(f"\n{test.num_texts} texts of {options.test.name}\n")
    print(markdown(pd.DataFrame(lines).fillna("")))


if __name__ == "__main__":
    answer_signals()
    main()
