"""python -m analysis.sweep prompts=toy_math prompts.split=dev: score a grid of methods on one prompt set.

Every cell (one method with one setting) is written whole as cells/<hash>.parquet; the hash covers everything its rows
depend on: method, head weights, models, prompts, sampling. Cells that exist are not made again. Only plain decoding is run:
its responses are recorded once, and every chain method with token-level rejection is replayed on the recording, exactly in
distribution. The others, and with source=live all of them, are decoded. The grid does not name the output folder, so that a
larger grid goes on where a smaller one ended; rows.parquet holds the cells of the last grid (columns: `analysis.rows`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd

from analysis import plots
from analysis.cells import TEXTS, Workbench, responses_of
from analysis.grid import CEILING, ORACLE, PLAIN, YARDSTICKS, Cell, expand
from analysis.rows import COUNTS, counts_of, join_cells, labels, save_rows
from analysis.selection import settings_table
from analysis.tables import read_table, save_table, show
from analysis.traced import Recording
from toolkit import metrics
from toolkit.config import instantiate, plain
from toolkit.errors import InputError, unknown_name
from toolkit.io import write_atomic
from toolkit.stage import Stage, command, open_stage
from toolkit.tracking import log_image, log_lines, log_scatter, log_table, wandb_run

SOURCES = ("live", "traces")
IGNORED = ("grid", "cost_ratio", "track")


def run(cfg: Any) -> Path:
    """Decode every cell that is not there yet, then join all of them; returns the output folder.

    Raises InputError before any work for cells that cannot be built; and at the end, with all other cells safe, for
    cells that failed on the way.
    """
    if cfg.source not in SOURCES:
        raise unknown_name("source", str(cfg.source), SOURCES)
    cells = expand(plain(cfg.grid), with_plain=cfg.source == "traces")
    bench = Workbench(instantiate(cfg.pair), instantiate(cfg.prompts).load(), instantiate(cfg.sampling), cfg.batch_size)
    cells = _possible(cells, bench)
    keys = {cell.name: bench.prepare(cell) for cell in cells}
    stage = open_stage("sweep", cfg, ignore=IGNORED)
    paths = {name: stage.folder / "cells" / f"{key}.parquet" for name, key in keys.items()}
    facts = {
        "num_prompts": len(bench.prompts),
        "model_fingerprints": bench.fingerprints,
        "cells": keys,
        "cost_ratio": cfg.cost_ratio,
    }
    if _whole(stage, facts, paths):
        print(f"sweep: {len(cells)} cells, finished before")
        _show(stage.folder, cfg, len(bench.prompts))
        return stage.folder
    stage.start()
    done, failures = _work(cells, paths, bench, cfg)
    if not done:
        raise InputError(f"every cell failed, first: {next(iter(failures.values()))}")
    _publish(stage.folder, cells, done, cfg)
    if failures:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        raise InputError(
            f"{len(failures)} of {len(cells)} cells failed ({reasons}); the rows of the others are in {stage.folder}; "
            "run again to retry"
        )
    return stage.finish(**facts)


def _whole(stage: Stage, facts: dict[str, Any], paths: dict[str, Path]) -> bool:
    """Whether the folder holds these very cells, joined and readable: then there is nothing to do."""
    if not stage.finished or any(stage.manifest.get(name) != fact for name, fact in facts.items()):
        return False
    tables = [stage.folder / f"{name}.parquet" for name in ("rows", "summary")]
    return all(_read_cell(path) is not None for path in (*tables, *paths.values()))


def _possible(cells: Sequence[Cell], bench: Workbench) -> list[Cell]:
    """The cells, without the ceiling's where the recording that it needs cannot be made."""
    kept = [cell for cell in cells if cell.method != CEILING or bench.recordable]
    if len(kept) < len(cells):
        print(f"{CEILING}: left out, traces know neither stop strings nor a repetition penalty")
    return kept


def _work(
    cells: Sequence[Cell], paths: dict[str, Path], bench: Workbench, cfg: Any
) -> tuple[dict[str, pd.DataFrame], dict[str, str]]:
    """Rows of every cell that could be had, read from its file or made; and why the others could not."""
    done: dict[str, pd.DataFrame] = {}
    failures: dict[str, str] = {}
    recording: Recording | None = None
    replayed = [cell for cell in cells if cfg.source == "traces" and bench.replayable(cell, cfg.max_drafted)]
    replayed += [cell for cell in cells if cell.method == CEILING]
    with _Progress(len(cells), len(bench.prompts), cfg.cost_ratio) as progress:
        for cell in cells:
            progress.begin(cell)
            try:
                rows = _read_cell(paths[cell.name])
                if rows is None:
                    if cell.method == ORACLE:
                        rows = bench.score_oracle(cell, responses_of(done))
                    elif cell in replayed:
                        recording = recording or Recording(
                            bench, responses_of(done), paths[PLAIN], replayed, cfg.max_drafted
                        )
                        rows = recording.rows(cell)
                    else:
                        rows = bench.decode(cell, progress.prompt_done)
                    write_atomic(paths[cell.name], _parquet_writer(rows))
            except Exception as error:  # whatever it is, the other cells are worth having
                failures[cell.name] = f"{type(error).__name__}: {error}".splitlines()[0]
                progress.fail(cell, failures[cell.name])
            else:
                done[cell.name] = rows
                progress.end(cell, rows)
    return done, failures


