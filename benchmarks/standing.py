"""Where the stopping policies stand: between the best fixed K and what nobody can beat, on the toy pair.

Every policy is replayed on the same recordings of frozen test prompts. Whatever has a setting (K, a threshold, lambda) was
given the one that is best on the dev prompts, at each cost ratio anew. Cost is counted in forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from analysis import ceilings, programming
from analysis.recorded import with_recorded_heads
from analysis.replay import Geometry, replay, replay_starts, sweep_levels
from analysis.statistics import percentile_interval, resampling_weights
from analysis.tally import Replayed
from data_gen.frozen import load_frozen
from data_gen.recording import Recorder
from toolkit import ModelPair
from toolkit.acceptance import HeadEstimator, PrereadEstimator
from toolkit.acceptance.folder import head_hash, recorded_scorers
from toolkit.config import method
from toolkit.decoding import Sampling, decode
from toolkit.io import content_hash
from toolkit.pair import fingerprint
from toolkit.stopping import (
    AdaEdl,
    Bounded,
    Confidence,
    DynamicConfidence,
    Fixed,
    Heuristic,
    Rate,
    StoppingPolicy,
    Survival,
    Svip,
    Tail,
    Thresholded,
)
from toolkit.trace import Trace, join

Array = NDArray[np.float64]
FOLDER = Path(__file__).resolve().parent.parent / "outputs" / "standing"
DOMAINS = ("instruct", "math", "code")
COSTS = (0.1, 0.2, 0.3)
SPLITS = {"dev": 200, "test": 400}
ROWS = 10_000  # apart, so that no two prompt sets share random numbers
SAMPLING = Sampling(max_new_tokens=96, seed=1)
MAX_DRAFTED, RESAMPLES = 20, 2000
LEVELS = [round(0.02 * i, 2) for i in range(1, 50)]
RATE = "rate, lambda solved on dev"


@dataclass(frozen=True)
class Totals:
    """Counts per text of one policy [T] each."""

    tokens: Array
    drafts: Array
    targets: Array

    def rate(self, cost_ratio: float) -> float:
        """Tokens per target-forward time over all texts."""
        return float(self.tokens.sum() / (cost_ratio * self.drafts.sum() + self.targets.sum()))

    def resampled(self, weights: Array, cost_ratio: float) -> Array:
        """The same of every resample of texts [R]; weights [R, T]."""
        found: Array = (weights @ self.tokens) / (cost_ratio * (weights @ self.drafts) + weights @ self.targets)
        return found


@dataclass(frozen=True)
class AcceptedOnly:
    """A pre-read head without its second output: a survival threshold that knows the drawn token."""

    estimator: Any

    def drawn_probs(self, step: Any) -> tuple[Tensor, Tensor]:
        """P(y_k accepted) and 1."""
        accepted, following = self.estimator.drawn_probs(step)
        return accepted, following * 0 + 1


def standing() -> str:
    """Tokens per target-forward time of every policy, and its share of the way from the best fixed K to the oracle."""
    pair = ModelPair.toy()
    traces = {(d, s): _record(pair, d, s, n) for d in DOMAINS for s, n in SPLITS.items()}
    parts = []
    for cost_ratio in COSTS:
        found = {d: _domain(pair, traces[d, "dev"], traces[d, "test"], cost_ratio) for d in DOMAINS}
        parts += [f"## c = {cost_ratio:g}", "", *_table(found, cost_ratio), ""]
        parts += [
            "The rate rule against the others (its throughput over theirs, paired):",
            "",
            *_duels(found, cost_ratio),
            "",
        ]
    texts = ", ".join(f"{d} {traces[d, 'test'].num_positions}" for d in DOMAINS)
    about = f"""\
{SPLITS["test"]} test prompts per domain (tokens: {texts}), settings tuned on {SPLITS["dev"]} dev prompts (not those of the
heuristic and of dynamic confidence, which have none to speak of; DP value, ceiling and oracle are yardsticks that know
the test texts). A round has at least one token, SpecDec++'s as many as published (2) or said. T = 1, at most
{SAMPLING.max_new_tokens} tokens; one set of coins; heads as shipped. Throughput: tokens per target-forward time; in brackets
95 % intervals, bootstrap over prompts. *oracle* and *ceiling*: share of the way from the best fixed K to the clairvoyant
oracle, and to the policy that knows p and q but not the coins.
"""
    return "\n".join([about, *parts])


def _record(pair: ModelPair, domain: str, split: str, count: int) -> Trace:
    """The recording of a domain's prompts; kept below outputs/ for the next time."""
    about = [
        [fingerprint(m) for m in (pair.target, pair.draft)],
        head_hash(str(pair.head)),
        vars(SAMPLING),
        MAX_DRAFTED,
        ROWS,
    ]
    path = FOLDER / f"{domain}-{split}-{count}-{content_hash(about)}.safetensors"
    if not path.exists():
        _recorded(pair, domain, split, count).save(path)
    return Trace.load(path)


