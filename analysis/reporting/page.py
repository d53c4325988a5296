"""The page: one HTML file that needs nothing else, and the same as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from analysis.reporting.charts import DARK
from analysis.tables.files import as_markdown_text

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"


def render(template: str, facts: dict[str, Any]) -> str:
    """A template with these facts. Everything that is not the template's own is escaped, in HTML and in Markdown."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["md"] = lambda value: as_markdown_text(str(value))
    return environment.get_template(template).render(**facts)


def scripts(specs: dict[str, Any]) -> dict[str, str]:
    """What the HTML page carries inside: the plotting library, the charts as data, our few lines, the styles.

    The data are JSON in a script element of their own; "<" is written as an escape there, so that no text can end it.
    """
    import vl_convert

    library = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;") if specs else ""
    return {
        "library": library.replace("</script", "<\\/script"),
        "charts": _json({"specs": specs, "dark": DARK}),
        "script": (TEMPLATES / "report.js").read_text(encoding="utf-8"),
        "style": (TEMPLATES / "report.css").read_text(encoding="utf-8"),
    }


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
