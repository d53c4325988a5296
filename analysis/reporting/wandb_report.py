"""A W&B report of a report's specification.

It shows each group's headline, the comparison table and, per panel, what the runs logged under the same keys. Needs the
`reports` extra. Checked offline only: the specification, not how the server shows it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis.tables.files import as_markdown_text
from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_json
from toolkit.runs.tracking import PROJECT, unreachable

TABLES = ("frontier/frontier", "compare/table", "sweep/summary")  # logged as tables, the others as figures
PUBLISHED = "published.json"  # where the report is


def publish(folder: Path, cfg: Any) -> None:
    """Write wandb_report.json and, once and unless dry_run, save the report on the server. Raises InputError without one."""
    report = build(
        read_json(folder / "report.json"), cfg.entity, cfg.project or os.environ.get("WANDB_PROJECT", PROJECT)
    )
    write_json(folder / "wandb_report.json", serialised(report))
    if cfg.dry_run:
        return
    if not (folder / PUBLISHED).exists():
        if reason := unreachable():
            raise InputError(f"{reason}; the report was not published, its specification is in {folder}")
        report.save(draft=cfg.draft)
        write_json(folder / PUBLISHED, {"url": report.url})
    print(f"published: {read_json(folder / PUBLISHED)['url']}")


def build(spec: dict[str, Any], entity: str | None, project: str) -> Any:
    """The report as an object of wandb_workspaces, made without a server. Raises InputError if that is not installed."""
    try:
        import wandb_workspaces.reports.v2 as wr
    except ImportError as error:
        raise InputError("publishing needs wandb-workspaces: pip install acceptance-toolkit[reports]") from error
    origin = spec["made"]
    description = f"Made {origin['time']} from revision {origin['revision']}"
    blocks: list[Any] = [wr.TableOfContents()]
    for group in spec["groups"]:
        blocks += [wr.H1(text=group["title"]), wr.P(text=group["headline"])]
        for panel in group["panels"]:
            blocks += [wr.H2(text=panel["title"]), *_blocks(panel)]
        runs: list[Any] = [
            f"{folder['stage']}: {as_markdown_text(Path(folder['path']).name)}, "
            + (f"run {folder['run']}" if folder["run"] else "no W&B run")
            for folder in group["folders"]
        ]
        blocks += [wr.H2(text="Runs"), wr.UnorderedList(items=runs)]
    title = spec["title"]
    return wr.Report(project=project, entity=entity or "", title=title, description=description, blocks=blocks)


def serialised(report: Any) -> dict[str, Any]:
    content: dict[str, Any] = report._to_model().model_dump(mode="json", by_alias=True)
    return content


def _blocks(panel: dict[str, Any]) -> Iterator[Any]:
    import wandb_workspaces.reports.v2 as wr

    if panel["missing"]:
        yield wr.P(text=panel["missing"])
        return
    if panel["table"]:
        yield wr.MarkdownBlock(text=panel["table"])
    if not panel["runs"]:
        yield wr.P(text="None of these folders left a W&B run.")
        return
    tables = [key for key in panel["logged"] if key in TABLES]
    media = [key for key in panel["logged"] if key not in TABLES]
    panels: list[Any] = [wr.WeavePanelSummaryTable(table_name=key) for key in tables]
    panels += [wr.MediaBrowser(media_keys=media)] if media else []
    run_ids = ", ".join(f"'{run}'" for run in panel["runs"])
    yield wr.PanelGrid(runsets=[wr.Runset(name=panel["title"], filters=f"Metric('ID') in [{run_ids}]")], panels=panels)
