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
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from analysis.figures import plots
from analysis.figures.plots import few_settings
from analysis.tables.bootstrap import ENOUGH, Bootstrap
from analysis.tables.files import read_parquet, read_table, save_table, show, write_parquet
from analysis.tables.grid import ORACLE, PARAMETERS, PLAIN, REFERENCES, UPPER_BOUND, Setting, expand
from analysis.tables.replayed_settings import Recording
from analysis.tables.rows import (
    COUNTS,
    LENGTHS,
    SETTING,
    acceptance_positions,
    bound_notes,
    check_comparable,
    counts_of,
    join_settings,
    labels,
    length_table,
    load_rows,
    source_shares,
)  # fmt: skip
from analysis.tables.selection import settings_table
from analysis.tables.standing import gain_over, sweep_scalars
from analysis.tables.sweep_context import TEXTS, SweepContext, responses_of
from toolkit import metrics
from toolkit.config import commands, instantiate, plain
from toolkit.engine.facts import reads_states
from toolkit.errors import InputError
from toolkit.files import lock
from toolkit.files.atomic import write_json
from toolkit.files.text import first_line
from toolkit.runs.sharding import RANKS, all_there, joining, part_of, share
from toolkit.runs.stage import MANIFEST, check_some_done, finished_stage, open_stage, read_manifest, settings_hash
from toolkit.runs.tracking import log_folder, log_image, log_lines, log_scatter, log_summary, log_table, wandb_run
from toolkit.trace.store import without_states

GRID = ("grid", "cost_ratio", "track", "artifacts", "hidden", "replayed")
IGNORED = (*GRID, *RANKS)
RECORDING = ".lock-recording"  # of the one process that decodes autoregressively and records
SHOWN_TEXTS = 3  # in tokens.json
RESAMPLES = 1000  # for the bands of acceptance by position
SAME = [*SETTING, "prompt", "prompt_hash"]


def agreement_of(live: Path, replayed: Sequence[Path], cost_ratio: float) -> pd.DataFrame:
    """The agreement of a decoded sweep with replayed ones. Raises InputError if these were decoded, too."""
    tables = load_rows(replayed, "replayed"), load_rows([live], "live")
    check_comparable([*replayed, live])
    for folder in replayed:
        source = read_manifest(folder)["config"].get("source") if (folder / MANIFEST).exists() else None
        if source not in (None, "traces"):
            raise InputError(
                f"replayed: expected sweeps with source=traces, {folder} was made with source={source}: both sides would "
                "be the same computation"
            )
    return agreement(*tables, cost_ratio, Bootstrap())


def agreement(replayed: pd.DataFrame, live: pd.DataFrame, cost_ratio: float, bootstrap: Bootstrap) -> pd.DataFrame:
    """One line per setting of both; `difference`: decoded over replayed throughput, less 1. Raises InputError without any."""
    both = replayed.merge(live, on=SAME, suffixes=("_replayed", "_live"))
    both = both[both.error_replayed.isna() & both.error_live.isna()]
    if both.empty:
        raise InputError(
            "replayed and live have no setting and prompt in common: same grid values, same prompts are needed"
        )
    lines = []
    for setting, part in both.groupby(SETTING, sort=False):
        sides = [part[[f"{name}_{side}" for name in COUNTS]].to_numpy(dtype=float) for side in ("replayed", "live")]
        replayed_total, live_total = (counts_of(dict(zip(COUNTS, side.sum(0).tolist(), strict=True))) for side in sides)
        throughputs = [metrics.throughput(total, cost_ratio) for total in (replayed_total, live_total)]
        gain = gain_over(sides[1], sides[0], cost_ratio, bootstrap)
        lines.append({
            **dict(zip(SETTING, setting, strict=True)), "prompts": len(part),
            "replayed": throughputs[0], "live": throughputs[1],
            "difference": gain["gain"], "low": gain["gain_low"], "high": gain["gain_high"],
            "discard_replayed": metrics.discard_rate(replayed_total), "discard_live": metrics.discard_rate(live_total),
            "verification_replayed": metrics.verification_rate(replayed_total),
            "verification_live": metrics.verification_rate(live_total),
        })  # fmt: skip
    return pd.DataFrame(lines)


