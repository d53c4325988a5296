"""python -m benchmarks.blocks DRAFT [--head HEAD] [--limit 40] [--costs C COLUMN ...]: how much of a block to send.

DRAFT is a DFlash or DSpark draft of the toy target, HEAD a pre-read head of it. The target writes responses to dev and test
prompts of the three domains; recordings of them are replayed. K and the threshold are chosen on dev, everything is counted on
test, with 95% intervals over its texts. Costs are measured here at batch sizes 1, 4 and 16 unless they are given: c_block and
the target's columns, in target forward passes over one token per row. A round of k tokens costs c_block + C(k + 1).

    whole block, fixed K    every round alike
    largest q >= h          a threshold
    statistics, confidence head, our head   `block_draft_rate`, by who estimates acceptance
    perfect confidence      the same, with sum min(p, q) of every position
    and of drawn tokens     the same, and min(1, p/q) of every drawn token
    upper bound             `toolkit.trace.bounds`: a block and its tokens are known before it is drafted

Then calibration: mean estimate and mean acceptance by depth, over rounds in which all before it was accepted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from analysis.tables.bootstrap import Bootstrap
from data_gen.prompts import ToyPrompts
from toolkit import ModelPair, config
from toolkit.acceptance import PrereadEstimator, StatisticsEstimator
from toolkit.acceptance.folder import Scorer
from toolkit.costs.load import LoadCost
from toolkit.costs.measure import measure
from toolkit.costs.table import CostTable
from toolkit.decoding import Sampling, decode
from toolkit.drafts.block.estimator import ConfidenceHeadEstimator
from toolkit.errors import answer_signals
from toolkit.stopping import BlockDraftRate, Bounded, Fixed, Largest, StoppingPolicy
from toolkit.stopping.prices import Prices, PriceTable
from toolkit.trace import Trace
from toolkit.trace.bounds import true_probability
from toolkit.trace.record_by_start import recorder_of
from toolkit.trace.replay import Replayed, replay
from toolkit.trace.score import named_scorers, with_logits
from toolkit.trace.steps import Geometry, RecordedStep, step_at

BATCHES = (1, 4, 16)
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class TruePositions:
    """The recording's own sum min(p, q) of a position, before its token is drawn."""

    def bind(self, pair: Any) -> TruePositions:
        return self

    def position_prob(self, step: RecordedStep) -> Tensor:
        return step.trace.alpha[step.index]


class TrueTokens(TruePositions):
    """And min(1, p/q) of the drawn token."""

    def drawn_probs(self, step: RecordedStep) -> tuple[Tensor, Tensor]:
        accepted = step.trace.accept_prob[step.index]
        return accepted, torch.ones_like(accepted)


def recorded(pair: ModelPair, part: Literal["dev", "test"], limit: int) -> Trace:
    """The recording of responses to `limit` prompts of each domain."""
    prompts = [
        prompt.prompt for name in ("instruct", "math", "code") for prompt in ToyPrompts(name, part, limit).load()
    ]
    sampling = Sampling(max_new_tokens=96, seed=1)
    plain = decode(pair, prompts, config.method("autoregressive"), sampling, batch_size=16)
    sequences = [(generation.prompt_ids, generation.token_ids) for generation in plain]
    recorder = recorder_of(pair, sampling, 20, hidden=True, upper_bound=True)
    return recorder.record_all(sequences, range(len(sequences)), batch_size=8)


def estimators(pair: ModelPair, head: str | None) -> Iterator[tuple[str, Any]]:
    """Who estimates acceptance, and how tables call it."""
    yield "statistics", StatisticsEstimator().bind(pair)
    if pair.draft.confidence_head is not None:
        yield "confidence head", ConfidenceHeadEstimator(pair.draft.confidence_head)
    if head is not None:
        yield "our head", PrereadEstimator(head).bind(pair)
    yield "perfect confidence", TruePositions()
    yield "and of drawn tokens", TrueTokens()


def counted(replayed: Replayed, prices: Prices) -> np.ndarray:
    """Tokens, target forward passes and cost of every text [T, 3]."""
    counts = {name: values.astype(float) for name, values in replayed.counts.items()}
    columns = prices.read(torch.arange(replayed.drafted.shape[1])).double().numpy()
    cost = replayed.drafted @ (1 + columns) + counts["num_draft_calls"] * float(prices.forward[0])
    return np.stack([counts["num_generated"], counts["num_target_calls"], cost], 1)


