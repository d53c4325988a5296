"""The page of a paper's table: what the paper claims and what came out here, then the table, then what differs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.papers.table import Cell, PaperTable, Runs
from analysis.tables.files import markdown
from toolkit.runs.stage import read_manifest

READING = "Each cell: the figure here, with its interval in square brackets where there is one; in round brackets the paper's."
FEW = 4  # gains in a sentence
TOY, TOY_TARGET = "the toy pair", "toy/"  # how `models` names it
FACTS = ("num_prompts", "num_texts", "prompts", "group_size", "positions", "dev_share", "sampling", "cost_ratio")
PRINTED = re.compile(r"(-?\d+(?:\.\d+)?)(?: ± .*)?")
Cells = Mapping[tuple[str, str], Cell]


def as_markdown(table: PaperTable, cells: Cells, runs: Runs, models: str, figure: str | None) -> str:
    """The whole page.

    models  the pair that ran, in words
    figure  the name of the figure's file, if there is one
    """
    run = f"python -m toolkit.train +experiment={table.experiment} pair="
    named = ", ".join(f"`{pair}`" if len(table.pairs) > 2 else f"`{run}{pair}`" for pair in table.pairs)
    named = f"`{run}PAIR` with {named}" if len(table.pairs) > 2 else named
    parts = [f"# {table.paper}, {table.item}: {table.title}"]
    parts += [sentence(table, claim, cells) for claim in table.claims]
    parts.append(
        f"The models here: {models}. The paper's {'pair' if len(table.pairs) == 1 else 'pairs'}: {named}. With other models, "
        "compare which row is ahead, not the numbers."
    )
    if table.rows:
        parts += [markdown(side_by_side(table, cells)), READING]
    if figure is not None:
        parts += [f"![{table.item}]({figure})"]
    if sentences := differences(table, runs, models):
        parts += ["What differs from the paper:", "\n".join(f"- {line}" for line in sentences)]
    parts += ["Runs that this page was made from:", runs_list(runs), f"Paper: {table.cite}."]
    return "\n\n".join(parts) + "\n"


def differences(table: PaperTable, runs: Runs, models: str) -> list[str]:
    """The sentences on what differs from the paper, as far as they are about what ran, with what the runs say filled in."""
    kind = "toy" if models == TOY or f" for {TOY_TARGET}" in models else "models"
    sentences = [line if isinstance(line, str) else line.get(kind) for line in table.differs]
    return [text for line in sentences if line is not None and (text := runs.filled(line)) is not None]


def side_by_side(table: PaperTable, cells: Cells) -> pd.DataFrame:
    """The paper's layout, "here (paper)" in each cell."""

    def text(row: str, column: str) -> str:
        printed = table.printed(row, column)
        return cells[row, column].text() + ("" if printed is None else f" ({printed})")

    return pd.DataFrame([{"": row, **{column: text(row, column) for column in table.columns}} for row in table.rows])


def sentence(table: PaperTable, claim: Mapping[str, Any], cells: Cells) -> str:
    """A claim: the left row over the right one, here and in the paper, column by column; or columns, row by row.

    In a sentence where there are a few of them, else in a table below the ranges.
    """
    sides, names = (claim["left"], claim["right"]), claim["only"]
    pairs = [[(name, side) if claim["left"] in table.columns else (side, name) for side in sides] for name in names]
    here = [_gain(cells[left].value, cells[right].value) for left, right in pairs]
    there = [_gain(table.printed(*left), table.printed(*right)) for left, right in pairs]
    columns = {"": names, "here": list(map(_percent, here)), "in the paper": list(map(_percent, there))}
    published = any(gain is not None for gain in there)
    if len(names) <= FEW:
        published_range = f", {', '.join(columns['in the paper'])} in the paper" if published else ""
        return f"{claim['text']}: {', '.join(columns['here'])} here{published_range} ({', '.join(names)})."
    published_range = f", {_range(there)} in the paper" if published else ""
    lines = pd.DataFrame(columns if published else {key: columns[key] for key in ("", "here")})
    return f"{claim['text']}: {_range(here)} here{published_range}.\n\n{markdown(lines)}"


def runs_list(runs: Runs) -> str:
    """One line per run: its stage and the settings that its manifest names."""
    lines = []
    for name, folder in runs.folders.items():
        manifest = read_manifest(folder) or {}
        settings = {**(manifest.get("config") or {}), **manifest}
        facts = [f"{key} {_settings(settings[key])}" for key in FACTS if settings.get(key) is not None]
        lines.append(f"- {name}: {folder.name}" + (f" ({'; '.join(facts)})" if facts else ""))
    return "\n".join(lines) or "- none"


def _settings(value: Any) -> str:
    """A node of a config in a few words: its settings that are set."""
    if not isinstance(value, Mapping):
        return str(value)
    plain = {
        key: setting
        for key, setting in value.items()
        if not key.startswith("_") and not isinstance(setting, (list, Mapping))
    }
    return ", ".join(f"{key}={setting}" for key, setting in plain.items() if setting is not None)


def _range(gains: Sequence[float | None]) -> str:
    """The range of gains, from the least to the largest."""
    numbers = [gain for gain in gains if gain is not None]
    return f"{min(numbers):+.1%} to {max(numbers):+.1%}" if numbers else "not run"


def _percent(gain: float | None) -> str:
    return "–" if gain is None else f"{gain:+.1%}"


def _gain(left: Any, right: Any) -> float | None:
    """Left over right, less one; None where one of them is not a number."""
    first, second = _number(left), _number(right)
    return None if first is None or not second else first / second - 1


def _number(value: Any) -> float | None:
    """A number, also as the paper prints it; of "2.13 ± 0.05" the 2.13."""
    if not isinstance(value, str):
        return None if value is None else float(value)
    number = PRINTED.fullmatch(value)
    return float(number[1]) if number else None
