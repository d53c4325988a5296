"""python -m analysis.report inputs=[FOLDER,...]: what output folders found, on one page.

    report.html  one self-contained page: the result in one sentence, charts, texts token by token, tables, provenance
    report.md    tables and figures for readers without a browser
    report.json  what the page shows and where that comes from

publish=true makes a W&B report of it, too (`analysis.reporting.page`). Folders of different pairs or sampling settings
are kept apart. What a folder lacks is shown as missing.
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("report")

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis import keys
from analysis.reporting.folders import Folder, FolderGroup, grouped, read_folder
from analysis.reporting.page import publish, render, report_spec, scripts
from analysis.reporting.panels import figure_files, figure_views, headline, panels, table_files, table_view
from analysis.reporting.tokens import KINDS, LEVELS, token_views
from analysis.tables.files import DEFINITIONS
from toolkit.config import flatten, plain
from toolkit.files.atomic import write_json, write_text
from toolkit.runs.stage import MANIFEST, open_stage, provenance

TABLES_READ = ("settings", "costs", "summary", "positions")
EXTRA_FILES = ("tokens.json", "generations.jsonl", *(f"{name}.parquet" for name in TABLES_READ))
PUBLISHING = ("publish", "entity", "project", "draft", "dry_run")
MOST_BYTES = 5_000_000  # of report.html
FIGURE_BYTES = 2_000_000  # of all figures within it


def run(cfg: keys.Report) -> Path:
    inputs = plain(cfg.inputs)
    paths = [Path(folder) for folder in (inputs if isinstance(inputs, list) else [inputs])]
    folders = [read_folder(path) for path in paths]
    stage = open_stage("report", cfg, inputs=[file for path in paths for file in _files(path)], ignore=PUBLISHING)
    if not stage.finished:
        parts = _parts(grouped(folders), stage.folder, cfg.max_cells)
        origin = provenance()
        specs = {anchor: spec for part in parts for anchor, _, spec in part["charts"]}
        facts: dict[str, Any] = {"title": cfg.title, "parts": parts, "definitions": DEFINITIONS, "made": origin}
        facts |= {"kinds": KINDS, "levels": LEVELS}
        html = render("report.html.j2", {**facts, **scripts(specs)})
        write_text(stage.folder / "report.html", html)
        write_text(stage.folder / "report.md", render("report.md.j2", facts))
        write_json(stage.folder / "report.json", report_spec(cfg.title, origin, parts))
        if (size := len(html.encode())) > MOST_BYTES:
            print(f"report: the page has {size / 1e6:.1f} MB; give fewer folders, or a smaller max_cells")
        stage.finish()
    print(f"report: {stage.folder / 'report.html'}")
    if cfg.publish:
        publish(stage.folder, cfg)
    return stage.folder


def _parts(groups: Sequence[FolderGroup], report: Path, max_cells: int) -> list[dict[str, Any]]:
    """What the templates show of each group of folders that compare: anchors say where a chart is on the page."""
    number_of = {folder.path: n for n, folder in enumerate((f for group in groups for f in group.folders), 1)}
    budget = FIGURE_BYTES // max(len(number_of), 1)
    parts = []
    for number, group in enumerate(groups, 1):
        group_panels = panels(group.folders)
        drawn = [(panel, spec) for panel in group_panels for _, spec in panel.charts]
        charts = [(f"chart-{number}-{n}", panel, spec) for n, (panel, spec) in enumerate(drawn, 1)]
        sections = [_section(number_of[folder.path], folder, report, max_cells, budget) for folder in group.folders]
        part = {"group": group, "anchor": f"group-{number}", "headline": headline(group.folders)}
        part |= {"panels": group_panels, "charts": charts, "tokens": token_views(group.folders), "sections": sections}
        parts.append(part)
    return parts


def _section(number: int, folder: Folder, report: Path, max_cells: int, budget: int) -> dict[str, Any]:
    manifest = folder.manifest
    facts = {name: manifest.get(name, {}) for name in ("config", "inputs", "versions", "machine", "python")}
    return {
        "title": f"{folder.stage}: {folder.path.name}",
        "anchor": f"section-{number}",
        **{name: str(manifest.get(name, "")) for name in ("status", "time", "revision")},
        "command": shlex.join(manifest.get("argv", [])),
        "provenance": [(key, str(value)) for key, value in flatten(facts).items()],
        "tables": [table_view(path, max_cells) for path in table_files(folder.path)],
        "figures": figure_views(figure_files(folder.path), number, report, budget),
    }


def _files(folder: Path) -> list[Path]:
    more = [folder / name for name in EXTRA_FILES if (folder / name).exists()]
    return [folder / MANIFEST, *table_files(folder), *figure_files(folder), *more]
