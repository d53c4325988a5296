"""Where the stopping policies stand: between the best fixed K and the upper bound, on the toy pair.

Every policy is replayed on the same recordings of frozen test prompts. Whatever has a setting (K, a threshold, lambda) was
given the one that is best on the dev prompts, for each cost ratio. Cost is counted in forwards.

python -m benchmarks.standing [--small]      prints the tables; `make evidence` writes them into a page
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from analysis.figures.plots import label
from analysis.replay import dynamic_program, upper_bound
from analysis.replay.policies import replay, replay_starts, sweep_levels
from analysis.replay.recorded_heads import with_recorded_heads
from analysis.replay.tally import Replayed
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.grid import ORACLE, PLAIN, UPPER_BOUND
from analysis.tables.rows import COUNTS
from analysis.tables.standing import SHARES, gain_over, standing
from data_gen.held_out import load_frozen
from data_gen.recording import Recorder
from toolkit import ModelPair, metrics
from toolkit.acceptance import HeadEstimator, PrereadEstimator
from toolkit.acceptance.folder import head_hash, recorded_scorers
from toolkit.config import method
from toolkit.decoding import Sampling, decode
from toolkit.errors import answer_signals
from toolkit.files.atomic import content_hash
from toolkit.models.pair import fingerprint
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
from toolkit.stopping.base import DrawnEstimator
from toolkit.trace import Trace, join
from toolkit.trace.rounds import Geometry
from toolkit.types import Step

Array = NDArray[np.float64]
FOLDER = Path(__file__).resolve().parent.parent / "outputs" / "standing"
DOMAINS = ("instruct", "math", "code")
COSTS = (0.1, 0.2, 0.3)
SPLITS = {"dev": 200, "test": 400}
SMALL = {"dev": 6, "test": 6}
OWN = "own"  # what a recording calls the pair's head folder
ROWS = 10_000  # apart, so that no two prompt sets share random numbers
SAMPLING = Sampling(max_new_tokens=96, seed=1)
MAX_DRAFTED, BOOTSTRAP = 20, Bootstrap(2000)
LEVELS = [round(0.02 * i, 2) for i in range(1, 50)]
FIXED, RATE = "best fixed K", "rate, lambda solved on dev"
Counted = dict[str, Array]  # policy -> counts per text [T, counts]


@dataclass(frozen=True)
class AcceptedOnly:
    """A pre-read head without its second output: a survival threshold that knows the drawn token."""

    estimator: DrawnEstimator

    def bind(self, pair: Any) -> AcceptedOnly:
        """Itself: the estimator is bound already."""
        return self

    def drawn_probs(self, step: Step) -> tuple[Tensor, Tensor]:
        """P(y_k accepted) and 1."""
        accepted, following = self.estimator.drawn_probs(step)
        return accepted, following * 0 + 1


def standings(small: bool = False) -> str:
    """Tokens per target-forward time of every policy, and its share of the way from the best fixed K to the oracle."""
    pair, splits = ModelPair.toy(), SMALL if small else SPLITS
    traces = {(d, s): recording(pair, d, s, n) for d in DOMAINS for s, n in splits.items()}
    parts = []
    for cost_ratio in COSTS[1:2] if small else COSTS:
        by_domain = {d: _domain(pair, traces[d, "dev"], traces[d, "test"], cost_ratio) for d in DOMAINS}
        parts += [f"## c = {cost_ratio:g}", "", *_table(by_domain, cost_ratio), ""]
        parts += [
            "The rate rule against the others (its throughput over theirs, paired):",
            "",
            *_duels(by_domain, cost_ratio),
            "",
        ]
    texts = ", ".join(f"{d} {traces[d, 'test'].num_positions}" for d in DOMAINS)
    note = f"""\
{splits["test"]} test prompts per domain (tokens: {texts}). Settings are tuned on {splits["dev"]} dev prompts; those of the
heuristic and of dynamic confidence stay as they are. DP value, upper bound and oracle are references that know
the test texts. A round has at least one token, SpecDec++'s at least 2 (published) or its lower bound. T = 1, at most
{SAMPLING.max_new_tokens} tokens; one set of acceptance draws; heads as shipped. Throughput: tokens per target-forward
time; in brackets 95 % intervals over prompts. *oracle* and *upper bound*: share of the way from the best fixed K
to each. The oracle knows the acceptance draws, the upper bound only p and q.
"""
    return "\n".join([note, *parts])


def recording(pair: ModelPair, domain: str, split: str, count: int) -> Trace:
    """The recording of a domain's prompts; kept below outputs/ for the next time."""
    contents = [
        [fingerprint(m) for m in (pair.target, pair.draft)],
        head_hash(str(pair.head)),
        vars(SAMPLING),
        MAX_DRAFTED,
        ROWS,
    ]
    path = FOLDER / f"{domain}-{split}-{count}-{content_hash(contents)}.safetensors"
    if not path.exists():
        prompts = [example.prompt for example in load_frozen(domain, split)[:count]]
        first_row = ROWS * (DOMAINS.index(domain) * len(SPLITS) + list(SPLITS).index(split))
        rows = range(first_row, first_row + count)
        responses = decode(pair, prompts, method("autoregressive"), SAMPLING, batch_size=64, row_ids=rows)
        recorder = Recorder(
            pair, SAMPLING, MAX_DRAFTED, recorded_scorers(pair, {OWN: str(pair.head)}), upper_bound=True
        )
        recorder.record_all([(response.prompt_ids, response.token_ids) for response in responses], rows).save(path)
    return Trace.load(path)


