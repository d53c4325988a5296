"""python -m analysis.paper table=NAME runs=FOLDERS: a table or figure of a paper in its own layout, made from finished runs.

`conf/papers/PAPER.yaml` says rows, columns and the published figures; `+experiment=NAME` of `toolkit.train` makes the runs
and ends with this command. Numbers are looked up in the runs' own tables; only quotients are computed. Files:

    table    one line per entry: row, column, value, interval, what the paper has
    points   of a figure: panel, curve, x, y
    page.md  the paper's layout, our figure beside the published one
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("paper")

from pathlib import Path

from analysis import keys
from analysis.papers import page
from analysis.papers.page import draw
from analysis.papers.table import PaperTable, Runs, as_frame, cells_of
from analysis.tables.files import save_table, show
from toolkit.config import plain
from toolkit.errors import InputError
from toolkit.files.atomic import write_text
from toolkit.runs.stage import MANIFEST, open_stage
from toolkit.runs.tracking import log_image, log_table, wandb_run

PAGE, FIGURE = "page.md", "figure.png"


def run(cfg: keys.Paper) -> Path:
    table = PaperTable.of(plain(cfg.table))
    runs = Runs(plain(cfg.runs) or {})
    if not runs.folders:
        raise InputError(
            f"runs: expected {{NAME: FOLDER}} of the runs that conf/papers names; +experiment={table.experiment} makes them"
        )
    for name, folder in runs.folders.items():
        if not (folder / MANIFEST).exists():
            raise InputError(f"runs.{name}: expected the output folder of a finished command, got {folder}")
    stage = open_stage("paper", cfg, inputs=[folder / MANIFEST for folder in runs.folders.values()], ignore=("track",))
    cells = cells_of(table, runs)
    if not stage.finished:
        frame, folder = as_frame(table, cells), stage.folder
        if table.rows:
            save_table(frame, folder, "table")
        if table.figure is not None:
            points = draw(table.figure, runs, table.item, folder / FIGURE)
            save_table(points, folder, "points")
        write_text(folder / PAGE, page.as_markdown(table, cells, runs, cfg.models, FIGURE if table.figure else None))
        name, inputs = f"{table.paper} {table.item}", list(runs.folders.values())
        with wandb_run("paper", plain(cfg), folder, track=cfg.track, name=name, inputs=inputs) as wandb:
            log_table(wandb, "paper/table", frame if table.rows else points)
            if table.figure is not None:
                log_image(wandb, "paper/figure", folder / FIGURE)
        stage.finish(paper=table.paper, item=table.item)
    if table.rows:
        heading = f"{table.paper}, {table.item}: {table.title}"
        show(page.side_by_side(table, cells), heading, stage.folder / PAGE)
    print(f"page: {stage.folder / PAGE}")
    return stage.folder
