"""Every interval that the project prints holds the truth in at least 92 of 100 repetitions, at the sizes it is printed for.

Prompts, groups and requests are drawn from a made-up population, thousands of times; the truth is the figure of a very large
draw. Each case goes through the function that makes the printed table.
"""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from analysis.loads import observed
from analysis.loads.choosing import _speedups
from analysis.multi_draft.acceptance_table import SHAPE, acceptance_table, block_efficiency_table
from analysis.quality import Metric
from analysis.replay.drafts import figures as draft_figures
from analysis.replay.head_table import worth
from analysis.reporting.method_table import measured_figures, table_of
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.grid import PLAIN, Setting
from analysis.tables.rows import COUNTS, acceptance_positions
from analysis.tables.standing import standing
from tests.analysis.loads.test_observed import of_histograms

REPETITIONS, AT_ONCE, LEAST = 2000, 20, 0.92
QUICK = Bootstrap(300)
LARGE = 20_000


def lengths(rng, n):
    return np.minimum(rng.geometric(1 / 60, n) + 3, 96).astype(float)


def counts(rng, n, block=2.5, drafted=4):
    """[n, COUNTS] of prompts: a length, a block efficiency of its own, so many forwards."""
    tokens = lengths(rng, n)
    calls = np.maximum(np.ceil(tokens / (block * np.exp(rng.normal(0, 0.3, n)))), 1)
    lines = dict.fromkeys(COUNTS, np.zeros(n)) | {
        "num_generated": tokens, "num_target_calls": calls, "num_draft_calls": drafted * calls,
        "num_drafted": drafted * calls, "num_discarded": (drafted + 1) * calls - tokens,
    }  # fmt: skip
    return np.stack([lines[name] for name in COUNTS], 1)


def three_methods(rng, n):
    """[n, 3, COUNTS]: two policies that find the same prompts hard, and an upper bound."""
    slow = counts(rng, n)
    fast, best = slow.copy(), slow.copy()
    for lines, factor in ((fast, 0.9), (best, 0.7)):
        for name in ("num_target_calls", "num_draft_calls"):
            lines[:, COUNTS.index(name)] *= factor * np.exp(rng.normal(0, 0.1, n))
    return np.stack([slow, fast, best], 1)


ENDS = ("", "_low", "_high")


def named(line, *names):
    return {name: [line[f"{name}{end}"] for end in ENDS] for name in names}


def of_standing(rng, n, bootstrap):
    table = standing(three_methods(rng, n), ["speculative", "rate", "upper_bound"], "speculative", 0.2, bootstrap)
    return named(table.iloc[1], "throughput", "gain", "upper_bound_share")


class Right(Metric):
    columns, scale = ("right", "texts"), "probability"

    def measure(self, prompts, generations, pair=None):
        raise NotImplementedError


class Nats(Right):
    scale = "log"

    def value(self, totals):
        return np.exp(super().value(totals))


def comparison(size):
    """Comparisons with groups of `size` prompts: counts and scores over prompts, seconds over groups.

    Their settings are as many repetitions.
    """

    def table(rng, n, bootstrap):
        settings = [Setting("m", {"K": number}) for number in range(AT_ONCE if n < LARGE else 1)]
        metrics = {"hard": Right(), "easy": Right(), "nats": Nats(), "f": Right()}
        prompts, groups = [], []
        for setting in settings:
            lines = pd.DataFrame(counts(rng, n), columns=list(COUNTS))
            rate = 0.9 * np.exp(rng.normal(0, 0.25, n))
            lines = lines.assign(
                name=setting.name, prompt=np.arange(n), group=np.arange(n) // size, layers=lines.num_target_calls,
                widths=np.round(lines.num_target_calls * rng.uniform(1, 3, n)),
                **{"hard.right": rng.random(n) < 0.5, "easy.right": rng.random(n) < 0.93, "f.right": rng.beta(2, 2, n)},
                **{"nats.right": rate * lines.num_generated, "nats.texts": lines.num_generated},
                **{f"{name}.texts": 1.0 for name in ("hard", "easy", "f")},
            )  # fmt: skip
            prompts.append(lines)
            sums = lines.groupby(["name", "group"], as_index=False)[list(COUNTS)].sum()
            busy = np.exp(rng.normal(0, 0.2, len(sums)))  # what else the machine does
            groups.append(sums.assign(
                method=setting.method, setting="", group_size=size, prompts=size, failed=0, cache_bytes=0,
                target_runs=sums.num_target_calls / size, seconds=sums.num_target_calls * busy,
                joules=9 * sums.num_target_calls * busy, idle_joules=np.nan,
            ))  # fmt: skip
        compared = table_of(pd.concat(groups), pd.concat(prompts), settings, metrics, settings[0].name, 0.2, bootstrap)
        return {name: compared[[f"{name}{end}" for end in ENDS]].to_numpy() for name in (*COUNTED, *SCORED, *MEASURED)}

    return table


def of_speedups(rng, n, bootstrap):
    """Speed over a baseline's, over groups that the machine slows for both; each of a kind of prompts that gains its own."""
    busy, kinds = np.exp(rng.normal(0, 0.3, n)), np.array([0.9, 1.0, 1.0, 1.1, 1.3, 1.6, 2.2])
    tokens, own = rng.normal(300, 60, (n, 2)).clip(50), np.exp(rng.normal(0, 0.1, (n, 2)))
    own[:, 1] /= rng.choice(kinds, n)
    columns, speedup, scale = measured_figures(0)["speedup"]
    values = np.stack([tokens, tokens * own * busy[:, None] * [1.0, 0.6]], 2)
    both = lambda totals: speedup(totals.reshape(*totals.shape[:-1], 2, 2))
    assert columns == ("num_generated", "seconds")
    return {"speedup": [numbers[1] for numbers in bootstrap.spread(values.reshape(n, -1), both, scale)]}