def rates(totals: np.ndarray) -> np.ndarray:
    """Tokens per target forward pass, and per unit of cost, from totals [..., 3]."""
    return totals[..., :1] / totals[..., 1:]


def chosen(dev: Trace, policies: Mapping[str, StoppingPolicy], prices: Prices) -> str:
    """The name of the policy that makes the most tokens per cost of a recording."""
    return max(policies, key=lambda name: rates(counted(replay(dev, policies[name]), prices).sum(0))[1])


def of_costs(dev: Trace, trace: Trace, who: list[tuple[str, Any]], table: CostTable, name: str) -> None:
    """Print the rows of one table of costs."""
    batch = table.batch_size
    most = trace.max_drafted
    prices = PriceTable.of(LoadCost.of([table]), batch, most, blocks=True).middle
    columns = ", ".join(f"{value:.3f}" for value in prices.columns[0].tolist())
    print(f"\n{name}: c_block {float(prices.forward[0]):.2f}, columns {columns}\n")
    print("| sent | tokens per target forward | tokens per cost |\n|---|---|---|\n| nothing | 1.000 | 1.000 |")
    fixed = {f"K={k}": Bounded(Fixed(k), 1, k) for k in range(1, most + 1)}
    sure = {f"largest q >= {h}": Bounded(Largest(h), 0, most) for h in THRESHOLDS}
    rows = {"whole block": replay(trace, fixed[f"K={most}"])}
    for group in (fixed, sure):
        best = chosen(dev, group, prices)
        rows[best] = replay(trace, group[best])
    for estimated, estimator in who:
        policy = BlockDraftRate(estimator, costs=table, batch_size=batch).within(most)
        bound = replace(policy, table=LoadCost.of([table]), blocks=True)
        rows[estimated] = replay(trace, Bounded(bound, 0, most))
    bound = true_probability(trace, float(prices.forward[0]), columns=prices.columns[0, :most].tolist())
    rows["upper bound"] = bound.replayed
    for sent, replayed in rows.items():
        cells = zip(*Bootstrap().interval(counted(replayed, prices), rates), strict=True)
        print(f"| {sent} | " + " | ".join("{:.3f} [{:.3f}, {:.3f}]".format(*cell) for cell in cells) + " |")


def calibration(trace: Trace, who: list[tuple[str, Any]]) -> None:
    """Print mean estimates before a token is drawn, and mean acceptance, by depth."""
    geometry, starts = Geometry.of(trace), torch.arange(trace.num_positions)
    named = [(name, estimator) for name, estimator in who if hasattr(estimator, "position_prob")]
    print("\n| depth | positions | " + " | ".join(name for name, _ in named) + " |\n" + "|---" * (2 + len(named)) + "|")
    for depth in range(1, trace.max_drafted + 1):
        index, exists = step_at(trace, geometry, starts, depth)
        steps = index[exists & (geometry.run >= depth - 1) & (geometry.left >= depth)]
        means = [
            float(e.position_prob(RecordedStep(trace, depth, steps, drawn=False)).double().mean()) for _, e in named
        ]
        print(f"| {depth} | {len(steps)} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("draft")
    parser.add_argument("--head", default=None)
    parser.add_argument("--limit", type=int, default=40, help="prompts of each domain")
    parser.add_argument(
        "--costs", type=float, nargs="+", help="c_block, and prices of a column, instead of measured ones"
    )
    options = parser.parse_args()
    pair = ModelPair.from_pretrained("toy/target", options.draft)
    dev, trace = (recorded(pair, part, options.limit) for part in ("dev", "test"))
    who = list(estimators(pair, options.head))
    if options.head is not None:
        scorers: dict[str, Scorer] = named_scorers(pair, {"ours": options.head})
        trace = replace(with_logits(trace, scorers), names={scorer.key: name for name, scorer in scorers.items()})
    print(f"{trace.num_texts} texts, {trace.num_positions} tokens, blocks of {trace.max_drafted}")
    for batch in BATCHES if options.costs is None else ():
        of_costs(dev, trace, who, measure(pair, batch)[0], f"batch {batch}")
    for column in () if options.costs is None else options.costs[1:]:
        of_costs(dev, trace, who, CostTable.ratio(options.costs[0], column), "given")
    calibration(trace, [(name, estimator) for name, estimator in who if name != "and of drawn tokens"])


if __name__ == "__main__":
    answer_signals()
    main()
