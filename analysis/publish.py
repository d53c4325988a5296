"""python -m analysis.publish report=outputs/report-HASH entity=TEAM: a W&B report of a report's specification.

Upload the runs first (python -m toolkit.sync folder=outputs). The report shows each group's headline, the comparison table and,
per panel, what the runs logged under the same keys. With dry_run=true nothing is sent: wandb_report.json holds the
specification that would be. Needs the `reports` extra. Checked offline only: the specification, not how the server shows it.
"""

from __future__ import annotations

if __name__ == "__main__":  # help and faults, before anything heavy is imported
    from toolkit.config.command_line import check_command_line

    check_command_line("publish")

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis.tables.files import as_markdown_text
from toolkit.errors import InputError
from toolkit.io import read_json, write_json
from toolkit.stage import command, open_stage
from toolkit.tracking import PROJECT, unreachable

TABLES = ("frontier/frontier", "compare/table", "sweep/summary")  # logged as tables, the others as figures


def run(cfg: Any) -> Path:
    """Build the report and save it on the server, unless dry_run; returns the output folder."""
    path = Path(cfg.report) / "report.json"
    spec = read_json(path)
    stage = open_stage("publish", cfg, inputs=[path])
    report = build(spec, cfg.entity, cfg.project or os.environ.get("WANDB_PROJECT", PROJECT))
    write_json(stage.folder / "wandb_report.json", serialised(report))
    if not cfg.dry_run and not stage.finished:
        if reason := unreachable():
            raise InputError(f"{reason}; the report was not published, its specification is in {stage.folder}")
        report.save(draft=cfg.draft)
        print(f"publish: {report.url}")
        stage.finish(url=report.url)
    return stage.folder


def build(spec: dict[str, Any], entity: str | None, project: str) -> Any:
    """The report as an object of wandb_workspaces, made without a server. Raises InputError if that is not installed."""
    try:
        import wandb_workspaces.reports.v2 as wr
    except ImportError as error:
        raise InputError("publishing needs wandb-workspaces: pip install acceptance-toolkit[reports]") from error
    made = spec["made"]
    description = f"Made {made['time']} from revision {made['revision']}"
    blocks: list[Any] = [wr.TableOfContents()]
    for group in spec["groups"]:
        blocks += [wr.H1(text=group["title"]), wr.P(text=group["headline"])]
        for panel in group["panels"]:
            blocks += [wr.H2(text=panel["title"]), *_blocks(panel)]
        blocks += [wr.H2(text="Runs"), wr.UnorderedList(items=list(_runs(group)))]
    title = spec["title"]
    return wr.Report(project=project, entity=entity or "", title=title, description=description, blocks=blocks)


def serialised(report: Any) -> dict[str, Any]:
    """What the server would be sent, as plain containers."""
    found: dict[str, Any] = report._to_model().model_dump(mode="json", by_alias=True)
    return found


def _blocks(panel: dict[str, Any]) -> Iterator[Any]:
    """A panel's table and what its runs logged; or why it is missing."""
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
    wanted = ", ".join(f"'{run}'" for run in panel["runs"])
    yield wr.PanelGrid(runsets=[wr.Runset(name=panel["title"], filters=f"Metric('ID') in [{wanted}]")], panels=panels)


def _runs(group: dict[str, Any]) -> Iterator[str]:
    for folder in group["folders"]:
        run = f"run {folder['run']}" if folder["run"] else "no W&B run"
        yield f"{folder['stage']}: {as_markdown_text(Path(folder['path']).name)}, {run}"


if __name__ == "__main__":
    command("publish", run)