COUNTED = ("throughput", "block_efficiency", "draft_calls", "discard_rate", "verification_rate", "mean_width")
SCORED = ("hard", "easy", "nats", "f")
MEASURED = (
    "tokens_per_second", "seconds_per_forward", "seconds_per_input", "joules_per_token", "joules_per_forward",
    "joules_per_input",
)  # fmt: skip


def of_acceptance(rng, n, bootstrap):
    positions = np.full(n, 12.0)
    optimum = rng.beta(8, 3, n) * positions
    accepted = optimum * rng.beta(40, 2, n)
    sums = pd.DataFrame({"positions": positions, "accepted": accepted, "drafted": accepted, "optimum": optimum})
    table = acceptance_table(sums.assign(dataset="d", method="m", scheme="iid", K=2), bootstrap)
    return named(table.iloc[0], "acceptance", "drafted", "optimum", "gap")


def of_shapes(rng, n, bootstrap):
    about = {"dataset": "d", "split": "test", "method": "m", "setting": "s", SHAPE: "2x1", "error": None}
    rows = pd.DataFrame(counts(rng, n), columns=list(COUNTS)).assign(**about, prompt=np.arange(n))
    return named(block_efficiency_table(rows, bootstrap).iloc[0], "block_efficiency")


def histograms(rng, n, most=4):
    """Rounds by accepted tokens [n, most + 1]; requests differ in their acceptance."""
    rounds, rate = rng.poisson(15, n) + 5, rng.beta(8, 3, n)
    lengths_of = [np.minimum(rng.geometric(1 - a, size) - 1, most) for size, a in zip(rounds, rate, strict=True)]
    return np.stack([np.bincount(accepted, minlength=most + 1) for accepted in lengths_of]).astype(float)


def of_lengths(rng, n, bootstrap):
    table = observed.by_length(of_histograms(histograms(rng, n)), 0.1, bootstrap)
    return named(table.iloc[3], "tokens_per_round", "throughput")


def of_positions(rng, n, bootstrap):
    """The first position is reached in every round, the third in fewer, all rounds drafting four tokens."""
    counted = histograms(rng, n)
    served = observed.by_position(of_histograms(counted), bootstrap)
    rows = pd.DataFrame({"accepted_lengths": list(counted)})
    rows["drafted_lengths"] = [[0, 0, 0, 0, sum(line)] for line in counted]
    rows["reached_lengths"] = [[0, *line[:3], sum(line[3:])] for line in counted]
    decoded = acceptance_positions(rows.assign(dataset="d", split="t", method="m", setting="s"), bootstrap)
    return {
        **{f"served {k}": [served.iloc[k - 1][f"accepted{end}"] for end in ENDS] for k in (1, 3)},
        **{f"decoded {k}": [decoded.iloc[k - 1][f"rate{end}"] for end in ENDS] for k in (1, 3)},
    }


def of_heads(rng, n, bootstrap):
    both = three_methods(rng, n)
    figures = worth(both[:, 1], both[:, 0], 0.2, bootstrap)
    return named(figures, "throughput", "gain", "discard_rate", "verification_rate")


def of_drafts(rng, n, bootstrap):
    def parts(shift):
        tokens = lengths(np.random.default_rng(seed), n)
        alpha = np.clip(base + shift + rng.normal(0, 0.03, n), 0, 1)
        rounds = np.ceil(tokens / 3)
        return np.stack([alpha * tokens, tokens, 3 * alpha * rounds, rounds, tokens, tokens / (2 + alpha)], 1)

    seed, base = int(rng.integers(1 << 30)), rng.beta(8, 3, n)
    figures = draft_figures(parts(0.02), parts(0.0), bootstrap)
    return named(figures, *(f"{name}{gain}" for name in ("alpha", "accepted", "throughput") for gain in ("", " gain")))


def of_requests(rng, n, bootstrap):
    tokens, busy = lengths(rng, n), np.exp(rng.normal(0, 0.2, n))
    served = {}
    for key, speed in (((PLAIN, False), 1.0), (("rate", False), 1.6)):
        seconds = tokens * busy * np.exp(rng.normal(0, 0.2, n)) / speed
        served[key] = SimpleNamespace(tokens=tokens, seconds=seconds)
    return named(_speedups(served, n, bootstrap.spread)["rate", False], "speedup")


CASES = [  # at the smallest sizes, where intervals are worst; of fewer than 16 there are none
    (of_standing, (24, 64)),
    (comparison(4), (64,)),  # 16 groups
    (comparison(1), (24,)),  # a paper's own models: one prompt at a time
    (of_speedups, (16, 24)),
    (of_acceptance, (16,)),
    (of_shapes, (16,)),
    (of_lengths, (16,)),
    (of_positions, (16,)),
    (of_heads, (25,)),
    (of_drafts, (20,)),
    (of_requests, (16,)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "size"), [(case, size) for case, sizes in CASES for size in sizes])
def test_intervals_hold_the_truth(case, size):
    rng = np.random.default_rng(size)
    many = [case(rng, LARGE, Bootstrap(2)) for _ in range(10)]
    truth = {name: np.mean([np.atleast_2d(figures[name])[0, 0] for figures in many]) for name in many[0]}
    held = {name: [] for name in truth}
    while len(held[min(held)]) < REPETITIONS:
        for name, numbers in case(rng, size, QUICK).items():
            _, low, high = np.atleast_2d(numbers).T
            held[name] += ((low <= truth[name]) & (truth[name] <= high)).tolist()
    shares = {name: np.mean(values) for name, values in held.items()}
    assert min(shares.values()) >= LEAST, shares