def reading(pair: ModelPair, policy: Any) -> Any:
    """A policy, bound to the pair, that reads its head's logits from such a recording."""
    return with_recorded_heads(policy.bind(pair), {str(pair.head): OWN})


def _domain(pair: ModelPair, dev: Trace, test: Trace, cost_ratio: float) -> Counted:
    """What every policy counts on the test texts, tuned on dev."""
    k, _ = upper_bound.best_fixed(dev, cost_ratio, 14)
    bound = upper_bound.true_probability(test, cost_ratio, min_drafted=1)
    clairvoyant = [[counts[name] for name in COUNTS] for counts in upper_bound.oracle(test, MAX_DRAFTED)]
    return {
        PLAIN: replay_starts(test, Bounded(Fixed(0), 0, 0)).per_text,
        FIXED: replay_starts(test, Bounded(Fixed(k), 1, k)).per_text,
        "heuristic": replay(test, Bounded(Heuristic(), 1, MAX_DRAFTED)).per_text,
        "dynamic confidence": replay(test, Bounded(DynamicConfidence(), 1, MAX_DRAFTED)).per_text,
        **_tuned(pair, dev, test, cost_ratio),
        **_priced(pair, dev, test, cost_ratio),
        UPPER_BOUND: bound.replayed.per_text,
        ORACLE: np.array(clairvoyant, dtype=np.float64),
    }


def _tuned(pair: ModelPair, dev: Trace, test: Trace, cost_ratio: float) -> Counted:
    """Policies with a threshold: the one that is best on dev."""
    drawn, survival = reading(pair, Rate(PrereadEstimator())).estimator, reading(pair, Survival(HeadEstimator()))
    ways: dict[str, tuple[Callable[[Trace, Sequence[float]], list[Replayed]], Sequence[float]]] = {
        "confidence": (_levels(Confidence()), LEVELS),
        "tail product": (_levels(Tail()), LEVELS),
        "SVIP": (_levels(Svip()), [-level for level in LEVELS]),
        "AdaEDL": (_each(lambda level: AdaEdl(threshold=level)), LEVELS[::2]),
        "SpecDec++ (published rule)": (_levels(survival, 2), LEVELS),
        "SpecDec++, lower bound 3": (_levels(survival, 3), LEVELS),
        "SpecDec++, lower bound 4": (_levels(survival, 4), LEVELS),
        "survival threshold, pre-read head": (_levels(Rate(AcceptedOnly(drawn), rate=1.0)), LEVELS),
    }
    counted = {}
    for name, (sweep, levels) in ways.items():
        rates = [metrics.throughput(replayed.total, cost_ratio) for replayed in sweep(dev, levels)]
        (chosen,) = sweep(test, [levels[int(np.argmax(rates))]])
        counted[name] = chosen.per_text
    return counted


