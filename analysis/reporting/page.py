"""The page: one HTML file that needs nothing else, the same as Markdown, and what it shows as a small JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from analysis.reporting.charts import DARK
from analysis.tables.files import as_markdown_text

VERSION = 1  # of the JSON file
# Control characters that models write, as signs: their bytes end some readers' pages, or change what a terminal shows.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
VISIBLE |= dict.fromkeys(range(128, 160), 0xFFFD)
TEMPLATES = Path(__file__).resolve().parent.parent / "templates"


def render(template: str, facts: dict[str, Any]) -> str:
    """A template with these facts. What is not the template's own is escaped, and its control characters are shown as signs."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=lambda value: value.translate(VISIBLE) if type(value) is str else value,
    )
    environment.filters["md"] = lambda value: as_markdown_text(str(value))
    return environment.get_template(template).render(**facts)


def scripts(specs: dict[str, Any]) -> dict[str, str]:
    """What the HTML page carries inside. "<" is an escape in its JSON, so that no text can end the script element."""
    charts = json.dumps({"specs": specs, "dark": DARK}, ensure_ascii=False, allow_nan=False, default=str)
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
