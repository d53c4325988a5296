"""python -m analysis.sweep prompts=toy_math prompts.split=dev: score a grid of methods on one prompt set.

Every setting is written whole as settings/<hash of all its rows depend on>.parquet, and not made again: a larger grid goes on
where a smaller one ended. Autoregressive responses are recorded once, and every chain method with token-level rejection is
replayed on them, exactly in distribution. The others, and with source=live all of them, are decoded. Processes share the
settings (`toolkit.runs.sharding`). rows.parquet holds those of the last grid (columns: `analysis.tables.rows`).
source=live replayed=[SWEEP,...] compares decoded with replayed settings: agreement.parquet, one line per setting.
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("sweep")

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from analysis import keys
from analysis.figures import plots
from analysis.tables.agreement import write_agreement
from analysis.tables.files import read_parquet, read_table, save_table, show, write_parquet
from analysis.tables.grid import ORACLE, PLAIN, REFERENCES, UPPER_BOUND, Setting, expand
from analysis.tables.rows import (
    BANDS,
    COUNTS,
    LENGTHS,
    acceptance_positions,
    bound_notes,
    join_settings,
    labels,
    length_table,
    summary_table,
    sweep_scalars,
)  # fmt: skip
from analysis.tables.sweep_context import TEXTS, Recording, SweepContext
from toolkit import metrics
from toolkit.config import instantiate, plain
from toolkit.errors import InputError
from toolkit.files import lock
from toolkit.files.atomic import write_json
from toolkit.files.text import first_line
from toolkit.runs.sharding import RANKS, all_there, joining, part_of, share
from toolkit.runs.stage import check_some_done, finished_stage, open_stage, settings_hash
from toolkit.runs.tracking import log_folder, log_image, log_lines, log_scatter, log_summary, log_table, wandb_run
from toolkit.trace.store import without_states
from toolkit.types import Counts

GRID = ("grid", "cost_ratio", "track", "artifacts", "hidden", "replayed")
IGNORED = (*GRID, *RANKS)
RECORDING = ".lock-recording"  # of the one process that decodes autoregressively and records
SHOWN_TEXTS = 3  # in tokens.json


def run(cfg: keys.Sweep) -> Path:
    if cfg.replayed and cfg.source != "live":
        raise InputError("replayed: expected source=live with it, the sweep that is compared with replayed ones")
    settings = expand(plain(cfg.grid), with_plain=cfg.source == "traces", max_drafted=cfg.max_drafted)
    part = part_of(cfg)
    finished = finished_stage("sweep", cfg, ignore=IGNORED, repairs=True)
    digest = settings_hash("sweep", cfg, (*GRID, "batch_size"), methods=[setting.content for setting in settings])
    if finished is not None and finished.manifest.get("asked") == digest:
        print(f"sweep: {len(settings)} settings, finished before")
        summary, lengths = (read_table(finished.folder, name) for name in ("summary", "lengths"))
        notes = bound_notes(lengths, summary, cfg.max_drafted)
        _show(finished.folder, summary, notes, cfg, finished.manifest["num_prompts"])
        return write_agreement(finished.folder, cfg) if cfg.replayed else finished.folder
    context = SweepContext(
        instantiate(cfg.pair), instantiate(cfg.prompts).load(), instantiate(cfg.sampling), cfg.batch_size
    )
    keys = context.prepare_all(settings)
    settings = [setting for setting in settings if setting.name in keys]
    from_traces = [setting for setting in settings if cfg.source == "traces"]
    replayed = [setting for setting in from_traces if context.replayable(setting, cfg.max_drafted)]
    stage = open_stage("sweep", cfg, ignore=IGNORED, repairs=True, shared=part)
    facts = {"num_prompts": len(context.prompts), "model_fingerprints": context.fingerprints, "settings": keys}
    facts |= {"cost_ratio": cfg.cost_ratio, "asked": digest, "bound_reaches_methods": True}
    stage.start()
    work = Work(stage.folder, settings, keys, context, cfg, replayed)
    work.run()
    if not work.done:
        raise InputError(f"every setting failed, first: {next(iter(work.failures.values()))}")
    if cfg.world_size > 1:
        work.check_failures()
        if not all_there(stage, list(work.paths.values()), cfg):
            return stage.folder
    with joining(stage) if cfg.world_size > 1 else nullcontext(True) as last:
        if not last:
            return stage.folder
        if cfg.world_size > 1:
            work.read()
        _publish(work)
        stage.finish(**facts)
    return write_agreement(stage.folder, cfg) if cfg.replayed else stage.folder


class Work:
    """The settings of a sweep, each with a file of its rows.

    paths     by setting, in the order of the settings
    done      rows of the settings that are there; failures  why some are not
    replayed  settings whose rows come from a recording, the upper bound among them
    """

    def __init__(
        self,
        folder: Path,
        settings: Sequence[Setting],
        keys: dict[str, str],
        context: SweepContext,
        cfg: keys.Sweep,
        replayed: Sequence[Setting],
    ):
        self.folder, self.settings, self.context, self.cfg = folder, settings, context, cfg
        self.paths = {name: folder / "settings" / f"{key}.parquet" for name, key in keys.items()}
        self.done: dict[str, pd.DataFrame] = {}
        self.failures: dict[str, str] = {}
        self.replayed = [*replayed, *(setting for setting in settings if setting.method == UPPER_BOUND)]

    @cached_property
    def recording(self) -> Recording:
        """The recording of the autoregressive responses."""
        folder, cfg = self.folder / "settings", self.cfg
        return Recording(self.context, self._responses(), folder, self.replayed, cfg.max_drafted, cfg.hidden)

    def _responses(self) -> pd.DataFrame:
        """The autoregressive rows. Raises InputError if there are none."""
        if PLAIN not in self.done:
            raise InputError("expected the responses of autoregressive decoding, which failed; run again to retry")
        return self.done[PLAIN]

    def run(self) -> None:
        """Make the rows of this process's share of the settings. The first process decodes autoregressively."""
        cfg, context = self.cfg, self.context
        names = {setting.name for setting in share(self.settings, cfg)}
        chosen = [setting for setting in self.settings if setting.name in names or setting.method == PLAIN]
        decoded = [each.method for each in chosen if each not in self.replayed and each.method not in (PLAIN, ORACLE)]
        if cfg.source == "traces" and decoded:
            print(f"decoded, as a recording lacks their rounds: {', '.join(dict.fromkeys(decoded))}")
        with _Progress(len(chosen), len(context.prompts), cfg.cost_ratio) as progress:
            for setting in chosen:
                progress.begin(setting)
                try:
                    rows = self._rows(setting, progress)
                except Exception as error:  # whatever it is, the other settings are worth having
                    self.failures[setting.name] = first_line(f"{type(error).__name__}: {error}")
                    progress.write(f"{setting.name} failed: {self.failures[setting.name]}", file=sys.stderr)
                    progress.update()
                else:
                    self.done[setting.name] = rows
                    progress.end(setting, rows)

    def _rows(self, setting: Setting, progress: _Progress) -> pd.DataFrame:
        """A setting's rows, from its file or else made and written. Raises InputError if every prompt has failed.

        Autoregressive rows and recordings are shared: one process makes them, the others wait.
        """
        path = self.paths[setting.name]
        rows = _read_rows(path)
        if rows is None and setting.method == PLAIN:
            with self._alone():
                rows = _read_rows(path)  # another process may have made them
                return self._scored(setting, progress) if rows is None else rows
        return self._scored(setting, progress) if rows is None else rows

    def _scored(self, setting: Setting, progress: _Progress) -> pd.DataFrame:
        """A setting's rows by the oracle, from the recording or decoded, and written."""
        if setting.method == ORACLE:
            rows = self.context.score_oracle(setting, self._responses(), progress.round_done)
        elif setting in self.replayed:
            with self._alone():
                self.recording.trace_for(setting)
            rows = self.recording.rows(setting)
        else:
            rows = self.context.decode(setting, progress.prompt_done, progress.round_done)
        path = self.paths[setting.name]
        check_some_done(int(rows.error.notna().sum()), len(rows), rows.error.iloc[0], path)
        write_parquet(rows, path)
        return rows

    def _alone(self) -> AbstractContextManager[None]:
        """One of several processes at a time works within it."""
        return lock.alone(self.folder, RECORDING) if self.cfg.world_size > 1 else nullcontext()

    def read(self) -> None:
        """Read the rows that all processes have made."""
        self.done = {name: rows for name, path in self.paths.items() if (rows := _read_rows(path)) is not None}
        self.failures = {}

    def write_tokens(self) -> None:
        """Write tokens.json: a few texts, token by token, as the best replayed setting of every method treats them."""
        if not self.replayed or PLAIN not in self.done:
            return
        recording = self.recording
        best: dict[str, tuple[float, Setting]] = {}
        for setting in self.replayed:
            if setting.name in self.done and setting.method != UPPER_BOUND:
                counts = Counts(**self.done[setting.name][list(COUNTS)].sum())
                scored = (metrics.throughput(counts, self.cfg.cost_ratio), setting)
                best[setting.method] = max(best.get(setting.method, scored), scored, key=lambda entry: entry[0])
        ordered = sorted(best.values(), key=lambda entry: -entry[0])
        views = [recording.tokens(setting, SHOWN_TEXTS) for _, setting in ordered]
        write_json(self.folder / "tokens.json", [view for view in views if view is not None])

    def check_failures(self) -> None:
        """Raises InputError if some settings failed."""
        if self.failures:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.failures.items())
            raise InputError(
                f"{len(self.failures)} of {len(self.settings)} settings failed ({reasons}); the rows of the others are in "
                f"{self.folder}; run again to retry"
            )


