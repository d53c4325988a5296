"""python -m analysis.paper table=NAME runs=FOLDERS: a table or figure of a paper in its own layout, made from finished runs.

`conf/table/NAME.yaml` tells rows, columns and the published figures; `+experiment=NAME` of `toolkit.train` makes the runs
and ends with this command. Numbers are looked up in the runs' own tables, nothing is computed anew but quotients. Files:

    table    one line per entry: row, column, value, interval, what the paper has
    points   of a figure: panel, curve, x, y
    page.md  the paper's layout, our figure beside the published one
"""

from __future__ import annotations

if __name__ == "__main__":  # help and faults, before anything heavy is imported
    from toolkit.config.command_line import check_command_line

    check_command_line("paper")

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.papers import figure, page
from analysis.papers.cells import Runs, as_frame, cells_of
from analysis.papers.spec import PaperTable, of_config
from analysis.tables.console import show
from analysis.tables.files import save_table
from toolkit.config import plain
from toolkit.errors import InputError
from toolkit.io import write_text
from toolkit.stage import MANIFEST, command, open_stage
from toolkit.tracking import log_image, log_table, wandb_run

PAGE, FIGURE = "page.md", "figure.png"


def run(cfg: Any) -> Path:
    """Look up, draw, write; returns the output folder."""
    spec = of_config(plain(cfg.table))
    folders = plain(cfg.runs)
    if not folders:
        raise InputError(
            f"runs: expected {{NAME: FOLDER}} of the runs that conf/table names; +experiment={spec.experiment} makes them"
        )
    page.folders_of(folders)
    runs = Runs(folders)
    stage = open_stage("paper", cfg, inputs=[Path(folder) / MANIFEST for folder in folders.values()], ignore=("track",))
    if not stage.finished:
        make(spec, runs, cfg, stage.folder)
        stage.finish(paper=spec.paper, item=spec.item)
    if spec.rows:
        shown = page.side_by_side(spec, cells_of(spec, runs))
        show(shown, f"{spec.paper}, {spec.item}: {spec.title}", stage.folder / PAGE)
    print(f"page: {stage.folder / PAGE}")
    return stage.folder


def make(spec: PaperTable, runs: Runs, cfg: Any, folder: Path) -> None:
    """Table, figure and page, on disk and on W&B."""
    cells = cells_of(spec, runs)
    table, shown = as_frame(spec, cells), None
    if spec.rows:
        save_table(table, folder, "table")
    if spec.figure is not None:
        shown = figure.draw(spec.figure, runs, spec.item, folder / FIGURE)
        save_table(shown, folder, "points")
    write_text(folder / PAGE, page.as_markdown(spec, cells, runs, cfg.models, shown, FIGURE if spec.figure else None))
    name = f"{spec.paper} {spec.item}"
    with wandb_run(
        "paper", plain(cfg), folder, track=cfg.track, name=name, inputs=list(runs.folders.values())
    ) as wandb:
        log_table(wandb, "paper/table", pd.DataFrame(table if shown is None or not table.empty else shown))
        if spec.figure is not None:
            log_image(wandb, "paper/figure", folder / FIGURE)


if __name__ == "__main__":
    command("paper", run)
