"""python -m analysis.report inputs=[FOLDER,...]: tables and figures of output folders on one page.

report.html holds everything it shows (figures embedded), report.md shows the same with the figures beside it. Of every
folder: the tables (*.csv) and figures (*.png, in `figures/` too), its manifest as provenance. The templates are in
`analysis/templates/`.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.tables.definitions import DEFINITIONS
from analysis.tables.files import cell, markdown, numeric_columns
from toolkit.config import flatten, plain
from toolkit.errors import InputError
from toolkit.io import copy_file, write_text
from toolkit.stage import MANIFEST, command, open_stage, provenance, read_manifest

TEMPLATES = Path(__file__).parent / "templates"


def run(cfg: Any) -> Path:
    """Write report.html and report.md; returns the output folder."""
    inputs = plain(cfg.inputs)
    folders = [Path(folder) for folder in (inputs if isinstance(inputs, list) else [inputs])]
    for folder in folders:
        if not (folder / MANIFEST).exists():
            raise InputError(f"inputs: expected an output folder (with a {MANIFEST}) at {folder}, found none")
    files = [path for folder in folders for path in (folder / MANIFEST, *_tables(folder), *_figures(folder))]
    stage = open_stage("report", cfg, inputs=files)
    if not stage.finished:
        size = (cfg.max_rows, cfg.max_columns)
        sections = [_section(number, folder, stage.folder, size) for number, folder in enumerate(folders, 1)]
        facts = {"title": cfg.title, "sections": sections, "definitions": DEFINITIONS, "made": provenance()}
        for name in ("report.html", "report.md"):
            write_text(stage.folder / name, _render(f"{name}.j2", facts))
        stage.finish()
    print(f"report: {stage.folder / 'report.html'}")
    return stage.folder


@dataclass(frozen=True)
class TableView:
    """A table ready to be shown; `rows` is None, and `note` says why, if it is not."""

    name: str
    note: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] | None = None
    numeric: Sequence[bool] = ()
    markdown: str = ""


@dataclass(frozen=True)
class FigureView:
    """A figure as the page's own data, and as a file beside the Markdown."""

    name: str
    file: str
    base64: str


@dataclass(frozen=True)
class Section:
    """What the report shows of one folder."""

    title: str
    anchor: str
    status: str
    time: str
    revision: str
    command: str
    provenance: Sequence[tuple[str, str]]
    tables: Sequence[TableView] = field(default_factory=list)
    figures: Sequence[FigureView] = field(default_factory=list)


def _section(number: int, folder: Path, report: Path, size: tuple[int, int]) -> Section:
    about = read_manifest(folder)
    known = {
        "config": about.get("config", {}),
        "inputs": about.get("inputs", {}),
        "versions": about.get("versions", {}),
    }
    return Section(
        title=f"{about.get('stage', 'stage')}: {folder.name}",
        anchor=f"section-{number}",
        status=str(about.get("status", "")),
        time=str(about.get("time", "")),
        revision=str(about.get("revision", "")),
        command=shlex.join(about.get("argv", [])),
        provenance=[(key, str(value)) for key, value in flatten(known).items()],
        tables=[_table_view(path, *size) for path in _tables(folder)],
        figures=[_figure_view(path, report / "figures" / f"{number}-{path.name}", report) for path in _figures(folder)],
    )


def _table_view(path: Path, max_rows: int, max_columns: int) -> TableView:
    """The table of a CSV file. Large ones, such as the single rows of a sweep, are named only."""
    try:
        frame = pd.read_csv(path)
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError):
        return TableView(path.stem, note=f"{path.name} could not be read as a table.")
    if len(frame) > max_rows or len(frame.columns) > max_columns:
        return TableView(path.stem, note=f"{len(frame)} lines of {len(frame.columns)} columns, in {path.name} there.")
    rows = [[cell(value) for value in row] for row in frame.itertuples(index=False)]
    columns = [str(name) for name in frame.columns]
    return TableView(path.stem, "", columns, rows, numeric_columns(rows, len(columns)), markdown(frame))


def _figure_view(path: Path, copy: Path, report: Path) -> FigureView:
    copy_file(path, copy)
    data = base64.b64encode(path.read_bytes()).decode()
    return FigureView(path.stem, copy.relative_to(report).as_posix(), data)


def _tables(folder: Path) -> list[Path]:
    """Results first: the table that was made to be read."""
    return sorted(folder.glob("*.csv"), key=lambda path: (path.stem != "results", path.name))


def _figures(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.png"), *folder.glob("figures/*.png")])


def _render(template: str, facts: dict[str, Any]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**facts)


if __name__ == "__main__":
    command("report", run)