def _publish(work: Work) -> None:
    """Join the settings; write, draw, log and print what came out. Raises InputError if some failed."""
    folder, cfg = work.folder, work.cfg
    work.write_tokens()
    names = labels(cfg)
    parts = []
    for setting in work.settings:
        if setting.name in work.done:
            columns = {**names, "method": setting.method, "setting": setting.label, **setting.parameters}
            parts.append(work.done[setting.name].drop(columns=TEXTS).assign(**columns))
    rows = join_settings(parts)
    summary, lengths = summary_table(rows, cfg.cost_ratio), length_table(rows)
    scalars, notes = sweep_scalars(summary, cfg.cost_ratio), bound_notes(lengths, summary, cfg.max_drafted)
    positions = acceptance_positions(rows, BANDS)
    tables = {"rows": rows, "summary": summary, "positions": positions, "lengths": lengths}
    for name, table in tables.items():
        save_table(table, folder, name)
    title = _show(folder, summary, notes, cfg, rows.prompt.nunique())
    figures = plots.of_sweep(tables, folder / "figures", title)
    tags = [names["dataset"], names["split"], cfg.source]
    with wandb_run("sweep", plain(cfg), folder, tags=tags, track=cfg.track, name=" ".join(tags)) as wandb:
        log_summary(wandb, {**scalars, "failed_settings": len(work.failures), **work.context.parameters})
        for name, table in (("rows", rows), ("summary", summary), ("by_position", positions)):
            log_table(wandb, f"sweep/{name}", table)
        x, y = "verification_rate", "discard_rate"
        log_scatter(wandb, "sweep/settings", summary, x, y, "Discard rate against verification rate")
        log_lines(wandb, "sweep/curves", summary, x, y, "method", "Discard rate against verification rate, per method")
        for figure in figures:
            log_image(wandb, f"sweep/{figure.stem}", figure)
        work.check_failures()
        if plain(cfg).get("artifacts"):  # last: a sweep that fails publishes none
            for path in sorted((folder / "settings").glob("traces-*.safetensors")):
                with TemporaryDirectory() as copy:
                    log_folder(wandb, path.stem, "traces", without_states(path, copy))


