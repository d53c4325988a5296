"""Does replay count what decoding counts? A decoded sweep compared with replayed ones, setting by setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import keys
from analysis.tables.bootstrap import ENOUGH, Bootstrap
from analysis.tables.files import save_table, show
from analysis.tables.rows import COUNTS, SETTING, counts_of
from analysis.tables.selection import check_comparable, load_rows
from analysis.tables.standing import gain_over
from toolkit import metrics
from toolkit.config import plain
from toolkit.errors import InputError
from toolkit.runs.stage import MANIFEST, read_manifest

SAME = [*SETTING, "prompt", "prompt_hash"]


def write_agreement(folder: Path, cfg: keys.Sweep) -> Path:
    """Compare the sweep in a folder with the replayed ones that its config names; returns the folder."""
    table = agreement_of(folder, [Path(sweep) for sweep in plain(cfg.replayed)], cfg.cost_ratio)
    save_table(table, folder, "agreement")
    outside = int(((table.low > 0) | (table.high < 0)).sum())
    ends = "intervals" if table.prompts.min() >= ENOUGH else "ranges"
    title = f"decoded against replayed, c = {cfg.cost_ratio:g}: {outside} of {len(table)} {ends} leave out 0"
    show(table, title, folder / "agreement.csv", ("method", "setting", "difference", "low", "high"))
    return folder


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
