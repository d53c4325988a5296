"""python -m analysis.agreement replayed=[SWEEP,...] live=[SWEEP,...]: do sweeps on traces say what decoding does?

Every setting and prompt that both kinds of sweep hold is compared: throughput decoded over throughput replayed, and
discard and verification rate of both. Intervals come from resampling prompts (both sides of a prompt together). The two
sides make their own acceptance draws, so single settings leave their interval now and then: one in twenty at 95 %.

    agreement   one line per data set and setting
"""

from __future__ import annotations

if __name__ == "__main__":  # help and faults, before anything heavy is imported
    from toolkit.config.command_line import check_command_line

    check_command_line("agreement")

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.tables.bootstrap import Bootstrap
from analysis.tables.console import show
from analysis.tables.files import read_table, save_table
from analysis.tables.rows import COUNTS, SETTING, check_comparable, counts_of, load_rows
from analysis.tables.standing import gain_over
from toolkit import metrics
from toolkit.config import plain
from toolkit.errors import InputError
from toolkit.stage import MANIFEST, command, open_stage, read_manifest

SAME = [*SETTING, "prompt", "prompt_hash"]


def run(cfg: Any) -> Path:
    """Compare; returns the output folder. Raises InputError if the sweeps have no setting and prompt in common."""
    bootstrap = Bootstrap(cfg.resamples, cfg.confidence, cfg.seed)
    replayed, live = ([Path(folder) for folder in plain(cfg[side])] for side in ("replayed", "live"))
    tables = load_rows(replayed, "replayed"), load_rows(live, "live")
    check_comparable([*replayed, *live])
    for folders, side, source in ((replayed, "replayed", "traces"), (live, "live", "live")):
        _check_source(folders, side, source)
    inputs = [folder / "rows.parquet" for folder in (*replayed, *live)]
    stage = open_stage("agreement", cfg, inputs=inputs)
    if not stage.finished:
        save_table(compare(*tables, cfg.cost_ratio, bootstrap), stage.folder, "agreement")
        stage.finish()
    found = read_table(stage.folder, "agreement")
    outside = int(((found.low > 0) | (found.high < 0)).sum())
    title = f"decoded against replayed, c = {cfg.cost_ratio:g}: {outside} of {len(found)} intervals leave out 0"
    show(found, title, stage.folder / "agreement.csv", ("method", "setting", "difference", "low", "high"))
    return stage.folder


def compare(replayed: pd.DataFrame, live: pd.DataFrame, cost_ratio: float, bootstrap: Bootstrap) -> pd.DataFrame:
    """One line per setting of both tables; `difference` is decoded over replayed throughput, less one."""
    both = replayed.merge(live, on=SAME, suffixes=("_replayed", "_live"))
    both = both[both.error_replayed.isna() & both.error_live.isna()]
    if both.empty:
        raise InputError(
            "replayed and live have no setting and prompt in common: same grid values, same prompts are needed"
        )
    lines = []
    for setting, part in both.groupby(SETTING, sort=False):
        sides = [part[[f"{name}_{side}" for name in COUNTS]].to_numpy(dtype=float) for side in ("replayed", "live")]
        one, two = (counts_of(dict(zip(COUNTS, side.sum(0).tolist(), strict=True))) for side in sides)
        rates = {"replayed": metrics.throughput(one, cost_ratio), "live": metrics.throughput(two, cost_ratio)}
        gain = gain_over(sides[1], sides[0], cost_ratio, bootstrap)
        lines.append({
            **dict(zip(SETTING, setting, strict=True)), "prompts": len(part), **rates,
            "difference": gain["gain"], "low": gain["gain_low"], "high": gain["gain_high"],
            "discard_replayed": metrics.discard_rate(one), "discard_live": metrics.discard_rate(two),
            "verification_replayed": metrics.verification_rate(one), "verification_live": metrics.verification_rate(two),
        })  # fmt: skip
    return pd.DataFrame(lines)


def _check_source(folders: list[Path], side: str, expected: str) -> None:
    """Raises InputError if a sweep was made the other way: both sides would then be the same computation."""
    for folder in folders:
        found = read_manifest(folder)["config"].get("source") if (folder / MANIFEST).exists() else None
        if found not in (None, expected):
            raise InputError(f"{side}: expected sweeps with source={expected}, {folder} was made with source={found}")


if __name__ == "__main__":
    command("agreement", run)