def run(cfg: commands.Sweep) -> Path:
    if cfg.replayed and cfg.source != "live":
        raise InputError("replayed: expected source=live with it, the sweep that is compared with replayed ones")
    settings = expand(plain(cfg.grid), with_plain=cfg.source == "traces", max_drafted=cfg.max_drafted)
    part = part_of(cfg)
    finished = finished_stage("sweep", cfg, ignore=IGNORED, repairs=True)
    digest = settings_hash("sweep", cfg, GRID, methods=[setting.content for setting in settings])
    if finished is not None and finished.manifest.get("asked") == digest:
        print(f"sweep: {len(settings)} settings, finished before")
        _show(finished.folder, cfg, finished.manifest["num_prompts"])
        return _with_agreement(finished.folder, cfg)
    context = SweepContext(
        instantiate(cfg.pair), instantiate(cfg.prompts).load(), instantiate(cfg.sampling), cfg.batch_size
    )
    settings = _possible(settings, context)
    keys = {setting.name: context.prepare(setting) for setting in settings}
    stage = open_stage("sweep", cfg, ignore=IGNORED, repairs=True, shared=part)
    facts = {"num_prompts": len(context.prompts), "model_fingerprints": context.fingerprints, "settings": keys}
    facts |= {"cost_ratio": cfg.cost_ratio, "asked": digest, "bound_reaches_methods": True}
    stage.start()
    work = Work(stage.folder, settings, keys, context, cfg)
    work.run()
    if not work.done:
        raise InputError(f"every setting failed, first: {next(iter(work.failures.values()))}")
    if cfg.world_size == 1:
        work.write_tokens()
        _publish(stage.folder, work, context, cfg)
        return _with_agreement(stage.finish(**facts), cfg)
    work.check_failures()
    if all_there(stage, list(work.paths.values()), cfg):
        with joining(stage) as last:
            if last:
                work.read()
                work.write_tokens()
                _publish(stage.folder, work, context, cfg)
                _with_agreement(stage.finish(**facts), cfg)
    return stage.folder


def _possible(settings: Sequence[Setting], context: SweepContext) -> list[Setting]:
    """The settings that pair and sampling allow. A grid of nothing but methods without their head is refused later."""
    headless = sorted({setting.method for setting in settings if context.lacks_head(setting)})
    possible = [setting for setting in settings if setting.method not in headless]
    if headless and any(setting.method not in (*PARAMETERS, PLAIN) for setting in possible):
        print(f"{', '.join(headless)}: left out, the pair has no trained head; grid.METHOD.head=[FOLDER] names one")
    elif headless:
        possible = list(settings)  # building them says what is missing
    if reads_states(context.pair.draft) and any(setting.method == ORACLE for setting in possible):
        print("oracle: left out, a draft that reads the target's states has no acceptance of a position alone")
        possible = [setting for setting in possible if setting.method != ORACLE]
    return possible


class Work:
    """The settings of a sweep, each with a file of its rows.

    paths     by setting, in the order of the settings
    done      rows of the settings that are there; failures  why some are not
    replayed  settings whose rows come from a recording
    """

    def __init__(
        self,
        folder: Path,
        settings: Sequence[Setting],
        keys: dict[str, str],
        context: SweepContext,
        cfg: commands.Sweep,
    ):
        self.folder, self.settings, self.context, self.cfg = folder, settings, context, cfg
        self.paths = {name: folder / "settings" / f"{key}.parquet" for name, key in keys.items()}
        self.done: dict[str, pd.DataFrame] = {}
        self.failures: dict[str, str] = {}
        from_traces = [setting for setting in settings if cfg.source == "traces"]
        self.replayed = [setting for setting in from_traces if context.replayable(setting, cfg.max_drafted)]
        self.replayed += [setting for setting in settings if setting.method == UPPER_BOUND]

    @cached_property
    def recording(self) -> Recording:
        """The recording of the autoregressive responses. Raises InputError if there are none."""
        responses, folder = responses_of(self.done), self.folder / "settings"
        return Recording(self.context, responses, folder, self.replayed, self.cfg.max_drafted, self.cfg.hidden)

    def run(self) -> None:
        """Make the rows of this process's share of the settings. The first process decodes autoregressively."""
        cfg, context = self.cfg, self.context
        mine = {setting.name for setting in share(self.settings, cfg)}
        chosen = [setting for setting in self.settings if setting.name in mine or setting.method == PLAIN]
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
        if rows is not None:
            return rows
        alone = lock.alone(self.folder, RECORDING) if self.cfg.world_size > 1 else nullcontext()
        if setting.method == ORACLE:
            rows = self.context.score_oracle(setting, responses_of(self.done), progress.round_done)
        elif setting in self.replayed:
            with alone:
                self.recording.trace_for(setting)
            rows = self.recording.rows(setting)
        elif setting.method == PLAIN:
            with alone:
                rows = _read_rows(path)
                if rows is None:
                    rows = _written(self.context.decode(setting, progress.prompt_done, progress.round_done), path)
                return rows
        else:
            rows = self.context.decode(setting, progress.prompt_done, progress.round_done)
        return _written(rows, path)

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
                counts = counts_of(self.done[setting.name][list(COUNTS)].sum())
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


