"""What predictors are worth at cost tables: analysis.heads tuning=... tests=... costs={NAME: FILE}.

A text costs its draft forward passes and, for every round, a target forward pass over the drafted tokens and one more: by the
table at batch size 1, in the middle of its contexts, in target forward passes over one token. Plain decoding then makes one
token per cost. Numbers are chosen again for each table, on the tuning texts. Every row that estimates has a second line: the
rate rule at the table's costs, without a chosen number.

    costs       one line per domain, table and row: number, tokens per cost, share of the way from the best fixed K to the
                upper bound; K = 0 does not draft
    cost_texts  one line per domain, table, row and text of the responses: its tokens and what it cost

Shapes: T texts, M most tokens of a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from analysis.replay.predictor_domain import Domain
from analysis.replay.predictor_rows import NAMES, without_level
from analysis.tables.bootstrap import Array, Bootstrap
from analysis.tables.files import markdown
from analysis.tables.grid import FIXED, ORACLE
from analysis.tables.rows import COUNTS
from analysis.tables.standing import interval_text, standing
from toolkit.costs.load import LoadCost
from toolkit.errors import InputError

RULE = ", no level"
TOKENS, CALLS, PASSES = map(COUNTS.index, ("num_generated", "num_draft_calls", "num_target_calls"))


def read_tables(files: Mapping[str, str], deepest: int) -> dict[str, LoadCost]:
    """Cost tables by name. Raises InputError for one that knows no batch size 1, or one width alone."""
    tables = {name: LoadCost.load(file) for name, file in files.items()}
    for name, table in tables.items():
        if lacking := table.lacks([1], widest=deepest + 1):
            hint = "" if table.is_published else "; python -m analysis.timing batch_sizes=[1] writes a table"
            raise InputError(f"costs: {name}: {lacking}{hint}")
    return tables


def priced(counts: Array, table: LoadCost) -> Array:
    """Tokens and cost [..., 2] of counts [..., counts + M + 1]."""
    single, num_lengths = table.target(1, 1, table.middle), counts.shape[-1] - len(COUNTS)
    passes = np.array([table.target(1, 1 + drafted, table.middle) for drafted in range(num_lengths)]) / single
    cost = counts[..., len(COUNTS) :] @ passes + counts[..., CALLS] * table.draft(1, 1, table.middle) / single
    return np.stack([counts[..., TOKENS], cost], -1)


def standing_of(texts: pd.DataFrame, bootstrap: Bootstrap) -> pd.DataFrame:
    """`standing` of lines of `cost_texts`, those of one domain and table: plain decoding with the same tokens and cost."""
    rows = list(dict.fromkeys(texts.method))
    wide = texts.pivot(index="row", columns="method", values=["tokens", "cost"])
    counts = np.zeros((len(wide), len(rows), len(COUNTS)))
    counts[..., TOKENS], counts[..., PASSES] = wide["tokens"][rows], wide["cost"][rows]
    return standing(counts, rows, FIXED, 1.0, bootstrap).assign(prompts=len(wide))


def at_costs(domain: Domain, name: str, table: LoadCost, bootstrap: Bootstrap) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The lines of a domain in `costs` and in `cost_texts`, at one table."""

    def speed(counts: Array) -> Array:
        tokens, cost = np.moveaxis(priced(counts, table), -1, 0)
        return tokens / cost

    counts, settings = {}, {}
    for row, predictor in domain.rows.items():
        chosen = domain.best(row, speed)
        counts[row] = priced(domain.at(row, chosen, domain.test), table)
        settings[row] = "" if row == ORACLE else domain.setting(row, chosen)
        if (rule := without_level(domain.test, predictor.estimator, table)) is not None:
            counts[row + RULE] = priced(rule, table)
    of_rows = [
        pd.DataFrame({"method": row, "row": domain.test.rows, "tokens": values[:, 0], "cost": values[:, 1]})
        for row, values in counts.items()
    ]
    texts = pd.concat(of_rows, ignore_index=True).assign(domain=domain.name, costs=name)
    lines = standing_of(texts, bootstrap).assign(domain=domain.name, costs=name)
    return lines.assign(setting=lines.method.map(settings).fillna("")), texts


def cost_tables(table: pd.DataFrame, rows: Sequence[str]) -> list[str]:
    """A Markdown table per domain: of these rows tokens per cost and the share of the way, at every cost table."""
    shown = [name for row in rows for name in (row, row + RULE)]
    parts = []
    for domain, of_domain in table.groupby("domain", sort=False):
        methods = [name for name in shown if name in set(of_domain.method)]
        columns = {"predictor": [NAMES.get(name, name) for name in methods]}
        for name, lines in of_domain.groupby("costs", sort=False):
            entries = [line for _, line in lines.set_index("method").loc[methods].iterrows()]
            columns[str(name)] = [
                f"{interval_text(line, 'throughput', '{:.3f}')} {line.setting}".strip() for line in entries
            ]
            columns[f"share, {name}"] = [interval_text(line, "upper_bound_share", "{:.0%}") for line in entries]
        parts += [f"### {domain}", markdown(pd.DataFrame(columns))]
    return parts
