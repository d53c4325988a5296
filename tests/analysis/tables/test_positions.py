"""Acceptance by position: counted from the rounds themselves."""

import numpy as np
import pandas as pd

from analysis.tables.bootstrap import Bootstrap
from analysis.tables.rows import acceptance_positions, bound_notes, length_table, round_lengths
from toolkit.types import Round


def rows_of(texts, chains=True):
    about = {"dataset": "d", "split": "test", "method": "svip", "setting": "h=0.5"}
    rounds = [[Round(k, k, n, n + 1, n == k) for k, n in text] for text in texts]
    return pd.DataFrame([{**about, **round_lengths(text, chains)} for text in rounds])


def test_positions_and_lengths_are_those_of_the_rounds():
    generator = np.random.default_rng(0)
    texts = [[(k, int(generator.integers(k + 1))) for k in generator.integers(0, 5, size=20)] for _ in range(7)]
    table = acceptance_positions(rows_of(texts), Bootstrap(200)).set_index("position")
    rounds = [pair for text in texts for pair in text]
    for k in range(1, 5):
        assert table.reached[k] == sum(n >= k - 1 and drafted >= k for drafted, n in rounds)
        assert table.accepted[k] == sum(n >= k for _, n in rounds)
        assert table.rate_low[k] <= table.rate[k] == table.accepted[k] / table.reached[k] <= table.rate_high[k]
    lengths = length_table(rows_of(texts)).set_index("length")
    assert [lengths.drafted[n] for n in range(5)] == [sum(k == n for k, _ in rounds) for n in range(5)]
    assert lengths.accepted.sum() == lengths.drafted.sum() == len(rounds)


def test_rounds_that_are_no_chains_have_no_positions():
    table = acceptance_positions(rows_of([[(6, 2), (6, 3)]], chains=False))
    assert table.empty and list(table.columns)[-1] == "rate"
    assert length_table(rows_of([[(0, 0)]])).empty, "plain decoding drafts nothing"


def test_the_bound_is_named_where_it_ends_rounds():
    """Of each method's best setting: a rule that would draft on is held up by the bound, a fixed K is not."""
    about = {"dataset": "d", "split": "s"}
    drafted = {("rate", "c=.1"): [0, 6, 2, 2], ("rate", "c=.9"): [9, 1, 0, 0], ("speculative", "K=3"): [0, 0, 0, 10]}
    drafted["tail", "t=.5"] = [50, 49, 1, 0]
    lengths = pd.DataFrame([
        {**about, "method": method, "setting": setting, "length": n, "drafted": count, "accepted": 0}
        for (method, setting), counts in drafted.items() for n, count in enumerate(counts)
    ])  # fmt: skip
    settings = pd.DataFrame([{"method": m, "setting": s, "throughput": 2.0 - (s == "c=.9")} for m, s in drafted])
    (line,) = bound_notes(lengths, settings, bound=3)
    assert line.startswith("rate c=.1: the bound of 3 drafted tokens ended 20% of its rounds")