def _recorded(pair: ModelPair, domain: str, split: str, count: int) -> Trace:
    prompts = [example.prompt for example in load_frozen(domain, split)[:count]]
    first_row = ROWS * (DOMAINS.index(domain) * len(SPLITS) + list(SPLITS).index(split))
    rows = range(first_row, first_row + count)
    generations = decode(pair, prompts, method("autoregressive"), SAMPLING, batch_size=64, row_ids=rows)
    recorder = Recorder(pair, SAMPLING, MAX_DRAFTED, recorded_scorers(pair, {"own": str(pair.head)}), ceiling=True)
    texts = [(g.prompt_ids, g.token_ids) for g in generations]
    return recorder.record_all(texts, rows)


def _domain(pair: ModelPair, dev: Trace, test: Trace, cost_ratio: float) -> dict[str, Totals]:
    """What every policy counts on the test texts, tuned on dev."""
    names = {str(pair.head): "own"}

    def own(policy: Any) -> Any:
        return with_recorded_heads(policy.bind(pair), names)

    k, _ = ceilings.best_fixed(dev, cost_ratio, 14)
    drawn = own(Rate(PrereadEstimator())).estimator
    survival = own(Survival(HeadEstimator()))
    tuned: dict[str, tuple[Callable[[Trace, Sequence[float]], list[Replayed]], Sequence[float]]] = {
        "confidence": (_levels(Confidence()), LEVELS),
        "tail product": (_levels(Tail()), LEVELS),
        "SVIP": (_levels(Svip()), [-level for level in LEVELS]),
        "AdaEDL": (_each(lambda level: AdaEdl(threshold=level)), LEVELS[::2]),
        "SpecDec++ (published rule)": (_levels(survival, 2), LEVELS),
        "SpecDec++, lower bound 3": (_levels(survival, 3), LEVELS),
        "SpecDec++, lower bound 4": (_levels(survival, 4), LEVELS),
        "survival threshold, pre-read head": (_levels(Rate(AcceptedOnly(drawn), rate=1.0)), LEVELS),
    }
    found = {"plain decoding": _replayed(replay_starts(test, Bounded(Fixed(0), 0, 0)))}
    found["best fixed K"] = _replayed(replay_starts(test, Bounded(Fixed(k), 1, k)))
    found["heuristic"] = _replayed(replay(test, Bounded(Heuristic(), 1, MAX_DRAFTED)))
    found["dynamic confidence"] = _replayed(replay(test, Bounded(DynamicConfidence(), 1, MAX_DRAFTED)))
    for name, (sweep, levels) in tuned.items():
        rates = [_replayed(one).rate(cost_ratio) for one in sweep(dev, levels)]
        (chosen,) = sweep(test, [levels[int(np.argmax(rates))]])
        found[name] = _replayed(chosen)
    theory = with_recorded_heads(Rate(PrereadEstimator(instead=HeadEstimator(corrected=True).bind(pair))), names)
    for name, policy in (("SpecDec++, h = 1 - lambda c", theory), (RATE, own(Rate(PrereadEstimator())))):
        solved = ceilings.solve_policy(dev, policy, cost_ratio)
        priced = replace(policy, cost_ratio=cost_ratio, rate=solved.price)
        found[name] = _replayed(replay_starts(test, Bounded(priced, 1, MAX_DRAFTED)))
    tracked = replace(own(Rate(PrereadEstimator())), cost_ratio=cost_ratio)
    found["rate, lambda tracked per prompt"] = _replayed(replay(test, Bounded(tracked, 1, MAX_DRAFTED)))
    found["DP value of the pre-read head (cross-fitted)"] = _worth_of_head(dev, test, drawn, cost_ratio)
    found["ceiling: p and q known"] = _replayed(ceilings.true_probability(test, cost_ratio, min_drafted=1).replayed)
    counts = ceilings.oracle(test, MAX_DRAFTED)
    column = lambda name: np.array([c[name] for c in counts], dtype=np.float64)
    found["oracle: coins known"] = Totals(*map(column, ("num_generated", "num_draft_calls", "num_target_calls")))
    return found