def _publish(folder: Path, cells: Sequence[Cell], done: dict[str, pd.DataFrame], cfg: Any) -> None:
    """Join the cells; write, draw, log and print what came out."""
    names = labels(cfg)
    rows = join_cells([_labelled(done[cell.name], cell, names) for cell in cells if cell.name in done])
    save_rows(rows, folder)
    summary = settings_table(rows, cfg.cost_ratio)
    summary["seconds"] = list(rows.groupby(["method", "setting"], sort=False).cell_seconds.first())
    save_table(summary, folder, "summary")
    title = _show(folder, cfg, rows.prompt.nunique())
    figure = plots.pareto(read_table(folder, "summary"), folder / "figures" / "pareto.png", title)
    with wandb_run("sweep", plain(cfg), folder, track=cfg.track) as wandb:
        log_table(wandb, "sweep/rows", rows)
        log_table(wandb, "sweep/summary", summary)
        x, y = "verification_rate", "discard_rate"
        log_scatter(wandb, "sweep/settings", summary, x, y, "Discard rate against verification rate")
        log_lines(wandb, "sweep/curves", summary, x, y, "method", "Discard rate against verification rate, per method")
        log_image(wandb, "sweep/pareto", figure)


def _show(folder: Path, cfg: Any, num_prompts: int) -> str:
    """Print the summary; returns its title."""
    names = labels(cfg)
    title = f"{names['dataset']} {names['split']}, {num_prompts} prompts"
    summary = read_table(folder, "summary").drop(columns=["dataset", "split", "lossless", *COUNTS])
    show(summary, f"{title}, c = {cfg.cost_ratio:g}")
    return title


def _labelled(rows: pd.DataFrame, cell: Cell, names: dict[str, str]) -> pd.DataFrame:
    """A cell's rows without the texts, and with the columns that say which cell they are of."""
    said = {**names, "method": cell.method, "setting": cell.setting, **cell.parameters}
    return rows.drop(columns=TEXTS).assign(**said)


def _read_cell(path: Path) -> pd.DataFrame | None:
    """A cell's rows if it was finished before; a broken file counts as none."""
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError):
        return None


def _parquet_writer(rows: pd.DataFrame) -> Callable[[Path], None]:
    return lambda path: rows.to_parquet(path, index=False)


class _Progress:
    """A bar over cells: which one, how far it is, and the best so far."""

    def __init__(self, num_cells: int, num_prompts: int, cost_ratio: float):
        from tqdm.auto import tqdm

        self.bar = tqdm(total=num_cells, desc="sweep", unit="cell")
        self.num_prompts, self.cost_ratio = num_prompts, cost_ratio
        self.current, self.prompts_done = "", 0
        self.best, self.best_name = 0.0, ""
        self.every = 0.2 if sys.stderr.isatty() else 10.0  # seconds between redrawings within a cell
        self.shown = 0.0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.close()

    def begin(self, cell: Cell) -> None:
        """A cell starts."""
        self.current, self.prompts_done = cell.name, 0
        self._show()

    def prompt_done(self, _: Any) -> None:
        """One more prompt of the cell has ended."""
        self.prompts_done += 1
        if perf_counter() - self.shown > self.every:
            self._show()

    def end(self, cell: Cell, rows: pd.DataFrame) -> None:
        """A cell is there, made now or before. Yardsticks are no settings one could choose."""
        throughput = metrics.throughput(counts_of(rows[list(COUNTS)].sum()), self.cost_ratio)
        if cell.method not in YARDSTICKS and throughput > self.best:
            self.best, self.best_name = throughput, cell.name
        self._show()
        self.bar.update()

    def fail(self, cell: Cell, reason: str) -> None:
        """A cell failed."""
        self.bar.write(f"{cell.name} failed: {reason}", file=sys.stderr)
        self.bar.update()

    def _show(self) -> None:
        self.shown = perf_counter()
        best = f", best so far {self.best_name} ({self.best:.2f} at c={self.cost_ratio:g})" if self.best_name else ""
        self.bar.set_postfix_str(f"{self.current} {self.prompts_done}/{self.num_prompts}{best}")


if __name__ == "__main__":
    command("sweep", run)