def _written(rows: pd.DataFrame, path: Path) -> pd.DataFrame:
    """The rows, in their file. Raises InputError if every prompt has failed."""
    check_some_done(int(rows.error.notna().sum()), len(rows), rows.error.iloc[0], path)
    write_parquet(rows, path)
    return rows


def _publish(folder: Path, work: Work, context: SweepContext, cfg: commands.Sweep) -> None:
    """Join the settings; write, draw, log and print what came out. Raises InputError if some failed."""
    names = labels(cfg)
    parts = []
    for setting in work.settings:
        if setting.name in work.done:
            columns = {**names, "method": setting.method, "setting": setting.label, **setting.parameters}
            parts.append(work.done[setting.name].drop(columns=TEXTS).assign(**columns))
    rows = join_settings(parts)
    save_table(rows, folder, "rows")
    summary = settings_table(rows, cfg.cost_ratio)
    summary = summary.assign(**source_shares(rows))
    summary["seconds"] = list(rows.groupby(["method", "setting"], sort=False).setting_seconds.first())
    save_table(summary, folder, "summary")
    positions, lengths = acceptance_positions(rows, Bootstrap(RESAMPLES)), length_table(rows)
    save_table(positions, folder, "positions")
    save_table(lengths, folder, "lengths")
    title = _show(folder, cfg, rows.prompt.nunique())
    figures = draw(folder, title)
    tags = [names["dataset"], names["split"], cfg.source]
    with wandb_run("sweep", plain(cfg), folder, tags=tags, track=cfg.track, name=" ".join(tags)) as wandb:
        log_summary(
            wandb,
            {**sweep_scalars(summary, cfg.cost_ratio), "failed_settings": len(work.failures), **context.parameters()},
        )
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


def draw(folder: Path, title: str) -> list[Path]:
    """The figures of a sweep folder, from its saved tables; rounds are shown of each method's best setting, few of them."""
    summary, positions, lengths = (read_table(folder, name) for name in ("summary", "positions", "lengths"))
    figures_folder = folder / "figures"
    figures = [plots.pareto(summary, figures_folder / "pareto.png", title)]
    if len(chosen := few_settings(positions, summary)):
        figures.append(plots.acceptance_by_position(chosen, figures_folder / "positions.png", title))
    if len(chosen := few_settings(lengths, summary)):
        figures.append(plots.lengths(chosen, figures_folder / "lengths.png", title))
    return figures


def _show(folder: Path, cfg: commands.Sweep, num_prompts: int) -> str:
    """Print the summary; returns its title. Seconds are those of decoding where all settings were decoded: not of replays."""
    names = labels(cfg)
    title = f"{names['dataset']} {names['split']}".rstrip() + f", {num_prompts} prompts"
    hidden = ["dataset", "split", "lossless", *COUNTS, *(["seconds"] if cfg.source == "traces" else [])]
    summary = read_table(folder, "summary").drop(columns=hidden)
    first = [name for name in ("method", "setting", "throughput", *summary.columns) if name != "prompts"]
    show(summary, f"{title}, c = {cfg.cost_ratio:g}", folder / "summary.csv", list(dict.fromkeys(first)))
    for line in bound_notes(read_table(folder, "lengths"), summary, cfg.max_drafted):
        print(line)
    return title


def _with_agreement(folder: Path, cfg: commands.Sweep) -> Path:
    """The folder of a finished sweep, after it was compared with the replayed sweeps that are named."""
    if cfg.replayed:
        table = agreement_of(folder, [Path(sweep) for sweep in plain(cfg.replayed)], cfg.cost_ratio)
        save_table(table, folder, "agreement")
        outside = int(((table.low > 0) | (table.high < 0)).sum())
        ends = "intervals" if table.prompts.min() >= ENOUGH else "ranges"
        title = f"decoded against replayed, c = {cfg.cost_ratio:g}: {outside} of {len(table)} {ends} leave out 0"
        show(table, title, folder / "agreement.csv", ("method", "setting", "difference", "low", "high"))
    return folder


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
        throughput = metrics.throughput(counts_of(rows[list(COUNTS)].sum()), self.cost_ratio)
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