def _priced(pair: ModelPair, dev: Trace, test: Trace, cost_ratio: float) -> Counted:
    """Policies whose threshold follows from lambda, solved on dev or tracked; and what the head's outputs are worth."""
    counted, rate = {}, reading(pair, Rate(PrereadEstimator()))
    theory = reading(pair, Rate(PrereadEstimator(instead=HeadEstimator(corrected=True).bind(pair))))
    for name, policy in (("SpecDec++, h = 1 - lambda c", theory), (RATE, rate)):
        solved = upper_bound.solve_policy(dev, policy, cost_ratio)
        priced = replace(policy, cost_ratio=cost_ratio, rate=solved.price)
        counted[name] = replay_starts(test, Bounded(priced, 1, MAX_DRAFTED)).per_text
    tracked = Bounded(replace(rate, cost_ratio=cost_ratio), 1, MAX_DRAFTED)
    counted["rate, lambda tracked per prompt"] = replay(test, tracked).per_text
    counted["DP value of the pre-read head (cross-fitted)"] = _worth_of_head(dev, test, rate.estimator, cost_ratio)
    return counted


def _worth_of_head(dev: Trace, test: Trace, estimator: DrawnEstimator, cost_ratio: float) -> Array:
    """The best policy on the head's outputs; fitted to the texts of both splits, counted on test."""
    both = join([dev, test])
    seen = dynamic_program.head_inputs(both, Geometry.of(both), estimator, MAX_DRAFTED)
    return dynamic_program.best_policy(both, seen, cost_ratio).replayed.per_text[dev.num_texts :]


def _levels(policy: Thresholded, min_drafted: int = 1) -> Callable[[Trace, Sequence[float]], list[Replayed]]:
    return lambda trace, levels: sweep_levels(trace, policy, levels, min_drafted)


def _each(policy: Callable[[float], StoppingPolicy]) -> Callable[[Trace, Sequence[float]], list[Replayed]]:
    return lambda trace, levels: [replay(trace, Bounded(policy(level), 1, MAX_DRAFTED)) for level in levels]


def _table(by_domain: Mapping[str, Counted], cost_ratio: float) -> list[str]:
    names = list(by_domain[DOMAINS[0]])
    tables = [
        standing(np.stack(list(counted.values()), 1), names, FIXED, cost_ratio, BOOTSTRAP).set_index("method")
        for counted in by_domain.values()
    ]
    lines = [
        "| policy | " + " | ".join(f"{domain} | oracle | upper bound" for domain in by_domain) + " |",
        "|---|" + "---:|" * (3 * len(by_domain)),
    ]
    for name in names:
        entries = [_entries(name, table.loc[name]) for table in tables]
        lines.append(f"| {label(name)} | {' | '.join(entries)} |")
    return lines


def _entries(name: str, line: Any) -> str:
    """Throughput and both shares of one policy on one domain; intervals where the share is not 0 or 1 by definition."""
    texts = [f"{line.throughput:.3f}"]
    for share, end in SHARES.items():
        text = f"{line[share]:.0%}"
        if name not in (FIXED, end):
            text += f" [{line[f'{share}_low']:.0%}, {line[f'{share}_high']:.0%}]"
        texts.append("" if name == PLAIN else text)
    return " | ".join(texts)


def _duels(by_domain: Mapping[str, Counted], cost_ratio: float) -> list[str]:
    lines = [f"| {RATE}, over | " + " | ".join(by_domain) + " |", "|---|" + "---:|" * len(by_domain)]
    for name in by_domain[DOMAINS[0]]:
        if name in (RATE, PLAIN, ORACLE):
            continue
        texts = []
        for counted in by_domain.values():
            ratio, low, high = gain_over(counted[RATE], counted[name], cost_ratio, BOOTSTRAP).values()
            mark = "**" if low > 0 or high < 0 else ""
            texts.append(f"{mark}{ratio:+.1%}{mark} [{low:+.1%}, {high:+.1%}]")
        lines.append(f"| {label(name)} | {' | '.join(texts)} |")
    return lines


if __name__ == "__main__":
    answer_signals()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few prompts only")
    print(standings(parser.parse_args().small))