def _show(folder: Path, summary: pd.DataFrame, notes: Sequence[str], cfg: keys.Sweep, num_prompts: int) -> str:
    """Print the summary and notes on its settings; returns its title. Seconds are shown where all settings were decoded."""
    names = labels(cfg)
    title = f"{names['dataset']} {names['split']}".rstrip() + f", {num_prompts} prompts"
    hidden = ["dataset", "split", "lossless", *COUNTS, *(["seconds"] if cfg.source == "traces" else [])]
    summary = summary.drop(columns=hidden)
    first = [name for name in ("method", "setting", "throughput", *summary.columns) if name != "prompts"]
    show(summary, f"{title}, c = {cfg.cost_ratio:g}", folder / "summary.csv", list(dict.fromkeys(first)))
    for line in notes:
        print(line)
    return title


def _read_rows(path: Path) -> pd.DataFrame | None:
    """A setting's rows if it was finished before; None if the file is missing, damaged or of an older version."""
    try:
        rows = read_parquet(path)
    except InputError:
        return None
    return rows if path.stem == "summary" or set(LENGTHS) <= set(rows.columns) else None


class _Progress(tqdm):
    def __init__(self, num_settings: int, num_prompts: int, cost_ratio: float):
        super().__init__(total=num_settings, desc="sweep", unit="setting")
        self.num_prompts, self.cost_ratio, self.best, self.best_name = num_prompts, cost_ratio, 0.0, ""
        self.every = 0.2 if sys.stderr.isatty() else 10.0  # seconds between redrawings within a setting
        self.shown = 0.0

    def begin(self, setting: Setting) -> None:
        self.current, self.prompts_done, self.tokens, self.begun = setting.name, 0, 0, perf_counter()
        self._show()

    def prompt_done(self, _: Any) -> None:
        self.prompts_done += 1

    def round_done(self, num_tokens: int) -> None:
        self.tokens += num_tokens
        if perf_counter() - self.shown > self.every:
            self._show()

    def end(self, setting: Setting, rows: pd.DataFrame) -> None:
        """Count a finished setting. References are not settings one could choose."""
        throughput = metrics.throughput(Counts(**rows[list(COUNTS)].sum()), self.cost_ratio)
        if setting.method not in REFERENCES and throughput > self.best:
            self.best, self.best_name = throughput, setting.name
        self._show()
        self.update()

    def _show(self) -> None:
        self.shown = perf_counter()
        best = f", best so far {self.best_name} ({self.best:.2f} at c={self.cost_ratio:g})" if self.best_name else ""
        speed = self.tokens / max(perf_counter() - self.begun, 1e-3)
        now = f"{self.prompts_done}/{self.num_prompts}, {self.tokens:,} tokens, {speed:,.1f}/s" if self.tokens else ""
        self.set_postfix_str(f"{self.current} {now}{best}")
