"""python -m analysis.standing dev=[SWEEP,...] test=[SWEEP,...]: how far every method comes, at several cost ratios.

At each cost ratio, every method's setting is chosen on the dev rows and reported on the test rows. Without `test` these
are the other half of the same prompts. The baseline is the best fixed K. Sweeps hold two references. `upper_bound` is the
policy that knows p and q, `oracle` the one that knows the acceptance draws. The table gives the share of the way from
the baseline to each. A line is marked where a method loses to plain decoding or to the baseline beyond its interval. For a
pair of your own:

    python -m analysis.sweep grid=policies pair.target=T pair.draft=D prompts=jsonl prompts.path=P.jsonl
    python -m analysis.standing dev=[SWEEP]

Files: standing (one line per data set, cost ratio and method), standing.md (one table per cost ratio).
"""

from __future__ import annotations

if __name__ == "__main__":  # help and faults, before anything heavy is imported
    from toolkit.config.command_line import check_command_line

    check_command_line("standing")

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.plots import label
from analysis.frontier import by_dataset, read_sides
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.console import show
from analysis.tables.files import markdown, read_table, save_table
from analysis.tables.frontier_tables import Cost, compare
from analysis.tables.grid import PLAIN
from analysis.tables.rows import totals
from analysis.tables.selection import choose, comparable, unseen
from analysis.tables.standing import SHARES, interval_text, notes
from toolkit.config import plain
from toolkit.errors import InputError
from toolkit.io import write_text
from toolkit.stage import command, open_stage
from toolkit.tracking import log_table, wandb_run

NAMES = {"upper_bound": "upper bound", "oracle": "oracle"}


def run(cfg: Any) -> Path:
    """Choose and report at every cost ratio; returns the output folder."""
    dev, test, folders = read_sides(cfg)
    inputs = [folder / "rows.parquet" for folder in folders]
    stage = open_stage("standing", cfg, inputs=inputs, ignore=("track",))
    ratios = list(dict.fromkeys(plain(cfg.cost_ratios)))
    if not ratios:
        raise InputError("cost_ratios: expected at least one number above 0, got none")
    if not stage.finished:
        found = pd.concat([part for ratio in ratios for part in _at(ratio, dev, test, cfg)])
        save_table(found.reset_index(drop=True), stage.folder, "standing")
        write_text(stage.folder / "standing.md", as_markdown(found))
        with wandb_run("standing", plain(cfg), stage.folder, inputs=folders, track=cfg.track) as wandb:
            log_table(wandb, "standing", found)
        stage.finish(datasets=sorted(set(found.dataset)))
    found = read_table(stage.folder, "standing")
    for ratio, table in found.groupby("cost_ratio", sort=False):
        shown = side_by_side(table)
        first = [name for name in shown if ": way to" not in name]
        show(shown, f"c = {ratio:g}", stage.folder / "standing.md", first)
    return stage.folder


def side_by_side(table: pd.DataFrame) -> pd.DataFrame:
    """One line per method, three columns per data set: throughput, gain over the baseline, share of the way."""
    shares = [name for name in SHARES if name in table]
    methods = list(dict.fromkeys(table.method))
    shown = pd.DataFrame({"method": [label(name) for name in methods]})
    for dataset, part in table.groupby("dataset", sort=False):
        lines = part.set_index("method")
        columns = {f"{dataset}": "throughput", f"{dataset}: over {label(table.baseline.iloc[0])}": "gain"}
        columns |= {f"{dataset}: way to {NAMES[SHARES[name]]}": name for name in shares}
        for heading, name in columns.items():
            form = "{:.3f}" if name == "throughput" else "{:+.1%}" if name == "gain" else "{:.0%}"
            shown[heading] = [
                interval_text(lines.loc[method], name, form)
                if method in lines.index and not (name in shares and method == PLAIN)
                else ""
                for method in methods
            ]
        shown[f"{dataset}: note"] = [lines.note.get(method, "") for method in methods]
    return shown.loc[:, (shown != "").any()]


def as_markdown(found: pd.DataFrame) -> str:
    """Every cost ratio's table."""
    parts = ["# Standing", "Tokens per target-forward time; in brackets intervals over prompts."]
    for ratio, table in found.groupby("cost_ratio", sort=False):
        parts += [f"## c = {ratio:g}", markdown(side_by_side(table))]
    return "\n\n".join(parts) + "\n"


def _at(cost_ratio: float, dev: pd.DataFrame, test: pd.DataFrame, cfg: Any) -> list[pd.DataFrame]:
    """The lines of every data set at one cost ratio."""
    found, cost = [], Cost(cost_ratio)
    bootstrap = Bootstrap(cfg.resamples, cfg.confidence, cfg.seed)
    for dataset, here, there in by_dataset(dev, test):
        reported = comparable(there, f"{dataset}, test")
        tuned = comparable(unseen(here, reported, dataset), f"{dataset}, dev")
        choice = choose(totals(tuned), totals(reported), cost_ratio, dataset)
        table = compare(reported, choice, cfg.baseline, cost, bootstrap)
        table["note"] = notes(table, label(cfg.baseline))
        found.append(table)
    return found


if __name__ == "__main__":
    command("standing", run)
