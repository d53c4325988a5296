"""The report as a small JSON file: what it shows and where it comes from, for W&B and for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.reporting.folders import Group
from analysis.reporting.panels import Panel

VERSION = 1


def report_spec(
    title: str, made: dict[str, Any], parts: Sequence[tuple[Group, str, Sequence[Panel]]]
) -> dict[str, Any]:
    """Plain containers. A panel names its folders, the keys under which their W&B runs log the same, or why it is missing."""
    return {
        "version": VERSION,
        "title": title,
        "made": {name: made[name] for name in ("time", "revision")},
        "groups": [
            {
                "title": group.title,
                "pair": group.pair,
                "sampling": group.sampling,
                "headline": said,
                "folders": [
                    {
                        "stage": folder.stage,
                        "path": str(folder.path),
                        "status": folder.about.get("status"),
                        "run": folder.run_id,
                    }
                    for folder in group.folders
                ],
                "panels": [_panel(panel) for panel in panels],
            }
            for group, said, panels in parts
        ],
    }


def _panel(panel: Panel) -> dict[str, Any]:
    found: dict[str, Any] = {"name": panel.name, "title": panel.title, "missing": panel.missing or None}
    found["folders"] = [str(Path(folder.path)) for folder in panel.folders]
    found["runs"] = [folder.run_id for folder in panel.folders if folder.run_id]
    found["logged"] = list(panel.logged)
    found["table"] = None if panel.table is None else panel.table.markdown
    return found
