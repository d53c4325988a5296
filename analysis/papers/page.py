"""The page of a paper's table: what the paper claims and what came out here, then the table, then what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.papers.cells import Cell, Runs
from analysis.papers.spec import Claim, PaperTable
from analysis.tables.files import markdown
from toolkit.errors import InputError
from toolkit.stage import MANIFEST, read_manifest

PAPERS = {
    "SpecDec++": "SpecDec++ (arXiv:2405.19715)",
    "DSBD": "Dynamic-Width Speculative Beam Decoding (arXiv:2409.16560)",
    "MTAD": "Multi-Token Assisted Decoding (arXiv:2407.09722)",
    "Multi-draft limits": "Multi-Draft Speculative Sampling: Canonical Architectures and Theoretical Limits (arXiv:2410.18234)",
    "MCSD": "Multi-Candidate Speculative Decoding (arXiv:2401.06706)",
}
READING = "Each cell: the figure here, with its interval in square brackets where there is one; in round brackets the paper's."
FEW = 4  # gains in a sentence
Cells = Mapping[tuple[str, str], Cell]


def as_markdown(
    spec: PaperTable, cells: Cells, runs: Runs, models: str, shown: pd.DataFrame | None, figure: str | None
) -> str:
    """The whole page.

    models  the pair that ran, in words
    shown   the points of the figure, if there is one, and `figure`, the name of its file
    """
    if spec.paper not in PAPERS:
        raise InputError(f"table.paper: expected one of {', '.join(PAPERS)}, got {spec.paper}")
    parts = [f"# {spec.paper}, {spec.item}: {spec.title}"]
    parts += [sentence(spec, claim, cells) for claim in spec.claims]
    parts.append(f"The models here: {models}. {_pairs(spec)}")
    if spec.rows:
        parts += [markdown(side_by_side(spec, cells)), READING]
    if figure is not None and shown is not None:
        parts += [f"![{spec.item}]({figure})"]
    if spec.differs:
        parts += ["What differs from the paper:", "\n".join(f"- {line}" for line in spec.differs)]
    parts += ["Runs that this page was made from:", runs_list(runs), f"Paper: {PAPERS[spec.paper]}."]
    return "\n\n".join(parts) + "\n"


def side_by_side(spec: PaperTable, cells: Cells) -> pd.DataFrame:
    """The paper's layout, "here (paper)" in each cell."""
    lines = []
    for row in spec.rows:
        line: dict[str, str] = {"": row}
        for column in spec.columns:
            published = _published(spec, row, column)
            behind = "" if published is None else f" ({published})"
            line[column] = cells[row, column].text() + behind
        lines.append(line)
    return pd.DataFrame(lines)


def sentence(spec: PaperTable, claim: Claim, cells: Cells) -> str:
    """A claim: the left row over the right one, here and in the paper, column by column; or columns, row by row.

    In a sentence where there are a few of them, else in a table below the ranges.
    """
    by_row = claim.left in spec.columns
    names = list(claim.only) or list(spec.rows if by_row else spec.columns)
    pairs = [[((name, side) if by_row else (side, name)) for side in (claim.left, claim.right)] for name in names]
    here = [_gain(*(cells[at].value for at in pair)) for pair in pairs]
    there = [_gain(*(_published(spec, *at) for at in pair)) for pair in pairs]
    published = any(one is not None for one in there)
    if len(names) <= FEW:
        behind = f", {', '.join(map(_percent, there))} in the paper" if published else ""
        return f"{claim.text}: {', '.join(map(_percent, here))} here{behind} ({', '.join(names)})."
    table = pd.DataFrame({"": names, "here": list(map(_percent, here)), "in the paper": list(map(_percent, there))})
    behind = f", {_range(there)} in the paper" if published else ""
    shown = markdown(table if published else table.drop(columns="in the paper"))
    return f"{claim.text}: {_range(here)} here{behind}.\n\n{shown}"


def _range(gains: Sequence[float | None]) -> str:
    """From the least to the largest."""
    known = [one for one in gains if one is not None]
    return f"{min(known):+.1%} to {max(known):+.1%}" if known else "not run"


def _percent(gain: float | None) -> str:
    return "–" if gain is None else f"{gain:+.1%}"


def _published(spec: PaperTable, row: str, column: str) -> float | str | None:
    return spec.published[row][list(spec.columns).index(column)] if row in spec.published else None


def _gain(left: Any, right: Any) -> float | None:
    """Left over right, less one; None where one of them is no number. Of "2.13 ± 0.05" the 2.13 counts."""
    one, other = (_number(value) for value in (left, right))
    return None if one is None or not other else one / other - 1


def _number(value: Any) -> float | None:
    text = value.partition(" ± ")[0] if isinstance(value, str) else value
    if isinstance(value, str) and (text == value or not text.replace(".", "", 1).isdigit()):
        return None
    return None if text is None else float(text)


def _pairs(spec: PaperTable) -> str:
    run = f"python -m toolkit.train +experiment={spec.experiment} pair="
    if len(spec.pairs) > 2:
        told = f"The paper's pairs: `{run}PAIR` with {', '.join(f'`{pair}`' for pair in spec.pairs)}."
    else:
        commands = [f"`{run}{pair}`" for pair in spec.pairs]
        told = f"The paper's {'pair' if len(commands) == 1 else 'pairs'}: {', '.join(commands)}."
    return f"{told} With other models, compare which row is ahead, not the numbers."


def runs_list(runs: Runs) -> str:
    """One line per run: its stage and the settings that its manifest names."""
    lines = []
    for name, folder in runs.folders.items():
        config = (read_manifest(folder) or {}).get("config") or {}
        about = [f"{key} {_short(config[key])}" for key in ("prompts", "sampling", "cost_ratio") if key in config]
        lines.append(f"- {name}: {folder.name}" + (f" ({'; '.join(about)})" if about else ""))
    return "\n".join(lines) or "- none"


def _short(value: Any) -> str:
    """A node of a config in a few words: its settings that are set."""
    if not isinstance(value, Mapping):
        return str(value)
    plain = {key: one for key, one in value.items() if not key.startswith("_") and not isinstance(one, (list, Mapping))}
    return ", ".join(f"{key}={one}" for key, one in plain.items() if one is not None)


def folders_of(runs: Mapping[str, Path | str]) -> None:
    """Raises InputError for a run that is no folder of a finished stage."""
    for name, folder in runs.items():
        if not (Path(folder) / MANIFEST).exists():
            raise InputError(f"runs.{name}: expected the output folder of a finished command, got {folder}")