def _worth_of_head(dev: Trace, test: Trace, estimator: Any, cost_ratio: float) -> Totals:
    """The best policy on the head's outputs; fitted to the texts of both splits, counted on test."""
    both = join([dev, test])
    seen = programming.head_inputs(both, Geometry.of(both), estimator, MAX_DRAFTED)
    found = _replayed(programming.best_policy(both, seen, cost_ratio).replayed)
    return Totals(*(part[dev.num_texts :] for part in (found.tokens, found.drafts, found.targets)))


def _levels(policy: Thresholded, min_drafted: int = 1) -> Callable[[Trace, Sequence[float]], list[Replayed]]:
    return lambda trace, levels: sweep_levels(trace, policy, levels, min_drafted)


def _each(policy: Callable[[float], StoppingPolicy]) -> Callable[[Trace, Sequence[float]], list[Replayed]]:
    return lambda trace, levels: [replay(trace, Bounded(policy(level), 1, MAX_DRAFTED)) for level in levels]


def _replayed(found: Replayed) -> Totals:
    names = ("num_generated", "num_draft_calls", "num_target_calls")
    return Totals(*(found.counts[name].astype(np.float64) for name in names))


def _weights(size: int) -> Array:
    return np.concatenate(list(resampling_weights(size, RESAMPLES, 0)))


def _table(found: Mapping[str, Mapping[str, Totals]], cost_ratio: float) -> list[str]:
    lines = [
        "| policy | " + " | ".join(f"{d} | oracle | ceiling" for d in found) + " |",
        "|---|" + "---:|" * (3 * len(found)),
    ]
    for name in found[DOMAINS[0]]:
        cells = []
        for policies in found.values():
            base, top, known = (policies[k] for k in ("best fixed K", "oracle: coins known", "ceiling: p and q known"))
            mine, weights = policies[name], _weights(len(base.tokens))
            r, b, o, k = (one.resampled(weights, cost_ratio) for one in (mine, base, top, known))
            cells.append(f"{mine.rate(cost_ratio):.3f}")
            for end, many in ((top, o), (known, k)):
                share = (mine.rate(cost_ratio) - base.rate(cost_ratio)) / (end.rate(cost_ratio) - base.rate(cost_ratio))
                low, high = percentile_interval((r - b) / (many - b))
                if name == "plain decoding":
                    cells.append("")
                elif name == "best fixed K" or mine is end:
                    cells.append(f"{share:.0%}")
                else:
                    cells.append(f"{share:.0%} [{low:.0%}, {high:.0%}]")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _duels(found: Mapping[str, Mapping[str, Totals]], cost_ratio: float) -> list[str]:
    lines = [f"| {RATE}, over | " + " | ".join(found) + " |", "|---|" + "---:|" * len(found)]
    others = [name for name in found[DOMAINS[0]] if name not in (RATE, "plain decoding", "oracle: coins known")]
    for name in others:
        cells = []
        for policies in found.values():
            mine, other = policies[RATE], policies[name]
            weights = _weights(len(mine.tokens))
            ratio = mine.rate(cost_ratio) / other.rate(cost_ratio) - 1
            low, high = percentile_interval(
                mine.resampled(weights, cost_ratio) / other.resampled(weights, cost_ratio) - 1
            )
            mark = "**" if low > 0 or high < 0 else ""
            cells.append(f"{mark}{ratio:+.1%}{mark} [{low:+.1%}, {high:+.1%}]")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print(standing())
