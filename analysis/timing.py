"""python -m analysis.timing prompts=toy_math: what a forward pass of each model costs here, and whether counts explain time.

prompts=...              decodes, times and regresses (`analysis.loads.regression`)
traces=FOLDER head=HEAD  solves the price of the rate rule on a recording; nothing is timed (`analysis.replay.price`)
"""

from __future__ import annotations

if __name__ == "__main__":  # help and faults, before anything heavy is imported
    from toolkit.config.command_line import check_command_line

    check_command_line("timing")

from pathlib import Path

from toolkit.config import commands
from toolkit.runs.stage import command


def run(cfg: commands.Timing) -> Path:
    if cfg.traces is not None:
        from analysis.replay.price import solve_prices

        return solve_prices(cfg)
    from analysis.loads.regression import regress

    return regress(cfg)


if __name__ == "__main__":
    command("timing", run)
