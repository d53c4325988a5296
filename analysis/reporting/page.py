"""The page: one HTML file that needs nothing else, the same as Markdown, and what it shows as a small JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from analysis import keys
from analysis.reporting.charts import DARK
from analysis.tables.files import as_markdown_text
from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_json
from toolkit.files.text import visible
from toolkit.runs.tracking import PROJECT, unreachable

VERSION = 1  # of the JSON file
TABLES = ("frontier/frontier", "compare/table", "sweep/summary")  # logged as tables, the others as figures
PUBLISHED = "published.json"  # where the report is
TEMPLATES = Path(__file__).resolve().parent.parent / "templates"


def render(template: str, facts: dict[str, Any]) -> str:
    """A template with these facts. What is not the template's own is escaped, and its control characters are shown as signs."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters["md"] = lambda value: as_markdown_text(str(value))
    return environment.get_template(template).render(**facts)


def scripts(specs: dict[str, Any]) -> dict[str, str]:
    """What the HTML page carries inside. "<" is an escape in its JSON, so that no text can end the script element."""
    charts = visible(json.dumps({"specs": specs, "dark": DARK}, ensure_ascii=False, allow_nan=False, default=str))
    library = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;") if specs else ""
    return {
        "library": library.replace("</script", "<\\/script"),
        "charts": charts.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
        "script": (TEMPLATES / "report.js").read_text(encoding="utf-8"),
        "style": (TEMPLATES / "report.css").read_text(encoding="utf-8"),
    }


def report_spec(title: str, origin: dict[str, Any], parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Plain containers. A panel names its folders, the keys under which their W&B runs log the same, or why it is missing."""
    return {
        "version": VERSION,
        "title": title,
        "made": {name: origin[name] for name in ("time", "revision")},
        "groups": [
            {
                **{name: getattr(part["group"], name) for name in ("title", "pair", "sampling")},
                "headline": part["headline"],
                "folders": [
                    {
                        "stage": folder.stage,
                        "path": str(folder.path),
                        "status": folder.manifest.get("status"),
                        "run": folder.run_id,
                    }
                    for folder in part["group"].folders
                ],
                "panels": [
                    {
                        "name": panel.name,
                        "title": panel.title,
                        "missing": panel.missing or None,
                        "folders": [str(folder.path) for folder in panel.folders],
                        "runs": [folder.run_id for folder in panel.folders if folder.run_id],
                        "logged": list(panel.logged),
                        "table": None if panel.table is None else panel.table.markdown,
                    }
                    for panel in part["panels"]
                ],
            }
            for part in parts
        ],
    }


def publish(folder: Path, cfg: keys.Report) -> None:
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
        blocks += [wr.H1(text=group["title"]), *([wr.P(text=group["headline"])] if group["headline"] else [])]
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
